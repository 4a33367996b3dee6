package podprovider

import (
	"errors"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes/fake"
	"k8s.io/client-go/tools/record"

	"cocoonstack.io/cocoon/api/contract"
	"cocoonstack.io/cocoon/internal/errdefs"
)

const asleepPod = "Running waiting:Hibernated"

func TestHibernateAndWake(t *testing.T) {
	for name, bare := range map[string]bool{"registry": false, "alone": true} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s := newKept()
				s.boot = 2 * time.Second
				w := keeping(t, s, bare)
				defer w.stop()
				w.create(pod(asks(map[string]string{contract.KeyGeneration: "3"})))
				p := w.after(5 * time.Second)
				expect(t, p, "Running running ready")
				ip := p.Status.PodIP
				s.knows(vmName, "counter 17")

				w.annotate(contract.KeyHibernate, "true")
				p = w.after(5 * time.Second)
				expect(t, p, asleepPod)
				w.expectLife(p, contract.LifecycleHibernated)
				if p.Annotations[contract.KeyLifecycleObserved] != "3" || p.Annotations[contract.KeyID] != "" || p.Annotations[contract.KeyIP] != "" || p.Status.PodIP != ip {
					t.Errorf("annotations %v, address %s", p.Annotations, p.Status.PodIP)
				}
				if got := s.registry.has(vmRepo, "hibernate"); got != "counter 17" && !bare {
					t.Errorf("the registry has %q", got)
				}
				w.expectTold("Normal Hibernated VM " + vmName)
				writes := w.writes()
				w.after(time.Hour)
				if n := w.writes() - writes; n != 0 {
					t.Errorf("%d writes in an hour of sleep", n)
				}

				w.annotate(contract.KeyHibernate, "")
				expect(t, w.after(time.Second), "Running waiting:ContainerCreating")
				p = w.after(10 * time.Second)
				expect(t, p, "Running running ready")
				w.expectLife(p, contract.LifecycleReady)
				if s.knows(vmName) != "counter 17" || p.Status.PodIP != ip || p.Annotations[contract.KeyID] == "" {
					t.Errorf("woke with %q at %s", s.knows(vmName), p.Status.PodIP)
				}
				if len(s.registry.tags) > 0 {
					t.Errorf("tags are left: %v", s.registry.tags)
				}
				w.expectTold("Normal Woken")
				if bare && len(s.registry.calls) > 0 {
					t.Errorf("a registry was called although the node has none: %v", s.registry.calls)
				}
			})
		})
	}
}

func TestAFailedPushWakesTheVMAndIsTriedAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newKept()
		w := keeping(t, s, false)
		defer w.stop()
		w.create(pod())
		expect(t, w.after(time.Second), "Running running ready")
		s.knows(vmName, "here")

		s.registry.fall(errdefs.Unavailablef("the registry is unavailable"))
		w.annotate(contract.KeyHibernate, "true")
		p := w.after(5 * time.Second)
		expect(t, p, "Running running ready") // a VM whose state cannot be stored is not hibernated
		w.expectLife(p, contract.LifecycleHibernating)
		if !strings.Contains(p.Annotations[contract.KeyLifecycleMessage], "the registry is unavailable") || s.called("hibernate") != 0 {
			t.Errorf("message %q, %d sleeps", p.Annotations[contract.KeyLifecycleMessage], s.called("hibernate"))
		}
		w.expectTold("Warning HibernateFailed")

		// The registry becomes unavailable between the check and the push.
		s.fail(&s.saveAs, func() error { s.registry.fall(errdefs.Unavailablef("cut")); return nil })
		s.registry.fall(nil)
		p = w.after(9 * time.Second)
		expect(t, p, "Running running ready")
		if s.called("hibernate") == 0 || s.called("wake") == 0 || s.knows(vmName) != "here" {
			t.Errorf("calls %v, memory %q", s.calls, s.knows(vmName))
		}
		w.expectTold("Warning HibernatePushFailed")

		s.fail(&s.saveAs, nil)
		s.registry.fall(nil)
		expect(t, w.after(2*time.Minute), asleepPod)
		if s.registry.has(vmRepo, "hibernate") != "here" {
			t.Error("the state is not in the registry")
		}
	})
}

func TestAFlipWaitsItsTurn(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newKept()
		s.takes = 10 * time.Second
		w := keeping(t, s, false)
		defer w.stop()
		w.create(pod())
		w.after(time.Second)
		w.annotate(contract.KeyHibernate, "true")
		w.after(3 * time.Second)
		w.annotate(contract.KeyHibernate, "")
		w.after(3 * time.Second)
		if s.called("wake") != 0 {
			t.Error("the VM was woken before it was hibernated")
		}
		p := w.after(20 * time.Second)
		expect(t, p, "Running running ready")
		w.expectLife(p, contract.LifecycleReady)
		if s.called("hibernate") != 1 || s.called("wake") != 1 || len(s.registry.tags) > 0 {
			t.Errorf("calls %v, tags %v", s.calls, s.registry.tags)
		}
	})
}

