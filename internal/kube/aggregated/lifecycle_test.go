package aggregated

import (
	"context"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	v1 "kubevirt.io/api/core/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

// machine is the VirtualMachine web; a strategy "true" or "false" is spec.running.
func machine(strategy string) *v1.VirtualMachine {
	vm := &v1.VirtualMachine{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "web", UID: "vm-web"}}
	if strategy == "true" || strategy == "false" {
		on := strategy == "true"
		vm.Spec.Running = &on
	} else {
		s := v1.VirtualMachineRunStrategy(strategy)
		vm.Spec.RunStrategy = &s
	}
	vm.Status.PrintableStatus = v1.VirtualMachineStatusStopped
	return vm
}

func instance(name string, phase v1.VirtualMachineInstancePhase) *v1.VirtualMachineInstance {
	yes := true
	return &v1.VirtualMachineInstance{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: "default", Name: name, UID: types.UID("vmi-" + name),
			OwnerReferences: []metav1.OwnerReference{{APIVersion: "kubevirt.io/v1", Kind: "VirtualMachine", Name: name, UID: types.UID("vm-" + name), Controller: &yes}},
		},
		Status: v1.VirtualMachineInstanceStatus{Phase: phase},
	}
}

func podOf(vmi *v1.VirtualMachineInstance) *corev1.Pod {
	yes := true
	return &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: "default", Name: "virt-launcher-" + vmi.Name, UID: types.UID("pod-" + vmi.Name), Labels: map[string]string{v1.CreatedByLabel: string(vmi.UID)},
			OwnerReferences: []metav1.OwnerReference{{APIVersion: "kubevirt.io/v1", Kind: "VirtualMachineInstance", Name: vmi.Name, UID: vmi.UID, Controller: &yes}},
		},
		Spec:   corev1.PodSpec{Containers: []corev1.Container{{Name: container}}},
		Status: corev1.PodStatus{Phase: corev1.PodRunning},
	}
}

// state is what a request has made of a VM: the strategy and the requests to the controller.
func state(vm *v1.VirtualMachine) string {
	var out string
	if vm.Spec.RunStrategy != nil {
		out = string(*vm.Spec.RunStrategy)
	} else {
		out = fmt.Sprint(*vm.Spec.Running)
	}
	for _, c := range vm.Status.StateChangeRequests {
		out += " " + string(c.Action)
		if c.UID != nil {
			out += ":" + string(*c.UID)
		}
		if c.Data["paused"] == "true" {
			out += "(paused)"
		}
	}
	return out
}

