package kubevirt

import (
	"os"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/apimachinery/pkg/util/validation"
	v1 "kubevirt.io/api/core/v1"
	"sigs.k8s.io/yaml"

	"cocoonstack.io/cocoon/api/contract"
	"cocoonstack.io/cocoon/internal/kube/convert"
	"cocoonstack.io/cocoon/internal/testkit/diff"
	"cocoonstack.io/cocoon/internal/vm"
)

var now = time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)

func vmi(t *testing.T, name string) *v1.VirtualMachineInstance {
	t.Helper()
	return &v1.VirtualMachineInstance{
		ObjectMeta: metav1.ObjectMeta{Name: name, Namespace: "ns", UID: "6a5f", Labels: map[string]string{"app": "web", v1.AppLabel: "forged"}},
		Spec:       *spec(t, cirros),
	}
}

func TestPod(t *testing.T) {
	i := vmi(t, "web")
	i.Spec.NodeSelector, i.Spec.ReadinessProbe = map[string]string{"zone": "a"}, &v1.Probe{Handler: v1.Handler{TCPSocket: &corev1.TCPSocketAction{Port: intstr.FromInt32(22)}}, PeriodSeconds: 3}
	got, err := yaml.Marshal([]any{Pod(i), Seed(i)})
	if err != nil {
		t.Fatal(err)
	}
	want, err := os.ReadFile("testdata/pod.yaml")
	if err != nil || string(want) != string(got) {
		t.Errorf("%v\n%s\nPod and Secret:\n%s", err, diff.Of(string(want), string(got)), got)
	}
	if errs := convert.Check(Pod(i)); len(errs) > 0 {
		t.Errorf("a node refuses the pod: %v", errs)
	}
	s := convert.Spec(Pod(i), convert.Node{}, nil)
	if s.CPUs != 2 || s.Memory != 128<<20 || s.Name != "vk-ns-virt-launcher-web" || s.Image != "cocoon/disk-demo:latest" || s.Hostname != "web" {
		t.Errorf("the node makes of it: %+v", s)
	}
	if strings.Contains(string(got), "echo hello") {
		t.Error("user data is readable in the pod")
	}
}

// An instance that starts paused has a pod that its node starts paused. It has no liveness probe.
func TestStartPaused(t *testing.T) {
	i := vmi(t, "web")
	for strategy, want := range map[v1.StartStrategy]bool{"": false, v1.StartStrategyPaused: true} {
		if i.Spec.StartStrategy = nil; strategy != "" {
			i.Spec.StartStrategy = &strategy
		}
		if errs, warnings := CheckInstance(i); len(errs) > 0 || len(warnings) > 0 {
			t.Errorf("%q: %v %v", strategy, errs, warnings)
		}
		if got := convert.Spec(Pod(i), convert.Node{}, nil).Paused; got != want {
			t.Errorf("%q: the VM starts paused: %v", strategy, got)
		}
	}
	paused := v1.StartStrategyPaused
	i.Spec.StartStrategy, i.Spec.LivenessProbe = &paused, &v1.Probe{Handler: v1.Handler{TCPSocket: &corev1.TCPSocketAction{Port: intstr.FromInt32(22)}}}
	if errs, _ := CheckInstance(i); len(errs) != 1 || errs[0].Field != "spec.startStrategy" {
		t.Errorf("with a liveness probe: %v", errs)
	}
	other := v1.StartStrategy("Later")
	i.Spec.StartStrategy, i.Spec.LivenessProbe = &other, nil
	if errs, _ := CheckInstance(i); len(errs) != 1 || errs[0].Field != "spec.startStrategy" {
		t.Errorf("another strategy: %v", errs)
	}
}

// An instance has a screen unless it says that it does not.
func TestGraphics(t *testing.T) {
	i := vmi(t, "web")
	yes, no := true, false
	for _, c := range []struct {
		auto  *bool
		video *v1.VideoDevice
		want  bool
	}{
		{nil, nil, true},
		{&yes, &v1.VideoDevice{Type: "vga"}, true},
		{nil, &v1.VideoDevice{}, true},
		{&no, nil, false},
	} {
		i.Spec.Domain.Devices.AutoattachGraphicsDevice, i.Spec.Domain.Devices.Video = c.auto, c.video
		if errs, warnings := CheckInstance(i); len(errs) > 0 || len(warnings) > 0 {
			t.Errorf("%+v: %v %v", c, errs, warnings)
		}
		if got := convert.Spec(Pod(i), convert.Node{}, nil).Graphics; got != c.want {
			t.Errorf("%+v: the VM has a screen: %v", c, got)
		}
	}
}

