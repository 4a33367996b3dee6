package podprovider

import (
	"encoding/base64"
	"errors"
	"maps"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes/fake"
	"k8s.io/client-go/tools/record"

	"cocoonstack.io/cocoon/api/contract"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/kube/convert"
	"cocoonstack.io/cocoon/internal/snapshot"
	"cocoonstack.io/cocoon/internal/vm"
)

// keeping is a world whose node keeps snapshots, with a registry unless bare.
func keeping(t *testing.T, s *shelf, bare bool) *world {
	t.Helper()
	w := &world{t: t, engine: s.engine, client: fake.NewClientset(), events: record.NewFakeRecorder(1000), reach: &reach{}, shelf: s}
	w.run(keepingConfig(bare))
	return w
}

func keepingConfig(bare bool) Config {
	if bare {
		return Config{}
	}
	return Config{Registry: Registry{URL: registryURL + "/"}}
}

func newKept() *shelf { return newShelf(newEngine(), newRegistry()) }

func asks(m map[string]string) func(*corev1.Pod) {
	return func(p *corev1.Pod) {
		if p.Annotations == nil {
			p.Annotations = map[string]string{}
		}
		maps.Copy(p.Annotations, m)
	}
}

var managedRun = asks(map[string]string{contract.KeyManaged: "true", contract.KeyMode: "run"})

// annotate changes the pod in the API and tells the provider, as virtual-kubelet does.
func (w *world) annotate(key, value string) {
	w.t.Helper()
	p, err := w.client.CoreV1().Pods("default").Get(w.t.Context(), "web", metav1.GetOptions{})
	if err != nil {
		w.t.Fatal(err)
	}
	if p.Annotations == nil {
		p.Annotations = map[string]string{}
	}
	if p.Annotations[key] = value; value == "" {
		delete(p.Annotations, key)
	}
	if p, err = w.client.CoreV1().Pods("default").Update(w.t.Context(), p, metav1.UpdateOptions{}); err != nil {
		w.t.Fatal(err)
	}
	if p.DeletionTimestamp == nil {
		err = w.p.UpdatePod(w.t.Context(), p.DeepCopy())
	} else {
		err = w.p.DeletePod(w.t.Context(), p.DeepCopy())
	}
	if err != nil {
		w.t.Fatal(err)
	}
}

// kill deletes the pod as `kubectl delete` and virtual-kubelet do.
func (w *world) kill() {
	w.t.Helper()
	p, err := w.client.CoreV1().Pods("default").Get(w.t.Context(), "web", metav1.GetOptions{})
	if err != nil {
		w.t.Fatal(err)
	}
	p.DeletionTimestamp, p.DeletionGracePeriodSeconds = new(metav1.Now()), new(int64(30))
	if err := w.client.Tracker().Update(corev1.SchemeGroupVersion.WithResource("pods"), p, "default"); err != nil {
		w.t.Fatal(err)
	}
	if err := w.p.DeletePod(w.t.Context(), p); err != nil {
		w.t.Fatal(err)
	}
}

func (w *world) expectLife(p *corev1.Pod, want contract.LifecycleState) {
	w.t.Helper()
	if got := p.Annotations[contract.KeyLifecycleState]; got != string(want) {
		w.t.Fatalf("lifecycle is %q (%s), want %q", got, p.Annotations[contract.KeyLifecycleMessage], want)
	}
}

