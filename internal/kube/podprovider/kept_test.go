package podprovider

import (
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"cocoonstack.io/cocoon/api/contract"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/vm"
)

const keptName = vmName + ":hibernate"

// ofSandbox makes a pod of the controller with that UID, whose VM hibernates when the pod is deleted.
func ofSandbox(owner string) func(*corev1.Pod) {
	return func(p *corev1.Pod) {
		asks(map[string]string{contract.KeyDeletionPolicy: string(contract.DeleteHibernates)})(p)
		p.OwnerReferences = []metav1.OwnerReference{{APIVersion: "agents.x-k8s.io/v1alpha1", Kind: "Sandbox", Name: "web", UID: types.UID(owner), Controller: new(true)}}
	}
}

func withUID(uid string) func(*corev1.Pod) {
	return func(p *corev1.Pod) { p.UID = types.UID(uid) }
}

// pausing returns a world with the pod of a sandbox, which is ready and knows "counter 17".
func pausing(t *testing.T, s *fakeSnapshots, bare bool) (*world, *registrar) {
	t.Helper()
	r := &registrar{e: s.engine}
	w := keepingWith(t, s, bare, r)
	w.create(pod(ofSandbox("sandbox-1")))
	expect(t, w.after(5*time.Second), "Running running ready")
	s.knows(vmName, "counter 17")
	return w, r
}

func (w *world) nothingLeft(s *fakeSnapshots) {
	w.t.Helper()
	if left := s.names(); left != "" || len(s.registry.tags) > 0 || s.count() != 0 {
		w.t.Errorf("left are the snapshots %q, the tags %v and %d VMs", left, s.registry.tags, s.count())
	}
}

func TestDeletionHibernates(t *testing.T) {
	for name, bare := range map[string]bool{"registry": false, "alone": true} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s := newKept()
				s.boot = 2 * time.Second
				w, _ := pausing(t, s, bare)
				defer func() { w.stop() }()
				w.kill()
				expect(t, w.after(time.Second), "gone")
				if s.count() != 0 || s.names() != keptName || s.registry.has(vmRepo, "hibernate") != "counter 17" && !bare {
					t.Errorf("%d VMs, snapshots %q, tags %v", s.count(), s.names(), s.registry.tags)
				}
				w.expectTold("Normal Hibernated VM " + vmName)
				w.pass(time.Hour) // the state stays as long as its owner, over a restart too
				w.stop()
				w.run(keepingConfig(bare))
				w.pass(time.Hour)

				w.create(pod(ofSandbox("sandbox-1"), withUID("uid-2")))
				expect(t, w.after(10*time.Second), "Running running ready")
				if got := s.knows(vmName); got != "counter 17" || s.registry.called("pull "+registryURL+"/"+vmRepo+":hibernate") > 0 {
					t.Errorf("it woke with %q, the registry got %v", got, s.registry.calls)
				}
				w.expectTold("Normal Woken VM " + vmName)
				if s.names() != "" || len(s.registry.tags) > 0 {
					t.Errorf("awake, it has the snapshots %q and the tags %v", s.names(), s.registry.tags)
				}
				s.knows(vmName, "counter 18") // and again
				w.kill()
				w.after(time.Second)
				w.create(pod(ofSandbox("sandbox-1"), withUID("uid-3")))
				w.after(10 * time.Second)
				if got := s.knows(vmName); got != "counter 18" {
					t.Errorf("it woke with %q the second time", got)
				}
			})
		})
	}
}

