package podprovider

import (
	"fmt"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	vkerr "github.com/virtual-kubelet/virtual-kubelet/errdefs"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"cocoonstack.io/cocoon/api/contract"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/image"
	"cocoonstack.io/cocoon/internal/vm"
)

func TestLifeOfAPod(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e := newEngine()
		e.boot, e.stopTime = 2*time.Second, time.Second
		w := start(t, e)
		defer w.stop()
		w.create(pod())
		expect(t, w.after(time.Second), "Pending waiting:ContainerCreating")
		p := w.after(1500 * time.Millisecond)
		expect(t, p, "Running running ready")
		rec, err := e.Inspect(t.Context(), vmName)
		if err != nil {
			t.Fatal(err)
		}
		if p.Status.PodIP != rec.NICs[0].IP || !slices.Equal(p.Status.PodIPs, []corev1.PodIP{{IP: rec.NICs[0].IP}, {IP: rec.NICs[0].IPv6}}) || p.Status.HostIP != "192.0.2.1" || len(p.Status.HostIPs) != 1 {
			t.Errorf("addresses: %+v", p.Status)
		}
		if p.Status.QOSClass != corev1.PodQOSBestEffort || p.Status.StartTime == nil || p.Status.ObservedGeneration != 1 {
			t.Errorf("status: %+v", p.Status)
		}
		c := p.Status.ContainerStatuses[0]
		if c.ContainerID != "cocoon://"+string(rec.ID) || c.ImageID != "sha256:abc" || c.State.Running.StartedAt.Unix() != rec.StartedAt.Unix() || !*c.Started {
			t.Errorf("container: %+v", c)
		}
		if p.Annotations[contract.KeyID] != string(rec.ID) || p.Annotations[contract.KeyIP] != rec.NICs[0].IP {
			t.Errorf("annotations: %v", p.Annotations)
		}
		if n := w.writes(); n != 2 {
			t.Errorf("%d writes until Ready, want 2", n)
		}
		if got := w.told(); !strings.HasPrefix(got, "Normal Started Created and started container c") {
			t.Errorf("events: %s", got)
		}

		w.after(time.Hour)
		if n := w.writes(); n != 2 {
			t.Errorf("%d writes after an idle hour, want 2", n)
		}

		p.DeletionTimestamp, p.DeletionGracePeriodSeconds = new(metav1.Now()), new(int64(30))
		if err := w.p.DeletePod(t.Context(), p); err != nil {
			t.Fatal(err)
		}
		expect(t, w.after(2*time.Second), "gone")
		if e.count() != 0 || e.called("stop 30s") != 1 {
			t.Errorf("%d VMs left, calls %v", e.count(), e.calls)
		}
		if n := w.writes(); n != 4 {
			t.Errorf("%d writes in a whole life, want 4 (two statuses, the last one, the deletion)", n)
		}
		if err := w.p.PodClient().Pods("default").Delete(t.Context(), "web", metav1.DeleteOptions{Preconditions: &metav1.Preconditions{UID: &p.UID}}); !apierrors.IsNotFound(err) || w.writes() != 4 {
			t.Errorf("virtual-kubelet deletes once more: %v", err)
		}
		if got := w.told(); got != "" {
			t.Errorf("events of a requested deletion: %s", got)
		}
		if _, err := w.p.GetPod(t.Context(), "default", "web"); !vkerr.IsNotFound(err) {
			t.Errorf("the pod is still known: %v", err)
		}
	})
}

func TestAQuickVMCostsOneWriteLess(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e := newEngine()
		e.boot = 50 * time.Millisecond
		w := start(t, e)
		defer w.stop()
		w.create(pod())
		expect(t, w.after(time.Second), "Running running ready")
		if n := w.writes(); n != 1 {
			t.Errorf("%d writes, want 1", n)
		}
	})
}

