// Package undo is a stack of rollback steps: push the step that reverts a change directly next to the change.
//
// It knows nothing about the steps, and it is no journal: it exists only during one operation of one process.
package undo

import (
	"context"
	"errors"
	"time"
)

// Limit bounds a whole rollback. The failed operation may have been cancelled, but its rollback must still run.
const Limit = 30 * time.Second

// Stack holds rollback steps. The zero value is ready. It is not safe for concurrent use.
type Stack struct{ steps []func(context.Context) error }

// Push adds a step that reverts what was just done.
func (s *Stack) Push(step func(context.Context) error) { s.steps = append(s.steps, step) }

// Release drops every step, because the operation succeeded.
func (s *Stack) Release() { s.steps = nil }

// Run executes the steps, newest first, under a fresh deadline that ignores the cancellation of ctx,
// and returns their errors joined. A second call does nothing.
func (s *Stack) Run(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), Limit)
	defer cancel()
	var errs []error
	for i := len(s.steps) - 1; i >= 0; i-- {
		errs = append(errs, s.steps[i](ctx))
	}
	s.steps = nil
	return errors.Join(errs...)
}
