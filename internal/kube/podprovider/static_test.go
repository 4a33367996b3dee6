package podprovider

import (
	"context"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"cocoonstack.io/cocoon/api/contract"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/guest"
	"cocoonstack.io/cocoon/internal/vm"
)

// static changes a pod to one that a CocoonSet creates for a static toolbox.
func static(p *corev1.Pod) {
	p.Spec.Containers[0].Image = "cocoon/static"
	p.Annotations = map[string]string{
		contract.KeyName: vmName, contract.KeyMode: "static", contract.KeyOS: "windows", contract.KeySnapshotPolicy: "always",
		contract.KeyID: "pc-7", contract.KeyIP: "192.0.2.7", contract.KeyVNCPort: "5907", contract.KeyProbePort: "3389",
	}
}

// A static pod adopts an existing machine. The provider does not call the engine, and the deletion removes only the pod,
// although a VM of the node has the machine's ID and the pod's VM name.
func TestStatic(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e := newEngine()
		e.recs["pc-7"] = &vm.Record{ID: "pc-7", Spec: vm.Spec{Name: vmName}, State: vm.StateRunning, AgentReady: true, StartedAt: time.Now()}
		w := start(t, e)
		w.reach.refuse.Store(true)
		w.create(pod(static))
		expect(t, w.after(10*time.Second), "Running running")
		w.reach.refuse.Store(false)
		p := w.after(5 * time.Second)
		expect(t, p, "Running running ready")
		if p.Status.PodIP != "192.0.2.7" || p.Status.ContainerStatuses[0].ContainerID != "cocoon://pc-7" || !p.Status.ContainerStatuses[0].State.Running.StartedAt.IsZero() {
			t.Errorf("status: %+v", p.Status)
		}
		if got := w.told(); !strings.Contains(got, "Normal Adopted Adopted the machine pc-7 at 192.0.2.7") {
			t.Errorf("events: %s", got)
		}
		check := func(when string, p *corev1.Pod) {
			t.Helper()
			want := pod(static).Annotations
			for key, value := range p.Annotations {
				if want[key] != value {
					t.Errorf("%s: %s became %q", when, key, value)
				}
			}
			if len(p.Annotations) != len(want) {
				t.Errorf("%s: annotations %v", when, p.Annotations)
			}
		}
		check("adopted", p)

		_, err := w.p.Exec(t.Context(), "default", "web", "c", guest.Exec{}, guest.Streams{})
		if !errdefs.IsFailedPrecondition(err) || !strings.Contains(err.Error(), "it does not support exec; reach it by vnc at 192.0.2.7, port 5907") {
			t.Errorf("exec: %v", err)
		}
		if err := w.p.Attach(t.Context(), "default", "web", "c", guest.Attach{}, guest.Streams{}); !errdefs.IsFailedPrecondition(err) {
			t.Errorf("attach: %v", err)
		}
		err = w.p.Logs(t.Context(), "default", "web", "c", guest.LogOptions{}, nil)
		if !errdefs.IsFailedPrecondition(err) || !strings.Contains(err.Error(), "it does not support log") {
			t.Errorf("logs: %v", err)
		}
		if vms := w.p.Tracked(); len(vms) != 0 {
			t.Errorf("measured as a VM of the node: %+v", vms)
		}

		// After a restart, the process adopts the machine again. The machine counts as ready until a probe fails. No Event is
		// repeated.
		w.stop()
		w.run(Config{})
		defer func() { w.stop() }()
		if err := w.p.CreatePod(t.Context(), p); err != nil {
			t.Fatal(err)
		}
		writes := w.writes()
		p = w.after(time.Hour)
		expect(t, p, "Running running ready")
		check("after a restart", p)
		if got := w.told(); got != "" || w.writes() != writes {
			t.Errorf("%d writes, events: %s", w.writes()-writes, got)
		}

		// The operator may change the address.
		p.Annotations[contract.KeyIP] = "192.0.2.8"
		if p, err = w.client.CoreV1().Pods("default").Update(t.Context(), p, metav1.UpdateOptions{}); err != nil {
			t.Fatal(err)
		}
		if err := w.p.UpdatePod(t.Context(), p); err != nil {
			t.Fatal(err)
		}
		if p = w.after(time.Second); p.Status.PodIP != "192.0.2.8" {
			t.Errorf("address %s", p.Status.PodIP)
		}

		// Without the mode, nobody could see that the address in the status is only the creator's claim.
		delete(p.Annotations, contract.KeyMode)
		if p, err = w.client.CoreV1().Pods("default").Update(t.Context(), p, metav1.UpdateOptions{}); err != nil {
			t.Fatal(err)
		}
		if err := w.p.UpdatePod(t.Context(), p); err != nil {
			t.Fatal(err)
		}
		if p = w.after(time.Second); p.Status.PodIP != "" || len(p.Status.PodIPs) > 0 {
			t.Errorf("addresses %s, %v", p.Status.PodIP, p.Status.PodIPs)
		}

		p.DeletionTimestamp, p.DeletionGracePeriodSeconds = new(metav1.Now()), new(int64(30))
		if err := w.p.DeletePod(t.Context(), p); err != nil {
			t.Fatal(err)
		}
		expect(t, w.after(time.Second), "gone")
		if e.count() != 1 {
			t.Error("a VM that is not the pod's was removed")
		}
		for _, call := range e.calls {
			for _, verb := range []string{"launch", "start", "stop", "remove", "exec", "pull"} {
				if strings.HasPrefix(call, verb) {
					t.Errorf("the engine was called: %s", call)
				}
			}
		}
	})
}