func (w *world) expectTold(parts ...string) {
	w.t.Helper()
	got := w.told()
	for _, part := range parts {
		if !strings.Contains(got, part) {
			w.t.Errorf("events lack %q: %s", part, got)
		}
	}
}

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
				if got := s.registry.has(vmName, "hibernate"); got != "counter 17" && !bare {
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
					t.Errorf("a registry that is not there was asked: %v", s.registry.calls)
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

		s.registry.fall(errdefs.Unavailablef("the registry is away"))
		w.annotate(contract.KeyHibernate, "true")
		p := w.after(5 * time.Second)
		expect(t, p, "Running running ready") // what cannot be kept is not put to sleep
		w.expectLife(p, contract.LifecycleHibernating)
		if !strings.Contains(p.Annotations[contract.KeyLifecycleMessage], "the registry is away") || s.called("hibernate") != 0 {
			t.Errorf("message %q, %d sleeps", p.Annotations[contract.KeyLifecycleMessage], s.called("hibernate"))
		}
		w.expectTold("Warning HibernateFailed")

		// It goes away between the check and the push.
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
		if s.registry.has(vmName, "hibernate") != "here" {
			t.Error("it is not in the registry")
		}
	})
}

// A flip in the middle of a transition waits its turn, and what has begun ends.
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
			t.Error("it was woken before it slept")
		}
		p := w.after(20 * time.Second)
		expect(t, p, "Running running ready")
		w.expectLife(p, contract.LifecycleReady)
		if s.called("hibernate") != 1 || s.called("wake") != 1 || len(s.registry.tags) > 0 {
			t.Errorf("calls %v, tags %v", s.calls, s.registry.tags)
		}
	})
}

// Wherever the process ends, the next one takes it up.
func TestAKilledProcessIsTakenUp(t *testing.T) {
	t.Run("before the push", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			s := newKept()
			w := keeping(t, s, false)
			w.create(pod())
			w.after(time.Second)
			w.stop()
			if _, err := s.Hibernate(t.Context(), vmName, hibernateName(vmName)); err != nil {
				t.Fatal(err)
			}
			p, _ := w.client.CoreV1().Pods("default").Get(t.Context(), "web", metav1.GetOptions{})
			p.Annotations[contract.KeyHibernate] = "true"
			_, _ = w.client.CoreV1().Pods("default").Update(t.Context(), p, metav1.UpdateOptions{})
			w.run(keepingConfig(false))
			defer w.stop()
			expect(t, w.after(time.Second), asleepPod)
			if len(s.registry.tags) != 1 {
				t.Error("it was not pushed")
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
			s.registry.fall(errors.New("away")) // that nobody can ask is no reason to wake it
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
				t.Error("the tag is left: a VM made anew would go back to it")
			}
		})
	})
}