// Whatever an instance is called, its pod, VM, labels and host name have valid names, and those of two instances differ.
func TestNames(t *testing.T) {
	long := strings.Repeat("a", 252)
	seen := map[string]string{}
	for _, name := range []string{"web", "web.example.com", strings.Repeat("b", 63), strings.Repeat("c.", 40) + "d", long + "1", long + "2", strings.Repeat("e", 63) + ".x"} {
		i := vmi(t, name)
		p := Pod(i)
		for _, errs := range [][]string{
			validation.IsDNS1123Subdomain(p.Name), validation.IsDNS1123Label(p.Spec.Hostname),
			validation.IsValidLabelValue(p.Labels[v1.VirtualMachineInstanceIDLabel]), validation.IsDNS1123Subdomain(Seed(i).Name),
		} {
			if len(errs) > 0 {
				t.Errorf("%s: %v", name, errs)
			}
		}
		if err := vm.ValidateName(VMName(i)); err != nil {
			t.Errorf("%s: %v", name, err)
		}
		for _, id := range []string{p.Name, VMName(i), p.Labels[v1.VirtualMachineInstanceIDLabel]} {
			if other, ok := seen[id]; ok && other != name {
				t.Errorf("%s and %s are both %s", name, other, id)
			}
			seen[id] = name
		}
	}
	a, b := vmi(t, "web"), vmi(t, "web")
	b.UID = "other"
	if PodName(a) == PodName(b) || VMName(a) != VMName(b) {
		t.Errorf("two instances of one name: pods %s and %s, VMs %s and %s", PodName(a), PodName(b), VMName(a), VMName(b))
	}
}

// What an instance says about its machine reaches the node's own form of it.
func TestMachine(t *testing.T) {
	const own, given = "0f5c2c1e-3f4b-4a3f-9d52-6e3f2a1b0c9d", "5D307CA9-B3EF-428C-8861-06E72D69F223"
	i := vmi(t, "web")
	look := func() (vm.Firmware, *vm.SMBIOS) {
		t.Helper()
		pod := Pod(i)
		if errs := convert.Check(pod); len(errs) > 0 {
			t.Errorf("a node refuses the pod: %v", errs)
		}
		s := convert.Spec(pod, convert.Node{}, nil)
		return s.Firmware, s.SMBIOS
	}
	if firmware, b := look(); firmware != "" || b != nil {
		t.Errorf("an instance whose UID is no UUID: %q, %+v", firmware, b)
	}
	i.UID = own
	if _, b := look(); b == nil || *b != (vm.SMBIOS{UUID: own}) {
		t.Errorf("an instance of its own: %+v", b)
	}
	const machine = "c3a1a1b2-58c5-4a9e-8a7e-0f1e2d3c4b5a"
	yes, no := true, false
	i.OwnerReferences = []metav1.OwnerReference{{Kind: "VirtualMachineInstanceReplicaSet", UID: machine, Controller: &yes}}
	if _, b := look(); b == nil || *b != (vm.SMBIOS{UUID: own}) {
		t.Errorf("an instance of a set: %+v", b)
	}
	i.OwnerReferences = []metav1.OwnerReference{{Kind: "VirtualMachine", UID: machine, Controller: &yes}}
	if _, b := look(); b == nil || *b != (vm.SMBIOS{UUID: machine}) {
		t.Errorf("an instance of a machine: %+v", b)
	}
	i.Spec.Domain.Firmware = &v1.Firmware{UUID: given, Serial: `1, "2"`, Bootloader: &v1.Bootloader{EFI: &v1.EFI{SecureBoot: &no}}}
	i.Spec.Domain.Chassis = &v1.Chassis{Manufacturer: "Cocoon", Version: "1", Serial: "2", Asset: "3", Sku: "4"}
	want := vm.SMBIOS{UUID: strings.ToLower(given), Serial: `1, "2"`, Chassis: vm.Chassis{Manufacturer: "Cocoon", Version: "1", Serial: "2", Asset: "3", SKU: "4"}}
	if firmware, b := look(); firmware != vm.FirmwareUEFI || b == nil || *b != want {
		t.Errorf("what is given: %q, %+v", firmware, b)
	}
}

