package podprovider

import (
	"context"
	"encoding/base64"
	"fmt"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"cocoonstack.io/cocoon/api/contract"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/snapshot"
	"cocoonstack.io/cocoon/internal/vm"
)

func TestClones(t *testing.T) {
	clone := func(image string, more ...string) func(*corev1.Pod) {
		m := map[string]string{contract.KeyMode: "clone", contract.KeyImage: image}
		for i := 0; i < len(more); i += 2 {
			m[more[i]] = more[i+1]
		}
		return asks(m)
	}
	template := func(t *testing.T, s *fakeSnapshots, name string) {
		t.Helper()
		rec, err := s.Launch(t.Context(), vm.Spec{Name: "template", Image: "x"}.Default())
		if err != nil {
			t.Fatal(err)
		}
		s.knows("template", "in "+name)
		if _, err := s.SaveSnapshot(t.Context(), string(rec.ID), vm.SaveSpec{Name: name}); err != nil {
			t.Fatal(err)
		}
		s.publish(name, "default")
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
			if _, err := s.PushSnapshot(t.Context(), "base:v2", registryURL+"/default/base:v2", snapshot.Auth{}, nil); err != nil {
				t.Fatal(err)
			}
			_ = s.RemoveSnapshot(t.Context(), "base:v2")
			w := keeping(t, s, false)
			defer w.stop()
			w.create(pod(clone("base:v2")))
			expect(t, w.after(time.Second), "Running running ready")
			if s.names() != "base:v2" {
				t.Errorf("snapshots on the node: %s", s.names())
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
			expect(t, p, "Pending/VMRejected waiting:CreateContainerConfigError")
			if !strings.Contains(p.Status.Message, "taken by fake and cannot resume in firecracker") || s.count() != 0 {
				t.Errorf("%s, %d VMs", p.Status.Message, s.count())
			}
		})
	})
	t.Run("of a stand-in", func(t *testing.T) {
		for name, tc := range map[string]struct{ asked, standIn string }{
			"that is the default":         {"", "fake"},
			"of a VM that asked for what": {"firecracker", "qemu"}, // another node's default took it
		} {
			t.Run(name, func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					s := newKept()
					template(t, s, "base")
					x := s.snaps["base"]
					x.Record.Spec.Driver = tc.asked
					s.snaps["base"] = x
					w := keeping(t, s, true)
					w.stop()
					w.standIn = func(context.Context) (string, error) { return tc.standIn, nil }
					w.run(keepingConfig(true))
					defer w.stop()
					w.create(pod(clone("base", contract.KeyBackend, "firecracker")))
					expect(t, w.after(time.Second), "Running running ready")
					w.expectTold("runs in fake, which stands in for firecracker")
				})
			})
		}
	})
	t.Run("of a stand-in, in a folder", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			w := keeping(t, newKept(), true)
			w.stop()
			w.standIn = func(context.Context) (string, error) { return "fake", nil }
			w.run(keepingConfig(true))
			defer w.stop()
			w.create(pod(asks(map[string]string{contract.KeyManaged: "true", contract.KeyCloneFromDir: "/srv/x", contract.KeyBackend: "firecracker"})))
			expect(t, w.after(time.Second), "Running running ready")
		})
	})
	t.Run("whose stand-in is not known yet", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			s := newKept()
			template(t, s, "base")
			w := keeping(t, s, true)
			w.stop()
			silent := true
			w.standIn = func(context.Context) (string, error) {
				if silent {
					silent = false
					return "", errdefs.Unavailablef("the engine does not answer")
				}
				return "fake", nil
			}
			w.run(keepingConfig(true))
			defer w.stop()
			w.create(pod(clone("base", contract.KeyBackend, "firecracker")))
			expect(t, w.after(time.Minute), "Running running ready")
		})
	})
	t.Run("of qemu where another stands in", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			s := newKept()
			template(t, s, "base")
			x := s.snaps["base"]
			x.Hypervisor = "qemu"
			s.snaps["base"] = x
			w := keeping(t, s, true)
			w.stop()
			w.standIn = func(context.Context) (string, error) { return "firecracker", nil }
			w.run(keepingConfig(true))
			defer w.stop()
			w.create(pod(clone("base", contract.KeyBackend, "cloud-hypervisor")))
			expect(t, w.after(time.Second), "Pending/VMRejected waiting:CreateContainerConfigError")
		})
	})
	t.Run("of several containers", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			s := newKept()
			template(t, s, "base")
			x := s.snaps["base"]
			for _, name := range []string{"c", "side"} {
				x.Record.Containers = append(x.Record.Containers, vm.ContainerRecord{Name: name, Status: vm.ContainerStatus{State: vm.ContainerRunning, StartedAt: time.Now(), Restarts: 2}})
			}
			s.snaps["base"] = x
			w := keeping(t, s, true)
			defer w.stop()
			w.create(pod(clone("base")))
			p := w.after(time.Second)
			expect(t, p, "Pending/VMRejected waiting:CreateContainerConfigError")
			if !strings.Contains(p.Status.Message, "which are c, side") || s.count() != 0 {
				t.Errorf("%s, %d VMs", p.Status.Message, s.count())
			}
			w.create(pod(clone("base"), func(p *corev1.Pod) {
				p.Name, p.UID = "two", "uid-2"
				p.Spec.Containers = append(p.Spec.Containers, corev1.Container{Name: "side", Image: "cocoon/demo:latest"})
			}))
			w.after(time.Second)
			if s.count() != 1 {
				t.Errorf("%d VMs", s.count())
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
			expect(t, w.after(time.Second), "Pending/VMRejected waiting:CreateContainerConfigError")
			if s.count() != 0 {
				t.Error("a VM is left")
			}
		})
	})
	t.Run("of a folder, adopted, with another hypervisor's", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			s := newKept()
			rec, err := s.CloneWithImage(t.Context(), vm.CloneSpec{Name: vmName, FromDir: "/srv/x"}, nil)
			if err != nil {
				t.Fatal(err)
			}
			s.change(rec.ID, func(r *vm.Record) { r.Spec.Offered = []string{"default"} })
			w := keeping(t, s, true)
			defer w.stop()
			w.create(pod(asks(map[string]string{contract.KeyManaged: "true", contract.KeyCloneFromDir: "/srv/x", contract.KeyBackend: "firecracker"})))
			expect(t, w.after(time.Second), "Running running ready")
		})
	})
	t.Run("whose name an id begins with", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			s := newKept()
			template(t, s, "base")
			other, err := s.Launch(t.Context(), vm.Spec{Name: "other", Image: "base"}.Default())
			if err != nil {
				t.Fatal(err)
			}
			w := keeping(t, s, true)
			defer w.stop()
			w.create(pod(clone("base", contract.KeyName, string(other.ID)[:5])))
			expect(t, w.after(time.Second), "Running running ready")
			if s.count() != 2 {
				t.Errorf("%d VMs", s.count())
			}
		})
	})
	t.Run("newer in the registry", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			s := newKept()
			template(t, s, "base")
			if _, err := s.PushSnapshot(t.Context(), "base", registryURL+"/default/base:latest", snapshot.Auth{}, nil); err != nil {
				t.Fatal(err)
			}
			s.registry.mu.Lock()
			s.registry.tags[registryURL+"/default/base:latest"], s.registry.text["sha256:new"] = "sha256:new", "newer"
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
			expect(t, w.after(time.Second), "Pending/VMRejected waiting:CreateContainerConfigError")
		})
	})
}