// The VM slept on another node; here it is nothing but a tag.
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
	synctest.Test(t, func(t *testing.T) { // recreated awake: a fresh boot would lose the state
		s := newShelf(newEngine(), slept(t))
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
	synctest.Test(t, func(t *testing.T) { // recreated asleep: it stays so until it is woken
		s := newShelf(newEngine(), slept(t))
		w := keeping(t, s, false)
		defer w.stop()
		w.create(pod(managedRun, asks(map[string]string{contract.KeyHibernate: "true"})))
		expect(t, w.after(time.Hour), asleepPod)
		if s.count() != 0 {
			t.Error("a VM was made")
		}
		w.annotate(contract.KeyHibernate, "")
		expect(t, w.after(5*time.Second), "Running running ready")
		if s.knows(vmName) != "counter 99" {
			t.Errorf("memory %q", s.knows(vmName))
		}
	})
	synctest.Test(t, func(t *testing.T) { // without the registry nobody knows, and nothing boots
		s := newShelf(newEngine(), slept(t))
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
	synctest.Test(t, func(t *testing.T) { // damaged here, whole there
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
	synctest.Test(t, func(t *testing.T) { // asleep, and its state is gone: it does not start afresh behind anybody's back
		s := newShelf(newEngine(), slept(t))
		clear(s.registry.tags)
		w := keeping(t, s, false)
		defer w.stop()
		w.create(pod(managedRun, asks(map[string]string{contract.KeyLifecycleState: "hibernated"})))
		expect(t, w.after(5*time.Second), asleepPod)
		if s.count() != 0 {
			t.Error("it was booted")
		}
	})
	synctest.Test(t, func(t *testing.T) { // it cannot wake for a while
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
	synctest.Test(t, func(t *testing.T) { // asked for, and nowhere
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
					snap := there.snaps[hibernateName(vmName)]
					snap.Digest = "sha256:old"
					there.snaps[snap.Name] = snap
				}

				here := newShelf(newEngine(), there.registry)
				here.peers = map[string]*shelf{"node-2:7": there}
				w = &world{t: t, engine: here.engine, client: fake.NewClientset(), events: record.NewFakeRecorder(1000), reach: &reach{}, shelf: here}
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

func TestClones(t *testing.T) {
	clone := func(image string, more ...string) func(*corev1.Pod) {
		m := map[string]string{contract.KeyMode: "clone", contract.KeyImage: image}
		for i := 0; i < len(more); i += 2 {
			m[more[i]] = more[i+1]
		}
		return asks(m)
	}
	template := func(t *testing.T, s *shelf, name string) {
		t.Helper()
		rec, err := s.Launch(t.Context(), vm.Spec{Name: "template", Image: "x"}.Default())
		if err != nil {
			t.Fatal(err)
		}
		s.knows("template", "in "+name)
		if _, err := s.SaveSnapshot(t.Context(), string(rec.ID), vm.SaveSpec{Name: name}); err != nil {
			t.Fatal(err)
		}
		if err := s.Remove(t.Context(), "template", true); err != nil {
			t.Fatal(err)
		}
	}
	t.Run("local", func(t *testing.T) {
		for image, name := range map[string]string{"base": "base", "base:latest": "base", "base:v2": "base:v2", "team/base": "team___base"} {
			synctest.Test(t, func(t *testing.T) {
				s := newKept()
				template(t, s, name)
				w := keeping(t, s, true)
				defer w.stop()
				w.create(pod(clone(image)))
				expect(t, w.after(time.Second), "Running running ready")
				if got := s.knows(vmName); got != "in "+name {
					t.Errorf("%s has %q", image, got)
				}
			})
		}
	})
	t.Run("pulled", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			s := newKept()
			template(t, s, "base:v2")
			if _, err := s.PushSnapshot(t.Context(), "base:v2", registryURL+"/base:v2", snapshot.Auth{}, nil); err != nil {
				t.Fatal(err)
			}
			_ = s.RemoveSnapshot(t.Context(), "base:v2")
			w := keeping(t, s, false)
			defer w.stop()
			w.create(pod(clone("base:v2")))
			expect(t, w.after(time.Second), "Running running ready")
			if s.names() != "base:v2" {
				t.Errorf("here is %s", s.names())
			}
			w.expectTold("Normal Pulled Successfully pulled snapshot")
		})
	})
	t.Run("nowhere", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			s := newKept()
			w := keeping(t, s, true)
			defer w.stop()
			w.create(pod(clone("base")))
			expect(t, w.after(time.Second), "Pending waiting:CreateContainerError")
			w.expectTold("no registry to pull it from")
			template(t, s, "base")
			expect(t, w.after(time.Minute), "Running running ready")
		})
	})
	t.Run("of another hypervisor", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			s := newKept()
			template(t, s, "base")
			w := keeping(t, s, true)
			defer w.stop()
			w.create(pod(clone("base", contract.KeyBackend, "firecracker")))
			p := w.after(time.Second)
			expect(t, p, "Failed/VMRejected")
			if !strings.Contains(p.Status.Message, "taken by fake and cannot go on in firecracker") || s.count() != 0 {
				t.Errorf("%s, %d VMs", p.Status.Message, s.count())
			}
		})
	})
	t.Run("of a folder", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			s := newKept()
			w := keeping(t, s, true)
			defer w.stop()
			w.create(pod(asks(map[string]string{contract.KeyManaged: "true", contract.KeyCloneFromDir: "/srv/x"})))
			expect(t, w.after(time.Second), "Running running ready")
			if got := s.knows(vmName); got != "of /srv/x" {
				t.Errorf("it has %q", got)
			}
		})
	})
	t.Run("of a folder with another hypervisor's", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			s := newKept()
			w := keeping(t, s, true)
			defer w.stop()
			w.create(pod(asks(map[string]string{contract.KeyManaged: "true", contract.KeyCloneFromDir: "/srv/x", contract.KeyBackend: "firecracker"})))
			expect(t, w.after(time.Second), "Failed/VMRejected")
			if s.count() != 0 {
				t.Error("a VM is left")
			}
		})
	})
	t.Run("newer in the registry", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			s := newKept()
			template(t, s, "base")
			if _, err := s.PushSnapshot(t.Context(), "base", registryURL+"/base:latest", snapshot.Auth{}, nil); err != nil {
				t.Fatal(err)
			}
			s.registry.mu.Lock()
			s.registry.tags[registryURL+"/base:latest"], s.registry.text["sha256:new"] = "sha256:new", "newer"
			s.registry.mu.Unlock()
			w := keeping(t, s, false)
			defer w.stop()
			w.create(pod(clone("base", contract.KeyForcePull, "true")))
			expect(t, w.after(time.Second), "Running running ready")
			if got := s.knows(vmName); got != "newer" {
				t.Errorf("it has %q", got)
			}
		})
	})
	t.Run("no snapshots here", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			w := start(t, newEngine())
			defer w.stop()
			w.create(pod(clone("base")))
			expect(t, w.after(time.Second), "Failed/VMRejected")
		})
	})
}

