package kubevirt

import (
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/validation/field"
	v1 "kubevirt.io/api/core/v1"

	"cocoonstack.io/cocoon/api/contract"
	"cocoonstack.io/cocoon/internal/kube/convert"
	"cocoonstack.io/cocoon/internal/testkit/diff"
)

// wired returns a machine with interfaces named a, b, … on networks, each of which is pod, NAME or default:NAME.
func wired(t *testing.T, networks ...string) *v1.VirtualMachineInstanceSpec {
	s := spec(t, cirros)
	s.Networks, s.Domain.Devices.Interfaces = nil, nil
	for i, n := range networks {
		name := string(rune('a' + i))
		network := v1.Network{Name: name, NetworkSource: v1.NetworkSource{Pod: &v1.PodNetwork{}}}
		if n != "pod" {
			main, isMain := strings.CutPrefix(n, "default:")
			network.NetworkSource = v1.NetworkSource{Multus: &v1.MultusNetwork{NetworkName: main, Default: isMain}}
		}
		s.Networks = append(s.Networks, network)
		s.Domain.Devices.Interfaces = append(s.Domain.Devices.Interfaces, v1.Interface{Name: name})
	}
	return s
}

func TestNetworks(t *testing.T) {
	for name, x := range map[string]struct {
		networks      []string
		main, further string
		refused       string
	}{
		"a pod's":              {networks: []string{"pod"}},
		"two":                  {networks: []string{"pod", "lab"}, further: "lab"},
		"three":                {networks: []string{"pod", "ns/lab", "dmz.2"}, further: "lab,dmz.2"},
		"no pod's":             {networks: []string{"lab", "dmz"}, main: "lab", further: "dmz"},
		"in its place":         {networks: []string{"default:lab", "dmz"}, main: "lab", further: "dmz"},
		"pod's is not first":   {networks: []string{"lab", "pod"}, refused: "spec.domain.devices.interfaces[1]: Forbidden: the guest has the network of the pod as its first interface"},
		"two in its place":     {networks: []string{"pod", "default:lab"}, refused: "spec.networks[1]: Forbidden: network a is that of the pod already"},
		"one network twice":    {networks: []string{"lab", "ns/lab"}, refused: "spec.networks[1].multus.networkName: Duplicate"},
		"no name":              {networks: []string{"pod", "lab,dmz"}, refused: "spec.networks[1].multus.networkName: Invalid"},
		"a name of interfaces": {networks: []string{"pod", "lab@eth7"}, refused: "spec.networks[1].multus.networkName: Invalid"},
		"a path":               {networks: []string{"pod", "../../etc/passwd"}, refused: "spec.networks[1].multus.networkName: Invalid"},
		"too many":             {networks: []string{"pod", "a", "b", "c", "d", "e", "f", "g", "h", "i"}, refused: "spec.networks: Too many"},
	} {
		s := wired(t, x.networks...)
		errs, _ := Check(s, field.NewPath("spec"))
		if x.refused != "" {
			if len(errs) == 0 || !strings.Contains(errs.ToAggregate().Error(), x.refused) {
				t.Errorf("%s: %v; want %s", name, errs, x.refused)
			}
			continue
		}
		if len(errs) > 0 {
			t.Errorf("%s: %v", name, errs)
		}
		got := map[string]string{}
		networks(s, got)
		if got[contract.KeyNetwork] != x.main || got[contract.KeyNetworks] != x.further {
			t.Errorf("%s: %v; want %q and %q", name, got, x.main, x.further)
		}
	}
}

// A network of multus needs an interface, because no guest gets one unasked.
func TestNetworkWithoutInterface(t *testing.T) {
	s := wired(t, "lab")
	s.Domain.Devices.Interfaces = nil
	errs, _ := Check(s, field.NewPath("spec"))
	if len(errs) != 1 || errs[0].Field != "spec.networks[0]" {
		t.Errorf("%v", errs)
	}
}

func TestInterfaceModels(t *testing.T) {
	s := wired(t, "pod", "lab")
	if got := nicModels(s); got != nil {
		t.Errorf("models of virtio: %v", got)
	}
	s.Domain.Devices.Interfaces[1].Model = "e1000e"
	if d := diff.Of([]string{"", "e1000e"}, nicModels(s)); d != "" {
		t.Error(d)
	}
}

