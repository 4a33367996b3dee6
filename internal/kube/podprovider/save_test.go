package podprovider

import (
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"

	"cocoonstack.io/cocoon/api/contract"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/kube/convert"
	"cocoonstack.io/cocoon/internal/snapshot"
	"cocoonstack.io/cocoon/internal/vm"
)

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
		"keep snapshot":   {[]func(*corev1.Pod){managedRun, asks(map[string]string{contract.KeyKeepSnapshot: "true"})}, false},
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
					got := s.registry.has("default/"+vmName, "latest")
					if bare {
						got = s.content[s.snaps["default/"+vmName].ID]
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
		s.registry.fall(errdefs.Unavailablef("the registry is unavailable"))
		w.kill()
		p := w.after(time.Hour)
		if p == nil || s.count() != 1 {
			t.Fatalf("pod %s, %d VMs", sketch(p), s.count())
		}
		w.expectTold("Warning SnapshotPushFailed", "the registry is unavailable", "snapshot-policy")
		if n := s.called("save " + vmName); n != 0 {
			t.Errorf("%d saves although the registry is unavailable", n)
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
		if s.count() != 0 || s.registry.has(vmRepo, "latest") != "the latest" {
			t.Errorf("%d VMs, the registry has %q", s.count(), s.registry.has(vmRepo, "latest"))
		}
	})
	synctest.Test(t, func(t *testing.T) { // an annotation gives up the state, so that the VM can be removed
		s := newKept()
		w := keeping(t, s, false)
		defer w.stop()
		w.create(pod(managedRun))
		w.after(time.Second)
		s.registry.fall(errdefs.Unavailablef("no registry"))
		w.kill()
		w.after(10 * time.Minute)
		w.annotate(contract.KeySnapshotPolicy, "never")
		expect(t, w.after(time.Minute), "gone")
		if s.count() != 0 {
			t.Error("the VM is left")
		}
	})
	synctest.Test(t, func(t *testing.T) { // the VM of a pod that was deleted by force is still saved
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
		if s.count() != 0 || s.registry.has(vmRepo, "latest") != "not lost" {
			t.Errorf("%d VMs, the registry has %q", s.count(), s.registry.has(vmRepo, "latest"))
		}
	})
	synctest.Test(t, func(t *testing.T) { // the same while no process ran
		s := newKept()
		w := keeping(t, s, false)
		w.create(pod(managedRun))
		w.after(time.Second)
		s.knows(vmName, "not lost")
		w.stop()
		_ = w.client.Tracker().Delete(corev1.SchemeGroupVersion.WithResource("pods"), "default", "web")
		w.run(keepingConfig(false))
		if s.count() != 1 {
			t.Fatal("the VM is gone")
		}
		next := pod(managedRun, func(p *corev1.Pod) { p.UID = "uid-2" })
		w.create(next)
		expect(t, w.after(time.Minute), "Pending waiting:VMLeftBehind")
		if s.count() != 1 || s.knows(vmName) != "not lost" {
			t.Fatal("the VM was removed although the policy keeps it")
		}
		w.stop()
		cfg := keepingConfig(false)
		cfg.Orphans = OrphanDestroy
		w.run(cfg)
		defer w.stop()
		if err := w.p.CreatePod(t.Context(), next.DeepCopy()); err != nil { // virtual-kubelet reports all pods
			t.Fatal(err)
		}
		expect(t, w.after(time.Minute), "Running running ready")
		if s.registry.has(vmRepo, "latest") != "not lost" {
			t.Errorf("the registry has %q", s.registry.has(vmRepo, "latest"))
		}
	})
}

func TestDeletingTheHibernated(t *testing.T) {
	asleep := func(t *testing.T, s *fakeSnapshots, bare bool, change ...func(*corev1.Pod)) *world {
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
		if s.count() != 0 || s.registry.has(vmRepo, "latest") != "asleep" || s.registry.has(vmRepo, "hibernate") != "asleep" || s.called("wake") != 0 {
			t.Errorf("%d VMs, tags %v, calls %v", s.count(), s.registry.tags, s.calls)
		}
	})
	synctest.Test(t, func(t *testing.T) { // without a registry, the snapshot of a hibernated VM is kept
		s := newKept()
		w := asleep(t, s, true, managedRun)
		defer w.stop()
		w.kill()
		expect(t, w.after(5*time.Second), "gone")
		if got := s.content[s.snaps["default/"+vmName].ID]; s.count() != 0 || got != "asleep" || s.called("wake") != 0 {
			t.Errorf("%d VMs, saved %q", s.count(), got)
		}
	})
	synctest.Test(t, func(t *testing.T) { // the state of a pod that is not managed is not saved
		s := newKept()
		w := asleep(t, s, false)
		defer w.stop()
		w.kill()
		expect(t, w.after(time.Second), "gone")
		if s.count() != 0 || len(s.registry.tags) != 0 {
			t.Errorf("%d VMs, tags %v", s.count(), s.registry.tags)
		}
	})
	synctest.Test(t, func(t *testing.T) { // with keep-snapshot-on-delete the tag stays in the registry
		s := newKept()
		w := asleep(t, s, false, managedRun, asks(map[string]string{contract.KeyKeepSnapshot: "true"}))
		defer w.stop()
		s.registry.mu.Lock()
		clear(s.registry.tags) // the save must push it again
		s.registry.mu.Unlock()
		w.kill()
		expect(t, w.after(time.Second), "gone")
		if s.registry.has(vmRepo, "latest") != "" || s.registry.has(vmRepo, "hibernate") != "asleep" {
			t.Errorf("tags %v", s.registry.tags)
		}
	})
}

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
		for _, name := range []string{vmName, vmName + ":latest"} { // both exist, as after a crash
			_, _ = s.put(snapshot.Snapshot{Name: name, Owner: vm.Owner{Namespace: "default"}, Labels: map[string]string{contract.VMLabelNode: "n"}}, "")
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