func TestAKilledProcessIsTakenUp(t *testing.T) {
	t.Run("before the push", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			s := newKept()
			w := keeping(t, s, false)
			w.create(pod())
			w.after(time.Second)
			w.stop()
			if _, err := s.Hibernate(t.Context(), vmName, vmName+":"+contract.HibernateSnapshotTag); err != nil {
				t.Fatal(err)
			}
			p, _ := w.client.CoreV1().Pods("default").Get(t.Context(), "web", metav1.GetOptions{})
			p.Annotations[contract.KeyHibernate] = "true"
			_, _ = w.client.CoreV1().Pods("default").Update(t.Context(), p, metav1.UpdateOptions{})
			w.run(keepingConfig(false))
			defer w.stop()
			expect(t, w.after(time.Second), asleepPod)
			if len(s.registry.tags) != 1 {
				t.Error("the state was not pushed")
			}
		})
	})
	t.Run("asleep", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			s := newKept()
			w := keeping(t, s, false)
			w.create(pod())
			w.after(time.Second)
			w.annotate(contract.KeyHibernate, "true")
			before := w.after(time.Second)
			w.stop()
			s.registry.fall(errors.New("away")) // a check that fails is no reason to wake the VM
			w.run(keepingConfig(false))
			defer w.stop()
			if got := w.after(time.Minute); sketch(got) != sketch(before) || s.called("wake") != 0 {
				t.Errorf("became %s, calls %v", sketch(got), s.calls)
			}
			s.registry.fall(nil)
			w.annotate(contract.KeyHibernate, "")
			expect(t, w.after(2*time.Minute), "Running running ready")
		})
	})
	t.Run("awake with a tag", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			s := newKept()
			w := keeping(t, s, false)
			w.create(pod())
			w.after(time.Second)
			w.annotate(contract.KeyHibernate, "true")
			w.after(time.Second)
			w.stop()
			p, _ := w.client.CoreV1().Pods("default").Get(t.Context(), "web", metav1.GetOptions{})
			delete(p.Annotations, contract.KeyHibernate)
			_, _ = w.client.CoreV1().Pods("default").Update(t.Context(), p, metav1.UpdateOptions{})
			if _, err := s.Wake(t.Context(), vmName); err != nil {
				t.Fatal(err)
			}
			s.registry.fall(errors.New("away"))
			w.run(keepingConfig(false))
			defer w.stop()
			expect(t, w.after(10*time.Second), "Running running ready")
			w.expectTold("Warning HibernateTagLeft")
			s.registry.fall(nil)
			p = w.after(time.Minute)
			w.expectLife(p, contract.LifecycleReady)
			if len(s.registry.tags) > 0 {
				t.Error("the tag was not removed, so a new VM would resume from it")
			}
		})
	})
}

