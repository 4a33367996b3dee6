package undo

import (
	"context"
	"errors"
	"slices"
	"testing"
)

func TestRunsBackwardsDespiteErrorsAndCancellation(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	var s Stack
	var got []int
	boom := errors.New("boom")
	for i := range 3 {
		s.Push(func(ctx context.Context) error {
			if ctx.Err() != nil {
				t.Errorf("step %d runs under a dead context", i)
			}
			got = append(got, i)
			if i == 1 {
				return boom
			}
			return nil
		})
	}
	if err := s.Run(ctx); !errors.Is(err, boom) {
		t.Errorf("error %v does not tell what failed", err)
	}
	if want := []int{2, 1, 0}; !slices.Equal(got, want) {
		t.Errorf("ran %v, want %v", got, want)
	}
	if err := s.Run(ctx); err != nil || len(got) != 3 {
		t.Error("a second run did something")
	}
}

func TestReleaseForgets(t *testing.T) {
	var s Stack
	s.Push(func(context.Context) error { t.Error("undone after release"); return nil })
	s.Release()
	if err := s.Run(t.Context()); err != nil {
		t.Error(err)
	}
}