func TestLifecycle(t *testing.T) {
	const none = v1.VirtualMachineInstancePhase("-")
	refused := `409 Operation cannot be fulfilled on virtualmachine.kubevirt.io "web": `
	for _, c := range []struct {
		strategy string
		phase    v1.VirtualMachineInstancePhase
		verb     string
		body     string
		answer   string
		state    string
	}{
		{"Halted", none, "start", ``, "202", "Always"},
		{"Halted", none, "start", `{}`, "202", "Always"},
		{"Halted", v1.Succeeded, "start", `{}`, "202", "Always"},
		{"false", none, "start", `{}`, "202", "true"},
		{"Halted", none, "start", `{"dryRun":["All"]}`, "202", "Halted"},
		{"Halted", none, "start", `{"dryRun":["Some"]}`, `400 dryRun "Some" must be All`, "Halted"},
		{"Halted", none, "start", `{"paused":true}`, "202", "Halted Start(paused)"},
		{"Halted", v1.Succeeded, "start", `{"paused":true}`, "202", "Halted Start(paused)"},
		{"Halted", none, "start", `{"paused":true,"dryRun":["All"]}`, "202", "Halted"},
		{"Manual", none, "start", `{"paused":true}`, "202", "Manual Start(paused)"},
		{"Always", none, "start", `{"paused":true}`, refused + "Always does not support manual start requests", "Always"},
		{"Halted", v1.Running, "start", `{}`, refused + "VM is already running", "Halted"},
		{"Always", v1.Running, "start", `{}`, refused + "VM is already running", "Always"},
		{"Always", none, "start", `{}`, refused + "Always does not support manual start requests", "Always"},
		{"true", none, "start", `{}`, refused + "Always does not support manual start requests", "true"},
		{"Once", none, "start", `{}`, refused + "Once does not support manual start requests", "Once"},
		{"WaitAsReceiver", none, "start", `{}`, refused + "WaitAsReceiver does not support manual start requests", "WaitAsReceiver"},
		{"Manual", none, "start", `{}`, "202", "Manual Start"},
		{"Manual", v1.Failed, "start", `{}`, "202", "Manual Stop:vmi-web Start"},
		{"RerunOnFailure", v1.Succeeded, "start", `{}`, "202", "RerunOnFailure Stop:vmi-web Start"},
		{"RerunOnFailure", v1.Failed, "start", `{}`, refused + "RerunOnFailure does not support starting VM from failed state", "RerunOnFailure"},

		{"Always", v1.Running, "stop", ``, "202", "Halted"},
		{"true", v1.Running, "stop", `{}`, "202", "false"},
		{"Once", v1.Running, "stop", `{}`, "202", "Halted"},
		{"Always", none, "stop", `{}`, "202", "Halted"},
		{"Halted", none, "stop", `{}`, refused + "VM is not running", "Halted"},
		{"Halted", v1.Running, "stop", `{}`, refused + "Halted only supports manual stop requests with a shorter graceperiod", "Halted"},
		{"Halted", v1.Running, "stop", `{"gracePeriod":30}`, refused + "Halted only supports manual stop requests with a shorter graceperiod", "Halted"},
		{"Halted", v1.Running, "stop", `{"gracePeriod":0}`, "202", "Halted"},
		{"Manual", v1.Running, "stop", `{}`, "202", "Manual Stop:vmi-web"},
		{"RerunOnFailure", v1.Running, "stop", `{"gracePeriod":5}`, "202", "RerunOnFailure Stop:vmi-web"},
		{"Manual", v1.Succeeded, "stop", `{}`, refused + "VM is not running", "Manual"},
		{"Manual", none, "stop", `{}`, refused + "VM is not running", "Manual"},
		{"Always", v1.Running, "stop", `{"gracePeriod":-1}`, "400 gracePeriod has to be greater or equal to 0", "Always"},

		{"Always", v1.Running, "restart", ``, "202", "Always Stop:vmi-web Start"},
		{"Manual", v1.Running, "restart", `{"gracePeriodSeconds":0}`, "202", "Manual Stop:vmi-web Start"},
		{"RerunOnFailure", v1.Running, "restart", `{"dryRun":["All"]}`, "202", "RerunOnFailure"},
		{"Halted", v1.Running, "restart", `{}`, refused + "RunStrategy Halted does not support manual restart requests", "Halted"},
		{"Once", v1.Running, "restart", `{}`, refused + "RunStrategy Once does not support manual restart requests", "Once"},
		{"Always", none, "restart", `{}`, refused + "VM is not running: Halted", "Always"},
		{"Always", v1.Running, "restart", `{"gracePeriodSeconds":7}`, "400 For force restart, only gracePeriod=0 is supported for now", "Always"},
		{"Always", v1.Running, "restart", `{"gracePeriodSeconds":-7}`, "400 gracePeriod has to be greater or equal to 0", "Always"},

		{"Halted", none, "start", `{"pausd":true}`, `400 Can not unmarshal Request body to struct, error: json: unknown field "pausd"`, "Halted"},
		{"Halted", none, "start", `{`, `400 Can not unmarshal Request body to struct, error: unexpected EOF`, "Halted"},
		{"Halted", none, "start", `{}{}`, `400 Can not unmarshal Request body to struct, error: there is more than one JSON value`, "Halted"},
		{"Halted", none, "start", `{"kind":"` + strings.Repeat("x", maxBody) + `"}`, `413 Request entity too large: the limit is 65536 bytes`, "Halted"},
	} {
		t.Run(fmt.Sprint(c.verb, " ", c.strategy, " ", c.phase, " ", c.body[:min(len(c.body), 40)]), func(t *testing.T) {
			objects := []client.Object{machine(c.strategy)}
			if c.phase != none {
				objects = append(objects, instance("web", c.phase))
			}
			r := start(t, objects...)
			if got := r.put("virtualmachines/web/"+c.verb, c.body); got != c.answer {
				t.Errorf("got %s\nwant %s", got, c.answer)
			}
			if got := state(r.vm()); got != c.state {
				t.Errorf("the VM is %s, want %s", got, c.state)
			}
		})
	}
}

// The answer of success has no body, and no Content-Type is needed.
func TestAccepted(t *testing.T) {
	r := start(t, machine("Halted"))
	code, body, _ := r.do(call{method: http.MethodPut, path: strings.Replace(prefix, "v1", "v1alpha3", 1) + "virtualmachines/web/start", cert: r.proxy})
	if code != http.StatusAccepted || body != "" {
		t.Errorf("%d %q", code, body)
	}
	if got, want := r.put("virtualmachines/none/start", `{}`), `404 virtualmachine.kubevirt.io "none" not found`; got != want {
		t.Errorf("got %s\nwant %s", got, want)
	}
}

// A grace period ends in the deletion of the pod, with one second at least.
func TestGrace(t *testing.T) {
	for body, want := range map[string]string{`{"gracePeriod":0}`: "1", `{"gracePeriod":9}`: "9", `{}`: "", `{"gracePeriod":0,"dryRun":["All"]}`: ""} {
		vmi := instance("web", v1.Running)
		stranger := podOf(vmi) // has the label, but belongs to nobody
		stranger.Name, stranger.OwnerReferences = "stranger", nil
		pod := podOf(vmi)
		pod.Finalizers = []string{"test/keep"}
		r := start(t, machine("Always"), vmi, pod, stranger)
		if got := r.put("virtualmachines/web/stop", body); got != "202" {
			t.Fatal(got)
		}
		var is corev1.Pod
		if err := r.client.Get(t.Context(), client.ObjectKeyFromObject(pod), &is); err != nil {
			t.Fatal(err)
		}
		if got := r.grace(); got != want || (is.DeletionTimestamp != nil) != (want != "") {
			t.Errorf("%s: the pod is deleted with %q seconds, want %q", body, got, want)
		}
		if err := r.client.Get(t.Context(), client.ObjectKeyFromObject(stranger), &is); err != nil {
			t.Errorf("%s: another pod was deleted: %v", body, err)
		}
	}
}

