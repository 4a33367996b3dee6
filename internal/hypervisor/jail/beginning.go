package jail

import (
	"context"
	"sync"
)

// Beginning is the state of a guest that was launched paused: whether it has begun, and whether somebody pressed its power button before. Its methods are
// safe for concurrent use.
type Beginning struct {
	turn chan struct{} // has room for one who starts the guest

	mu      sync.Mutex
	begun   bool
	pressed bool
}

// NewBeginning returns that of a guest that is not known to have begun.
func NewBeginning() *Beginning { return &Beginning{turn: make(chan struct{}, 1)} }

// Begun reports whether the guest is known to have begun.
func (b *Beginning) Begun() bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.begun
}

// HasBegun records that the guest has begun.
func (b *Beginning) HasBegun() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.begun = true
}

// PressLater leaves the power button to whoever starts the guest, and never waits for them. It returns false if the guest has begun.
func (b *Beginning) PressLater() bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	if !b.begun {
		b.pressed = true
	}
	return !b.begun
}

// Begin starts the guest once, however many ask, and then presses its power button if somebody wanted that before. If start fails, the next one tries again.
// Errors: those of start, of press, and of ctx while another one starts it.
func (b *Beginning) Begin(ctx context.Context, start, press func(context.Context) error) error {
	select {
	case b.turn <- struct{}{}:
		defer func() { <-b.turn }()
	case <-ctx.Done():
		return ctx.Err()
	}
	if b.Begun() {
		return nil
	}
	if err := start(ctx); err != nil {
		return err
	}
	b.mu.Lock()
	b.begun = true
	pressed := b.pressed
	b.mu.Unlock()
	if !pressed {
		return nil
	}
	return press(ctx)
}
