package hypervisortest

import (
	"bytes"
	"context"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/hypervisor"
	"cocoonstack.io/cocoon/internal/sparse"
)

// saver launches a VM and waits until its guest can be saved. It skips drivers that cannot save.
func (s *suite) saver(t *testing.T, p hypervisor.Plan) (hypervisor.Instance, hypervisor.Snapshotter) {
	t.Helper()
	i := s.launch(t, p)
	snapshotter, ok := hypervisor.As[hypervisor.Snapshotter](i)
	if !ok {
		t.Skip("no Snapshotter")
	}
	s.Booted(t, i)
	return i, snapshotter
}

func savePlan(t *testing.T) hypervisor.SavePlan {
	dir := t.TempDir()
	return hypervisor.SavePlan{State: filepath.Join(dir, "vmstate"), Memory: filepath.Join(dir, "memory-ranges")}
}

// from returns a plan of another VM that resumes from the saved state.
func (s *suite) from(t *testing.T, saved hypervisor.SavePlan) hypervisor.Plan {
	p := s.plan(t)
	p.Incoming = &hypervisor.Incoming{State: saved.State, Memory: saved.Memory}
	return p
}

func testSave(t *testing.T, s *suite) {
	p := s.plan(t)
	i, snapshotter := s.saver(t, p)
	plan, taken := savePlan(t), 0
	plan.Taken = func() { taken++ }
	still := 0
	plan.Still = func(ctx context.Context) error {
		still++
		if got, err := i.State(ctx); err != nil || got != hypervisor.Paused {
			t.Errorf("at the instant of the save the guest is %s, %v", got, err)
		}
		return nil
	}
	saved, err := snapshotter.Save(s.ctx(t), plan)
	if err != nil {
		t.Fatalf("Save: %v", err)
	}
	if taken != 1 || still != 1 || saved.Method == "" {
		t.Errorf("Taken was called %d times, Still %d times; %+v", taken, still, saved)
	}
	s.state(t, i, hypervisor.Running)
	for _, path := range []string{plan.State, plan.Memory} {
		if st, err := os.Stat(path); err != nil || st.Mode().Perm() != 0o600 {
			t.Errorf("%s: %v, %v", path, st, err)
		}
	}
	if st, err := os.Stat(plan.Memory); err != nil || st.Size() != p.Memory {
		t.Errorf("the memory is not as large as the guest's: %v", err)
	}
	if teller, ok := hypervisor.As[hypervisor.MachineTeller](s.driver); !ok {
		t.Error("a driver that saves does not say on which machine it runs")
	} else if host, err := teller.Machine(s.ctx(t), p.Accel); err != nil {
		t.Error(err)
	} else if err := saved.Machine.Resumes(host); err != nil {
		t.Error(err)
	}
	second := savePlan(t)
	second.Base = plan.Memory
	again, err := snapshotter.Save(s.ctx(t), second)
	if err != nil || !again.Delta || saved.Delta {
		t.Fatalf("Save again: %+v, %v; before: %+v", again, err, saved)
	}
	later := s.from(t, second)
	later.Incoming.Base = second.Base
	one, two := s.launch(t, s.from(t, plan)), s.launch(t, later)
	for _, j := range []hypervisor.Instance{i, one, two} {
		s.state(t, j, hypervisor.Running)
	}
	s.kill(t, one)
	s.state(t, two, hypervisor.Running)
	s.kill(t, i)
	s.state(t, two, hypervisor.Running)
	s.kill(t, two)
}

