package admission

import (
	"strings"
	"testing"

	admissionv1 "k8s.io/api/admission/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	ctrladmission "sigs.k8s.io/controller-runtime/pkg/webhook/admission"
	"sigs.k8s.io/yaml"

	"cocoonstack.io/cocoon/internal/kube/kubevirt"
)

func TestMachines(t *testing.T) {
	scheme := runtime.NewScheme()
	if err := kubevirt.AddToScheme(scheme); err != nil {
		t.Fatal(err)
	}
	c := &machineChecker{ctrladmission.NewDecoder(scheme), true}
	const good = `domain: {devices: {}, memory: {guest: 128Mi}}, volumes: [{name: root, containerDisk: {image: a}}]`
	machine := func(text string) string {
		return "{apiVersion: kubevirt.io/v1, kind: VirtualMachine, spec: {" + text + "}}"
	}
	for name, x := range map[string]struct {
		kind, now, before string
		want              string // in the message; "": allowed
		warns             string
	}{
		"a machine":      {"VirtualMachine", machine("running: true, template: {spec: {" + good + "}}"), "", "", ""},
		"an instance":    {"VirtualMachineInstance", "{spec: {" + good + "}}", "", "", ""},
		"no strategy":    {"VirtualMachine", machine("template: {spec: {" + good + "}}"), "", "spec.runStrategy: Required", ""},
		"both":           {"VirtualMachine", machine("running: true, runStrategy: Always, template: {spec: {" + good + "}}"), "", "spec.running: Forbidden", ""},
		"receiver":       {"VirtualMachine", machine("runStrategy: WaitAsReceiver, template: {spec: {" + good + "}}"), "", "spec.runStrategy: Unsupported", ""},
		"instancetype":   {"VirtualMachine", machine("running: true, instancetype: {name: small}, template: {spec: {" + good + "}}"), "", "spec.instancetype: Forbidden", ""},
		"preference":     {"VirtualMachine", machine("running: true, preference: {name: linux}, template: {spec: {" + good + "}}"), "", "spec.preference: Forbidden", ""},
		"DataVolumes":    {"VirtualMachine", machine("running: true, dataVolumeTemplates: [{}], template: {spec: {" + good + "}}"), "", "spec.dataVolumeTemplates: Forbidden", ""},
		"no template":    {"VirtualMachine", machine("running: true"), "", "spec.template: Required", ""},
		"a device":       {"VirtualMachine", machine("running: true, template: {spec: {domain: {devices: {sound: {name: s}}}}}"), "", "spec.template.spec.domain.devices.sound.name: Forbidden", ""},
		"has no effect":  {"VirtualMachineInstance", "{spec: {evictionStrategy: LiveMigrate, " + good + "}}", "", "", "spec.evictionStrategy has no effect"},
		"hooks":          {"VirtualMachineInstance", "{metadata: {annotations: {hooks.kubevirt.io/hookSidecars: x}}, spec: {" + good + "}}", "", "metadata.annotations[hooks.kubevirt.io/hookSidecars]: Forbidden", ""},
		"was wrong":      {"VirtualMachine", machine("running: false"), machine("running: true"), "", ""},
		"is wrong anew":  {"VirtualMachine", machine("running: true, preference: {name: a}"), machine("running: true"), "spec.preference", ""},
		"cannot be read": {"VirtualMachineInstance", "{spec: {volumes: 7}}", "", "cannot unmarshal", ""},
	} {
		raw := func(text string) runtime.RawExtension {
			b, err := yaml.YAMLToJSON([]byte(text))
			if err != nil {
				t.Fatal(err)
			}
			return runtime.RawExtension{Raw: b}
		}
		req := ctrladmission.Request{AdmissionRequest: admissionv1.AdmissionRequest{Kind: metav1.GroupVersionKind{Kind: x.kind}, Operation: admissionv1.Create, Object: raw(x.now)}}
		if x.before != "" {
			req.Operation, req.OldObject = admissionv1.Update, raw(x.before)
		}
		resp := c.Handle(t.Context(), req)
		message := ""
		if resp.Result != nil {
			message = resp.Result.Message
		}
		if resp.Allowed != (x.want == "") || !strings.Contains(message, x.want) {
			t.Errorf("%s: %v %s; want %q", name, resp.Allowed, message, x.want)
		}
		if got := strings.Join(resp.Warnings, "\n"); !strings.Contains(got, x.warns) || (x.warns == "" && got != "") {
			t.Errorf("%s warns: %q; want %q", name, got, x.warns)
		}
	}
	theirs := &machineChecker{c.decoder, false}
	if resp := theirs.Handle(t.Context(), ctrladmission.Request{AdmissionRequest: admissionv1.AdmissionRequest{Kind: metav1.GroupVersionKind{Kind: "VirtualMachine"}, Object: runtime.RawExtension{Raw: []byte("{}")}}}); !resp.Allowed {
		t.Errorf("a machine of another KubeVirt: %v", resp.Result)
	}
}
