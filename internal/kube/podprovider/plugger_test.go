package podprovider

import (
	"strings"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"cocoonstack.io/cocoon/api/contract"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/testkit/diff"
	"cocoonstack.io/cocoon/internal/vm"
)

func TestPlugTasks(t *testing.T) {
	here := func(ids ...vm.ID) *vm.Record {
		r := &vm.Record{}
		for _, id := range ids {
			r.Attached = append(r.Attached, vm.AttachedVolume{ID: id, Serial: "serial-" + string(id)})
		}
		return r
	}
	a := contract.Plugged{Volume: "a", Claim: "x", ID: "1", Serial: "serial-1"}
	with := func(change func(*contract.Plugged)) contract.Plugged {
		p := a
		change(&p)
		return p
	}
	for name, c := range map[string]struct {
		wants   map[string]string
		plugged []contract.Plugged
		rec     *vm.Record
		want    []plugTask
	}{
		"nothing":              {rec: here()},
		"somebody else's":      {rec: here("9")},
		"new ones":             {wants: map[string]string{"b": "y", "a": "x"}, rec: here(), want: []plugTask{{Plugged: contract.Plugged{Volume: "a", Claim: "x"}}, {Plugged: contract.Plugged{Volume: "b", Claim: "y"}}}},
		"there":                {wants: map[string]string{"a": "x"}, plugged: []contract.Plugged{a}, rec: here("1")},
		"killed before":        {wants: map[string]string{"a": "x"}, plugged: []contract.Plugged{with(func(p *contract.Plugged) { p.Serial = "" })}, rec: here(), want: []plugTask{{Plugged: with(func(p *contract.Plugged) { p.Serial = "" })}}},
		"killed after":         {wants: map[string]string{"a": "x"}, plugged: []contract.Plugged{with(func(p *contract.Plugged) { p.Serial = "" })}, rec: here("1"), want: []plugTask{{Plugged: with(func(p *contract.Plugged) { p.Serial = "" })}}},
		"another VM":           {wants: map[string]string{"a": "x"}, plugged: []contract.Plugged{a}, rec: here(), want: []plugTask{{Plugged: a}}},
		"wanted again":         {wants: map[string]string{"a": "x"}, plugged: []contract.Plugged{with(func(p *contract.Plugged) { p.Why = "in use" })}, rec: here("1"), want: []plugTask{{Plugged: with(func(p *contract.Plugged) { p.Why = "in use" })}}},
		"away":                 {plugged: []contract.Plugged{a}, rec: here("1"), want: []plugTask{{a, true}}},
		"away, killed after":   {plugged: []contract.Plugged{a}, rec: here(), want: []plugTask{{a, true}}},
		"another claim":        {wants: map[string]string{"a": "y"}, plugged: []contract.Plugged{a}, rec: here("1"), want: []plugTask{{a, true}}},
		"a note without sense": {plugged: []contract.Plugged{{}}, rec: here(), want: []plugTask{{contract.Plugged{}, true}}},
	} {
		if d := diff.Of(c.want, plugTasks(c.wants, c.plugged, c.rec)); d != "" {
			t.Errorf("%s:\n%s", name, d)
		}
	}
}

// disks creates the claim data, which has the volume 01disk.
func (w *world) disks() {
	w.t.Helper()
	core := w.client.CoreV1()
	if _, err := core.PersistentVolumes().Create(w.t.Context(), &corev1.PersistentVolume{ObjectMeta: metav1.ObjectMeta{Name: "pv"}, Spec: corev1.PersistentVolumeSpec{
		ClaimRef: &corev1.ObjectReference{UID: "claim"}, AccessModes: []corev1.PersistentVolumeAccessMode{corev1.ReadWriteOnce}, VolumeMode: new(corev1.PersistentVolumeBlock),
		PersistentVolumeSource: corev1.PersistentVolumeSource{CSI: &corev1.CSIPersistentVolumeSource{Driver: contract.VolumeDriver, VolumeHandle: "01disk"}},
	}}, metav1.CreateOptions{}); err != nil {
		w.t.Fatal(err)
	}
	if _, err := core.PersistentVolumeClaims("default").Create(w.t.Context(), &corev1.PersistentVolumeClaim{
		ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "data", UID: "claim"}, Spec: corev1.PersistentVolumeClaimSpec{VolumeName: "pv"},
		Status: corev1.PersistentVolumeClaimStatus{Phase: corev1.ClaimBound},
	}, metav1.CreateOptions{}); err != nil {
		w.t.Fatal(err)
	}
}

func (e *engine) fail(err error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.plugAs = err
}