func TestANameThatNoRegistryTakes(t *testing.T) {
	for name, tc := range map[string]struct {
		bare bool
		want string
	}{"registry": {false, "Failed/PodNotSupported"}, "alone": {true, "Running running ready"}} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := keeping(t, newKept(), tc.bare)
				defer w.stop()
				w.create(pod(managedRun, asks(map[string]string{contract.KeyName: "Web"})))
				expect(t, w.after(time.Second), tc.want)
			})
		})
	}
}

func TestForks(t *testing.T) {
	fork := func(name string) func(*corev1.Pod) {
		return func(p *corev1.Pod) {
			p.Name, p.UID = name, types.UID("uid-"+name)
			asks(map[string]string{contract.KeyForkFrom: vmName})(p)
		}
	}
	synctest.Test(t, func(t *testing.T) {
		s := newKept()
		s.takes = time.Second
		w := keeping(t, s, true)
		defer w.stop()
		w.create(pod(fork("a"))) // before there is a main
		w.pass(time.Second)
		w.create(pod())
		w.after(2 * time.Second)
		s.knows(vmName, "main's")
		w.create(pod(fork("b")))
		w.create(pod(fork("c")))
		w.after(10 * time.Second)
		for _, name := range []string{"b", "c"} {
			if got := s.knows("vk-default-" + name); got != "main's" {
				t.Errorf("%s has %q", name, got)
			}
		}
		if n := s.called("save fork-" + vmName); n != 1 || s.count() != 4 {
			t.Errorf("%d snapshots for three forks, %d VMs", n, s.count())
		}

		// Another main: what was taken of the one before is of no use.
		w.engine.vanish()
		w.after(time.Second)
		w.create(pod(func(p *corev1.Pod) { p.UID = "uid-again" }))
		w.after(time.Second)
		s.knows(vmName, "the new main's")
		w.create(pod(fork("d")))
		w.after(5 * time.Second)
		if got := s.knows("vk-default-d"); got != "the new main's" {
			t.Errorf("d has %q", got)
		}
	})
	synctest.Test(t, func(t *testing.T) { // a VM of another namespace is not to be had
		s := newKept()
		if _, err := s.Launch(t.Context(), vm.Spec{Name: vmName, Image: "x", Labels: map[string]string{contract.VMLabelPodNamespace: "secret"}}.Default()); err != nil {
			t.Fatal(err)
		}
		w := keeping(t, s, true)
		defer w.stop()
		p := pod(asks(map[string]string{contract.KeyForkFrom: vmName, contract.KeyName: "thief"}))
		w.create(p)
		expect(t, w.after(time.Second), "Failed/VMRejected")
	})
	synctest.Test(t, func(t *testing.T) { // a main on another node: what the registry has of it
		s := newKept()
		s.registry.tags[registryURL+"/"+"vk-default-main:latest"] = "sha256:1"
		s.registry.text["sha256:1"] = "far away"
		w := keeping(t, s, false)
		defer w.stop()
		w.create(pod(asks(map[string]string{contract.KeyForkFrom: "vk-default-main"})))
		expect(t, w.after(time.Second), "Running running ready")
		if got := s.knows(vmName); got != "far away" {
			t.Errorf("it has %q", got)
		}
	})
}

