package hypervisortest

import (
	"context"
	"debug/elf"
	"errors"
	"os"
	"path/filepath"
	"testing"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/hypervisor"
)

// writeFunc is an io.Writer.
type writeFunc func(p []byte) (int, error)

func (f writeFunc) Write(p []byte) (int, error) { return f(p) }

func testDumpMemory(t *testing.T, s *suite) {
	p := s.plan(t)
	i := s.launch(t, p)
	d, ok := hypervisor.As[hypervisor.MemoryDumper](i)
	if !ok {
		t.Skip("no MemoryDumper")
	}
	s.Booted(t, i)

	// What cannot be written ends the dump, and so does the caller. The guest goes on.
	full := errors.New("full")
	if err := d.DumpMemory(s.ctx(t), writeFunc(func([]byte) (int, error) { return 0, full })); !errors.Is(err, full) {
		t.Errorf("to a full disk: %v", err)
	}
	s.state(t, i, hypervisor.Running)
	ctx, cancel := context.WithCancel(s.ctx(t))
	err := d.DumpMemory(ctx, writeFunc(func(p []byte) (int, error) { cancel(); return len(p), nil }))
	if !errors.Is(err, context.Canceled) {
		t.Errorf("cancelled: %v", err)
	}
	s.state(t, i, hypervisor.Running)

	s.dump(t, i)
	s.state(t, i, hypervisor.Running)
	if pauser, ok := hypervisor.As[hypervisor.Pauser](i); ok {
		if err := pauser.Pause(s.ctx(t)); err != nil {
			t.Fatal(err)
		}
		s.dump(t, i)
		s.state(t, i, hypervisor.Paused)
		if err := pauser.Resume(s.ctx(t)); err != nil {
			t.Fatal(err)
		}
	}
	_ = i.Close()
	i = s.adopt(t, s.New(t), i.Handle())
	s.dump(t, i)
	s.kill(t, i)
	d, _ = hypervisor.As[hypervisor.MemoryDumper](i)
	if err := d.DumpMemory(s.ctx(t), writeFunc(func(p []byte) (int, error) { return len(p), nil })); !errdefs.IsNotFound(err) {
		t.Errorf("after the end: %v, want NotFound", err)
	}
}

// dump checks that the guest's memory can be written to a file, as a core file.
func (s *suite) dump(t *testing.T, i hypervisor.Instance) {
	t.Helper()
	d, _ := hypervisor.As[hypervisor.MemoryDumper](i)
	f, err := os.Create(filepath.Join(t.TempDir(), "core"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if err := d.DumpMemory(s.ctx(t), f); err != nil {
		t.Fatalf("DumpMemory: %v", err)
	}
	core, err := elf.NewFile(f)
	if err != nil {
		t.Fatalf("the dump: %v", err)
	}
	var memory uint64
	for _, part := range core.Progs {
		if part.Type == elf.PT_LOAD {
			memory += part.Filesz
		}
	}
	size, err := f.Seek(0, 2)
	if core.Type != elf.ET_CORE || memory == 0 || err != nil || uint64(size) < memory {
		t.Errorf("the dump of type %v has %d bytes of memory in %d bytes, %v", core.Type, memory, size, err)
	}
}
