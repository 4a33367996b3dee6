//go:build vm

package cocoond_test

import (
	"cmp"
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"strconv"
	"testing"
	"time"

	"cocoonstack.io/cocoon/internal/vm"
)

// TestVMClocks compares the clocks of guests with the host's while all CPUs of the host are busy: while the guests boot, when a
// kernel would measure its CPU wrongly, and afterwards. CLOCK_GUESTS and CLOCK_TIME make it a longer test.
func TestVMClocks(t *testing.T) {
	guests, err := strconv.Atoi(cmp.Or(os.Getenv("CLOCK_GUESTS"), "3"))
	if err != nil {
		t.Fatal(err)
	}
	span, err := time.ParseDuration(cmp.Or(os.Getenv("CLOCK_TIME"), "10s"))
	if err != nil {
		t.Fatal(err)
	}
	n := newNode(t)
	for range runtime.NumCPU() {
		busy := exec.CommandContext(t.Context(), "sh", "-c", "while :; do :; done") // ends with the test
		if err := busy.Start(); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = busy.Wait() })
	}
	name := func(i int) string { return fmt.Sprint("clock-", i) }
	for i := range guests {
		_, err := n.Launch(t.Context(), vm.Spec{
			Name: name(i), Image: demo, CPUs: 1, Memory: 128 << 20, Storage: 16 << 20, Process: vm.Process{Entrypoint: []string{"sleep", "100000"}},
		})
		if err != nil {
			t.Fatal(err)
		}
		n.ready(name(max(i-4, 0))) // five boot at a time
	}
	for i := range guests {
		n.ready(name(i))
	}
	first := make([]instant, guests)
	for i := range guests {
		first[i] = n.uptime(name(i))
	}
	<-time.After(span)
	for i := range guests {
		a, b := first[i], n.uptime(name(i))
		least, most := b.asked.Sub(a.answered), b.answered.Sub(a.asked)
		slack := 50*time.Millisecond + least/100
		if passed := b.up - a.up; passed < least-slack || passed > most+slack {
			t.Errorf("in guest %d, %s passed; on the host, %s to %s", i, passed, least, most)
		}
		if rec := n.ready(name(i)); rec.Reason != "" {
			t.Errorf("guest %d: %s: %s", i, rec.Reason, rec.Message)
		}
	}
}

// instant is an answer about a guest's uptime, and between which times of the host it was given.
type instant struct {
	asked, answered time.Time
	up              time.Duration
}

func (n *node) uptime(ref string) instant {
	n.t.Helper()
	asked := time.Now()
	text := n.sh(ref, "cut -d' ' -f1 /proc/uptime")
	answered := time.Now()
	seconds, err := strconv.ParseFloat(text, 64)
	if err != nil {
		n.t.Fatal(err)
	}
	return instant{asked, answered, time.Duration(seconds * float64(time.Second))}
}
