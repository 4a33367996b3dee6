package podprovider

import (
	"io"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/guest"
	"cocoonstack.io/cocoon/internal/image"
	"cocoonstack.io/cocoon/internal/kube/podstatus"
	"cocoonstack.io/cocoon/internal/vm"
)

func debugged(p *corev1.Pod, change ...func(*corev1.EphemeralContainer)) *corev1.Pod {
	p = p.DeepCopy()
	c := corev1.EphemeralContainer{EphemeralContainerCommon: corev1.EphemeralContainerCommon{Name: "debugger", Image: "busybox", Stdin: true, TTY: true}}
	for _, f := range change {
		f(&c)
	}
	p.Spec.EphemeralContainers = append(p.Spec.EphemeralContainers, c)
	return p
}

// A VM that boots its own system cannot run the ephemeral container of kubectl debug. The pod is not affected.
func TestAnEphemeralContainerThatCannotRun(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := start(t, newEngine())
		defer w.stop()
		p := pod()
		w.create(p)
		w.after(time.Second)
		w.engine.mu.Lock()
		id := w.engine.web().ID
		w.engine.mu.Unlock()
		w.engine.change(id, func(r *vm.Record) { r.ImageType = vm.ImageDisk })
		w.after(time.Second)
		if err := w.p.UpdatePod(t.Context(), debugged(p)); err != nil {
			t.Fatal(err)
		}
		got := w.after(time.Minute)
		expect(t, got, "Running running ready")
		if c := got.Status.EphemeralContainerStatuses; len(c) != 1 || c[0].Name != "debugger" || c[0].State.Terminated == nil || c[0].State.Terminated.Message != podstatus.NoEphemeral {
			t.Errorf("ephemeral containers: %+v", c)
		}
		err := w.p.Logs(t.Context(), "default", "web", "debugger", guest.LogOptions{}, nil)
		if !errdefs.IsFailedPrecondition(err) || !strings.Contains(err.Error(), podstatus.NoEphemeral) {
			t.Errorf("its log: %v", err)
		}
		if w.engine.called("add debugger") != 0 {
			t.Errorf("calls: %v", w.engine.calls)
		}
	})
}

// The ephemeral container of kubectl debug runs once in the pod's VM. Its end does not affect the pod.
func TestAnEphemeralContainer(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		from := &origin{here: true, img: image.Image{ID: "sha256:abc", Name: "cocoon/demo:latest"}}
		e := newEngine()
		e.inside, e.pullAs = true, from.pull
		w := start(t, e)
		defer w.stop()
		p := pod()
		w.create(p)
		expect(t, w.after(time.Second), "Running running ready")
		w.told()
		from.set(false, image.Image{ID: "sha256:debug", Name: "busybox:latest"})
		from.fail(errdefs.Unavailablef("no such host"))
		p = debugged(p)
		if err := w.p.UpdatePod(t.Context(), p); err != nil {
			t.Fatal(err)
		}
		known := w.after(0)
		known.Spec.EphemeralContainers = p.Spec.EphemeralContainers
		if _, err := w.client.CoreV1().Pods("default").Update(t.Context(), known, metav1.UpdateOptions{}); err != nil {
			t.Fatal(err)
		}
		state := func(d time.Duration) corev1.ContainerStatus {
			t.Helper()
			got := w.after(d)
			expect(t, got, "Running running ready")
			if len(got.Status.EphemeralContainerStatuses) != 1 {
				t.Fatalf("ephemeral containers: %+v", got.Status.EphemeralContainerStatuses)
			}
			return got.Status.EphemeralContainerStatuses[0]
		}
		if s := state(time.Second); s.State.Waiting == nil || s.State.Waiting.Reason != "ErrImagePull" {
			t.Errorf("a failed pull: %+v", s)
		}
		if err := w.p.Logs(t.Context(), "default", "web", "debugger", guest.LogOptions{}, nil); !errdefs.IsFailedPrecondition(err) || !strings.Contains(err.Error(), "ErrImagePull") {
			t.Errorf("its log: %v", err)
		}
		if s := state(11 * time.Second); s.State.Waiting == nil || s.State.Waiting.Reason != "ImagePullBackOff" {
			t.Errorf("a pull that failed twice: %+v", s)
		}
		from.fail(nil)
		s := state(time.Minute)
		w.engine.mu.Lock()
		rec := *w.engine.web()
		w.engine.mu.Unlock()
		id := "cocoon://" + string(rec.ID) + "/debugger"
		if s.State.Running == nil || s.ContainerID != id || s.ImageID != "sha256:debug" || s.Image != "busybox:latest" || s.Ready {
			t.Errorf("it runs: %+v", s)
		}
		if c := rec.Ephemeral[0].Spec; c.Image != "busybox" || !c.Process.TTY || !c.Process.Stdin || c.Process.Security == nil {
			t.Errorf("the VM got %+v", c)
		}
		if got := w.told(); !strings.Contains(got, "Successfully pulled image \"busybox\"") || !strings.Contains(got, "Created and started container debugger") {
			t.Errorf("events: %s", got)
		}
		if code, err := w.p.Exec(t.Context(), "default", "web", "debugger", guest.Exec{Command: []string{"x"}}, guest.Streams{Stdout: io.Discard}); err != nil || code != 7 {
			t.Errorf("exec: %d, %v", code, err)
		}
		w.stop()
		w.run(Config{})
		if s := state(time.Second); s.State.Running == nil || s.ContainerID != id || s.Image != "busybox:latest" {
			t.Errorf("after a restart of the node: %+v", s)
		}
		w.engine.change(rec.ID, func(r *vm.Record) {
			r.Ephemeral = slices.Clone(r.Ephemeral)
			c := &r.Ephemeral[0].Record.Status
			c.State, c.Exit = vm.ContainerTerminated, &vm.ContainerExit{Code: 3, Reason: vm.ContainerError}
		})
		if s := state(time.Second); s.State.Terminated == nil || s.State.Terminated.ExitCode != 3 || s.State.Terminated.ContainerID != id {
			t.Errorf("it has ended: %+v", s)
		}
		if n := w.engine.called("add debugger"); n != 1 {
			t.Errorf("it was added %d times", n)
		}

		// A setting that the VM cannot provide, and an older agent.
		p = debugged(p, func(c *corev1.EphemeralContainer) {
			c.Name, c.VolumeMounts = "mounts", []corev1.VolumeMount{{Name: "v", MountPath: "/v"}}
		})
		if err := w.p.UpdatePod(t.Context(), p); err != nil {
			t.Fatal(err)
		}
		refused := w.after(time.Second).Status.EphemeralContainerStatuses[1]
		if x := refused.State.Terminated; x == nil || x.ExitCode != 128 || !strings.Contains(x.Message, "volumeMounts") {
			t.Errorf("with volumes: %+v", refused)
		}
		w.engine.older = true
		p = debugged(p, func(c *corev1.EphemeralContainer) { c.Name = "late" })
		if err := w.p.UpdatePod(t.Context(), p); err != nil {
			t.Fatal(err)
		}
		refused = w.after(time.Minute).Status.EphemeralContainerStatuses[2]
		if x := refused.State.Terminated; x == nil || x.Reason != podstatus.ReasonUnserved || w.engine.called("add late") != 1 {
			t.Errorf("in an older guest: %+v", refused)
		}
	})
}
