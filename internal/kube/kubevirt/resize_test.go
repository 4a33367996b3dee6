package kubevirt

import (
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	v1 "kubevirt.io/api/core/v1"
)

// growing returns an instance whose guest has 2 sockets of 4, and 1 of 2 GiB.
func growing() *v1.VirtualMachineInstance {
	guest, most := resource.MustParse("1Gi"), resource.MustParse("2Gi")
	vmi := &v1.VirtualMachineInstance{}
	vmi.Name = "web"
	vmi.Spec.Domain.CPU = &v1.CPU{Sockets: 2, Cores: 2, Threads: 1, MaxSockets: 4}
	vmi.Spec.Domain.Memory = &v1.Memory{Guest: &guest, MaxGuest: &most}
	vmi.Spec.Volumes = []v1.Volume{{Name: "boot", VolumeSource: v1.VolumeSource{ContainerDisk: &v1.ContainerDiskSource{Image: "x"}}}}
	return vmi
}

func TestLive(t *testing.T) {
	size := func(sockets uint32, memory string) func(*v1.VirtualMachineInstanceSpec) {
		return func(s *v1.VirtualMachineInstanceSpec) {
			guest := resource.MustParse(memory)
			s.Domain.CPU.Sockets, s.Domain.Memory.Guest = sockets, &guest
		}
	}
	for what, tt := range map[string]struct {
		is   func(*v1.VirtualMachineInstanceSpec)
		want func(*v1.VirtualMachineInstanceSpec)
		why  string // "-": it is possible
	}{
		"both":               {want: size(4, "2Gi"), why: "-"},
		"CPUs":               {want: size(3, "1Gi"), why: "-"},
		"too many":           {want: size(5, "1Gi"), why: "can have 4 sockets"},
		"too much":           {want: size(2, "3Gi"), why: "can have 2Gi"},
		"fewer":              {want: size(1, "2Gi"), why: "not taken"},
		"less":               {want: size(3, "512Mi"), why: "not taken"},
		"half a step":        {want: size(2, "1025Mi"), why: "multiples of 2 MiB"},
		"something else":     {want: func(s *v1.VirtualMachineInstanceSpec) { size(3, "1Gi")(s); s.Hostname = "x" }},
		"another maximum":    {want: func(s *v1.VirtualMachineInstanceSpec) { size(3, "1Gi")(s); s.Domain.CPU.MaxSockets = 8 }},
		"no maximum":         {is: func(s *v1.VirtualMachineInstanceSpec) { s.Domain.CPU.MaxSockets = 0 }, want: size(3, "1Gi"), why: "without cpu.maxSockets"},
		"no maximum, memory": {is: func(s *v1.VirtualMachineInstanceSpec) { s.Domain.Memory.MaxGuest = nil }, want: size(2, "2Gi"), why: "without memory.maxGuest"},
		"its own request": {is: func(s *v1.VirtualMachineInstanceSpec) {
			s.Domain.Resources.Requests = corev1.ResourceList{corev1.ResourceCPU: resource.MustParse("1")}
		}, want: size(3, "1Gi"), why: "requests a number of CPUs itself"},
	} {
		is := growing().Spec
		if tt.is != nil {
			tt.is(&is)
		}
		want := *is.DeepCopy()
		tt.want(&want)
		next, why := Live(is, want)
		if (next != nil) != (tt.why == "-") || tt.why != "-" && !strings.Contains(why, tt.why) || tt.why == "" && why != "" {
			t.Errorf("%s: %v %q", what, next, why)
		}
	}
}

