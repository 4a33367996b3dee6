package kubevirt

import (
	"cmp"
	"fmt"
	"math"
	"net"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/validation/field"
	v1 "kubevirt.io/api/core/v1"

	"cocoonstack.io/cocoon/api/contract"
	"cocoonstack.io/cocoon/internal/vm"
)

// models are the models of interfaces, by what the node calls them.
var models = []string{"", v1.VirtIO, "e1000", "e1000e", "rtl8139"}

// interfaces checks networks and interfaces, and that the first interface is that of the pod.
func (c *check) interfaces() {
	s, at := c.spec, c.at.Child("networks")
	names := map[string]bool{}
	multus := map[string]bool{} // networks of the node
	var main []string           // the network of pods, or the one in its place
	for i, n := range s.Networks {
		at := at.Index(i)
		if names[n.Name] {
			c.errs = append(c.errs, field.Duplicate(at.Child("name"), n.Name))
		}
		names[n.Name] = true
		switch {
		case n.Pod != nil && n.Multus != nil:
			c.errs = append(c.errs, field.Forbidden(at, "a network is either pod or multus"))
		case n.Pod != nil:
			main = append(main, n.Name)
		case n.Multus != nil:
			name, ok := contract.NetworkName(n.Multus.NetworkName)
			if !ok {
				c.invalid(at.Child("multus", "networkName"), n.Multus.NetworkName, "it is no name of a network; write NAME or NAMESPACE/NAME")
			} else if multus[name] {
				c.errs = append(c.errs, field.Duplicate(at.Child("multus", "networkName"), n.Multus.NetworkName))
			}
			multus[name] = true
			if n.Multus.Default {
				main = append(main, n.Name)
			}
		case n.ResourceClaim == nil:
			c.errs = append(c.errs, field.Required(at, "say which network it is: pod or multus"))
		}
		if (n.Pod != nil || n.Multus != nil && n.Multus.Default) && len(main) > 1 {
			c.errs = append(c.errs, field.Forbidden(at, "network "+main[0]+" is that of the pod already"))
		}
	}
	if len(s.Networks) > contract.MaxNetworks+1 {
		c.errs = append(c.errs, field.TooMany(at, len(s.Networks), contract.MaxNetworks+1))
	}
	used, chosen := map[string]bool{}, map[string]bool{}
	for i, n := range s.Domain.Devices.Interfaces {
		at := c.at.Child("domain", "devices", "interfaces").Index(i)
		if used[n.Name] {
			c.errs = append(c.errs, field.Duplicate(at.Child("name"), n.Name))
		}
		used[n.Name] = true
		if !names[n.Name] {
			c.errs = append(c.errs, field.NotFound(at.Child("name"), n.Name))
		}
		only(c, at.Child("model"), n.Model, models...)
		if mac := n.MacAddress; mac != "" {
			if err := vm.ValidateMAC(mac); err != nil {
				c.invalid(at.Child("macAddress"), n.MacAddress, "is not the hardware address of one interface, such as 02:00:00:00:00:01")
			} else if mac := canonicalMAC(mac); chosen[mac] {
				c.errs = append(c.errs, field.Duplicate(at.Child("macAddress"), n.MacAddress))
			} else {
				chosen[mac] = true
			}
		}
		only(c, at.Child("state"), n.State, "", v1.InterfaceStateLinkUp, v1.InterfaceStateLinkDown, v1.InterfaceStateAbsent)
		if absent(n) && i == 0 {
			c.errs = append(c.errs, field.Forbidden(at.Child("state"), "the first interface of a guest stays"))
		}
		if n.Bridge != nil && n.Masquerade != nil {
			c.errs = append(c.errs, field.Forbidden(at, "an interface has one binding"))
		}
		c.masquerade(at, n)
		if i > 0 && slices.Contains(main, n.Name) {
			c.errs = append(c.errs, field.Forbidden(at, "the guest has the network of the pod as its first interface; put it first"))
		}
	}
	for i, n := range s.Networks {
		if !used[n.Name] && (len(s.Domain.Devices.Interfaces) > 0 || n.Multus != nil) {
			c.errs = append(c.errs, field.Required(at.Index(i), "the network needs an interface of its name"))
		}
	}
}