// The first interface has the addresses of the pod; what the node says of the others is shown.
func TestInterfacesOfStatus(t *testing.T) {
	pod := &corev1.Pod{Status: corev1.PodStatus{PodIP: "10.0.0.5", PodIPs: []corev1.PodIP{{IP: "10.0.0.5"}, {IP: "fd00::5"}}}}
	pod.Annotations = map[string]string{contract.KeyNetworkStatus: contract.NetworkStatusText([]contract.NetworkStatus{
		{Name: "default", Interface: "eth0", MAC: "52:54:00:00:00:01", Default: true}, {Name: "lab", Interface: "eth1", MAC: "52:54:00:00:00:02", IPs: []string{"192.0.2.7"}, Link: "down"},
	})}
	first := v1.VirtualMachineInstanceNetworkInterface{Name: "a", MAC: "52:54:00:00:00:01", IP: "10.0.0.5", IPs: []string{"10.0.0.5", "fd00::5"}, InfoSource: "domain", LinkState: "up"}
	second := v1.VirtualMachineInstanceNetworkInterface{Name: "b", MAC: "52:54:00:00:00:02", IP: "192.0.2.7", IPs: []string{"192.0.2.7"}, InfoSource: "domain", LinkState: "down"}
	if d := diff.Of([]v1.VirtualMachineInstanceNetworkInterface{first, second}, interfaces(wired(t, "pod", "lab"), pod)); d != "" {
		t.Error(d)
	}
	pod.Annotations[contract.KeyNetworkStatus] = "not JSON"
	first.MAC, second.MAC, second.IP, second.IPs, first.LinkState, second.LinkState = "", "", "", nil, "", ""
	if d := diff.Of([]v1.VirtualMachineInstanceNetworkInterface{first, second}, interfaces(wired(t, "pod", "lab"), pod)); d != "" {
		t.Error(d)
	}
}

// A machine says by annotations whether its VM stays on its node, what an eviction does, and what limits its disks.
func TestPassedAnnotations(t *testing.T) {
	vmi := &v1.VirtualMachineInstance{Spec: *wired(t, "pod")}
	vmi.Annotations = map[string]string{contract.KeySticky: "10m", contract.KeyEvictionPolicy: "shutdown", contract.KeyImage: "other", contract.KeyDiskBandwidth: "10Mi", contract.KeyDiskIOPS: "500"}
	if errs, _ := CheckInstance(vmi); len(errs) > 0 {
		t.Error(errs)
	}
	pod := Pod(vmi)
	if a := pod.Annotations; a[contract.KeySticky] != "10m" || a[contract.KeyEvictionPolicy] != "shutdown" || a[contract.KeyImage] != "" || a[contract.KeyDiskBandwidth] != "10Mi" || a[contract.KeyDiskIOPS] != "500" {
		t.Errorf("%v", a)
	}
	for key, values := range map[string][]string{
		contract.KeySticky: {"soon"}, contract.KeyEvictionPolicy: {"hibernate"}, contract.KeyDiskBandwidth: {"fast", "1Ki"}, contract.KeyDiskIOPS: {"-1", "1"},
	} {
		for _, value := range values {
			vmi.Annotations = map[string]string{key: value}
			if errs, _ := CheckInstance(vmi); len(errs) != 1 || errs[0].Field != "metadata.annotations["+key+"]" {
				t.Errorf("%s: %s: %v", key, value, errs)
			}
		}
	}
}

