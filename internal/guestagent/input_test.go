package guestagent

import (
	"bytes"
	"testing"

	guestv1 "cocoonstack.io/cocoon/api/guest/v1"
	"cocoonstack.io/cocoon/internal/errdefs"
)

// eager is a host that sends as much as it is allowed to as soon as it gets credit.
type eager struct {
	execStream
	input *input
}

func (h eager) Send(m *guestv1.ExecOutput) error {
	return h.input.add(make([]byte, m.GetStdinCredit()))
}

func TestInputIsTakenAsAllowed(t *testing.T) {
	i := newInput()
	e := &execution{stream: eager{input: i}, input: i}
	if err := e.send(credit(stdinWindow)); err != nil {
		t.Fatal(err)
	}
	for range 2 * stdinWindow / (32 << 10) {
		p, ok := i.take()
		if !ok {
			t.Fatal("there is no input")
		}
		if err := i.add(bytes.Repeat([]byte{1}, len(p))); !errdefs.Is(err, errdefs.ResourceExhausted) {
			t.Fatalf("more than the window: %v", err)
		}
		if err := e.spent(p); err != nil {
			t.Fatalf("as much as was allowed: %v", err)
		}
	}
}