// A VM without a status gets one. A second request waits for the first, but a stop replaces it.
func TestRequests(t *testing.T) {
	vm := machine("Manual")
	vm.Status = v1.VirtualMachineStatus{}
	r := start(t, vm, instance("web", v1.VmPhaseUnset))
	if got := r.put("virtualmachines/web/start", ``); got != "202" {
		t.Fatal(got)
	}
	if got := r.put("virtualmachines/web/start", ``); !strings.HasPrefix(got, "409") || !strings.HasSuffix(got, "unable to complete request: stop/start already underway") {
		t.Error(got)
	}
	if got := r.put("virtualmachines/web/stop", ``); got != "202" {
		t.Error(got)
	}
	if got := state(r.vm()); got != "Manual Stop:vmi-web" {
		t.Error(got)
	}
}

// A change between reading and writing is a conflict, and is kept.
func TestConcurrentChange(t *testing.T) {
	for verb, strategy := range map[string]string{"start": "Halted", "restart": "Manual"} {
		r := start(t, machine(strategy), instance("web", v1.Succeeded))
		once := true
		r.hooks.Get = func(ctx context.Context, c client.WithWatch, key client.ObjectKey, o client.Object, opts ...client.GetOption) error {
			err := c.Get(ctx, key, o, opts...)
			if vm, ok := o.(*v1.VirtualMachine); ok && once && err == nil {
				once = false
				other := vm.DeepCopy()
				manual := v1.RunStrategyRerunOnFailure
				other.Spec.RunStrategy = &manual
				if err := c.Update(ctx, other); err != nil {
					return err
				}
				other.Status.StateChangeRequests = []v1.VirtualMachineStateChangeRequest{{Action: v1.StopRequest}}
				return c.Status().Update(ctx, other)
			}
			return err
		}
		if got := r.put("virtualmachines/web/"+verb, `{}`); !strings.HasPrefix(got, "409") || !strings.HasSuffix(got, "the VM was changed at the same time; try again") {
			t.Errorf("%s: %s", verb, got)
		}
		r.hooks.Get = nil
		if got := state(r.vm()); got != "RerunOnFailure Stop" {
			t.Errorf("%s: %s", verb, got)
		}
	}
}

// An instance of the name that is not the VM's is not touched.
func TestForeignInstance(t *testing.T) {
	vmi := instance("web", v1.Running)
	vmi.OwnerReferences = nil
	r := start(t, machine("Manual"), vmi)
	for _, verb := range []string{"start", "stop", "restart"} {
		if got := r.put("virtualmachines/web/"+verb, ``); !strings.HasPrefix(got, "409") || !strings.Contains(got, "was not created by this VM") {
			t.Error(got)
		}
	}
}

// What the API server answers reaches the client, except that the manager itself is not known.
func TestErrorsOfTheAPIServer(t *testing.T) {
	for _, c := range []struct {
		err  error
		code string
	}{
		{apierrors.NewTooManyRequests("later", 1), "429"},
		{apierrors.NewUnauthorized("who"), "500"},
		{apierrors.NewServiceUnavailable("down"), "503"},
		{context.DeadlineExceeded, "504"},
		{fmt.Errorf("connection refused"), "500"},
	} {
		r := start(t)
		r.hooks.Get = func(context.Context, client.WithWatch, client.ObjectKey, client.Object, ...client.GetOption) error {
			return c.err
		}
		if got := r.put("virtualmachines/web/start", ``); !strings.HasPrefix(got, c.code+" ") || !strings.Contains(got, "get virtualmachine default/web: ") {
			t.Errorf("%v: %s", c.err, got)
		}
	}
}

// What is not offered says so, for objects that exist.
func TestUnoffered(t *testing.T) {
	r := start(t, machine("Always"), instance("web", v1.Running))
	for name, to := range served {
		resource, sub, _ := strings.Cut(name, "/")
		if offered := []string{"start", "stop", "restart", "pause", "unpause", "reset", "softreboot", "freeze", "unfreeze", "addvolume", "removevolume", "memorydump", "removememorydump", "guestosinfo", "userlist", "filesystemlist", "expand-spec", screenshotSubresource, cancelSubresource, ""}; to.stream || slices.Contains(offered, sub) {
			continue
		}
		code, body, _ := r.do(call{method: to.method, path: prefix + resource + "/web/" + sub, cert: r.proxy, body: `{"any":["thing"]}`})
		if code != http.StatusConflict || !strings.Contains(message(body), "Cocoon does not offer ") {
			t.Errorf("%s: %d %s", name, code, body)
		}
		if code, body, _ := r.do(call{method: to.method, path: prefix + resource + "/none/" + sub, cert: r.proxy}); code != http.StatusNotFound {
			t.Errorf("%s of nothing: %d %s", name, code, body)
		}
	}
}