// TestPlugAndUnplug: a volume is plugged when its claim is there, stays over a restart of the node, and is taken away when the guest
// gives it back. All of that is told.
func TestPlugAndUnplug(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := start(t, newEngine())
		defer func() { w.stop() }()
		w.create(pod())
		expect(t, w.after(5*time.Second), "Running running ready")
		says := func(p *corev1.Pod, want ...contract.Plugged) {
			t.Helper()
			if d := diff.Of(want, contract.ParsePlugged(p.Annotations)); d != "" {
				t.Errorf("it says:\n%s", d)
			}
		}
		w.annotate(contract.KeyVolumes, "disk=data")
		says(w.after(5*time.Second), contract.Plugged{Volume: "disk", Claim: "data", Why: `persistentvolumeclaim "data" not found`})
		w.expectTold(`Warning VolumePlugFailed Volume disk of claim data is not plugged into VM ` + vmName + ` yet: persistentvolumeclaim "data" not found`)
		w.disks()
		p := w.after(time.Minute)
		there := contract.Plugged{Volume: "disk", Claim: "data", ID: "01disk", Serial: "serial-01disk"}
		says(p, there)
		w.expectTold("Normal VolumePlugged Plugged volume disk of claim data into VM " + vmName + ", as the disk with the serial number serial-01disk")
		expect(t, p, "Running running ready")

		w.stop() // the node is started again
		w.run(Config{})
		w.recall(t)
		writes := w.writes()
		says(w.after(time.Hour), there)
		if n := w.engine.called("attach 01disk"); n != 1 || w.writes() != writes {
			t.Errorf("%d attachments, %d writes in an hour", n, w.writes()-writes)
		}

		w.engine.fail(errdefs.Preconditionf("the guest has mounted it"))
		w.annotate(contract.KeyVolumes, "")
		there.Why = "the guest has mounted it"
		says(w.after(time.Minute), there)
		if told := w.told(); strings.Count(told, "Warning VolumeUnplugFailed") != 1 {
			t.Errorf("told %s", told)
		}
		w.engine.fail(nil)
		p = w.after(2 * time.Minute)
		says(p)
		if _, ok := p.Annotations[contract.KeyPlugged]; ok {
			t.Error("the annotation is left")
		}
		w.expectTold("Normal VolumeUnplugged Took volume disk of claim data from VM " + vmName)
	})
}

// TestPlugIsNoted: wherever the node ends, the next process knows which volume to take away.
func TestPlugIsNoted(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := start(t, newEngine())
		defer func() { w.stop() }()
		noted := ""
		w.engine.plugged = func() {
			if p, err := w.client.CoreV1().Pods("default").Get(t.Context(), "web", metav1.GetOptions{}); err == nil {
				noted = p.Annotations[contract.KeyPlugged]
			}
		}
		w.create(pod())
		w.disks()
		w.after(5 * time.Second)
		w.annotate(contract.KeyVolumes, "disk=data")
		w.after(5 * time.Second)
		if !strings.Contains(noted, `"id":"01disk"`) {
			t.Fatalf("when the volume was plugged, the note was %q", noted)
		}
		w.stop()
		w.annotateOnly(contract.KeyPlugged, noted) // as if it was killed then
		w.annotateOnly(contract.KeyVolumes, "")
		w.run(Config{})
		w.recall(t)
		p := w.after(time.Minute)
		if w.engine.called("detach 01disk") != 1 || p.Annotations[contract.KeyPlugged] != "" {
			t.Errorf("calls %v, the note is %q", w.engine.calls, p.Annotations[contract.KeyPlugged])
		}
	})
}

// annotateOnly changes an annotation while no provider runs.
func (w *world) annotateOnly(key, value string) {
	w.t.Helper()
	pods := w.client.CoreV1().Pods("default")
	p, err := pods.Get(w.t.Context(), "web", metav1.GetOptions{})
	if err != nil {
		w.t.Fatal(err)
	}
	p.Annotations[key] = value
	if _, err := pods.Update(w.t.Context(), p, metav1.UpdateOptions{}); err != nil {
		w.t.Fatal(err)
	}
}

// TestPlugRefused: a list that cannot be read changes nothing, and says so once. A paused guest gets no volume before it runs again.
func TestPlugRefused(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := start(t, newEngine())
		defer w.stop()
		w.create(pod())
		w.disks()
		w.after(5 * time.Second)
		w.annotate(contract.KeyVolumes, "disk=data,more=../data")
		w.after(time.Hour)
		if told := w.told(); strings.Count(told, "Warning VolumePlugFailed") != 1 || w.engine.called("attach 01disk") != 0 {
			t.Errorf("told %s; calls %v", told, w.engine.calls)
		}
		w.annotate(contract.KeyPaused, "true")
		w.after(5 * time.Second)
		w.annotate(contract.KeyVolumes, "disk=data")
		w.after(time.Minute)
		if w.engine.called("attach 01disk") != 0 {
			t.Error("a paused guest gets a volume")
		}
		w.annotate(contract.KeyPaused, "")
		w.after(time.Minute)
		if w.engine.called("attach 01disk") != 1 {
			t.Error("a guest that is not paused any more gets no volume")
		}
	})
}