func testHold(t *testing.T, s *suite) {
	p := s.plan(t)
	i, snapshotter := s.saver(t, p)
	plan := savePlan(t)
	plan.Hold = true
	for range 2 {
		if _, err := snapshotter.Save(s.ctx(t), plan); err != nil {
			t.Fatalf("Save: %v", err)
		}
		s.state(t, i, hypervisor.Paused)
		pauser, ok := hypervisor.As[hypervisor.Pauser](i)
		if !ok {
			t.Fatal("a driver that holds guests cannot let them go")
		}
		if err := pauser.Resume(s.ctx(t)); err != nil {
			t.Fatal(err)
		}
		s.state(t, i, hypervisor.Running)
	}
	if _, err := snapshotter.Save(s.ctx(t), plan); err != nil {
		t.Fatalf("Save: %v", err)
	}
	// A later daemon finds it still paused.
	_ = i.Close()
	i = s.adopt(t, s.New(t), i.Handle())
	s.state(t, i, hypervisor.Paused)
	s.kill(t, i)
	again := s.from(t, plan)
	again.Incoming.Alone = true
	j := s.launch(t, again)
	s.state(t, j, hypervisor.Running)
	s.kill(t, j)
}

func testSaveFails(t *testing.T, s *suite) {
	i, snapshotter := s.saver(t, s.plan(t))
	plan := savePlan(t)
	plan.Memory = filepath.Join(t.TempDir(), "missing", "memory-ranges")
	if _, err := snapshotter.Save(s.ctx(t), plan); err == nil {
		t.Error("saved into a folder that is not there")
	}
	s.state(t, i, hypervisor.Running)
	for _, path := range []string{plan.State, plan.Memory} {
		if _, err := os.Stat(path); err == nil {
			t.Errorf("%s is left", path)
		}
	}
	plan = savePlan(t)
	if _, err := snapshotter.Save(s.ctx(t), plan); err != nil {
		t.Fatalf("Save after one that failed: %v", err)
	}
	s.kill(t, i)
	if err := os.Truncate(plan.Memory, 4096); err != nil {
		t.Fatal(err)
	}
	for _, alone := range []bool{false, true} {
		p := s.from(t, plan)
		p.Incoming.Alone = alone
		if _, err := s.driver.Launch(s.ctx(t), p); !errdefs.Is(err, errdefs.DataLoss) {
			t.Errorf("Launch from memory that was cut short: %v, want data loss", err)
		}
		s.nothingLeft(t, p)
	}
}

// testSaveDamaged overwrites files of a saved state that has checksums: no guest may resume from them.
func testSaveDamaged(t *testing.T, s *suite) {
	i, snapshotter := s.saver(t, s.plan(t))
	plan := savePlan(t)
	if _, err := snapshotter.Save(s.ctx(t), plan); err != nil {
		t.Fatalf("Save: %v", err)
	}
	s.kill(t, i)
	for _, path := range []string{plan.State, plan.Memory} {
		f, err := os.Open(path)
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close()
		sums, err := sparse.SumOf(s.ctx(t), f)
		if err == nil {
			err = sums.Write(path + sparse.SumSuffix)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	for _, path := range []string{plan.Memory, plan.State} {
		heal := spoil(t, path)
		for _, alone := range []bool{false, true} {
			p := s.from(t, plan)
			p.Incoming.Alone, p.Incoming.Summed = alone, true
			_, err := s.driver.Launch(s.ctx(t), p)
			if !errdefs.Is(err, errdefs.DataLoss) || !strings.Contains(err.Error(), filepath.Base(path)) || !strings.Contains(err.Error(), "at byte") {
				t.Errorf("Launch with a damaged %s: %v, want data loss that says where", filepath.Base(path), err)
			}
			s.nothingLeft(t, p)
		}
		heal()
	}
	p := s.from(t, plan)
	p.Incoming.Summed = true
	j := s.launch(t, p)
	s.state(t, j, hypervisor.Running)
	s.kill(t, j)
}

// spoil overwrites the middle of a file and returns a function that restores it.
func spoil(t *testing.T, path string) (heal func()) {
	t.Helper()
	was, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	write := func(f *os.File, p []byte, at int) {
		t.Helper()
		if _, err := f.WriteAt(p, int64(at)); err != nil {
			t.Fatal(err)
		}
	}
	at := len(was) / 2
	end := min(len(was), at+2<<20)
	write(f, bytes.Repeat([]byte("garbage!"), (end-at+7)/8)[:end-at], at)
	return func() {
		f, err := os.OpenFile(path, os.O_RDWR, 0)
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close()
		write(f, was[at:end], at)
	}
}
