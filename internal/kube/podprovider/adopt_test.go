package podprovider

import (
	"strings"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"cocoonstack.io/cocoon/api/contract"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/kube/convert"
	"cocoonstack.io/cocoon/internal/vm"
)

func TestAVanishedVMEvictsItsPod(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := start(t, newEngine())
		defer w.stop()
		w.create(pod())
		w.after(time.Second)
		var last *corev1.Pod
		watcher, err := w.client.CoreV1().Pods("default").Watch(t.Context(), metav1.ListOptions{})
		if err != nil {
			t.Fatal(err)
		}
		w.engine.vanish()
		expect(t, w.after(time.Second), "gone")
		watcher.Stop()
		for e := range watcher.ResultChan() {
			last, _ = e.Object.(*corev1.Pod)
		}
		expect(t, last, "Failed/VMGone terminated:Error:137")
		if got := w.told(); !strings.Contains(got, "Warning VMGone") {
			t.Errorf("events: %s", got)
		}
	})
}

// An earlier process was killed while it created the VM. The engine rolls the creation back while the next process already
// runs. The next process creates another VM.
func TestAVMThatVanishesBeforeItRanIsMadeAnew(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e := newEngine()
		rec, err := e.Launch(t.Context(), convert.Spec(pod(), convert.Node{Name: "node-1"}, nil))
		if err != nil {
			t.Fatal(err)
		}
		<-time.After(time.Minute) // the fake guest has booted
		e.change(rec.ID, func(r *vm.Record) { r.State, r.AgentReady, r.StartedAt = vm.StateCreating, false, time.Time{} })
		w := start(t, e)
		defer w.stop()
		w.create(pod())
		expect(t, w.after(time.Second), "Pending waiting:ContainerCreating")
		e.vanish()
		expect(t, w.after(time.Second), "Running running ready")
		if got := w.told(); strings.Contains(got, "VMGone") {
			t.Errorf("events: %s", got)
		}
	})
}

func TestARestartedProcessTouchesNothing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := start(t, newEngine())
		w.create(pod())
		before := w.after(time.Second)
		expect(t, before, "Running running ready")
		w.stop()
		writes, calls := w.writes(), len(w.engine.calls)
		w.run(Config{})
		defer w.stop()
		after := w.after(time.Minute)
		if !equality.Semantic.DeepEqual(after.Status, before.Status) {
			t.Errorf("status became\n%+v\nfrom\n%+v", after.Status, before.Status)
		}
		if n := w.writes() - writes; n != 0 {
			t.Errorf("%d writes", n)
		}
		if got := w.engine.calls[calls:]; len(got) != 1 || got[0] != "list" {
			t.Errorf("calls %v", got)
		}
		if _, err := w.p.GetPod(t.Context(), "default", "web"); err != nil {
			t.Error(err)
		}
		w.engine.exit(4) // the new process handles the exit
		expect(t, w.after(time.Second), "Running running last:4 restarts:1 ready")
	})
}

func TestWhatHappenedWhileTheEngineWasAway(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := start(t, newEngine())
		defer w.stop()
		w.create(pod())
		w.after(time.Second)
		w.engine.fall(errdefs.Unavailablef("cocoond does not answer"))
		p := w.after(time.Minute)
		expect(t, p, "Running running ready") // the last known state stays
		if w.p.Health() == nil {
			t.Error("Health is nil although the engine does not answer")
		}
		w.engine.vanish()
		w.engine.mu.Lock()
		w.engine.history = nil // the event stream cannot resume
		w.engine.mu.Unlock()
		w.engine.fall(nil)
		expect(t, w.after(2*time.Minute), "gone")
		if w.p.Health() != nil {
			t.Error("Health is an error although the engine answers")
		}
	})
}

func TestOrphans(t *testing.T) {
	for policy, left := range map[OrphanPolicy]int{OrphanAlert: 2, OrphanKeep: 2, OrphanDestroy: 1} {
		t.Run(string(policy), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				e := newEngine()
				spec := convert.Spec(pod(), convert.Node{Name: "node-1"}, nil)
				if _, err := e.Launch(t.Context(), spec); err != nil {
					t.Fatal(err)
				}
				if _, err := e.Launch(t.Context(), vm.Spec{Name: "mine", Image: "x"}.Default()); err != nil { // a VM of the operator, which must stay
					t.Fatal(err)
				}
				w := startWith(t, e, Config{Orphans: policy})
				defer w.stop()
				w.after(time.Second)
				if e.count() != left {
					t.Errorf("%d VMs left, want %d", e.count(), left)
				}
			})
		})
	}
	if _, err := New(Config{Orphans: "eat"}, Deps{}); !errdefs.IsInvalid(err) {
		t.Errorf("an invalid policy was accepted: %v", err)
	}
}