func TestReadinessFollowsTheProbe(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := start(t, newEngine())
		defer w.stop()
		w.reach.refuse.Store(true)
		w.create(pod())
		expect(t, w.after(10*time.Second), "Running running")
		w.reach.refuse.Store(false)
		p := w.after(2 * time.Second)
		expect(t, p, "Running running ready")
		since := condition(p, corev1.PodReady).LastTransitionTime
		w.reach.refuse.Store(true)
		expect(t, w.after(10*time.Second), "Running running ready") // two failures are not enough
		p = w.after(6 * time.Second)
		expect(t, p, "Running running")
		if got := w.told(); !strings.Contains(got, "Warning Unhealthy VM does not answer: no answer") {
			t.Errorf("events: %s", got)
		}
		if !condition(p, corev1.PodReady).LastTransitionTime.After(since.Time) || condition(p, corev1.PodScheduled).LastTransitionTime.Unix() != 1 {
			t.Errorf("transition times: %+v", p.Status.Conditions)
		}
	})
}

func condition(p *corev1.Pod, kind corev1.PodConditionType) corev1.PodCondition {
	for _, c := range p.Status.Conditions {
		if c.Type == kind {
			return c
		}
	}
	return corev1.PodCondition{}
}

func TestRestartPolicies(t *testing.T) {
	for _, tc := range []struct {
		policy corev1.RestartPolicy
		code   int
		want   string
	}{
		{corev1.RestartPolicyNever, 0, "Succeeded terminated:Completed:0"},
		{corev1.RestartPolicyNever, 3, "Failed terminated:Error:3"},
		{corev1.RestartPolicyOnFailure, 0, "Succeeded terminated:Completed:0"},
		{corev1.RestartPolicyOnFailure, 3, "Running running last:3 restarts:1 ready"},
		{corev1.RestartPolicyAlways, 0, "Running running last:0 restarts:1 ready"},
		{corev1.RestartPolicyAlways, 3, "Running running last:3 restarts:1 ready"},
	} {
		t.Run(fmt.Sprint(tc.policy, tc.code), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := start(t, newEngine())
				defer w.stop()
				w.create(pod(policy(tc.policy)))
				expect(t, w.after(time.Second), "Running running ready")
				w.engine.exit(tc.code)
				expect(t, w.after(time.Second), tc.want)
			})
		})
	}
}

// The end of a VM is reported immediately, not after the next start. A VM that is stopped from outside its pod counts as
// failed, even if its process exits with code 0.
func TestAVMThatIsStoppedByHand(t *testing.T) {
	for restart, want := range map[corev1.RestartPolicy]string{
		corev1.RestartPolicyNever:     "Failed/VMStopped terminated:VMStopped:0",
		corev1.RestartPolicyOnFailure: "Running running last:0 restarts:1 ready",
		corev1.RestartPolicyAlways:    "Running running last:0 restarts:1 ready",
	} {
		t.Run(string(restart), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := start(t, newEngine())
				w.create(pod(policy(restart)))
				expect(t, w.after(time.Second), "Running running ready")
				w.stop()
				if _, err := w.engine.Stop(t.Context(), vmName, -1); err != nil { // as `cocoon down` does
					t.Fatal(err)
				}
				w.run(Config{})
				defer w.stop()
				expect(t, w.after(time.Second), want)
			})
		})
	}
}

func TestAnEndIsToldBeforeTheNextStart(t *testing.T) {
	for _, managed := range []bool{false, true} {
		synctest.Test(t, func(t *testing.T) {
			e := newEngine()
			e.startAs = func() error { <-time.After(10 * time.Second); return nil }
			w := start(t, e)
			defer w.stop()
			p := pod()
			if managed {
				managedRun(p)
			}
			w.create(p)
			expect(t, w.after(time.Second), "Running running ready")
			e.exit(3)
			expect(t, w.after(50*time.Millisecond), "Running waiting:ContainerCreating last:3")
			expect(t, w.after(11*time.Second), "Running running last:3 restarts:1 ready")
		})
	}
}

