package podprovider

import (
	"testing"
	"testing/synctest"
	"time"

	vkerr "github.com/virtual-kubelet/virtual-kubelet/errdefs"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"cocoonstack.io/cocoon/api/contract"
)

func TestDeletion(t *testing.T) {
	synctest.Test(t, func(t *testing.T) { // a shorter grace period replaces a longer one
		e := newEngine()
		e.stopTime = time.Hour
		w := start(t, e)
		defer w.stop()
		w.create(pod())
		p := w.after(time.Second)
		p.DeletionTimestamp, p.DeletionGracePeriodSeconds = new(metav1.Now()), new(int64(600))
		_ = w.p.DeletePod(t.Context(), p)
		expect(t, w.after(time.Minute), "Running running ready")
		p.DeletionGracePeriodSeconds = new(int64(1))
		_ = w.p.DeletePod(t.Context(), p)
		expect(t, w.after(2*time.Second), "gone")
		if e.count() != 0 {
			t.Error("the VM is left")
		}
	})
	synctest.Test(t, func(t *testing.T) { // a VM is not removed because of a stale cache
		w := start(t, newEngine())
		defer w.stop()
		w.create(pod())
		p := w.after(time.Second)
		_ = w.p.DeletePod(t.Context(), p)
		expect(t, w.after(time.Minute), "Running running ready")
		if w.engine.count() != 1 {
			t.Error("the VM was destroyed")
		}
		_ = w.client.Tracker().Delete(corev1.SchemeGroupVersion.WithResource("pods"), "default", "web")
		_ = w.p.DeletePod(t.Context(), p)
		w.after(time.Minute)
		if w.engine.count() != 0 {
			t.Error("the VM of a deleted pod was not removed")
		}
	})
	synctest.Test(t, func(t *testing.T) { // virtual-kubelet does not delete a pod whose VM exists
		e := newEngine()
		e.boot = time.Minute
		w := start(t, e)
		defer w.stop()
		w.create(pod())
		p := w.after(time.Second)
		expect(t, p, "Pending waiting:ContainerCreating")
		if err := w.p.PodClient().Pods("default").Delete(t.Context(), "web", metav1.DeleteOptions{Preconditions: &metav1.Preconditions{UID: &p.UID}}); !apierrors.IsNotFound(err) {
			t.Error(err)
		}
		expect(t, w.after(time.Second), "gone")
		if e.count() != 0 || e.called("stop 0s") != 1 {
			t.Errorf("%d VMs left, calls %v", e.count(), e.calls)
		}
	})
	synctest.Test(t, func(t *testing.T) { // the next process continues a deletion that was interrupted
		w := start(t, newEngine())
		w.create(pod())
		p := w.after(time.Second)
		w.stop()
		p.DeletionTimestamp, p.DeletionGracePeriodSeconds = new(metav1.Now()), new(int64(30))
		if err := w.client.Tracker().Update(corev1.SchemeGroupVersion.WithResource("pods"), p, "default"); err != nil {
			t.Fatal(err)
		}
		if _, err := w.engine.Stop(t.Context(), vmName, 0); err != nil {
			t.Fatal(err)
		}
		w.run(Config{})
		defer w.stop()
		expect(t, w.after(time.Second), "gone")
		if w.engine.count() != 0 || w.engine.called("start") != 0 {
			t.Errorf("%d VMs left, calls %v", w.engine.count(), w.engine.calls)
		}
	})
	synctest.Test(t, func(t *testing.T) { // the deletion of a pod that has ended removes its VM
		w := start(t, newEngine())
		defer w.stop()
		w.create(pod(policy(corev1.RestartPolicyNever)))
		w.after(time.Second)
		w.engine.exit(0)
		p := w.after(time.Second)
		expect(t, p, "Succeeded terminated:Completed:0")
		_ = w.client.Tracker().Delete(corev1.SchemeGroupVersion.WithResource("pods"), "default", "web")
		p, err := w.p.GetPod(t.Context(), "default", "web")
		if err != nil {
			t.Fatal(err)
		}
		_ = w.p.DeletePod(t.Context(), p)
		w.after(time.Second)
		if w.engine.count() != 0 {
			t.Error("the VM is left")
		}
	})
	synctest.Test(t, func(t *testing.T) { // a pod waits for the VM name of an earlier pod of its name
		e := newEngine()
		e.stopTime = 5 * time.Second
		w := start(t, e)
		defer w.stop()
		w.create(pod())
		w.after(time.Second)
		_ = w.client.Tracker().Delete(corev1.SchemeGroupVersion.WithResource("pods"), "default", "web")
		second := pod(func(p *corev1.Pod) { p.UID = "uid-2" })
		_ = w.client.Tracker().Add(second)
		if _, err := w.p.GetPod(t.Context(), "default", "web"); !vkerr.IsNotFound(err) {
			t.Errorf("the first pod was returned for the second: %v", err)
		}
		_ = w.p.CreatePod(t.Context(), second)
		expect(t, w.after(time.Second), "Pending waiting:ContainerCreating")
		expect(t, w.after(6*time.Second), "Running running ready")
		if rec, _ := e.Inspect(t.Context(), vmName); rec.Spec.Labels[contract.VMLabelPodUID] != "uid-2" || e.count() != 1 {
			t.Errorf("VM of %s, %d in all", rec.Spec.Labels[contract.VMLabelPodUID], e.count())
		}
	})
}