func TestWhoOwnsTheName(t *testing.T) {
	launch := func(t *testing.T, e *engine, uid, node string) {
		t.Helper()
		spec := convert.Spec(pod(func(p *corev1.Pod) { p.UID = "other" }), convert.Node{Name: node}, nil)
		if uid == "" {
			spec.Labels, spec.Offered = nil, []string{"default"}
		} else {
			spec.Labels[contract.VMLabelPodUID] = uid
		}
		if _, err := e.Launch(t.Context(), spec); err != nil {
			t.Fatal(err)
		}
	}
	for _, policy := range []OrphanPolicy{OrphanAlert, OrphanKeep} { // these policies keep the VM's content
		synctest.Test(t, func(t *testing.T) {
			e := newEngine()
			launch(t, e, "dead", "node-1")
			w := startWith(t, e, Config{Orphans: policy})
			defer w.stop()
			w.create(pod())
			expect(t, w.after(time.Minute), "Pending waiting:VMLeftBehind")
			if got := w.told(); e.called("remove") != 0 || !strings.Contains(got, "cocoon vm rm --force") || !strings.Contains(got, "VK_ORPHAN_POLICY=destroy") {
				t.Errorf("%d removals, events: %s", e.called("remove"), got)
			}
			if err := e.Remove(t.Context(), vmName, true); err != nil { // as the message says
				t.Fatal(err)
			}
			expect(t, w.after(10*time.Minute), "Running running ready")
		})
	}
	synctest.Test(t, func(t *testing.T) { // a VM that never ran has no content
		e := newEngine()
		launch(t, e, "dead", "node-1")
		e.change(e.web().ID, func(r *vm.Record) { r.State, r.StartedAt = vm.StateCreated, time.Time{} })
		w := start(t, e)
		defer w.stop()
		w.create(pod())
		expect(t, w.after(time.Second), "Running running ready")
	})
	synctest.Test(t, func(t *testing.T) { // the VM of a deleted pod
		e := newEngine()
		w := startWith(t, e, Config{Orphans: OrphanDestroy})
		launch(t, e, "dead", "node-1") // the VM's pod does not exist
		defer w.stop()
		w.create(pod())
		expect(t, w.after(time.Second), "Running running ready")
		if rec, _ := e.Inspect(t.Context(), vmName); rec.Spec.Labels[contract.VMLabelPodUID] != "uid-1" {
			t.Error("the VM of a deleted pod was adopted")
		}
	})
	synctest.Test(t, func(t *testing.T) { // a VM of another node
		e := newEngine()
		launch(t, e, "alive", "node-2")
		w := start(t, e)
		defer w.stop()
		w.create(pod())
		p := w.after(time.Second)
		expect(t, p, "Pending waiting:CreateContainerError")
		if m := p.Status.ContainerStatuses[0].State.Waiting.Message; !strings.Contains(m, "taken by pod default/web") {
			t.Errorf("message: %s", m)
		}
	})
	synctest.Test(t, func(t *testing.T) { // a VM that the operator created is adopted, and removed with the pod
		e := newEngine()
		launch(t, e, "", "")
		w := start(t, e)
		defer w.stop()
		w.create(pod())
		expect(t, w.after(time.Second), "Running running ready")
		w.engine.exit(2)
		expect(t, w.after(time.Second), "Running running last:2 restarts:1 ready")
		if e.called("remove") != 0 {
			t.Error("the adopted VM was removed")
		}
	})
}

// A VM that the operator created and does not offer belongs only to the operator, even if a pod names it.
func TestAVMThatIsNotOffered(t *testing.T) {
	for name, offered := range map[string][]string{"not offered": nil, "offered to another namespace": {"other"}} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				e := newEngine()
				rec, err := e.Launch(t.Context(), vm.Spec{Name: vmName, Image: "x", Offered: offered}.Default())
				if err != nil {
					t.Fatal(err)
				}
				greedy := pod(asks(map[string]string{contract.KeyID: string(rec.ID)}))
				w := start(t, e)
				w.create(greedy)
				expect(t, w.after(time.Second), "Running running ready")
				w.stop()
				w.run(Config{}) // the next process, which adopts VMs
				defer w.stop()
				w.after(time.Minute)
				w.kill()
				expect(t, w.after(time.Minute), "gone")
				if left, err := e.Inspect(t.Context(), string(rec.ID)); err != nil || left.Revision != rec.Revision+1 || e.count() != 1 { // the one change is the boot of the guest
					t.Errorf("the operator's VM is %+v, %v, and %d are left", left, err, e.count())
				}
			})
		})
	}
}

// Only one pod adopts a VM that the operator created. Another pod that names the VM cannot use it, and does not remove it when
// that pod is deleted. Neither annotations nor the order of pods after a restart change that.
func TestAnAdoptedVMIsOnePods(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e := newEngine()
		spec := convert.Spec(pod(), convert.Node{Name: "node-1"}, nil)
		spec.Labels, spec.Offered = nil, []string{"other", "default"}
		rec, err := e.Launch(t.Context(), spec)
		if err != nil {
			t.Fatal(err)
		}
		w := start(t, e)
		w.create(pod())
		expect(t, w.after(time.Second), "Running running ready")
		greedy := pod(func(p *corev1.Pod) {
			p.Name, p.UID = "greedy", "uid-2" // sorts before the other
			p.Annotations = map[string]string{contract.KeyName: vmName, contract.KeyID: string(rec.ID)}
		})
		w.create(greedy)
		theirs := func(when string) {
			t.Helper()
			p, err := w.client.CoreV1().Pods("default").Get(t.Context(), greedy.Name, metav1.GetOptions{})
			if err != nil {
				t.Fatal(err)
			}
			if got := sketch(p); got != "Pending waiting:CreateContainerError" || !strings.Contains(p.Status.ContainerStatuses[0].State.Waiting.Message, "taken by pod default/web") {
				t.Errorf("%s: the other pod is %q: %+v", when, got, p.Status.ContainerStatuses[0].State.Waiting)
			}
		}
		w.after(time.Second)
		theirs("at first")
		w.stop()
		w.run(Config{})
		defer w.stop()
		if err := w.p.CreatePod(t.Context(), greedy.DeepCopy()); err != nil { // virtual-kubelet reports all pods
			t.Fatal(err)
		}
		w.after(time.Minute)
		theirs("after a restart")
		greedy.DeletionTimestamp, greedy.DeletionGracePeriodSeconds = new(metav1.Now()), new(int64(30))
		if err := w.p.DeletePod(t.Context(), greedy); err != nil {
			t.Fatal(err)
		}
		expect(t, w.after(time.Minute), "Running running ready")
		if e.count() != 1 {
			t.Error("the VM was removed with a pod that had not adopted it")
		}
	})
}