func TestDeletePolicies(t *testing.T) {
	mainOf := func(p *corev1.Pod) {
		p.Labels = map[string]string{contract.LabelSetName: "we"}
		p.Annotations[contract.KeyName] = "vk-default-we-0"
	}
	for name, tc := range map[string]struct {
		change []func(*corev1.Pod)
		saved  bool
	}{
		"plain":           {nil, false},
		"managed":         {[]func(*corev1.Pod){managedRun}, true},
		"always":          {[]func(*corev1.Pod){asks(map[string]string{contract.KeySnapshotPolicy: "always"})}, true},
		"never":           {[]func(*corev1.Pod){managedRun, asks(map[string]string{contract.KeySnapshotPolicy: "never"})}, false},
		"main-only":       {[]func(*corev1.Pod){managedRun, asks(map[string]string{contract.KeySnapshotPolicy: "main-only"}), mainOf}, true},
		"main-only other": {[]func(*corev1.Pod){managedRun, asks(map[string]string{contract.KeySnapshotPolicy: "main-only"})}, false},
		"seat given up":   {[]func(*corev1.Pod){managedRun, asks(map[string]string{contract.KeyKeepSnapshot: "true"})}, false},
	} {
		for _, bare := range []bool{false, true} {
			t.Run(name, func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					s := newKept()
					w := keeping(t, s, bare)
					defer w.stop()
					p := pod(tc.change...)
					w.create(p)
					expect(t, w.after(time.Second), "Running running ready")
					vmName := convert.VMName(p)
					s.knows(vmName, "the end")
					w.kill()
					expect(t, w.after(time.Second), "gone")
					want := ""
					if tc.saved {
						want = "the end"
					}
					got := s.registry.has(vmName, "latest")
					if bare {
						got = s.content[s.snaps[vmName].ID]
					}
					if got != want || s.count() != 0 {
						t.Errorf("saved is %q, want %q; %d VMs left", got, want, s.count())
					}
					if left := s.names(); !bare && left != "" {
						t.Errorf("snapshots are left on the node: %s", left)
					}
				})
			})
		}
	}
}