// The owner is deleted: while the VM runs, while it is saved, and while it is hibernated.
func TestKeptStateGoesWithItsOwner(t *testing.T) {
	for name, bare := range map[string]bool{"registry": false, "alone": true} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s := newKept()
				w, r := pausing(t, s, bare)
				defer w.stop()
				r.lose()
				w.kill()
				expect(t, w.after(time.Second), "gone")
				w.nothingLeft(s)
				if s.called("hibernate") != 0 {
					t.Error("the VM was saved in vain")
				}
			})
			synctest.Test(t, func(t *testing.T) {
				s := newKept()
				w, r := pausing(t, s, bare)
				defer w.stop()
				s.takes = 10 * time.Second
				w.kill()
				w.pass(3 * time.Second)
				r.lose()
				expect(t, w.after(10*time.Second), "gone")
				w.nothingLeft(s)
			})
			synctest.Test(t, func(t *testing.T) {
				s := newKept()
				w, r := pausing(t, s, bare)
				defer w.stop()
				w.kill()
				expect(t, w.after(time.Minute), "gone")
				r.lose()
				w.pass(time.Minute)
				w.nothingLeft(s)
			})
		})
	}
}

// A manager that releases the claim of a node which is away deletes it, too. The node must not remove what another node needs.
func TestReleasedStateStaysInTheRegistry(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newKept()
		w, r := pausing(t, s, false)
		w.kill()
		w.pass(time.Minute)
		w.stop()
		r.lose()
		w.run(keepingConfig(false))
		defer w.stop()
		w.pass(time.Hour)
		if s.names() != "" || s.registry.has(vmRepo, "hibernate") != "counter 17" {
			t.Errorf("snapshots %q, tags %v", s.names(), s.registry.tags)
		}
	})
	synctest.Test(t, func(t *testing.T) { // the VM is awake on another node
		s := newKept()
		w, r := pausing(t, s, false)
		defer w.stop()
		w.kill()
		w.pass(time.Minute)
		r.move("node-2")
		w.pass(time.Minute)
		if s.names() != "" || s.registry.has(vmRepo, "hibernate") != "counter 17" {
			t.Errorf("snapshots %q, tags %v", s.names(), s.registry.tags)
		}
	})
	synctest.Test(t, func(t *testing.T) { // and comes back to a node that kept an older state
		s := newKept()
		w, _ := pausing(t, s, false)
		defer w.stop()
		w.kill()
		w.pass(time.Second)
		delete(s.registry.tags, registryURL+"/"+vmRepo+":hibernate")
		w.create(pod(ofSandbox("sandbox-1"), withUID("uid-2")))
		expect(t, w.after(10*time.Second), "Running running ready")
		if got := s.knows(vmName); got != "" || s.names() != "" {
			t.Errorf("it resumed %q, snapshots %q", got, s.names())
		}
	})
}

// A sandbox that is created again under its name starts anew, from the node's state and from the registry's.
func TestKeptStateOfAnEarlierOwner(t *testing.T) {
	for name, drop := range map[string]bool{"on the node": false, "in the registry": true} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s := newKept()
				w, _ := pausing(t, s, false)
				defer w.stop()
				w.kill()
				w.pass(time.Second)
				if drop {
					if err := s.RemoveSnapshot(t.Context(), keptName); err != nil {
						t.Fatal(err)
					}
				}
				w.create(pod(ofSandbox("sandbox-2"), withUID("uid-2")))
				expect(t, w.after(10*time.Second), "Running running ready")
				if got := s.knows(vmName); got != "" || s.names() != "" || len(s.registry.tags) > 0 {
					t.Errorf("it resumed %q, snapshots %q, tags %v", got, s.names(), s.registry.tags)
				}
			})
		})
	}
}

// A pod that is deleted before its VM has resumed leaves the state as it was.
func TestDeletionWhileTheVMResumes(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newKept()
		w, _ := pausing(t, s, true)
		defer w.stop()
		w.kill()
		w.pass(time.Second)
		s.boot = time.Minute
		w.create(pod(ofSandbox("sandbox-1"), withUID("uid-2")))
		w.pass(time.Second)
		if s.count() != 1 {
			t.Fatal("the VM does not resume")
		}
		w.kill()
		expect(t, w.after(time.Second), "gone")
		if s.names() != keptName || s.count() != 0 {
			t.Errorf("snapshots %q, %d VMs", s.names(), s.count())
		}
		s.boot = time.Second
		w.create(pod(ofSandbox("sandbox-1"), withUID("uid-3")))
		w.pass(10 * time.Second)
		if got := s.knows(vmName); got != "counter 17" {
			t.Errorf("it woke with %q", got)
		}
	})
}