// Data disks are devices of the pod: those of claims, and those that go with the instance.
func TestDataDisks(t *testing.T) {
	i := vmi(t, strings.Repeat("a", 253))
	long := strings.Repeat("b", 63)
	for _, name := range []string{long, "cloud-init"} {
		i.Spec.Domain.Devices.Disks = append(i.Spec.Domain.Devices.Disks, v1.Disk{Name: name})
	}
	i.Spec.Volumes = append(i.Spec.Volumes,
		v1.Volume{Name: long, VolumeSource: v1.VolumeSource{EmptyDisk: &v1.EmptyDiskSource{Capacity: resource.MustParse("2Gi")}}},
		v1.Volume{Name: "cloud-init", VolumeSource: v1.VolumeSource{PersistentVolumeClaim: &v1.PersistentVolumeClaimVolumeSource{
			PersistentVolumeClaimVolumeSource: corev1.PersistentVolumeClaimVolumeSource{ClaimName: "mine", ReadOnly: true},
		}}})
	if errs, warnings := CheckInstance(i); len(errs) > 0 || len(warnings) > 0 {
		t.Fatalf("%v %q", errs, warnings)
	}
	pod := Pod(i)
	if errs := convert.Check(pod); len(errs) > 0 {
		t.Errorf("a node refuses the pod: %v", errs)
	}
	if errs := validation.IsDNS1123Subdomain(pod.Name + "-" + long); len(errs) > 0 {
		t.Errorf("the name of the claim: %v", errs)
	}
	seen := map[string]bool{}
	for _, v := range pod.Spec.Volumes {
		if seen[v.Name] {
			t.Errorf("two volumes are called %s", v.Name)
		}
		seen[v.Name] = true
	}
	empty, claim := pod.Spec.Volumes[1].Ephemeral.VolumeClaimTemplate.Spec, pod.Spec.Volumes[2].PersistentVolumeClaim
	if empty.Resources.Requests.Storage().Value() != 2<<30 || *empty.VolumeMode != corev1.PersistentVolumeBlock || claim.ClaimName != "mine" || !claim.ReadOnly {
		t.Errorf("%+v, %+v", empty, claim)
	}
	s := convert.Spec(pod, convert.Node{}, nil)
	var disks []string
	for _, v := range s.DiskVolumes() {
		disks = append(disks, v.Name)
	}
	if d := diff.Of([]string{long, "cloud-init"}, disks); d != "" {
		t.Errorf("the node makes of it: %s", d)
	}
}