// masquerade checks the binding of an interface, and the ports for it.
func (c *check) masquerade(at *field.Path, n v1.Interface) {
	if n.Masquerade == nil {
		return
	}
	network := networkOf(c.spec, n.Name)
	if network == nil {
		return
	}
	if network.Pod == nil {
		c.errs = append(c.errs, field.Forbidden(at.Child("masquerade"), "it is for the network of pods; write bridge"))
		return
	}
	check := func(at *field.Path, value any, m vm.Masquerade) {
		if err := (vm.Spec{NICs: []vm.NICSpec{{Masquerade: m}}}).ValidateMasquerade(); err != nil {
			c.invalid(at, value, err.Error())
		}
	}
	pod := c.at.Child("networks").Index(slices.IndexFunc(c.spec.Networks, func(o v1.Network) bool { return o.Name == n.Name })).Child("pod")
	check(pod.Child("vmNetworkCIDR"), network.Pod.VMNetworkCIDR, vm.Masquerade{CIDR: cmp.Or(network.Pod.VMNetworkCIDR, vm.MasqueradeCIDR), CIDR6: vm.MasqueradeCIDR6})
	check(pod.Child("vmIPv6NetworkCIDR"), network.Pod.VMIPv6NetworkCIDR, vm.Masquerade{CIDR: vm.MasqueradeCIDR, CIDR6: cmp.Or(network.Pod.VMIPv6NetworkCIDR, vm.MasqueradeCIDR6)})
	for i, p := range n.Ports {
		at := at.Child("ports").Index(i)
		only(c, at.Child("protocol"), p.Protocol, "", "TCP", "UDP")
		if p.Port < 1 || p.Port > math.MaxUint16 {
			c.invalid(at.Child("port"), p.Port, "a port is between 1 and 65535")
		}
	}
	for i, p := range n.PortRanges {
		at := at.Child("portRanges").Index(i)
		only(c, at.Child("protocol"), p.Protocol, "TCP", "UDP")
		if p.Start < 1 || p.End < p.Start || p.End > math.MaxUint16 {
			c.invalid(at, fmt.Sprintf("%d-%d", p.Start, p.End), "a range is between 1 and 65535, and does not end before it starts")
		}
	}
	if most := 256; len(n.Ports)+len(n.PortRanges) > most {
		c.errs = append(c.errs, field.TooMany(at.Child("ports"), len(n.Ports)+len(n.PortRanges), most))
	}
}

// masqueradeOf returns what the first interface says of the guest's own address; nil if it has that of its pod.
func masqueradeOf(s *v1.VirtualMachineInstanceSpec) *contract.Masquerade {
	if len(s.Domain.Devices.Interfaces) == 0 || s.Domain.Devices.Interfaces[0].Masquerade == nil {
		return nil
	}
	n := s.Domain.Devices.Interfaces[0]
	network := networkOf(s, n.Name)
	if network == nil || network.Pod == nil {
		return nil
	}
	out := &contract.Masquerade{CIDR: network.Pod.VMNetworkCIDR, CIDR6: network.Pod.VMIPv6NetworkCIDR}
	for _, p := range n.Ports {
		out.Ports = append(out.Ports, contract.MasqueradePort{Protocol: p.Protocol, Port: p.Port})
	}
	for _, p := range n.PortRanges {
		out.Ports = append(out.Ports, contract.MasqueradePort{Protocol: p.Protocol, Port: p.Start, Last: p.End})
	}
	return out
}

// networks writes the networks of the instance to the annotations of its pod.
func networks(s *v1.VirtualMachineInstanceSpec, annotations map[string]string) {
	var further []string
	for i, n := range present(s) {
		network := networkOf(s, n.Name)
		if network == nil || network.Multus == nil {
			continue
		}
		name, _ := contract.NetworkName(network.Multus.NetworkName)
		if i == 0 {
			annotations[contract.KeyNetwork] = name
		} else {
			further = append(further, name)
		}
	}
	if further != nil {
		annotations[contract.KeyNetworks] = strings.Join(further, ",")
	}
	if m := masqueradeOf(s); m != nil {
		m.Apply(annotations)
	}
}

