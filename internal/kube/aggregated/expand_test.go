package aggregated

import (
	"encoding/json"
	"fmt"
	"net/http"
	"strings"
	"testing"

	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	v1 "kubevirt.io/api/core/v1"
	"kubevirt.io/api/instancetype/v1beta1"
)

// A machine is shown with its instancetype and its preference in it, whether it exists or not, and nothing is changed.
func TestExpand(t *testing.T) {
	small := &v1beta1.VirtualMachineClusterInstancetype{ObjectMeta: metav1.ObjectMeta{Name: "small"}}
	small.Spec.CPU.Guest, small.Spec.Memory.Guest = 2, resource.MustParse("1Gi")
	cores := v1beta1.Cores
	linux := &v1beta1.VirtualMachinePreference{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "linux"}, Spec: v1beta1.VirtualMachinePreferenceSpec{CPU: &v1beta1.CPUPreferences{PreferredCPUTopology: &cores}}}
	vm := machine("Halted")
	vm.Spec.Template = &v1.VirtualMachineInstanceTemplateSpec{}
	vm.Spec.Instancetype, vm.Spec.Preference = &v1.InstancetypeMatcher{Name: "small"}, &v1.PreferenceMatcher{Name: "linux", Kind: "VirtualMachinePreference"}
	r := start(t, vm, small, linux)
	show := func(method, path, body string) string {
		t.Helper()
		code, text, _ := r.do(call{method: method, path: path, body: body, cert: r.proxy})
		if code != http.StatusOK {
			return fmt.Sprint(code, " ", message(text))
		}
		got := &v1.VirtualMachine{}
		if err := json.Unmarshal([]byte(text), got); err != nil {
			t.Fatal(err)
		}
		d := got.Spec.Template.Spec.Domain
		if d.CPU == nil {
			return fmt.Sprint(got.Kind, " ", got.Name)
		}
		return fmt.Sprint(got.Kind, " ", got.Name, " ", d.CPU.Cores, " cores ", d.Memory.Guest, " ", got.Spec.Instancetype == nil && got.Spec.Preference == nil)
	}
	const spec, given = prefix + "virtualmachines/web/expand-spec", prefix + "expand-vm-spec"
	if got := show(http.MethodGet, spec, ""); got != "VirtualMachine web 2 cores 1Gi true" {
		t.Error(got)
	}
	if now := r.vm(); now.Spec.Instancetype == nil || now.Spec.Template.Spec.Domain.CPU != nil || now.ResourceVersion == "" {
		t.Errorf("the machine has changed: %+v", now.Spec)
	}
	for body, want := range map[string]string{
		`{"metadata":{"name":"new"},"spec":{"instancetype":{"name":"small"},"template":{"spec":{"domain":{"devices":{}}}}}}`:                  "VirtualMachine new 1 cores 1Gi true",
		`{"metadata":{"name":"new","namespace":"default"},"spec":{"template":{"spec":{"domain":{"devices":{}}}}}}`:                            "VirtualMachine new",
		`{"metadata":{"namespace":"other"},"spec":{"template":{"spec":{"domain":{"devices":{}}}}}}`:                                           "400 VM namespace must be empty or default",
		`{"metadata":{"name":"new"},"spec":{"instancetype":{"name":"small"}}}`:                                                                "400 Object is not a valid VirtualMachine: spec.template: Required value",
		`{"spec":{"instancetype":{"name":"none"},"template":{"spec":{"domain":{"devices":{}}}}}}`:                                             "400 spec.instancetype: the VirtualMachineClusterInstancetype none does not exist; create it",
		`{"spec":{"instancetype":{"name":"small"},"template":{"spec":{"domain":{"devices":{},"cpu":{"cores":1},"memory":{"guest":"1Gi"}}}}}}`: "400 spec.template.spec.domain.cpu.cores: Forbidden: conflicts with the instancetype small, which sets it; remove the field\nspec.template.spec.domain.memory.guest: Forbidden",
		`{"spec":{"unknown":1}}`: "400 Can not unmarshal",
		`{"spec":{"template":{"spec":{"volumes":[{"name":"` + strings.Repeat("x", maxBody) + `"}]}}}}`:                                                       "413 ",
		`{"spec":{"instancetype":{"name":"small","revisionName":"x"},"template":{"spec":{"domain":{"devices":{}}}}},"metadata":{"namespace":"default"}}`:     "400 spec.instancetype: the ControllerRevision x",
		`{"spec":{"preference":{"name":"linux","kind":"VirtualMachinePreference"},"template":{"spec":{"domain":{"devices":{},"memory":{"guest":"64Mi"}}}}}}`: "VirtualMachine ",
	} {
		if got := show(http.MethodPut, given, body); !strings.HasPrefix(got, want) {
			t.Errorf("%s: %s; want %s", body[:min(len(body), 200)], got, want)
		}
	}
	vm = r.vm()
	vm.Spec.Instancetype.Name = "none"
	if err := r.client.Update(t.Context(), vm); err != nil {
		t.Fatal(err)
	}
	if got := show(http.MethodGet, spec, ""); !strings.HasPrefix(got, "409 ") || !strings.Contains(got, "VirtualMachineClusterInstancetype none does not exist") {
		t.Error(got)
	}
	for path, want := range map[string]string{
		prefix + "virtualmachines/nobody/expand-spec":      "404 ",
		prefix + "virtualmachineinstances/web/expand-spec": "404 ",
		given + "/web": "404 ",
		"/apis/subresources.kubevirt.io/v1/expand-vm-spec":                                   "404 ",
		"/apis/subresources.kubevirt.io/v1/namespaces/default/virtualmachines":               "404 ",
		"/apis/subresources.kubevirt.io/v1/namespaces/default//expand-vm-spec":               "404 ",
		"/apis/subresources.kubevirt.io/v1/namespaces/default/expand-vm-spec/web/status":     "404 ",
		"/apis/subresources.kubevirt.io/v1alpha3/namespaces/default/virtualmachines/a/start": "405 ",
		given: "405 ",
	} {
		if got := show(http.MethodGet, path, ""); !strings.HasPrefix(got, want) {
			t.Errorf("GET %s: %s; want %s", path, got, want)
		}
	}
	// Each right is reviewed by its name.
	code, _, _ := r.do(call{method: http.MethodPut, path: given, user: "bob", cert: r.proxy, body: `{}`})
	r.mu.Lock()
	last := r.reviews[len(r.reviews)-1]
	r.mu.Unlock()
	if a := last.ResourceAttributes; code != http.StatusForbidden || a.Verb != "update" || a.Resource != "expand-vm-spec" || a.Subresource != "" || a.Namespace != "default" {
		t.Errorf("%d %+v", code, last.ResourceAttributes)
	}
}
