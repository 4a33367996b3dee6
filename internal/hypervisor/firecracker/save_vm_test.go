//go:build vm

package firecracker

import (
	"bufio"
	"fmt"
	"os"
	"strings"
	"testing"

	"cocoonstack.io/cocoon/internal/hypervisor"
	"cocoonstack.io/cocoon/internal/sparse"
	"cocoonstack.io/cocoon/internal/testkit/testguest"
)

// TestClonesShare: two clones map the same memory, and have only what they write for themselves. The file with the memory is sparse.
func TestClonesShare(t *testing.T) {
	a, d := needGuest(t), testDriver(t)
	p := a.Plan(t)
	i := start(t, d, p)
	testguest.Logged(t, i, "GUEST-READY")
	s := saved(t)
	s.Hold = true
	result := doSave(t, i, s)
	if err := i.Kill(t.Context()); err != nil {
		t.Fatal(err)
	}
	if st, err := os.Stat(s.Memory); err != nil || st.Size() != p.Memory || sparse.Occupied(st) > result.Memory+p.Memory/8 {
		t.Errorf("the memory: %v, %v; %d bytes are not zero", st, err, result.Memory)
	}
	one, two := start(t, d, from(t, a, p, s)), start(t, d, from(t, a, p, s))
	for _, i := range []hypervisor.Instance{one, two} {
		testguest.Say(t, i, "sh echo I am $((40 + 2))")
		testguest.Logged(t, i, "I am 42 .")
	}
	for _, i := range []hypervisor.Instance{one, two} {
		shared, private := mapped(t, i.PID())
		t.Logf("process %d shares %d KiB and has %d KiB of its own; %d KiB were saved", i.PID(), shared, private, result.Memory>>10)
		if shared == 0 || private > result.Memory>>11 {
			t.Errorf("process %d shares %d KiB and has %d KiB of its own; %d KiB were saved", i.PID(), shared, private, result.Memory>>10)
		}
	}
}

// mapped returns how much of the saved memory a process has mapped and shares, and how much of it it has written, in KiB.
func mapped(t *testing.T, pid int) (shared, private int64) {
	t.Helper()
	f, err := os.Open(fmt.Sprintf("/proc/%d/smaps", pid))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	inside := false
	for scan := bufio.NewScanner(f); scan.Scan(); {
		line := scan.Text()
		var n int64
		switch fields := strings.Fields(line); {
		case len(fields) > 4 && strings.Contains(fields[0], "-"):
			inside = strings.Contains(line, "memfd:guest")
		case !inside:
		case strings.HasPrefix(line, "Shared_Clean:"), strings.HasPrefix(line, "Shared_Dirty:"):
			_, _ = fmt.Sscan(fields[1], &n)
			shared += n
		case strings.HasPrefix(line, "Private_Dirty:"):
			_, _ = fmt.Sscan(fields[1], &n)
			private += n
		}
	}
	return shared, private
}
