//go:build vm

package cocoond_test

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"cocoonstack.io/cocoon/internal/testkit/diff"
)

// TestVMJournalLost removes the journal while guests run, are hibernated and are stopped. cocoond does not start until
// the operator has chosen. Guests that it does not know keep running. A journal rebuilt from the VMs' folders has all
// of them.
func TestVMJournalLost(t *testing.T) {
	n := newNode(t)
	n.counting("runs")
	n.counting("sleeps")
	n.counting("stops")
	if _, err := n.Hibernate(t.Context(), "sleeps", ""); err != nil {
		t.Fatal(err)
	}
	if _, err := n.Stop(t.Context(), "stops", 0); err != nil {
		t.Fatal(err)
	}
	before, err := n.List(t.Context())
	if err != nil || len(before) != 3 {
		t.Fatalf("%d VMs, %v", len(before), err)
	}
	journal := filepath.Join(n.dir, "state/journal.db")
	lose := func() {
		t.Helper()
		_ = n.process.Process.Kill()
		_ = n.process.Wait()
		for _, suffix := range []string{"", "-wal", "-shm"} {
			_ = os.Remove(journal + suffix)
		}
	}
	run := func(args ...string) (string, error) {
		out, err := exec.Command(n.process.Path, append(args, n.flags...)...).CombinedOutput()
		return string(out), err
	}

	lose()
	if out, err := run(); err == nil || !strings.Contains(out, "No VM was touched") {
		t.Fatalf("an empty journal is taken: %v\n%s", err, out)
	}
	flags := n.flags
	n.flags = append([]string{"--older-journal"}, flags...)
	n.start()
	n.flags = flags
	strays, err := n.Strays(t.Context())
	if err != nil || len(strays) != 3 {
		t.Fatalf("kept aside: %+v, %v", strays, err)
	}
	for _, s := range strays {
		if running := s.Name == "runs"; running != (len(s.PIDs) == 1) || s.Name == "" {
			t.Errorf("kept aside: %+v", s)
		}
	}

	lose()
	if out, err := run("recover", "--rebuild"); err != nil || !strings.Contains(out, "3 VMs are on record again") {
		t.Fatalf("rebuild: %v\n%s", err, out)
	}
	n.start()
	for _, was := range before {
		is, err := n.Inspect(t.Context(), was.Spec.Name)
		if err != nil || is.ID != was.ID || is.State != was.State || is.PID != was.PID || is.NICs[0].IP != was.NICs[0].IP {
			t.Errorf("%s, compared with before: %v, %s", was.Spec.Name, err, diff.Of(was, is))
		}
	}
	n.ready("runs")
	n.goesOn("runs")
	if c := n.counts("runs"); len(c) == 0 || c[0] != 1 {
		t.Errorf("it has begun anew: %v", c[:min(3, len(c))])
	}
	if _, err := n.Wake(t.Context(), "sleeps"); err != nil {
		t.Fatal(err)
	}
	n.ready("sleeps")
	n.goesOn("sleeps")
	if _, err := n.Start(t.Context(), "stops"); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"runs", "sleeps", "stops"} {
		if err := n.Remove(t.Context(), name, true); err != nil {
			t.Error(err)
		}
	}
	if left := n.unlisted(); len(left) > 0 {
		t.Errorf("left: %v", left)
	}
}