// Wherever the process ends, the next one continues.
func TestDeletionIsTakenUp(t *testing.T) {
	finish := func(t *testing.T, s *fakeSnapshots, w *world) {
		t.Helper()
		w.run(keepingConfig(true))
		defer w.stop()
		if p := w.after(0); p != nil { // virtual-kubelet asks for a pod that the provider does not know
			if err := w.p.CreatePod(t.Context(), p); err != nil {
				t.Fatal(err)
			}
		}
		expect(t, w.after(time.Minute), "gone")
		if s.count() != 0 || s.names() != keptName {
			t.Errorf("%d VMs, snapshots %q", s.count(), s.names())
		}
		w.create(pod(ofSandbox("sandbox-1"), withUID("uid-2")))
		w.pass(10 * time.Second)
		if got := s.knows(vmName); got != "counter 17" {
			t.Errorf("it woke with %q", got)
		}
	}
	for name, at := range map[string]func(s *fakeSnapshots, w *world){
		"before the save":            func(*fakeSnapshots, *world) {},
		"after the save":             func(s *fakeSnapshots, w *world) { _, _ = s.Hibernate(w.t.Context(), vmName, keptName) },
		"after the state was kept":   keptHere,
		"after the VM was removed":   func(s *fakeSnapshots, w *world) { keptHere(s, w); _ = s.Remove(w.t.Context(), vmName, true) },
		"after the operator's sleep": func(s *fakeSnapshots, w *world) { _, _ = s.Hibernate(w.t.Context(), vmName, "hibernate-1") },
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s := newKept()
				w, _ := pausing(t, s, true)
				w.stop()
				at(s, w)
				p := w.after(0)
				p.DeletionTimestamp, p.DeletionGracePeriodSeconds = new(metav1.Now()), new(int64(30))
				if err := w.client.Tracker().Update(corev1.SchemeGroupVersion.WithResource("pods"), p, "default"); err != nil {
					t.Fatal(err)
				}
				finish(t, s, w)
			})
		})
	}
	t.Run("the owner is deleted meanwhile", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			s := newKept()
			w, r := pausing(t, s, true)
			w.stop()
			keptHere(s, w)
			r.lose()
			p := w.after(0)
			p.DeletionTimestamp, p.DeletionGracePeriodSeconds = new(metav1.Now()), new(int64(30))
			if err := w.client.Tracker().Update(corev1.SchemeGroupVersion.WithResource("pods"), p, "default"); err != nil {
				t.Fatal(err)
			}
			w.run(keepingConfig(true))
			defer w.stop()
			expect(t, w.after(time.Minute), "gone")
			w.nothingLeft(s)
		})
	})
	t.Run("deleted by force meanwhile", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			s := newKept()
			w, _ := pausing(t, s, true)
			w.stop()
			if err := w.client.Tracker().Delete(corev1.SchemeGroupVersion.WithResource("pods"), "default", "web"); err != nil {
				t.Fatal(err)
			}
			w.run(keepingConfig(true))
			defer w.stop()
			w.create(pod(ofSandbox("sandbox-1"), withUID("uid-2")))
			expect(t, w.after(5*time.Second), "Running running ready")
			if got := s.knows(vmName); got != "counter 17" || s.count() != 1 {
				t.Errorf("it woke with %q, %d VMs", got, s.count())
			}
		})
	})
}