func TestAVMIsKeptUntilItIsSaved(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newKept()
		w := keeping(t, s, false)
		defer w.stop()
		w.create(pod(managedRun))
		w.after(time.Second)
		s.registry.fall(errdefs.Unavailablef("the registry is away"))
		w.kill()
		p := w.after(time.Hour)
		if p == nil || s.count() != 1 {
			t.Fatalf("pod %s, %d VMs", sketch(p), s.count())
		}
		w.expectTold("Warning SnapshotPushFailed", "the registry is away", "snapshot-policy")
		if n := s.called("save " + vmName); n != 0 {
			t.Errorf("%d saves for a registry that is away", n)
		}
		s.registry.fall(nil)
		s.fail(&s.saveAs, func() error { return errdefs.Exhaustedf("no space") })
		w.after(2 * time.Minute)
		w.expectTold("Warning SnapshotSaveFailed", "no space")
		tries := s.called("save " + vmName)
		w.after(time.Hour)
		if n := s.called("save "+vmName) - tries; n < 55 || n > 65 {
			t.Errorf("%d tries in an hour, want one a minute", n)
		}
		s.fail(&s.saveAs, nil)
		s.knows(vmName, "the latest")
		expect(t, w.after(2*time.Minute), "gone")
		if s.count() != 0 || s.registry.has(vmName, "latest") != "the latest" {
			t.Errorf("%d VMs, the registry has %q", s.count(), s.registry.has(vmName, "latest"))
		}
	})
	synctest.Test(t, func(t *testing.T) { // the way out: the state is given up in so many words
		s := newKept()
		w := keeping(t, s, false)
		defer w.stop()
		w.create(pod(managedRun))
		w.after(time.Second)
		s.registry.fall(errdefs.Unavailablef("gone for good"))
		w.kill()
		w.after(10 * time.Minute)
		w.annotate(contract.KeySnapshotPolicy, "never")
		expect(t, w.after(time.Minute), "gone")
		if s.count() != 0 {
			t.Error("the VM is left")
		}
	})
	synctest.Test(t, func(t *testing.T) { // a pod that was deleted by force is gone; its VM is saved all the same
		s := newKept()
		w := keeping(t, s, false)
		defer w.stop()
		w.create(pod(managedRun))
		p := w.after(time.Second)
		s.knows(vmName, "not lost")
		_ = w.client.Tracker().Delete(corev1.SchemeGroupVersion.WithResource("pods"), "default", "web")
		if err := w.p.DeletePod(t.Context(), p); err != nil {
			t.Fatal(err)
		}
		w.pass(time.Minute)
		if s.count() != 0 || s.registry.has(vmName, "latest") != "not lost" {
			t.Errorf("%d VMs, the registry has %q", s.count(), s.registry.has(vmName, "latest"))
		}
	})
	synctest.Test(t, func(t *testing.T) { // the same while no process looked
		s := newKept()
		w := keeping(t, s, false)
		w.create(pod(managedRun))
		w.after(time.Second)
		s.knows(vmName, "not lost")
		w.stop()
		_ = w.client.Tracker().Delete(corev1.SchemeGroupVersion.WithResource("pods"), "default", "web")
		w.run(keepingConfig(false))
		defer w.stop()
		if s.count() != 1 {
			t.Fatal("the VM is gone")
		}
		w.create(pod(managedRun, func(p *corev1.Pod) { p.UID = "uid-2" }))
		expect(t, w.after(time.Second), "Running running ready")
		if s.registry.has(vmName, "latest") != "not lost" {
			t.Errorf("the registry has %q", s.registry.has(vmName, "latest"))
		}
	})
}

