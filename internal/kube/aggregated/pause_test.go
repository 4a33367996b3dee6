package aggregated

import (
	"context"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
	v1 "kubevirt.io/api/core/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"cocoonstack.io/cocoon/api/contract"
)

// node does what a node and the controller do with the annotation of the pod of vmi, until the test ends.
func (r *rig) node(vmi *v1.VirtualMachineInstance, pod *corev1.Pod) {
	ctx := r.t.Context()
	go func() {
		for ctx.Err() == nil {
			var p corev1.Pod
			var i v1.VirtualMachineInstance
			if r.client.Get(ctx, client.ObjectKeyFromObject(pod), &p) == nil && r.client.Get(ctx, client.ObjectKeyFromObject(vmi), &i) == nil && contract.Paused(p.Annotations) != isPaused(&i) {
				i.Status.Conditions = nil
				if contract.Paused(p.Annotations) {
					i.Status.Conditions = []v1.VirtualMachineInstanceCondition{{Type: v1.VirtualMachineInstancePaused, Status: corev1.ConditionTrue}}
				}
				_ = r.client.Update(ctx, &i)
			}
			select {
			case <-ctx.Done():
			case <-time.After(5 * time.Millisecond):
			}
		}
	}()
}

func (r *rig) asked(pod *corev1.Pod) bool {
	r.t.Helper()
	var p corev1.Pod
	if err := r.client.Get(r.t.Context(), client.ObjectKeyFromObject(pod), &p); err != nil {
		r.t.Fatal(err)
	}
	return contract.Paused(p.Annotations)
}

// The answers are those of KubeVirt. Each success has come true when it is told.
func TestPause(t *testing.T) {
	vmi := instance("web", v1.Running)
	pod := podOf(vmi)
	r := start(t, machine("Always"), vmi, pod)
	r.node(vmi, pod)
	const refused = `409 Operation cannot be fulfilled on virtualmachineinstance.kubevirt.io "web": `
	for i, c := range []struct {
		verb, body, answer string
		paused             bool
	}{
		{"unpause", `{}`, refused + "VMI is not paused", false},
		{"pause", `{"dryRun":["All"]}`, "202", false},
		{"pause", `{"dryRun":["Some"]}`, `400 dryRun "Some" must be All`, false},
		{"pause", `{"grace":1}`, `400 Can not unmarshal Request body to struct, error: json: unknown field "grace"`, false},
		{"pause", `{}`, "202", true},
		{"pause", `{}`, refused + "VMI is already paused", true},
		{"unpause", `{"dryRun":["All"]}`, "202", true},
		{"unpause", ``, "202", false},
		{"unpause", ``, refused + "VMI is not paused", false},
		{"pause", ``, "202", true},
	} {
		if got := r.put("virtualmachineinstances/web/"+c.verb, c.body); got != c.answer {
			t.Errorf("%d: %s %s: %s, want %s", i, c.verb, c.body, got, c.answer)
		}
		is := &v1.VirtualMachineInstance{}
		err := r.client.Get(t.Context(), client.ObjectKeyFromObject(vmi), is)
		if err != nil || r.asked(pod) != c.paused || isPaused(is) != c.paused {
			t.Errorf("%d: after %s %s, asked: %v, paused: %v, %v", i, c.verb, c.body, r.asked(pod), isPaused(is), err)
		}
	}
	if got := r.put("virtualmachineinstances/none/pause", ``); got != `404 virtualmachineinstance.kubevirt.io "none" not found` {
		t.Error(got)
	}
}

