package podprovider

import (
	"errors"
	"os"
	"path/filepath"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"k8s.io/apimachinery/pkg/runtime"
	clienttesting "k8s.io/client-go/testing"

	"cocoonstack.io/cocoon/api/contract"
	"cocoonstack.io/cocoon/internal/vm"
)

// outage makes API calls fail while away is set.
func outage(away *atomic.Bool) clienttesting.ReactionFunc {
	return func(clienttesting.Action) (bool, runtime.Object, error) {
		if away.Load() {
			return true, nil, errors.New("connection refused")
		}
		return false, nil, nil
	}
}

func FuzzLeases(f *testing.F) {
	f.Add([]byte(`[{"mac":"02:00:00:00:00:01","ip":"10.0.0.7","expiry":"2100-01-01T00:00:00Z"}]`))
	f.Add([]byte(`[{"mac":"02:00:00:00:00:01","ip":"10.0.0.7","expiry":12}]`))
	f.Add([]byte(`[{"mac":1}]`))
	f.Add([]byte(`{`))
	f.Fuzz(func(_ *testing.T, data []byte) {
		parseLeases(data, "02:00:00:00:00:01", time.Unix(1e9, 0))
	})
}

func TestLeases(t *testing.T) {
	now := time.Unix(1e9, 0)
	for data, want := range map[string]string{
		`[{"mac":"02:00:00:00:00:0A","ip":"10.0.0.7","expiry":"2100-01-01T00:00:00Z"}]`: "10.0.0.7",
		`[{"mac":"02:00:00:00:00:0a","ip":"10.0.0.7","expiry":2000000000}]`:             "10.0.0.7",
		`[{"mac":"02:00:00:00:00:0a","ip":"10.0.0.7"}]`:                                 "10.0.0.7",
		`[{"mac":"02:00:00:00:00:0a","ip":"10.0.0.7","expiry":"2000-01-01T00:00:00Z"}]`: "",
		`[{"mac":"02:00:00:00:00:0a","ip":"10.0.0.777"}]`:                               "",
		`[{"mac":"02:00:00:00:00:0b","ip":"10.0.0.7"}]`:                                 "",
		`not json`: "",
	} {
		if got := parseLeases([]byte(data), "02:00:00:00:00:0a", now); got != want {
			t.Errorf("%s: %q, want %q", data, got, want)
		}
	}
	if leaseIP("/nonexistent", "02:00:00:00:00:0a", now) != "" {
		t.Error("a missing lease file returned an address")
	}
}

// If the engine does not know the address, each probe looks in the lease file until the address is found.
func TestAMissingAddressIsLookedUp(t *testing.T) {
	path := filepath.Join(t.TempDir(), "leases.json")
	synctest.Test(t, func(t *testing.T) {
		e := newEngine()
		e.boot = time.Second
		w := startWith(t, e, Config{LeasesPath: path})
		defer w.stop()
		w.create(pod())
		w.after(100 * time.Millisecond)
		rec, err := e.Inspect(t.Context(), vmName)
		if err != nil {
			t.Fatal(err)
		}
		e.change(rec.ID, func(r *vm.Record) { r.NICs = []vm.NIC{{MAC: r.NICs[0].MAC}} })
		p := w.after(10 * time.Second)
		expect(t, p, "Running running")
		if p.Status.PodIP != "" || p.Annotations[contract.KeyIP] != "" {
			t.Errorf("the status has an unknown address: %q", p.Status.PodIP)
		}
		if err := os.WriteFile(path, []byte(`[{"mac":"`+rec.NICs[0].MAC+`","ip":"10.0.0.77"}]`), 0o600); err != nil {
			t.Fatal(err)
		}
		p = w.after(3 * time.Second)
		expect(t, p, "Running running ready")
		if p.Status.PodIP != "10.0.0.77" || p.Annotations[contract.KeyIP] != "10.0.0.77" {
			t.Errorf("address %q", p.Status.PodIP)
		}
	})
}