// Each document of cloud-init comes from where the instance has it, and the node may read each Secret.
func TestDocuments(t *testing.T) {
	ref := func(name string) *corev1.LocalObjectReference { return &corev1.LocalObjectReference{Name: name} }
	for name, c := range map[string]struct {
		given    v1.CloudInitNoCloudSource
		secret   map[string]string // what ours holds
		user     string            // annotations
		network  string
		readable []string
	}{
		"both here":      {v1.CloudInitNoCloudSource{UserData: "#!a", NetworkDataBase64: "dmVyc2lvbjogMg=="}, map[string]string{"userdata": "#!a", "networkdata": "version: 2"}, "secret/own", "secret/own/networkdata", []string{"own"}},
		"user data":      {v1.CloudInitNoCloudSource{UserData: "#!a"}, map[string]string{"userdata": "#!a"}, "secret/own", "", []string{"own"}},
		"network data":   {v1.CloudInitNoCloudSource{NetworkData: "version: 2"}, map[string]string{"networkdata": "version: 2"}, "", "secret/own/networkdata", []string{"own"}},
		"in one Secret":  {v1.CloudInitNoCloudSource{UserDataSecretRef: ref("a"), NetworkDataSecretRef: ref("a")}, nil, "secret/a", "secret/a/networkdata", []string{"a"}},
		"in two":         {v1.CloudInitNoCloudSource{UserDataSecretRef: ref("a"), NetworkDataSecretRef: ref("b")}, nil, "secret/a", "secret/b/networkdata", []string{"a", "b"}},
		"here and there": {v1.CloudInitNoCloudSource{UserDataSecretRef: ref("a"), NetworkData: "version: 2"}, map[string]string{"networkdata": "version: 2"}, "secret/a", "secret/own/networkdata", []string{"a", "own"}},
	} {
		i := vmi(t, "web")
		i.Spec.Volumes[1].CloudInitNoCloud = &c.given
		if errs, _ := CheckInstance(i); len(errs) > 0 {
			t.Errorf("%s: %v", name, errs)
		}
		var secret map[string]string
		if s := Seed(i); s != nil {
			secret = map[string]string{}
			for key, data := range s.Data {
				secret[key] = string(data)
			}
		}
		if d := diff.Of(c.secret, secret); d != "" {
			t.Errorf("%s: our Secret: %s", name, d)
		}
		pod := Pod(i)
		if errs := convert.Check(pod); len(errs) > 0 {
			t.Errorf("%s: a node refuses the pod: %v", name, errs)
		}
		if left := convert.Unnamed(pod); len(left) > 0 {
			t.Errorf("%s: the node may not read %v", name, left)
		}
		say := func(s string) string { return strings.Replace(s, "secret/"+seedName(i), "secret/own", 1) }
		if user, network := say(pod.Annotations[contract.KeyVirtletUserDataSource]), say(pod.Annotations[contract.KeyNetworkData]); user != c.user || network != c.network {
			t.Errorf("%s: the pod names %q and %q", name, user, network)
		}
		var readable []string
		for _, v := range pod.Spec.Volumes[0].Projected.Sources {
			readable = append(readable, strings.Replace(v.Secret.Name, seedName(i), "own", 1))
		}
		if d := diff.Of(c.readable, readable); d != "" {
			t.Errorf("%s: volumes: %s", name, d)
		}
	}
}

func TestSeedOfSecret(t *testing.T) {
	i := vmi(t, "web")
	i.Spec.Volumes[1].CloudInitNoCloud = &v1.CloudInitNoCloudSource{UserDataSecretRef: &corev1.LocalObjectReference{Name: "mine"}}
	if s := Seed(i); s != nil {
		t.Errorf("a Secret of our own: %v", s)
	}
	if p := Pod(i); p.Spec.Volumes[0].Projected.Sources[0].Secret.Name != "mine" {
		t.Errorf("the pod has %v", p.Spec.Volumes)
	}
}