// A static pod is refused if it does not describe a machine, or if it has settings that the node cannot apply to the machine.
func TestStaticRefusals(t *testing.T) {
	for name, change := range map[string]func(*corev1.Pod){
		contract.KeyID:                func(p *corev1.Pod) { delete(p.Annotations, contract.KeyID) },
		"needs this annotation":       func(p *corev1.Pod) { delete(p.Annotations, contract.KeyIP) },
		"must be an IP address":       func(p *corev1.Pod) { p.Annotations[contract.KeyIP] = "here" },
		"cannot manage a static VM":   func(p *corev1.Pod) { p.Annotations[contract.KeyManaged] = "true" },
		"cannot hibernate a static":   func(p *corev1.Pod) { p.Annotations[contract.KeyHibernate] = "true" },
		"cannot stop a static VM":     func(p *corev1.Pod) { p.Spec.ActiveDeadlineSeconds = new(int64(5)) },
		"must have one container":     func(p *corev1.Pod) { p.Spec.Containers = append(p.Spec.Containers, p.Spec.Containers[0]) },
		"does not run the containers": func(p *corev1.Pod) { p.Spec.Containers[0].LivenessProbe = &corev1.Probe{} },
		contract.KeyVNCPort + ": ":    func(p *corev1.Pod) { p.Annotations[contract.KeyVNCPort] = "many" },
	} {
		synctest.Test(t, func(t *testing.T) {
			w := start(t, newEngine())
			defer w.stop()
			w.create(pod(static, change))
			p := w.after(time.Second)
			expect(t, p, "Pending/PodNotSupported"+strings.Repeat(" waiting:CreateContainerConfigError", len(p.Spec.Containers)))
			if !strings.Contains(p.Status.Message, strings.TrimSuffix(name, ": ")) {
				t.Errorf("%s: %s", name, p.Status.Message)
			}
		})
	}
}

// asked is a Prober that records its requests.
type asked struct {
	ip   string
	port int
}

func (a *asked) Probe(_ context.Context, ip string, port int) error {
	a.ip, a.port = ip, port
	return nil
}

func TestStaticIsProbedWhereItIs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := start(t, newEngine())
		defer w.stop()
		a := &asked{}
		w.p.Prober = a
		w.create(pod(static))
		expect(t, w.after(time.Second), "Running running ready")
		if a.ip != "192.0.2.7" || a.port != 3389 {
			t.Errorf("asked %s, port %d", a.ip, a.port)
		}
	})
}