func TestCrashLoopBacksOff(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := start(t, newEngine())
		defer w.stop()
		w.create(pod())
		w.after(time.Second)
		w.engine.exit(1)
		expect(t, w.after(time.Second), "Running running last:1 restarts:1 ready") // the first restart is immediate
		for i, pause := range []time.Duration{10 * time.Second, 20 * time.Second, 40 * time.Second} {
			w.told()
			w.engine.exit(1)
			expect(t, w.after(pause-time.Second), fmt.Sprintf("Running waiting:CrashLoopBackOff last:1 restarts:%d", i+1))
			if got := w.told(); !strings.Contains(got, "Warning BackOff Back-off restarting") {
				t.Errorf("events: %s", got)
			}
			expect(t, w.after(2*time.Second), fmt.Sprintf("Running running last:1 restarts:%d ready", i+2))
		}
		w.after(11 * time.Minute) // a long run resets the back-off
		w.engine.exit(1)
		expect(t, w.after(time.Second), "Running running last:1 restarts:5 ready")
	})
}

func TestRefusals(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := start(t, newEngine())
		defer w.stop()
		w.create(pod(func(p *corev1.Pod) { p.Spec.HostNetwork = true }))
		p := w.after(time.Second)
		expect(t, p, "Pending/PodNotSupported waiting:CreateContainerConfigError")
		if !strings.Contains(p.Status.Message, "spec.hostNetwork") {
			t.Errorf("message: %s", p.Status.Message)
		}
		w.annotate("example.com/note", "changes nothing")
		w.after(time.Second)
		if got := w.told(); strings.Count(got, "Warning PodNotSupported") != 1 {
			t.Errorf("events: %s", got)
		}
		if w.engine.called("launch "+vmName) != 0 {
			t.Error("a VM was launched")
		}
	})
	synctest.Test(t, func(t *testing.T) {
		e := newEngine()
		var changed atomic.Bool
		e.launchAt = func(vm.Spec) error {
			if changed.Load() {
				return nil
			}
			return errdefs.Invalidf("storage is smaller than the image")
		}
		w := start(t, e)
		defer w.stop()
		w.create(pod())
		p := w.after(time.Second)
		expect(t, p, "Pending/VMRejected waiting:CreateContainerConfigError")
		if got := p.Annotations[contract.KeyLifecycleState]; got != string(contract.LifecycleFailed) {
			t.Errorf("its lifecycle state is %q", got)
		}
		changed.Store(true) // by the operator of the node
		p = w.after(time.Hour)
		expect(t, p, "Running running ready")
		if got := p.Annotations[contract.KeyLifecycleState] + p.Annotations[contract.KeyLifecycleMessage] + p.Annotations[contract.KeyLifecycleObserved]; got != "" {
			t.Errorf("its lifecycle state is %q", got)
		}
	})
}

// TestBackendThatTheNodeLacks: if the node lacks the hypervisor that the pod names, the VM runs in the node's hypervisor, and
// an Event says so.
func TestBackendThatTheNodeLacks(t *testing.T) {
	for want, told := range map[string]string{"cloud-hypervisor": "VM " + vmName + " runs in fake, which stands in for cloud-hypervisor", "": ""} {
		synctest.Test(t, func(t *testing.T) {
			w := start(t, newEngine())
			defer w.stop()
			w.create(pod(asks(map[string]string{contract.KeyBackend: want})))
			expect(t, w.after(10*time.Second), "Running running ready")
			if got := w.told(); told != "" && !strings.Contains(got, told) || told == "" && strings.Contains(got, eventStandIn) {
				t.Errorf("backend %q: %s", want, got)
			}
		})
	}
}