func TestObserve(t *testing.T) {
	i := vmi(t, "web")
	i.Status.PhaseTransitionTimestamps = []v1.VirtualMachineInstancePhaseTransitionTimestamp{{Phase: v1.Pending}}
	pod := Pod(i)
	look := func(change func()) v1.VirtualMachineInstanceStatus {
		change()
		i.Status = Observe(i, pod, now)
		if again := Observe(i, pod, now.Add(time.Hour)); diff.Of(i.Status, again) != "" {
			t.Errorf("a second look changes the status: %s", diff.Of(i.Status, again))
		}
		return i.Status
	}
	status := func(kind v1.VirtualMachineInstanceConditionType) string {
		c := Condition(i, kind)
		if c == nil {
			return ""
		}
		return string(c.Status) + " " + c.Reason
	}
	s := look(func() {
		pod.Status = corev1.PodStatus{Phase: corev1.PodPending, Conditions: []corev1.PodCondition{{Type: corev1.PodScheduled, Status: corev1.ConditionFalse, Reason: corev1.PodReasonUnschedulable, Message: "no room"}}}
	})
	if s.Phase != v1.Scheduling || status("PodScheduled") != "False Unschedulable" || status(v1.VirtualMachineInstanceReady) != "False GuestNotRunning" {
		t.Errorf("%+v", s)
	}
	s = look(func() {
		pod.Spec.NodeName, pod.Status.Conditions = "node", nil
		pod.Status.ContainerStatuses = []corev1.ContainerStatus{{State: corev1.ContainerState{Waiting: &corev1.ContainerStateWaiting{Reason: "ErrImagePull", Message: "no such image"}}}}
	})
	if s.Phase != v1.Scheduled || s.NodeName != "node" || status("PodScheduled") != "" || status(v1.VirtualMachineInstanceSynchronized) != "False ErrImagePull" {
		t.Errorf("%+v", s)
	}
	s = look(func() {
		pod.Status = corev1.PodStatus{
			Phase: corev1.PodRunning, PodIP: "10.1.2.3", PodIPs: []corev1.PodIP{{IP: "10.1.2.3"}, {IP: "fd00::3"}},
			Conditions: []corev1.PodCondition{{Type: corev1.PodReady, Status: corev1.ConditionTrue}},
		}
	})
	if s.Phase != v1.Running || len(s.Interfaces) != 1 || s.Interfaces[0].IP != "10.1.2.3" || len(s.Interfaces[0].IPs) != 2 || status(v1.VirtualMachineInstanceReady) != "True " ||
		status(v1.VirtualMachineInstanceSynchronized) != "" || !Ran(i) || len(s.PhaseTransitionTimestamps) != 4 {
		t.Errorf("%+v", s)
	}
	running := pod.Status.DeepCopy()
	s = look(func() {
		pod.Status.Conditions = []corev1.PodCondition{
			{Type: corev1.PodReady, Status: corev1.ConditionFalse, Reason: "Paused"}, {Type: contract.ConditionPaused, Status: corev1.ConditionTrue, Reason: "Paused"},
		}
	})
	if s.Phase != v1.Running || status(v1.VirtualMachineInstancePaused) != "True PausedByUser" || status(v1.VirtualMachineInstanceReady) != "False Paused" {
		t.Errorf("%+v", s)
	}
	s = look(func() {
		pod.Status = *running
		pod.Status.Conditions = append(pod.Status.Conditions, corev1.PodCondition{Type: contract.ConditionPaused, Status: corev1.ConditionFalse})
	})
	if s.Phase != v1.Running || status(v1.VirtualMachineInstancePaused) != "" || status(v1.VirtualMachineInstanceReady) != "True " {
		t.Errorf("%+v", s)
	}
	for _, agent := range []corev1.ConditionStatus{corev1.ConditionTrue, corev1.ConditionFalse} {
		look(func() {
			pod.Status = *running.DeepCopy()
			pod.Status.Conditions = append(pod.Status.Conditions, corev1.PodCondition{Type: contract.ConditionAgent, Status: agent})
		})
		if got := status(v1.VirtualMachineInstanceAgentConnected); (got == "True ") != (agent == corev1.ConditionTrue) || agent == corev1.ConditionFalse && got != "" {
			t.Errorf("the pod's agent is %s, that of the instance %q", agent, got)
		}
	}
	for frozen, want := range map[corev1.ConditionStatus]string{corev1.ConditionTrue: "frozen", corev1.ConditionFalse: ""} {
		s = look(func() {
			pod.Status = *running.DeepCopy()
			pod.Status.Conditions = append(pod.Status.Conditions, corev1.PodCondition{Type: contract.ConditionFrozen, Status: frozen})
		})
		if s.FSFreezeStatus != want {
			t.Errorf("the pod is frozen %s, the file systems of the instance are %q", frozen, s.FSFreezeStatus)
		}
	}
	for _, logins := range []corev1.ConditionStatus{corev1.ConditionTrue, corev1.ConditionFalse, ""} {
		look(func() {
			pod.Status = *running.DeepCopy()
			if logins != "" {
				pod.Status.Conditions = append(pod.Status.Conditions, corev1.PodCondition{Type: contract.ConditionLogins, Status: logins, Reason: "FailedLogins"})
			}
		})
		want := map[corev1.ConditionStatus]string{corev1.ConditionTrue: "True ", corev1.ConditionFalse: "False FailedLogins"}[logins]
		if got := status(v1.VirtualMachineInstanceAccessCredentialsSynchronized); got != want {
			t.Errorf("the pod's logins are %s, those of the instance %q", logins, got)
		}
	}
	s = look(func() { pod.Status.Phase, pod.Status.Conditions = corev1.PodSucceeded, nil })
	if s.Phase != v1.Succeeded || status(v1.VirtualMachineInstanceReady) != "False GuestNotRunning" {
		t.Errorf("%+v", s)
	}
}