func networkOf(s *v1.VirtualMachineInstanceSpec, name string) *v1.Network {
	if i := slices.IndexFunc(s.Networks, func(n v1.Network) bool { return n.Name == name }); i >= 0 {
		return &s.Networks[i]
	}
	return nil
}

// macs returns the hardware addresses that the interfaces ask for; nil if none does.
func macs(s *v1.VirtualMachineInstanceSpec) (out []string) {
	asked := false
	for _, n := range present(s) {
		text := canonicalMAC(n.MacAddress)
		asked = asked || text != ""
		out = append(out, text)
	}
	if !asked {
		return nil
	}
	return out
}

// links returns the links of the interfaces; nil if all are up.
func links(s *v1.VirtualMachineInstanceSpec) []string {
	out := eachLink(s)
	if !slices.Contains(out, contract.LinkDown) {
		return nil
	}
	return out
}

func eachLink(s *v1.VirtualMachineInstanceSpec) (out []string) {
	for _, n := range present(s) {
		link := contract.LinkUp
		if n.State == v1.InterfaceStateLinkDown {
			link = contract.LinkDown
		}
		out = append(out, link)
	}
	return out
}

// canonicalMAC returns a hardware address as the node writes it.
func canonicalMAC(text string) string {
	if hw, err := net.ParseMAC(text); err == nil {
		return hw.String()
	}
	return text
}

// nicModels returns the models of the interfaces; nil if all are virtio.
func nicModels(s *v1.VirtualMachineInstanceSpec) (out []string) {
	for _, n := range present(s) {
		out = append(out, n.Model)
	}
	if !slices.ContainsFunc(out, func(m string) bool { return m != "" && m != v1.VirtIO }) {
		return nil
	}
	return out
}

// interfaces returns what is known of the interfaces of the guest, in their order.
func interfaces(s *v1.VirtualMachineInstanceSpec, pod *corev1.Pod) (out []v1.VirtualMachineInstanceNetworkInterface) {
	if pod.Status.PodIP == "" {
		return nil
	}
	var ips []string
	for _, ip := range pod.Status.PodIPs {
		ips = append(ips, ip.IP)
	}
	known := contract.ParseNetworkStatus(pod.Annotations)
	for i, name := range interfaceNames(s) {
		n := v1.VirtualMachineInstanceNetworkInterface{Name: name, InfoSource: "domain"}
		if at := reported(s, known, i, name); at >= 0 {
			n.MAC, n.IPs, n.LinkState = known[at].MAC, known[at].IPs, cmp.Or(known[at].Link, contract.LinkUp)
		} else if i > 0 && len(known) > 0 { // the guest does not have it yet, or any more
			continue
		}
		if i == 0 {
			n.IPs = ips
		}
		if len(n.IPs) > 0 {
			n.IP = n.IPs[0]
		}
		out = append(out, n)
	}
	return out
}

// reported returns the index in known of what the node says of the i-th interface, which is called name; -1: nothing. The first is that of the pod,
// and the others are on networks of their own.
func reported(s *v1.VirtualMachineInstanceSpec, known []contract.NetworkStatus, i int, name string) int {
	if i == 0 {
		return min(len(known), 1) - 1
	}
	network := networkOf(s, name)
	if network == nil || network.Multus == nil {
		return -1
	}
	of, _ := contract.NetworkName(network.Multus.NetworkName)
	return slices.IndexFunc(known, func(k contract.NetworkStatus) bool { return !k.Default && k.Name == of })
}

// interfaceNames returns the names of the interfaces of the guest. An instance that names none has that of its pod.
func interfaceNames(s *v1.VirtualMachineInstanceSpec) (out []string) {
	for _, n := range s.Domain.Devices.Interfaces {
		out = append(out, n.Name)
	}
	if len(out) == 0 && len(s.Networks) > 0 {
		return []string{s.Networks[0].Name}
	}
	if len(out) == 0 {
		return []string{"default"}
	}
	return out
}