func TestWhatCanComeIsWaitedFor(t *testing.T) {
	for name, tc := range map[string]struct {
		err  error
		want string
	}{
		"image": {errdefs.NotFoundf("the image was removed after the pull"), "Pending waiting:CreateContainerError"},
		"full":  {errdefs.Exhaustedf("no address is left"), "Pending waiting:CreateContainerError"},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				e := newEngine()
				var lacks atomic.Bool
				lacks.Store(true)
				e.launchAt = func(vm.Spec) error {
					if lacks.Load() {
						return tc.err
					}
					return nil
				}
				w := start(t, e)
				defer w.stop()
				w.create(pod())
				expect(t, w.after(time.Second), tc.want)
				if got := w.told(); !strings.Contains(got, tc.err.Error()) {
					t.Errorf("events: %s", got)
				}
				lacks.Store(false)
				expect(t, w.after(10*time.Second), "Running running ready")
			})
		})
	}
	t.Run("configmap", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			w := start(t, newEngine())
			defer w.stop()
			w.create(pod(func(p *corev1.Pod) {
				p.Spec.Containers[0].EnvFrom = []corev1.EnvFromSource{{ConfigMapRef: &corev1.ConfigMapEnvSource{LocalObjectReference: corev1.LocalObjectReference{Name: "cm"}}}}
			}))
			expect(t, w.after(time.Second), "Pending waiting:CreateContainerConfigError")
			_ = w.client.Tracker().Add(&corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "cm"}, Data: map[string]string{"A": "1"}})
			expect(t, w.after(5*time.Second), "Running running ready")
		})
	})
}

func TestCloudInitOfAPod(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e := newEngine()
		w := start(t, e)
		defer w.stop()
		w.create(pod(func(p *corev1.Pod) {
			p.Annotations = map[string]string{
				contract.KeyVirtletUserData: "runcmd: [ls]", contract.KeyVirtletSSHKeySource: "secret/keys", contract.KeyVirtletDiskDriver: "scsi",
			}
		}))
		expect(t, w.after(time.Second), "Pending waiting:CreateContainerConfigError")
		_ = w.client.Tracker().Add(&corev1.Secret{
			ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "keys"}, Data: map[string][]byte{"authorized_keys": []byte("ssh-rsa AAAAB me")},
		})
		expect(t, w.after(5*time.Second), "Running running ready")
		e.mu.Lock()
		defer e.mu.Unlock()
		for _, r := range e.recs {
			c := r.Spec.CloudInit
			if c == nil || c.UserData != "#cloud-config\nruncmd:\n  - ls\n" || len(c.SSHKeys) != 1 {
				t.Errorf("cloud-init is %+v", c)
			}
		}
		if got := w.told(); !strings.Contains(got, "These settings have no effect in this VM: VirtletDiskDriver scsi") {
			t.Errorf("events: %s", got)
		}
	})
}

func TestFirmwareOfAContainerIsTold(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := start(t, newEngine())
		defer w.stop()
		w.create(pod(func(p *corev1.Pod) {
			p.Annotations = map[string]string{contract.KeyFirmware: "uefi", contract.KeyGraphics: "true"}
		}))
		expect(t, w.after(5*time.Second), "Running running ready")
		if got := w.told(); !strings.Contains(got, "These settings have no effect in this VM: "+contract.KeyFirmware) || !strings.Contains(got, contract.KeyGraphics+" (") {
			t.Errorf("events: %s", got)
		}
	})
}

func TestStatusSurvivesAnAbsentServer(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := start(t, newEngine())
		defer w.stop()
		var away atomic.Bool
		w.client.PrependReactor("patch", "pods", outage(&away))
		away.Store(true)
		w.create(pod())
		w.after(time.Minute)
		w.engine.exit(1)
		w.after(time.Minute)
		away.Store(false)
		expect(t, w.after(20*time.Second), "Running running last:1 restarts:1 ready")
	})
}