func TestDeletingTheHibernated(t *testing.T) {
	asleep := func(t *testing.T, s *shelf, bare bool, change ...func(*corev1.Pod)) *world {
		t.Helper()
		w := keeping(t, s, bare)
		w.create(pod(change...))
		w.after(time.Second)
		s.knows(vmName, "asleep")
		w.annotate(contract.KeyHibernate, "true")
		expect(t, w.after(time.Second), asleepPod)
		return w
	}
	synctest.Test(t, func(t *testing.T) {
		s := newKept()
		w := asleep(t, s, false, managedRun)
		defer w.stop()
		w.kill()
		expect(t, w.after(time.Second), "gone")
		if s.count() != 0 || s.registry.has(vmName, "latest") != "asleep" || s.registry.has(vmName, "hibernate") != "asleep" || s.called("wake") != 0 {
			t.Errorf("%d VMs, tags %v, calls %v", s.count(), s.registry.tags, s.calls)
		}
	})
	synctest.Test(t, func(t *testing.T) { // without a registry it must be awake to be saved
		s := newKept()
		w := asleep(t, s, true, managedRun)
		defer w.stop()
		w.kill()
		expect(t, w.after(5*time.Second), "gone")
		if got := s.content[s.snaps[vmName].ID]; s.count() != 0 || got != "asleep" {
			t.Errorf("%d VMs, saved %q", s.count(), got)
		}
	})
	synctest.Test(t, func(t *testing.T) { // a plain pod comes back for nothing
		s := newKept()
		w := asleep(t, s, false)
		defer w.stop()
		w.kill()
		expect(t, w.after(time.Second), "gone")
		if s.count() != 0 || len(s.registry.tags) != 0 {
			t.Errorf("%d VMs, tags %v", s.count(), s.registry.tags)
		}
	})
	synctest.Test(t, func(t *testing.T) { // a seat that is given up keeps its tag
		s := newKept()
		w := asleep(t, s, false, managedRun, asks(map[string]string{contract.KeyKeepSnapshot: "true"}))
		defer w.stop()
		s.registry.mu.Lock()
		clear(s.registry.tags) // it must be there
		s.registry.mu.Unlock()
		w.kill()
		expect(t, w.after(time.Second), "gone")
		if s.registry.has(vmName, "latest") != "" || s.registry.has(vmName, "hibernate") != "asleep" {
			t.Errorf("tags %v", s.registry.tags)
		}
	})
}

// A crash between a save and what follows leaves an older snapshot; the next one takes its place.
func TestOlderSnapshotsAreReplaced(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newKept()
		for range 3 {
			w := keeping(t, s, true)
			w.create(pod(managedRun))
			w.after(time.Second)
			s.knows(vmName, "run "+string(rune('0'+len(s.snaps))))
			w.kill()
			expect(t, w.after(time.Second), "gone")
			w.stop()
			if len(s.snaps) != 1 {
				t.Fatalf("snapshots %s", s.names())
			}
		}
		for _, name := range []string{vmName, vmName + ":latest"} { // both there, as after a crash
			_, _ = s.put(snapshot.Snapshot{Name: name, Labels: map[string]string{contract.VMLabelNode: "n"}}, "")
			<-time.After(time.Second)
		}
		w := keeping(t, s, true)
		defer w.stop()
		w.create(pod(managedRun))
		w.after(time.Second)
		w.kill()
		expect(t, w.after(time.Second), "gone")
		if len(s.snaps) != 1 {
			t.Errorf("snapshots %s", s.names())
		}
	})
}

func TestPostCloneHint(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newKept()
		s.boot = -1 // no agent
		w := keeping(t, s, true)
		defer w.stop()
		s.snaps["base"] = snapshot.Snapshot{ID: "base", Name: "base", Hypervisor: "fake"}
		w.reach.refuse.Store(true)
		w.create(pod(asks(map[string]string{contract.KeyMode: "clone", contract.KeyImage: "base"})))
		p := w.after(20 * time.Second)
		if p.Annotations[contract.KeyPostCloneHint] != "" {
			t.Error("there is a hint before anybody could answer")
		}
		p = w.after(20 * time.Second)
		text, err := base64.StdEncoding.DecodeString(p.Annotations[contract.KeyPostCloneHint])
		if err != nil || !strings.Contains(string(text), "02:00:00:00:00:01") || ready(p) {
			t.Errorf("hint %q, %v, pod %s", text, err, sketch(p))
		}
		w.expectTold("Warning PostCloneHint")
		writes := w.writes()
		w.after(time.Hour)
		if n := w.writes() - writes; n != 0 {
			t.Errorf("%d writes in an hour of waiting", n)
		}
		rec, _ := s.Inspect(t.Context(), vmName)
		s.change(rec.ID, func(r *vm.Record) { r.AgentReady, r.Resume = true, nil })
		w.reach.refuse.Store(false)
		p = w.after(10 * time.Second)
		expect(t, p, "Running running ready")
		if _, there := p.Annotations[contract.KeyPostCloneHint]; there {
			t.Error("the hint is left")
		}
	})
}
