package podprovider

import (
	"context"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"

	"cocoonstack.io/cocoon/internal/csinode"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/kube/convert"
	"cocoonstack.io/cocoon/internal/kube/csi"
	"cocoonstack.io/cocoon/internal/vm"
)

// drivers publish one folder for each pod.
type drivers struct {
	mu        sync.Mutex
	published int // calls
	renewed   int
	stale     bool
	has       bool
	stuck     error // why nothing can be published or released
	vms       func() int
	early     bool // released while the VM was there
}

func (d *drivers) Persistent(context.Context, *corev1.Pod, string, *corev1.PersistentVolume, bool, csi.Ask) (convert.Disk, error) {
	return convert.Disk{}, errdefs.Unsupportedf("no test has one")
}

func (d *drivers) Inline(_ context.Context, _ *corev1.Pod, v *corev1.Volume, ask csi.Ask) (convert.Disk, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if ask.Renew {
		d.renewed++
		return convert.Disk{}, d.stuck
	}
	if d.stuck != nil {
		return convert.Disk{}, d.stuck
	}
	d.published++
	d.has, d.stale = true, false
	return convert.Disk{Dir: &vm.HostDir{Path: "/csi/" + v.Name, Published: true}}, nil
}

func (d *drivers) Stale(context.Context, *corev1.Pod) (bool, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.stale, nil
}

func (d *drivers) Release(context.Context, *corev1.Pod) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.early = d.early || d.vms() > 0
	if d.stuck == nil {
		d.has = false
	}
	return d.stuck
}

func (d *drivers) Usage(context.Context, *corev1.Pod, string) (csinode.Usage, error) {
	return csinode.Usage{Bytes: csinode.Amount{Total: 100, Used: 30}}, nil
}

func (d *drivers) set(f func()) {
	d.mu.Lock()
	defer d.mu.Unlock()
	f()
}

// TestPublishedVolumes: a pod waits for its driver. Its volume is published again before its VM starts if the machine has lost it, and
// released after the VM is gone; until then the pod is Terminating.
func TestPublishedVolumes(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e := newEngine()
		d := &drivers{stuck: errdefs.Unavailablef("driver d is not registered"), vms: e.count}
		var asked vm.Spec
		e.launchAt = func(s vm.Spec) error {
			asked = s
			return nil
		}
		w := &world{t: t, engine: e, plugins: d}
		w.begin(Config{})
		defer func() { w.stop() }()
		w.create(pod(mounting("data", corev1.VolumeSource{CSI: &corev1.CSIVolumeSource{Driver: "d"}})))
		p := w.after(5 * time.Second)
		expect(t, p, "Pending waiting:ContainerCreating")
		if got := p.Status.ContainerStatuses[0].State.Waiting.Message; !strings.Contains(got, "driver d is not registered") || !strings.Contains(w.told(), "FailedMount") {
			t.Errorf("it says %q, told %s", got, w.told())
		}
		d.set(func() { d.stuck = nil })
		expect(t, w.after(31*time.Second), "Running running ready")
		if dirs := asked.Dirs(); len(dirs) != 1 || !dirs[0].Dir.Published || dirs[0].Dir.Path != "/csi/data" {
			t.Errorf("the VM has %+v", dirs)
		}
		all := w.p.Tracked()
		stats, err := w.p.Inside(t.Context(), all[0].ID)
		if err != nil || len(stats.Volumes) != 1 || stats.Volumes[0].Name != "data" || stats.Volumes[0].Used != 30 {
			t.Errorf("usage %+v, %v", stats.Volumes, err)
		}

		// The driver may renew what is in the volume. If it cannot, the pod goes on, and an Event says so once.
		w.pass(10 * time.Minute)
		d.set(func() { d.stuck = errdefs.Unavailablef("no token today") })
		expect(t, w.after(10*time.Minute), "Running running ready")
		if told := w.told(); strings.Count(told, "no token today") != 1 || d.renewed < 10 || d.renewed > 14 {
			t.Errorf("renewed %d times, told %s", d.renewed, told)
		}
		d.set(func() { d.stuck = nil })

		e.exit(1)
		expect(t, w.after(20*time.Second), "Running running last:1 restarts:1 ready")
		if d.published != 1 {
			t.Errorf("published %d times", d.published)
		}
		d.set(func() { d.stale = true })
		e.exit(1)
		expect(t, w.after(time.Minute), "Running running last:1 restarts:2 ready")
		if d.published != 2 {
			t.Errorf("published %d times after the machine had lost it", d.published)
		}

		d.set(func() { d.stuck = errdefs.Preconditionf("it is still mounted") })
		w.kill()
		if p := w.after(time.Minute); p == nil || e.count() != 0 {
			t.Errorf("the pod is %s with %d VMs", sketch(p), e.count())
		}
		if told := w.told(); strings.Count(told, "FailedUnMount") != 1 || !strings.Contains(told, "still mounted") {
			t.Errorf("told %s", told)
		}
		d.set(func() { d.stuck = nil })
		expect(t, w.after(2*time.Minute), "gone")
		if d.has || d.early {
			t.Errorf("published still %t, released while the VM was there %t", d.has, d.early)
		}
	})
}
