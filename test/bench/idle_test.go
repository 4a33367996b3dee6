//go:build bench

package bench

import (
	"fmt"
	"testing"
	"time"

	"cocoonstack.io/cocoon/internal/snapshot"
	"cocoonstack.io/cocoon/internal/vm"
)

const (
	idlePushes = 3
	idleTime   = time.Minute // between two saves of a guest that does nothing of its own
)

// idle saves a running, nearly idle VM again and again, and compares what each push sends with what the first one sent. The
// name and the tag are the same each time, and the earlier snapshot is gone, as when a VM hibernates and wakes.
func idle(t *testing.T, results *table) {
	d := start(t, "")
	ready := watchReady(t, d.Client)
	must(d.Launch(t.Context(), spec("idle")))(t)
	ready.wait(t, "idle")
	ref := fmt.Sprintf("http://%s/bench/idle:hibernate", epoch(t))
	var moved []int64
	for n := range idlePushes {
		if n > 0 {
			select { // the guest's own time, in which it changes memory
			case <-time.After(idleTime):
			case <-t.Context().Done():
				return
			}
		}
		name, most := fmt.Sprintf("idle-%d", n), int64(0)
		must(d.SaveSnapshot(t.Context(), "idle", vm.SaveSpec{Name: name}))(t)
		must(d.PushSnapshot(t.Context(), name, ref, snapshot.Auth{Token: benchToken}, func(p snapshot.Progress) { most = max(most, p.Moved) }))(t)
		if err := d.RemoveSnapshot(t.Context(), name); err != nil {
			t.Fatal(err)
		}
		moved = append(moved, most)
	}
	remove(t, d, "idle")
	for n, m := range moved[1:] {
		share := float64(m) / float64(moved[0])
		results.add(row{
			what: fmt.Sprintf("push %d of a running, nearly idle VM, saved %s after the one before (A), first (B): bytes moved", n+2, idleTime),
			a:    mib(m), b: mib(moved[0]), figure: fmt.Sprintf("%.2f %%", share*100), goal: "<= 10 %", missed: share > 0.1, n: 1,
		})
	}
}