func TestANameThatNoRegistryTakes(t *testing.T) {
	for name, tc := range map[string]struct {
		bare bool
		want string
	}{"registry": {false, "Pending/PodNotSupported waiting:CreateContainerConfigError"}, "alone": {true, "Running running ready"}} {
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
		w.create(pod(fork("a"))) // before main exists
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

		// After main is replaced, the snapshot of the earlier main is not used any more.
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
	synctest.Test(t, func(t *testing.T) { // a VM of another namespace cannot be forked
		s := newKept()
		if _, err := s.Launch(t.Context(), vm.Spec{Name: vmName, Image: "x", Labels: map[string]string{contract.VMLabelPodNamespace: "secret"}}.Default()); err != nil {
			t.Fatal(err)
		}
		w := keeping(t, s, true)
		defer w.stop()
		p := pod(asks(map[string]string{contract.KeyForkFrom: vmName, contract.KeyName: "thief"}))
		w.create(p)
		expect(t, w.after(time.Minute), "Pending waiting:CreateContainerError")
		w.expectTold(fmt.Sprintf("vm not found: %q in namespace default", vmName))
		if s.names() != "" || s.count() != 1 {
			t.Errorf("snapshots %q, %d VMs", s.names(), s.count())
		}
	})
	synctest.Test(t, func(t *testing.T) { // main is on another node: the state in the registry is used
		s := newKept()
		s.registry.tags[registryURL+"/default/"+"vk-default-main:latest"] = "sha256:1"
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

// TestForksOnOtherNodes: the main VM's node offers its state. Another node waits for the state of exactly this VM.
func TestForksOnOtherNodes(t *testing.T) {
	const ref = registryURL + "/" + vmRepo + ":fork"
	synctest.Test(t, func(t *testing.T) {
		s := newKept()
		s.registry.fall(errdefs.Unavailablef("away"))
		w := keeping(t, s, false)
		defer w.stop()
		w.create(pod())
		w.after(time.Second)
		s.knows(vmName, "main's")
		w.annotate(contract.KeyOfferFork, "true")
		w.pass(3 * time.Second)
		s.registry.fall(nil)
		w.pass(time.Minute)
		if got := s.registry.has(vmRepo, "fork"); got != "main's" {
			t.Errorf("offered is %q", got)
		}
		if n := s.called("save fork-" + vmName); n != 1 {
			t.Errorf("saved %d times", n)
		}
		w.kill()
		w.pass(time.Minute)
		if got := s.registry.has(vmRepo, "fork"); got != "" || s.names() != "" {
			t.Errorf("fork state of a removed VM: %q in the registry and %q on the node", got, s.names())
		}
	})
	synctest.Test(t, func(t *testing.T) {
		s := newKept()
		put := func(id vm.ID, text string) {
			s.registry.mu.Lock()
			defer s.registry.mu.Unlock()
			s.registry.tags[ref], s.registry.text["sha256:"+text] = "sha256:"+text, text
			s.registry.blobs["sha256:"+text] = snapshot.Snapshot{Source: snapshot.Source{VMID: id}}
		}
		w := keeping(t, s, false)
		defer w.stop()
		w.create(pod(asks(map[string]string{contract.KeyForkFrom: vmName, contract.KeyForkFromID: "second", contract.KeyName: "fork"})))
		w.pass(10 * time.Second)
		put("first", "old")
		w.pass(2 * time.Minute)
		if s.count() != 0 {
			t.Error("the VM was forked from a main VM that no longer exists")
		}
		if n := s.registry.called("pull " + ref); n != 1 {
			t.Errorf("the snapshot of the earlier main VM was pulled %d times", n)
		}
		put("second", "new")
		expect(t, w.after(time.Minute), "Running running ready")
		if got := s.knows("fork"); got != "new" {
			t.Errorf("it has %q", got)
		}
		w.kill()
		w.pass(time.Minute)
		if s.names() != "" {
			t.Errorf("snapshots left on the node: %s", s.names())
		}
	})
}

func TestPostCloneHint(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newKept()
		s.boot = -1 // no agent
		w := keeping(t, s, true)
		defer w.stop()
		s.snaps["base"] = snapshot.Snapshot{ID: "base", Name: "base", Hypervisor: "fake", Published: []string{"default"}}
		w.reach.refuse.Store(true)
		w.create(pod(asks(map[string]string{contract.KeyMode: "clone", contract.KeyImage: "base"})))
		p := w.after(20 * time.Second)
		if p.Annotations[contract.KeyPostCloneHint] != "" {
			t.Error("a hint is shown before an agent could answer")
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
			t.Error("the hint was not removed")
		}
	})
}