func TestDeadline(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := start(t, newEngine())
		defer w.stop()
		w.create(pod(func(p *corev1.Pod) { p.Spec.ActiveDeadlineSeconds = new(int64(60)) }))
		expect(t, w.after(50*time.Second), "Running running ready")
		expect(t, w.after(20*time.Second), "Failed/DeadlineExceeded terminated:Completed:0")
	})
}

// The active deadline counts from the start time of the pod, also while the pod waits for an image.
func TestDeadlineOfAPodThatWaits(t *testing.T) {
	soon := func(p *corev1.Pod) { p.Spec.ActiveDeadlineSeconds = new(int64(60)) }
	for name, from := range map[string]*origin{
		"an image that cannot be pulled": {err: errdefs.Unavailablef("no such host")},
		"a pull that takes long":         {takes: 24 * time.Hour},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := startPulling(t, from)
				defer w.stop()
				w.create(pod(pullPolicy(corev1.PullIfNotPresent), soon))
				if p := w.after(50 * time.Second); p.Status.Phase != corev1.PodPending {
					t.Fatalf("pod is %q", sketch(p))
				}
				expect(t, w.after(20*time.Second), "Failed/DeadlineExceeded")
				from.set(true, image.Image{ID: "sha256:abc", Name: "cocoon/demo:latest"})
				expect(t, w.after(10*time.Minute), "Failed/DeadlineExceeded")
				if w.engine.called("launch "+vmName) != 0 {
					t.Error("a VM was created")
				}
			})
		})
	}
}

// kubectl set image changes the pod. The running VM and the reported image stay the same.
func TestAnotherImage(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := startPulling(t, &origin{here: true, img: image.Image{ID: "sha256:abc", Name: "cocoon/demo:latest"}})
		p := pod(pullPolicy(corev1.PullIfNotPresent))
		w.create(p)
		before := w.after(time.Second)
		expect(t, before, "Running running ready")
		shows := func(when string, p *corev1.Pod) {
			t.Helper()
			if c := p.Status.ContainerStatuses[0]; c.Image != "cocoon/demo:latest" || c.ImageID != before.Status.ContainerStatuses[0].ImageID {
				t.Errorf("%s: runs %s (%s)", when, c.Image, c.ImageID)
			}
		}
		shows("at first", before)
		p = before.DeepCopy()
		p.Spec.Containers[0].Image = "cocoon/other:2"
		if _, err := w.client.CoreV1().Pods("default").Update(t.Context(), p, metav1.UpdateOptions{}); err != nil {
			t.Fatal(err)
		}
		if err := w.p.UpdatePod(t.Context(), p); err != nil {
			t.Fatal(err)
		}
		shows("changed", w.after(time.Second))
		if got := w.told(); strings.Count(got, "keeps the image that it was created from") != 1 {
			t.Errorf("events: %s", got)
		}
		w.engine.exit(1)
		got := w.after(time.Minute)
		expect(t, got, "Running running last:1 restarts:1 ready")
		shows("started again", got)
		w.stop()
		w.run(Config{})
		defer w.stop()
		shows("another process", w.after(time.Minute))
	})
}

func TestReadinessGates(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := start(t, newEngine())
		defer w.stop()
		w.create(pod(func(p *corev1.Pod) {
			p.Spec.ReadinessGates = []corev1.PodReadinessGate{{ConditionType: "example.com/lb"}}
		}))
		p := w.after(time.Second)
		expect(t, p, "Running running")
		p.Status.Conditions = append(p.Status.Conditions, corev1.PodCondition{Type: "example.com/lb", Status: corev1.ConditionTrue})
		p, err := w.client.CoreV1().Pods("default").UpdateStatus(t.Context(), p, metav1.UpdateOptions{})
		if err != nil {
			t.Fatal(err)
		}
		w.p.observe(p)
		p = w.after(time.Second)
		expect(t, p, "Running running ready")
		if condition(p, "example.com/lb").Status != corev1.ConditionTrue {
			t.Error("a condition of another owner was lost")
		}
	})
}