// The guest has the hardware address that its interface asks for, and the node chooses the others.
func TestHardwareAddresses(t *testing.T) {
	for text, want := range map[string]string{"": "", "02-AB-00-00-00-01": "02:ab:00:00:00:01", "de:ad:00:00:be:af": "de:ad:00:00:be:af"} {
		i := vmi(t, "web")
		i.Spec = *wired(t, "pod", "lab")
		i.Spec.Domain.Devices.Interfaces[1].MacAddress = text
		if errs, _ := CheckInstance(i); len(errs) > 0 {
			t.Fatal(text, errs)
		}
		pod := Pod(i)
		if errs := convert.Check(pod); len(errs) > 0 {
			t.Fatalf("a node refuses the pod: %v", errs)
		}
		nics := convert.NICs(pod)
		if len(nics) != 2 || nics[0].MAC != "" || nics[1].MAC != want {
			t.Errorf("%q: %+v", text, nics)
		}
	}
	for text, why := range map[string]string{
		"noise": "Invalid", "01:00:00:00:00:01": "Invalid", "00:00:00:00:00:00": "Invalid", "02:00:00:00:00:00:00:01": "Invalid", "02-00-00-00-00-01": "Duplicate",
	} {
		s := wired(t, "pod", "lab")
		s.Domain.Devices.Interfaces[0].MacAddress, s.Domain.Devices.Interfaces[1].MacAddress = "02:00:00:00:00:01", text
		if errs, _ := Check(s, field.NewPath("spec")); len(errs) != 1 || !strings.Contains(errs.ToAggregate().Error(), "spec.domain.devices.interfaces[1].macAddress: "+why) {
			t.Errorf("%s: %v", text, errs)
		}
	}
}

func TestMasquerade(t *testing.T) {
	s := wired(t, "pod", "lab")
	first, pod := &s.Domain.Devices.Interfaces[0], s.Networks[0].Pod
	first.Masquerade = &v1.InterfaceMasquerade{}
	text := func() string {
		if errs, warnings := Check(s, field.NewPath("spec")); len(errs) > 0 {
			t.Fatal(errs, warnings)
		}
		out := map[string]string{}
		networks(s, out)
		return out[contract.KeyMasquerade]
	}
	if got := text(); got != "{}" {
		t.Error(got)
	}
	pod.VMNetworkCIDR, pod.VMIPv6NetworkCIDR = "10.7.0.0/16", "fd07::/64"
	first.Ports, first.PortRanges = []v1.Port{{Port: 80}}, []v1.PortRange{{Protocol: "UDP", Start: 5, End: 9}}
	want := `{"cidr":"10.7.0.0/16","cidr6":"fd07::/64","ports":[{"port":80},{"protocol":"UDP","port":5,"last":9}]}`
	if d := diff.Of(want, text()); d != "" {
		t.Error(d)
	}
	good := s.DeepCopy()
	for want, change := range map[string]func(s *v1.VirtualMachineInstanceSpec){
		"spec.networks[0].pod.vmNetworkCIDR: Invalid":                           func(s *v1.VirtualMachineInstanceSpec) { s.Networks[0].Pod.VMNetworkCIDR = "10.7.0.1/16" },
		"spec.networks[0].pod.vmIPv6NetworkCIDR: Invalid":                       func(s *v1.VirtualMachineInstanceSpec) { s.Networks[0].Pod.VMIPv6NetworkCIDR = "10.7.0.0/16" },
		"spec.domain.devices.interfaces[0].ports[0].port: Invalid":              func(s *v1.VirtualMachineInstanceSpec) { s.Domain.Devices.Interfaces[0].Ports[0].Port = 0 },
		"spec.domain.devices.interfaces[0].ports[0].protocol: Unsupported":      func(s *v1.VirtualMachineInstanceSpec) { s.Domain.Devices.Interfaces[0].Ports[0].Protocol = "ICMP" },
		"spec.domain.devices.interfaces[0].portRanges[0]: Invalid":              func(s *v1.VirtualMachineInstanceSpec) { s.Domain.Devices.Interfaces[0].PortRanges[0].End = 4 },
		"spec.domain.devices.interfaces[0].portRanges[0].protocol: Unsupported": func(s *v1.VirtualMachineInstanceSpec) { s.Domain.Devices.Interfaces[0].PortRanges[0].Protocol = "" },
		"spec.domain.devices.interfaces[1].masquerade: Forbidden": func(s *v1.VirtualMachineInstanceSpec) {
			s.Domain.Devices.Interfaces[1].Masquerade = &v1.InterfaceMasquerade{}
		},
		"spec.domain.devices.interfaces[0].ports: Too many": func(s *v1.VirtualMachineInstanceSpec) {
			s.Domain.Devices.Interfaces[0].Ports = slices.Repeat([]v1.Port{{Port: 1}}, 256)
		},
	} {
		bad := good.DeepCopy()
		change(bad)
		if errs, _ := Check(bad, field.NewPath("spec")); len(errs) != 1 || !strings.Contains(errs.ToAggregate().Error(), want) {
			t.Errorf("%v; want %s", errs, want)
		}
	}
}
