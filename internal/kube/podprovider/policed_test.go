package podprovider

import (
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"cocoonstack.io/cocoon/internal/errdefs"
)

// A pod's VM is attached as policed, and no VM is created while it is not known whether it must be.
func TestPoliced(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e := newEngine()
		why := errdefs.Preconditionf("this node may not read the network policies")
		var known atomic.Bool
		w := &world{t: t, engine: e, policed: func() (bool, error) {
			if known.Load() {
				return true, nil
			}
			return false, why
		}}
		w.begin(Config{})
		defer w.stop()
		w.create(pod())
		p := w.after(time.Minute)
		expect(t, p, "Pending waiting:CreateContainerConfigError")
		if got := p.Status.ContainerStatuses[0].State.Waiting.Message; got != why.Error() {
			t.Errorf("it says %q", got)
		}
		if all, err := e.List(t.Context()); len(all) > 0 || err != nil {
			t.Fatalf("VMs %+v, %v", all, err)
		}
		known.Store(true)
		expect(t, w.after(time.Minute), "Running running ready")
		rec, err := e.Inspect(t.Context(), vmName)
		if err != nil || len(rec.Spec.NICs) != 1 || !rec.Spec.NICs[0].Policed {
			t.Errorf("interfaces %+v, %v", rec.Spec.NICs, err)
		}
	})
}