func TestWakingFromTheRegistry(t *testing.T) {
	slept := func(t *testing.T) *registry {
		s := newKept()
		w := keeping(t, s, false)
		w.create(pod(managedRun))
		w.after(time.Second)
		s.knows(vmName, "counter 99")
		w.annotate(contract.KeyHibernate, "true")
		expect(t, w.after(time.Second), asleepPod)
		w.stop()
		return s.registry
	}
	synctest.Test(t, func(t *testing.T) { // the pod is recreated; the VM resumes, because a new VM would lose the state
		s := newFakeSnapshots(newEngine(), slept(t))
		w := keeping(t, s, false)
		defer w.stop()
		w.create(pod(managedRun))
		p := w.after(time.Second)
		expect(t, p, "Running running ready")
		w.expectLife(p, contract.LifecycleReady)
		if s.knows(vmName) != "counter 99" || s.called("launch "+vmName) != 0 || len(s.registry.tags) > 0 || s.names() != "" {
			t.Errorf("memory %q, calls %v, tags %v, snapshots %s", s.knows(vmName), s.calls, s.registry.tags, s.names())
		}
		w.expectTold("Normal Pulling Pulling snapshot", "Normal Woken")
	})
	synctest.Test(t, func(t *testing.T) { // the pod is recreated as hibernated; the VM stays hibernated until it is told to wake
		s := newFakeSnapshots(newEngine(), slept(t))
		w := keeping(t, s, false)
		defer w.stop()
		w.create(pod(managedRun, asks(map[string]string{contract.KeyHibernate: "true"})))
		expect(t, w.after(time.Hour), asleepPod)
		if s.count() != 0 {
			t.Error("a VM was created")
		}
		w.annotate(contract.KeyHibernate, "")
		expect(t, w.after(5*time.Second), "Running running ready")
		if s.knows(vmName) != "counter 99" {
			t.Errorf("memory %q", s.knows(vmName))
		}
	})
	synctest.Test(t, func(t *testing.T) { // while the registry is unavailable, no VM is created
		s := newFakeSnapshots(newEngine(), slept(t))
		s.registry.fall(errdefs.Unavailablef("away"))
		w := keeping(t, s, false)
		defer w.stop()
		w.create(pod(managedRun))
		expect(t, w.after(10*time.Second), "Pending waiting:CreateContainerError")
		s.registry.fall(nil)
		expect(t, w.after(time.Minute), "Running running ready")
		if s.knows(vmName) != "counter 99" {
			t.Errorf("memory %q", s.knows(vmName))
		}
	})
	synctest.Test(t, func(t *testing.T) { // the state is damaged on the node and intact in the registry
		s := newKept()
		w := keeping(t, s, false)
		defer w.stop()
		w.create(pod(managedRun))
		w.after(time.Second)
		s.knows(vmName, "whole")
		w.annotate(contract.KeyHibernate, "true")
		w.after(time.Second)
		s.fail(&s.wakeAs, func() error { return errdefs.DataLossf("memory-ranges is cut short") })
		w.annotate(contract.KeyHibernate, "")
		expect(t, w.after(5*time.Second), "Running running ready")
		if s.knows(vmName) != "whole" {
			t.Errorf("memory %q", s.knows(vmName))
		}
	})
	synctest.Test(t, func(t *testing.T) { // the state of a hibernated VM is lost; no new VM boots silently
		s := newFakeSnapshots(newEngine(), slept(t))
		clear(s.registry.tags)
		w := keeping(t, s, false)
		defer w.stop()
		w.create(pod(managedRun, asks(map[string]string{contract.KeyLifecycleState: "hibernated"})))
		expect(t, w.after(5*time.Second), asleepPod)
		if s.count() != 0 {
			t.Error("a new VM was booted")
		}
	})
	synctest.Test(t, func(t *testing.T) { // waking fails for a while
		s := newKept()
		w := keeping(t, s, false)
		defer w.stop()
		w.create(pod(managedRun))
		w.after(time.Second)
		w.annotate(contract.KeyHibernate, "true")
		w.after(time.Second)
		s.fail(&s.wakeAs, func() error { return errdefs.Exhaustedf("no memory is left") })
		w.annotate(contract.KeyHibernate, "")
		p := w.after(10 * time.Second)
		expect(t, p, asleepPod)
		if !strings.Contains(p.Annotations[contract.KeyLifecycleMessage], "no memory") {
			t.Errorf("annotations %v", p.Annotations)
		}
		w.expectTold("Warning WakeFailed")
		s.fail(&s.wakeAs, nil)
		expect(t, w.after(time.Minute), "Running running ready")
	})
	synctest.Test(t, func(t *testing.T) { // the pod asks for a restore, but no state exists
		s := newKept()
		w := keeping(t, s, false)
		defer w.stop()
		w.create(pod(managedRun, asks(map[string]string{contract.KeyRestoreFromHibernate: "true"})))
		expect(t, w.after(5*time.Second), "Pending waiting:CreateContainerError")
		w.expectTold("no hibernated state")
	})
}

func TestWakingFromAPeer(t *testing.T) {
	for name, tc := range map[string]struct {
		bare, stale bool
		pulls       int
	}{"verified by the registry": {false, false, 0}, "of another sleep": {false, true, 1}, "without a registry": {true, false, 0}} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				there := newKept()
				w := keeping(t, there, tc.bare)
				w.create(pod(managedRun))
				w.after(time.Second)
				there.knows(vmName, "counter 3")
				w.annotate(contract.KeyHibernate, "true")
				expect(t, w.after(time.Second), asleepPod)
				w.stop()
				if tc.stale {
					snap := there.snaps["default/"+vmName+":"+contract.HibernateSnapshotTag]
					snap.Digest = "sha256:old"
					there.snaps["default/"+snap.Name] = snap
				}

				here := newFakeSnapshots(newEngine(), there.registry)
				here.peers = map[string]*fakeSnapshots{"node-2:7": there}
				w = &world{t: t, engine: here.engine, client: fake.NewClientset(), events: record.NewFakeRecorder(1000), reach: &answers{}, fakeSnapshots: here}
				cfg := keepingConfig(tc.bare)
				cfg.Registry.Peers = []string{"node-1:7", "node-2:7"}
				w.run(cfg)
				defer w.stop()
				w.create(pod(managedRun, asks(map[string]string{contract.KeyRestoreFromHibernate: "true"})))
				expect(t, w.after(time.Second), "Running running ready")
				pulls := 0
				for _, call := range here.registry.calls {
					if strings.HasPrefix(call, "pull") {
						pulls++
					}
				}
				if here.knows(vmName) != "counter 3" || pulls != tc.pulls || here.names() != "" {
					t.Errorf("memory %q, %d pulls, snapshots %s", here.knows(vmName), pulls, here.names())
				}
			})
		})
	}
}