func keptHere(s *fakeSnapshots, w *world) {
	rec, err := s.Hibernate(w.t.Context(), vmName, keptName)
	if err != nil {
		w.t.Fatal(err)
	}
	labels := map[string]string{contract.VMLabelNode: "node-1", contract.VMLabelOwnerUID: "sandbox-1"}
	if _, err := s.SaveSnapshot(w.t.Context(), string(rec.ID), vm.SaveSpec{Name: keptName, Labels: labels}); err != nil {
		w.t.Fatal(err)
	}
}

func TestVMIsKeptUntilItIsHibernated(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newKept()
		w, r := pausing(t, s, true)
		defer w.stop()
		r.say(errdefs.Unavailablef("the API server is unavailable"))
		w.kill()
		if p := w.after(time.Hour); p == nil || s.count() != 1 {
			t.Fatalf("pod %s, %d VMs", sketch(p), s.count())
		}
		w.expectTold("Warning HibernateFailed", "the API server is unavailable", contract.KeyDeletionPolicy)
		r.say(nil)
		s.fail(&s.saveAs, func() error { return errdefs.Exhaustedf("no space") })
		if p := w.after(time.Hour); p == nil || s.count() != 1 {
			t.Fatalf("pod %s, %d VMs", sketch(p), s.count())
		}
		w.expectTold("no space")
		w.annotate(contract.KeyDeletionPolicy, "delete")
		expect(t, w.after(time.Minute), "gone")
		w.nothingLeft(s)
	})
}

// The annotation may be newer than the VM. Without it, deletion removes the VM.
func TestDeletionPolicyOfARunningPod(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newKept()
		w, r := pausing(t, s, true)
		defer w.stop()
		before, _ := r.seen()
		w.annotate(contract.KeyDeletionPolicy, "")
		w.pass(time.Minute)
		w.kill()
		expect(t, w.after(time.Second), "gone")
		w.nothingLeft(s)
		w.create(pod(withUID("uid-2"), func(p *corev1.Pod) { ofSandbox("sandbox-1")(p); delete(p.Annotations, contract.KeyDeletionPolicy) }))
		w.pass(time.Minute)
		if now, _ := r.seen(); now != before {
			t.Error("the node was claimed for a pod that does not ask for it")
		}
		w.annotate(contract.KeyDeletionPolicy, "hibernate")
		w.pass(time.Minute)
		if now, _ := r.seen(); now != before+1 {
			t.Errorf("claimed %d times", now-before)
		}
	})
}

// The pod is annotated and deleted before its node could claim the VM. Then the absence of a claim says nothing of the owner.
func TestDeletionBeforeTheClaim(t *testing.T) {
	for name, ownerGone := range map[string]bool{"the owner exists": false, "the owner is gone": true} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s := newKept()
				r := &registrar{e: s.engine}
				w := keepingWith(t, s, true, r)
				defer w.stop()
				r.never()
				w.create(pod(func(p *corev1.Pod) { ofSandbox("sandbox-1")(p); delete(p.Annotations, contract.KeyDeletionPolicy) }))
				expect(t, w.after(5*time.Second), "Running running ready")
				s.knows(vmName, "counter 17")
				r.say(errdefs.Unavailablef("the API server is unavailable"))
				w.annotate(contract.KeyDeletionPolicy, "hibernate")
				w.pass(time.Minute)
				if ownerGone {
					r.lose()
				}
				w.kill()
				w.pass(time.Minute)
				if s.count() != 1 {
					t.Fatal("the VM was removed although nothing is known")
				}
				r.say(nil)
				expect(t, w.after(2*time.Minute), "gone")
				if ownerGone {
					w.nothingLeft(s)
					w.expectTold("Normal HibernateStateDropped", "its owner is gone")
					return
				}
				if s.count() != 0 || s.names() != keptName {
					t.Errorf("%d VMs, snapshots %q", s.count(), s.names())
				}
				r.lose()
				w.pass(time.Hour)
				w.nothingLeft(s)
				w.expectTold("Normal HibernateStateDropped", "its owner is gone")
			})
		})
	}
}
