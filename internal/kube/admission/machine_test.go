package admission

import (
	"errors"
	"strings"
	"testing"

	admissionv1 "k8s.io/api/admission/v1"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"kubevirt.io/api/instancetype/v1beta1"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"
	ctrladmission "sigs.k8s.io/controller-runtime/pkg/webhook/admission"
	"sigs.k8s.io/yaml"

	"cocoonstack.io/cocoon/internal/kube/kubevirt"
	"cocoonstack.io/cocoon/internal/kube/machinebase"
)

func TestMachines(t *testing.T) {
	scheme := runtime.NewScheme()
	if err := kubevirt.AddToScheme(scheme); err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(corev1.AddToScheme(scheme), appsv1.AddToScheme(scheme)); err != nil {
		t.Fatal(err)
	}
	small := &v1beta1.VirtualMachineClusterInstancetype{ObjectMeta: metav1.ObjectMeta{Name: "small"}}
	small.Spec.CPU.Guest, small.Spec.Memory.Guest = 1, resource.MustParse("128Mi")
	pinned := small.DeepCopy()
	yes := true
	pinned.Name, pinned.Spec.CPU.DedicatedCPUPlacement = "pinned", &yes
	ne2k := &v1beta1.VirtualMachinePreference{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "ne2k"}, Spec: v1beta1.VirtualMachinePreferenceSpec{Devices: &v1beta1.DevicePreferences{PreferredInterfaceModel: "ne2k_pci"}}}
	claim := &corev1.PersistentVolumeClaim{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "bare"}}
	objects := fake.NewClientBuilder().WithScheme(scheme).WithObjects(small, pinned, ne2k, claim).Build()
	c := &machineChecker{ctrladmission.NewDecoder(scheme), true, machinebase.Finder{Client: objects, Live: objects}}
	const open = `template: {spec: {domain: {devices: {}}, volumes: [{name: root, containerDisk: {image: a}}, {name: data, persistentVolumeClaim: {claimName: bare}}, {name: new, persistentVolumeClaim: {claimName: new}}]}}`
	const good = `domain: {devices: {}, memory: {guest: 128Mi}}, volumes: [{name: root, containerDisk: {image: a}}]`
	machine := func(text string) string {
		return "{apiVersion: kubevirt.io/v1, kind: VirtualMachine, spec: {" + text + "}}"
	}
	set := func(labels, more string) string {
		return "{spec: {selector: {matchLabels: {app: web}}, template: {metadata: {labels: " + labels + "}, spec: {" + good + more + "}}}}"
	}
	pool := func(more, labels, of string) string {
		return "{spec: {selector: {matchLabels: {app: web}}, " + more + "virtualMachineTemplate: {metadata: {labels: " + labels + "}, spec: {runStrategy: Always, " + of + "}}}}"
	}
	wired := func(interfaces, networks string) string {
		return "{spec: {domain: {devices: {interfaces: [{name: a, masquerade: {}}" + interfaces + "]}, memory: {guest: 128Mi}}, networks: [{name: a, pod: {}}" + networks + "], volumes: [{name: root, containerDisk: {image: a}}]}}"
	}
	const whole = "template: {spec: {" + good + "}}"
	for name, x := range map[string]struct {
		kind, now, before string
		want              string // in the message; "": allowed
		warns             string
	}{
		"a machine":           {"VirtualMachine", machine("running: true, template: {spec: {" + good + "}}"), "", "", ""},
		"an instance":         {"VirtualMachineInstance", "{spec: {" + good + "}}", "", "", ""},
		"one more interface":  {"VirtualMachineInstance", wired(", {name: b, bridge: {}}", ", {name: b, multus: {networkName: lab}}"), wired("", ""), "", ""},
		"one less":            {"VirtualMachineInstance", wired("", ""), wired(", {name: b, bridge: {}}", ", {name: b, multus: {networkName: lab}}"), "spec.domain.devices.interfaces: Forbidden: interface b is not taken from a running guest unless its state is absent", ""},
		"one that was absent": {"VirtualMachineInstance", wired("", ""), wired(", {name: b, bridge: {}, state: absent}", ", {name: b, multus: {networkName: lab}}"), "", ""},
		"the first is absent": {"VirtualMachine", machine("running: true, template: {spec: {domain: {devices: {interfaces: [{name: a, bridge: {}, state: absent}]}, memory: {guest: 128Mi}}, networks: [{name: a, pod: {}}], volumes: [{name: root, containerDisk: {image: a}}]}}"), "", "interfaces[0].state: Forbidden", ""},
		"no strategy":         {"VirtualMachine", machine("template: {spec: {" + good + "}}"), "", "spec.runStrategy: Required", ""},
		"both":                {"VirtualMachine", machine("running: true, runStrategy: Always, template: {spec: {" + good + "}}"), "", "spec.running: Forbidden", ""},
		"receiver":            {"VirtualMachine", machine("runStrategy: WaitAsReceiver, template: {spec: {" + good + "}}"), "", "spec.runStrategy: Unsupported", ""},
		"instancetype":        {"VirtualMachine", machine("running: true, instancetype: {name: small}, " + open), "", "", ""},
		"conflict":            {"VirtualMachine", machine("running: true, instancetype: {name: small}, template: {spec: {" + good + "}}"), "", "spec.template.spec.domain.memory.guest: Forbidden: conflicts with the instancetype small", ""},
		"a refused one":       {"VirtualMachine", machine("running: true, instancetype: {name: pinned}, " + open), "", "spec.instancetype[pinned].cpu.dedicatedCPUPlacement: Forbidden", ""},
		"comes later":         {"VirtualMachine", machine("running: true, instancetype: {name: small, kind: VirtualMachineInstancetype}, " + open), "", "", "spec.instancetype: the VirtualMachineInstancetype small does not exist; create it; until then"},
		"later conflict":      {"VirtualMachine", machine("running: true, instancetype: {name: other}, template: {spec: {" + good + "}}"), "", "spec.template.spec.domain.memory.guest: Forbidden: conflicts with the instancetype other", "spec.instancetype"},
		"preference":          {"VirtualMachine", machine("running: true, preference: {name: ne2k, kind: VirtualMachinePreference}, template: {spec: {" + good + "}}"), "", "", "spec.preference[ne2k].devices.preferredInterfaceModel has no effect: interfaces are virtio"},
		"no preference":       {"VirtualMachine", machine("running: true, preference: {name: ne2k}, template: {spec: {" + good + "}}"), "", "", "spec.preference: the VirtualMachineClusterPreference ne2k does not exist"},
		"inferred":            {"VirtualMachine", machine("running: true, instancetype: {inferFromVolume: root}, " + open), "", "spec.instancetype.inferFromVolume: Invalid value: volume root is neither a dataVolume nor a persistentVolumeClaim", ""},
		"no label":            {"VirtualMachine", machine("running: true, instancetype: {inferFromVolume: data}, " + open), "", "the claim of volume data has no label instancetype.kubevirt.io/default-instancetype", ""},
		"no claim":            {"VirtualMachine", machine("running: true, instancetype: {inferFromVolume: new}, " + open), "", "", "the claim new of volume new does not exist"},
		"may be none":         {"VirtualMachine", machine("running: true, instancetype: {inferFromVolume: root, inferFromVolumeFailurePolicy: Ignore}, template: {spec: {" + good + "}}"), "", "", ""},
		"no copy":             {"VirtualMachine", machine("running: true, instancetype: {name: small, revisionName: x}, " + open), "", "", "the ControllerRevision x, which is the machine's copy, does not exist"},
		"DataVolumes":         {"VirtualMachine", machine("running: true, dataVolumeTemplates: [{}], template: {spec: {" + good + "}}"), "", "spec.dataVolumeTemplates[0].metadata.name: Required", ""},
		"no template":         {"VirtualMachine", machine("running: true"), "", "spec.template: Required", ""},
		"a device":            {"VirtualMachine", machine("running: true, template: {spec: {domain: {devices: {sound: {name: s}}}}}"), "", "spec.template.spec.domain.devices.sound.name: Forbidden", ""},
		"has no effect":       {"VirtualMachineInstance", "{spec: {dnsPolicy: None, " + good + "}}", "", "", "spec.dnsPolicy has no effect"},
		"hooks":               {"VirtualMachineInstance", "{metadata: {annotations: {hooks.kubevirt.io/hookSidecars: x}}, spec: {" + good + "}}", "", "metadata.annotations[hooks.kubevirt.io/hookSidecars]: Forbidden", ""},
		"a set":               {"VirtualMachineInstanceReplicaSet", set("{app: web, tier: front}", ""), "", "", ""},
		"other labels":        {"VirtualMachineInstanceReplicaSet", set("{app: db}", ""), "", "spec.template.metadata.labels: Invalid value", ""},
		"unlabelled":          {"VirtualMachineInstanceReplicaSet", set("{}", ""), "", "do not match spec.selector; add its labels", ""},
		"no value":            {"VirtualMachineInstanceReplicaSet", set("{app: '-'}", ""), "", "spec.template.metadata.labels: Invalid value", ""},
		"all of them":         {"VirtualMachineInstanceReplicaSet", "{spec: {selector: {}, template: {spec: {" + good + "}}}}", "", "spec.selector: Required value: an empty selector would match all instances", ""},
		"odd selector":        {"VirtualMachineInstanceReplicaSet", "{spec: {selector: {matchExpressions: [{key: a, operator: Like}]}, template: {spec: {" + good + "}}}}", "", "spec.selector.matchExpressions[0].operator", ""},
		"set of nothing":      {"VirtualMachineInstanceReplicaSet", "{spec: {selector: {matchLabels: {app: web}}}}", "", "spec.template: Required", ""},
		"fewer than 0":        {"VirtualMachineInstanceReplicaSet", "{spec: {replicas: -1, selector: {matchLabels: {app: web}}}}", "", "spec.replicas: Invalid value: -1", ""},
		"set of devices":      {"VirtualMachineInstanceReplicaSet", set("{app: web}", ", networks: [{name: a, resourceClaim: {claimName: b}}]"), "", "spec.template.spec.networks[0].resourceClaim.claimName: Forbidden", ""},
		"set that warns":      {"VirtualMachineInstanceReplicaSet", set("{app: web}", ", dnsPolicy: None"), "", "", "spec.template.spec.dnsPolicy has no effect"},
		"set with hooks":      {"VirtualMachineInstanceReplicaSet", "{spec: {selector: {matchLabels: {app: web}}, template: {metadata: {labels: {app: web}, annotations: {hooks.kubevirt.io/hookSidecars: x}}, spec: {" + good + "}}}}", "", "spec.template.metadata.annotations[hooks.kubevirt.io/hookSidecars]: Forbidden", ""},
		"a DataVolume":        {"DataVolume", "{spec: {storage: {resources: {requests: {storage: 1Gi}}}, source: {pvc: {namespace: ns, name: a}}}}", "", "", ""},
		"an S3 disk":          {"DataVolume", "{spec: {storage: {resources: {requests: {storage: 1Gi}}}, source: {s3: {url: a}}}}", "", "DataVolume.cdi.kubevirt.io \"\" is invalid: spec.source.s3: Forbidden", ""},
		"of another":          {"DataVolume", "{spec: {storage: {}, source: {pvc: {namespace: other, name: a}}}}", "", "spec.source.pvc.namespace: Forbidden", ""},
		"no DataVolume":       {"DataVolume", "{spec: 7}", "", "cannot unmarshal", ""},
		"a pool":              {"VirtualMachinePool", pool("maxUnavailable: 50%, scaleInStrategy: {proactive: {statePreservation: Disabled, selectionPolicy: {sortPolicy: Oldest}}}, ", "{app: web}", whole), "", "", ""},
		"pool's labels":       {"VirtualMachinePool", pool("", "{app: db}", whole), "", "spec.virtualMachineTemplate.metadata.labels: Invalid value", ""},
		"pool's machine":      {"VirtualMachinePool", pool("", "{app: web}", "template: {spec: {"+good+", networks: [{name: a, resourceClaim: {claimName: b}}]}}"), "", "spec.virtualMachineTemplate.spec.template.spec.networks[0].resourceClaim.claimName: Forbidden", ""},
		"pool's type":         {"VirtualMachinePool", pool("", "{app: web}", "instancetype: {name: small, kind: VirtualMachineInstancetype}, "+open), "", "", "spec.virtualMachineTemplate.spec.instancetype: the VirtualMachineInstancetype small does not exist"},
		"pool heals":          {"VirtualMachinePool", pool("autohealing: {}, ", "{app: web}", whole), "", "spec.autohealing: Forbidden", ""},
		"pool keeps":          {"VirtualMachinePool", pool("scaleInStrategy: {proactive: {statePreservation: Offline}}, ", "{app: web}", whole), "", "spec.scaleInStrategy.proactive.statePreservation: Unsupported value", ""},
		"pool of nodes":       {"VirtualMachinePool", pool("updateStrategy: {proactive: {selectionPolicy: {selectors: {nodeSelectorRequirementMatcher: []}}}}, ", "{app: web}", whole), "", "spec.updateStrategy.proactive.selectionPolicy.selectors.nodeSelectorRequirementMatcher: Forbidden", ""},
		"two strategies":      {"VirtualMachinePool", pool("updateStrategy: {unmanaged: {}, opportunistic: {}}, ", "{app: web}", whole), "", "spec.updateStrategy: Forbidden: use only one", ""},
		"none away":           {"VirtualMachinePool", pool("maxUnavailable: 0, ", "{app: web}", whole), "", "spec.maxUnavailable: Invalid value", ""},
		"all and more":        {"VirtualMachinePool", pool("maxUnavailable: 101%, ", "{app: web}", whole), "", "spec.maxUnavailable: Invalid value", ""},
		"pool of all":         {"VirtualMachinePool", "{spec: {selector: {}}}", "", "spec.selector: Required value", ""},
		"pool is none":        {"VirtualMachinePool", "{spec: 7}", "", "cannot unmarshal", ""},
		"set is no set":       {"VirtualMachineInstanceReplicaSet", "{spec: 7}", "", "cannot unmarshal", ""},
		"was wrong":           {"VirtualMachine", machine("running: false"), machine("running: true"), "", ""},
		"is wrong anew":       {"VirtualMachine", machine("running: true, dataVolumeTemplates: [{}]"), machine("running: true"), "spec.dataVolumeTemplates", ""},
		"cannot be read":      {"VirtualMachineInstance", "{spec: {volumes: 7}}", "", "cannot unmarshal", ""},
	} {
		raw := func(text string) runtime.RawExtension {
			b, err := yaml.YAMLToJSON([]byte(text))
			if err != nil {
				t.Fatal(err)
			}
			return runtime.RawExtension{Raw: b}
		}
		req := ctrladmission.Request{AdmissionRequest: admissionv1.AdmissionRequest{Kind: metav1.GroupVersionKind{Kind: x.kind}, Namespace: "ns", Operation: admissionv1.Create, Object: raw(x.now)}}
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
	theirs := &machineChecker{decoder: c.decoder}
	if resp := theirs.Handle(t.Context(), ctrladmission.Request{AdmissionRequest: admissionv1.AdmissionRequest{Kind: metav1.GroupVersionKind{Kind: "VirtualMachine"}, Object: runtime.RawExtension{Raw: []byte("{}")}}}); !resp.Allowed {
		t.Errorf("a machine of another KubeVirt: %v", resp.Result)
	}
}
