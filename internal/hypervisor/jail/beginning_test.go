package jail

import (
	"context"
	"errors"
	"testing"
	"time"
)

// TestBeginning: nobody waits to press the button, which is pressed once the guest has begun; one who wants to start it can give up while another does.
func TestBeginning(t *testing.T) {
	b := NewBeginning()
	starts, presses, failed := 0, 0, errors.New("no")
	press := func(context.Context) error { presses++; return failed }
	if err := b.Begin(t.Context(), func(context.Context) error { starts++; return failed }, press); !errors.Is(err, failed) || b.Begun() {
		t.Fatalf("not started: begun %t, %v", b.Begun(), err)
	}
	began, goOn, ended := make(chan struct{}), make(chan struct{}), make(chan error, 1)
	go func() {
		ended <- b.Begin(t.Context(), func(context.Context) error { starts++; close(began); <-goOn; return nil }, press)
	}()
	<-began
	pressed := make(chan bool, 1)
	go func() { pressed <- b.PressLater() }()
	select {
	case later := <-pressed:
		if !later {
			t.Error("it has not begun, but the button is to be pressed")
		}
	case <-time.After(time.Minute):
		t.Fatal("the button waits until the guest has begun")
	}
	gone, cancel := context.WithCancel(t.Context())
	cancel()
	if err := b.Begin(gone, nil, nil); !errors.Is(err, context.Canceled) {
		t.Errorf("while another one starts it: %v", err)
	}
	close(goOn)
	if err := <-ended; !errors.Is(err, failed) || !b.Begun() || presses != 1 {
		t.Errorf("begun %t, button pressed %d times, %v", b.Begun(), presses, err)
	}
	if err := b.Begin(t.Context(), nil, nil); err != nil || b.PressLater() || starts != 2 {
		t.Errorf("after it has begun: started %d times, %v", starts, err)
	}
}