func TestPauseRefused(t *testing.T) {
	const refused = `409 Operation cannot be fulfilled on virtualmachineinstance.kubevirt.io "web": `
	probed := instance("web", v1.Running)
	probed.Spec.LivenessProbe = &v1.Probe{Handler: v1.Handler{TCPSocket: &corev1.TCPSocketAction{Port: intstr.FromInt32(22)}}}
	ended := podOf(instance("web", v1.Running))
	ended.Status.Phase = corev1.PodSucceeded
	for name, c := range map[string]struct {
		vmi    *v1.VirtualMachineInstance
		pod    *corev1.Pod
		answer string
	}{
		"scheduled":      {instance("web", v1.Scheduled), podOf(instance("web", v1.Scheduled)), refused + "VMI is not running"},
		"ended":          {instance("web", v1.Succeeded), nil, refused + "VMI is not running"},
		"no pod":         {instance("web", v1.Running), nil, refused + "VMI is not running: it has no pod that runs"},
		"ended pod":      {instance("web", v1.Running), ended, refused + "VMI is not running: it has no pod that runs"},
		"liveness probe": {probed, podOf(probed), `403 virtualmachineinstance.kubevirt.io "web" is forbidden: Pausing VMIs with LivenessProbe is currently not supported`},
	} {
		objects := []client.Object{c.vmi}
		if c.pod != nil {
			objects = append(objects, c.pod)
		}
		r := start(t, objects...)
		if got := r.put("virtualmachineinstances/web/pause", `{}`); got != c.answer {
			t.Errorf("%s: %s, want %s", name, got, c.answer)
		}
		if c.pod != nil && r.asked(c.pod) {
			t.Errorf("%s: the pod is asked", name)
		}
	}
}

// An instance that ends while a request waits for it is a conflict, and the pod of another instance is not asked.
func TestPauseEnds(t *testing.T) {
	vmi := instance("web", v1.Running)
	pod := podOf(vmi)
	r := start(t, vmi, pod)
	go func() {
		ctx := context.WithoutCancel(t.Context())
		for !r.asked(pod) {
			<-time.After(5 * time.Millisecond)
		}
		var i v1.VirtualMachineInstance
		if err := r.client.Get(ctx, client.ObjectKeyFromObject(vmi), &i); err == nil {
			i.Status.Phase = v1.Failed
			_ = r.client.Update(ctx, &i)
		}
	}()
	if got := r.put("virtualmachineinstances/web/pause", `{}`); !strings.HasPrefix(got, "409") || !strings.HasSuffix(got, "VMI is not running") {
		t.Error(got)
	}
}

// Each request has an ID of its own, and the answer of the node is that of the request.
func TestReboot(t *testing.T) {
	const refused = `409 Operation cannot be fulfilled on virtualmachineinstance.kubevirt.io "web": `
	vmi := instance("web", v1.Running)
	pod := podOf(vmi)
	r := start(t, vmi, pod)
	asked := make(chan contract.Reboot)
	why := ""
	go func() { // the node
		ctx, last := t.Context(), ""
		for ctx.Err() == nil {
			var p corev1.Pod
			if r.client.Get(ctx, client.ObjectKeyFromObject(pod), &p) == nil {
				if ask, err := contract.ParseReboot(p.Annotations); err == nil && ask.ID != last {
					last = ask.ID
					asked <- ask
					p.Annotations[contract.KeyRebooted] = contract.Rebooted{ID: ask.ID, Why: why}.String()
					_ = r.client.Update(ctx, &p)
				}
			}
			select {
			case <-ctx.Done():
			case <-time.After(5 * time.Millisecond):
			}
		}
	}()
	seen := map[string]bool{}
	for _, c := range []struct {
		verb, why, answer string
		hard              bool
	}{
		{"reset", "", "202", true},
		{"softreboot", "", "202", false},
		{"reset", "the guest ends when it resets", refused + "the guest ends when it resets", true},
	} {
		why = c.why
		answer := make(chan string)
		go func() { answer <- r.put("virtualmachineinstances/web/"+c.verb, "") }()
		ask := <-asked
		if got := <-answer; got != c.answer || ask.Hard != c.hard || seen[ask.ID] {
			t.Errorf("%s: %s, asked %+v", c.verb, got, ask)
		}
		seen[ask.ID] = true
	}
	for name, c := range map[string]struct {
		change func(*v1.VirtualMachineInstance)
		answer string
	}{
		"paused": {func(i *v1.VirtualMachineInstance) {
			i.Status.Conditions = []v1.VirtualMachineInstanceCondition{{Type: v1.VirtualMachineInstancePaused, Status: corev1.ConditionTrue}}
		}, "VMI is paused"},
		"not running": {func(i *v1.VirtualMachineInstance) { i.Status.Phase = v1.Scheduled }, "VMI is not running"},
	} {
		i := instance("web", v1.Running)
		c.change(i)
		r := start(t, i, podOf(i))
		for _, verb := range []string{"reset", "softreboot"} {
			if got := r.put("virtualmachineinstances/web/"+verb, ""); got != refused+c.answer {
				t.Errorf("%s, %s: %s", name, verb, got)
			}
		}
	}
}
