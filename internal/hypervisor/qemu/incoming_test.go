package qemu

import (
	"context"
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"testing"
	"time"

	"cocoonstack.io/cocoon/internal/hypervisor/jail"

	"cocoonstack.io/cocoon/internal/hypervisor"
	"cocoonstack.io/cocoon/internal/vm"
)

// TestLoadHasNoLimit loads memory for longer than a process may take to answer, both for memory that is shared and for memory
// that is not.
func TestLoadHasNoLimit(t *testing.T) {
	memory := filepath.Join(t.TempDir(), "memory")
	if err := os.WriteFile(memory, make([]byte, 12<<20), 0o600); err != nil {
		t.Fatal(err)
	}
	bin, err := os.Executable() // never executed: its facts are set in advance
	if err != nil {
		t.Fatal(err)
	}
	for _, alone := range []bool{true, false} {
		d, err := New(Config{Binary: bin, LaunchTime: time.Nanosecond}, slog.New(slog.DiscardHandler))
		if err != nil {
			t.Fatal(err)
		}
		_, err = d.facts.Facts(t.Context(), bin, func(context.Context, string) (binaryFacts, error) {
			return binaryFacts{version: "7.2.22", machine: "pc-q35-7.2"}, nil
		})
		if err != nil {
			t.Fatal(err)
		}
		p := ociPlan()
		p.Dir, p.Memory, p.NICs, p.Accel = t.TempDir(), 12<<20, nil, vm.AccelTCG
		p.Incoming = &hypervisor.Incoming{State: "/none", Memory: memory, Alone: alone}
		l := &launch{Launch: jail.Launch{Jail: d.jail, Plan: p}, d: d}
		if err := l.run(t.Context()); !errors.Is(err, context.DeadlineExceeded) || l.memory == nil {
			t.Errorf("alone %v: %v, memory %v", alone, err, l.memory)
		}
		l.release()
		if err := l.Undo.Run(t.Context()); err != nil {
			t.Error(err)
		}
	}
}
