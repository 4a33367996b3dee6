package cocoond

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/snapshot"
)

func TestPeerIsAllOrNothing(t *testing.T) {
	junk := filepath.Join(t.TempDir(), "junk")
	if err := os.WriteFile(junk, []byte("junk"), 0o600); err != nil {
		t.Fatal(err)
	}
	for name, c := range map[string]struct {
		peer Peer
		want string // of the error; "": none
	}{
		"none":    {},
		"half":    {Peer{CA: junk}, "together"},
		"missing": {Peer{CA: junk, Cert: "/no/cert", Key: "/no/key"}, "/no/cert"},
		"junk":    {Peer{CA: junk, Cert: junk, Key: junk}, "peer.cert"},
	} {
		err := c.peer.complete()
		if (c.want == "") != (err == nil) || err != nil && (!errdefs.IsInvalid(err) || !strings.Contains(err.Error(), c.want)) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if (Peer{}).dial() != nil {
		t.Error("a node without a certificate dials")
	}
}

func TestTransfersAreCounted(t *testing.T) {
	r := prometheus.NewPedanticRegistry()
	m := newSnapshotMetrics(r)
	var seen []int64
	watched, done := m.transfer("push", func(p snapshot.Progress) { seen = append(seen, p.Moved) })
	for _, n := range []int64{5, 9, 7, 12} { // reports may arrive out of order
		watched(snapshot.Progress{Moved: n})
	}
	err := error(nil)
	done(&err)
	watched, done = m.transfer("pull", nil)
	watched(snapshot.Progress{Moved: 3})
	err = errdefs.Unavailablef("gone")
	done(&err)
	m.pause.Observe((5 * time.Millisecond).Seconds())
	if len(seen) != 4 {
		t.Errorf("the client heard %v", seen)
	}
	families, err := r.Gather()
	if err != nil {
		t.Fatal(err)
	}
	got := map[string]float64{}
	for _, f := range families {
		for _, x := range f.GetMetric() {
			var labels []string
			for _, l := range x.GetLabel() {
				labels = append(labels, l.GetValue())
			}
			name := f.GetName() + "{" + strings.Join(labels, ",") + "}"
			got[name] = x.GetCounter().GetValue() + float64(x.GetHistogram().GetSampleCount())
		}
	}
	for name, want := range map[string]float64{
		"cocoon_snapshot_transfer_bytes_total{push}": 12, "cocoon_snapshot_transfer_bytes_total{pull}": 3,
		"cocoon_snapshot_transfers_total{push,ok}": 1, "cocoon_snapshot_transfers_total{pull,unavailable}": 1,
		"cocoon_snapshot_transfer_seconds{push}": 1, "cocoon_snapshot_pause_seconds{}": 1,
	} {
		if got[name] != want {
			t.Errorf("%s is %v, want %v; all: %v", name, got[name], want, got)
		}
	}
}