// The pod of an instance follows its size, and the status tells how far the guest has got.
func TestResized(t *testing.T) {
	vmi, now := growing(), time.Unix(1e9, 0)
	pod := Pod(vmi)
	if ask := pod.Annotations["vm.cocoonstack.io/hardware"]; !strings.Contains(ask, `"maxSockets":4`) || !strings.Contains(ask, `"maxMemory":2147483648`) || !strings.Contains(ask, `"cpuShare":100`) {
		t.Errorf("the pod says %s", ask)
	}
	if r := Resized(vmi, pod); r != nil {
		t.Errorf("nothing has changed, but %+v", r)
	}
	run := func() {
		pod.Status.Phase = corev1.PodRunning
		pod.Status.ContainerStatuses = []corev1.ContainerStatus{{Name: Container, Resources: pod.Spec.Containers[0].Resources.DeepCopy()}}
	}
	run()
	state := func() (out string) {
		vmi.Status = Observe(vmi, pod, now)
		for _, kind := range []v1.VirtualMachineInstanceConditionType{v1.VirtualMachineInstanceVCPUChange, v1.VirtualMachineInstanceMemoryChange} {
			if c := Condition(vmi, kind); c != nil {
				out += string(c.Status) + c.Reason + " "
			}
		}
		m := vmi.Status.Memory
		return out + m.GuestAtBoot.String() + " " + m.GuestCurrent.String() + " " + m.GuestRequested.String() + " " + resource.NewQuantity(int64(vmi.Status.CurrentCPUTopology.Sockets), resource.DecimalSI).String()
	}
	expect := func(what, want string) {
		t.Helper()
		if got := state(); got != want {
			t.Errorf("%s: %q, want %q", what, got, want)
		}
	}
	expect("started", "1Gi 1Gi 1Gi 2")
	guest := resource.MustParse("2Gi")
	vmi.Spec.Domain.CPU.Sockets, vmi.Spec.Domain.Memory.Guest = 3, &guest
	expect("asked", "True True 1Gi 1Gi 2Gi 2")
	r := Resized(vmi, pod)
	if r == nil || r.Requests.Cpu().MilliValue() != 600 || r.Limits.Memory().String() != "2Gi" || r.Requests.Memory().String() != "2Gi" {
		t.Fatalf("the pod is to have %+v", r)
	}
	NotResized(&vmi.Status, "no", now)
	expect("refused", "FalseResizeRefused FalseResizeRefused 1Gi 1Gi 2Gi 2")
	pod.Spec.Containers[0].Resources = *r
	pod.Status.Conditions = []corev1.PodCondition{{Type: corev1.PodResizePending, Status: corev1.ConditionTrue, Reason: corev1.PodReasonDeferred, Message: "no room"}}
	expect("no room", "FalseDeferred FalseDeferred 1Gi 1Gi 2Gi 2")
	pod.Status.Conditions = nil
	expect("room", "True True 1Gi 1Gi 2Gi 2")
	run()
	expect("done", "1Gi 2Gi 2Gi 3")
}

func TestGrowthIsChecked(t *testing.T) {
	for field, spoil := range map[string]func(*v1.VirtualMachineInstanceSpec){
		"spec.domain.cpu.maxSockets": func(s *v1.VirtualMachineInstanceSpec) { s.Domain.CPU.MaxSockets = 1 },
		"spec.domain.memory.maxGuest": func(s *v1.VirtualMachineInstanceSpec) {
			less := resource.MustParse("512Mi")
			s.Domain.Memory.MaxGuest = &less
		},
	} {
		vmi := growing()
		if errs, _ := CheckInstance(vmi); len(errs) > 0 {
			t.Fatal(errs)
		}
		spoil(&vmi.Spec)
		if errs, _ := CheckInstance(vmi); len(errs) != 1 || errs[0].Field != field {
			t.Errorf("%s: %v", field, errs)
		}
	}
}

// A machine grows by its instancetype, also one whose pod requests less memory than the guest has.
func TestLiveByInstancetype(t *testing.T) {
	vm := machineOf(t, plain)
	vm.Spec.Preference = nil
	of := func(text string) v1.VirtualMachineInstanceSpec {
		whole, errs, _ := Unfold(vm, Base{Instancetype: instancetypeOf(t, text)})
		if len(errs) > 0 {
			t.Fatal(errs)
		}
		return whole.Spec.Template.Spec
	}
	const maxima = "maxSockets: 4}, memory: {overcommitPercent: 50, maxGuest: 4Gi, guest: "
	small := of("{cpu: {guest: 1, " + maxima + "1Gi}}")
	next, why := Live(small, of("{cpu: {guest: 2, "+maxima+"2Gi}}"))
	if next == nil || next.Domain.CPU.Sockets != 2 || next.Domain.Memory.Guest.String() != "2Gi" || next.Domain.Resources.Requests.Memory().String() != "1Gi" {
		t.Errorf("%+v, %q", next, why)
	}
	if next, why := Live(small, of("{cpu: {guest: 8, "+maxima+"2Gi}}")); next != nil || why == "" {
		t.Errorf("beyond the maximum: %+v, %q", next, why)
	}
	if next, _ := Live(small, of("{cpu: {guest: 1, maxSockets: 4}, memory: {maxGuest: 4Gi, guest: 1Gi}}")); next != nil {
		t.Errorf("less overcommitted: %+v", next)
	}
}
