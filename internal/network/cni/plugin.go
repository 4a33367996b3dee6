package cni

import (
	"context"
	"errors"
	"fmt"
	"math"
	"net/netip"
	"slices"
	"strings"

	"github.com/containernetworking/cni/libcni"
	"github.com/containernetworking/cni/pkg/types"
	types100 "github.com/containernetworking/cni/pkg/types/100"
	"github.com/vishvananda/netlink"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/network/host"
	"cocoonstack.io/cocoon/internal/vm"
)

// runtime is what plugins are told about an attachment, the same for ADD, CHECK and DEL.
func (n *Network) runtime(r record) *libcni.RuntimeConf {
	rt := &libcni.RuntimeConf{
		ContainerID: string(r.ID), NetNS: n.space(r).Path, IfName: r.link(),
		Args: [][2]string{{"IgnoreUnknown", "1"}},
	}
	if p := r.Pod; p != (vm.PodName{}) { // by the names that a kubelet uses
		rt.Args = append(rt.Args, [2]string{"K8S_POD_NAMESPACE", p.Namespace}, [2]string{"K8S_POD_NAME", p.Name},
			[2]string{"K8S_POD_INFRA_CONTAINER_ID", string(r.ID)}, [2]string{"K8S_POD_UID", p.UID})
	} else {
		rt.Args = append(rt.Args, [2]string{"K8S_POD_NAME", r.VM})
	}
	rt.CapabilityArgs = map[string]any{} // each is passed only to plugins with that capability
	if r.MAC != "" {
		rt.Args = append(rt.Args, [2]string{"MAC", r.MAC})
		rt.CapabilityArgs["mac"] = r.MAC
	}
	if len(r.Ports) > 0 {
		rt.CapabilityArgs[portMappings] = portsOf(r)
	}
	if r.Bandwidth != (vm.Bandwidth{}) {
		rt.CapabilityArgs["bandwidth"] = bandwidthOf(r.Bandwidth)
	}
	return rt
}

// portMappings is the capability of plugins that forward ports of the host, and portMapping its argument (CNI conventions).
const portMappings = "portMappings"

type portMapping struct {
	HostPort      uint16 `json:"hostPort"`
	ContainerPort uint16 `json:"containerPort"`
	Protocol      string `json:"protocol"`
	HostIP        string `json:"hostIP,omitempty"`
}

func portsOf(r record) (out []portMapping) {
	for _, p := range r.Ports {
		out = append(out, portMapping{p.HostPort, p.GuestPort, string(p.Protocol), p.HostIP})
	}
	return out
}

// bandwidth is the argument of the capability bandwidth (CNI conventions). Rates are bits per second, bursts are bits.
type bandwidth struct {
	IngressRate  uint64 `json:"ingressRate,omitempty"`
	IngressBurst uint64 `json:"ingressBurst,omitempty"`
	EgressRate   uint64 `json:"egressRate,omitempty"`
	EgressBurst  uint64 `json:"egressBurst,omitempty"`
}

// bandwidthOf has the burst that container runtimes give, because no pod names one.
func bandwidthOf(b vm.Bandwidth) (out bandwidth) {
	if b.Ingress > 0 {
		out.IngressRate, out.IngressBurst = uint64(b.Ingress), math.MaxUint32
	}
	if b.Egress > 0 {
		out.EgressRate, out.EgressBurst = uint64(b.Egress), math.MaxUint32
	}
	return out
}

// mapsPorts reports whether a plugin of the conflist forwards ports of the host.
func mapsPorts(list *libcni.NetworkConfigList) bool {
	return slices.ContainsFunc(list.Plugins, func(p *libcni.PluginConfig) bool { return p.Network.Capabilities[portMappings] })
}

// plug runs ADD and stores its result in r.
func (n *Network) plug(ctx context.Context, list *libcni.NetworkConfigList, r *record) error {
	pctx, cancel := context.WithTimeout(ctx, pluginTime)
	defer cancel()
	raw, err := n.cni.AddNetworkList(pctx, list, n.runtime(*r))
	if err != nil {
		return pluginError("ADD", err)
	}
	res, err := types100.NewResultFromResult(raw)
	if err != nil {
		return errdefs.New(errdefs.FailedPrecondition, "the result of the CNI plugins cannot be read: %w", err)
	}
	if err := n.read(r, res); err != nil {
		return err
	}
	if r.MAC != "" && r.NIC.MAC != r.MAC {
		return errdefs.Preconditionf("the CNI plugins set MAC %s instead of %s; this conflist does not allow to choose the MAC", r.NIC.MAC, r.MAC)
	}
	if r.NIC.IP != "" {
		return nil
	}
	r.NIC.DHCP = true // a server outside the plugins answers
	for _, i := range res.Interfaces {
		if i == nil {
			continue
		}
		give := n.cfg.Addresses[i.Name]
		if give == nil || i.Sandbox != "" {
			continue
		}
		r.Bridge = i.Name
		if err := n.save(*r); err != nil { // Unlease must find it after a crash
			return err
		}
		leased, err := give.Lease(ctx, r.ID, r.VM, r.Index, r.NIC.MAC)
		if err != nil {
			return err
		}
		r.NIC.IP, r.NIC.Prefix, r.NIC.Gateway, r.NIC.DNS = leased.IP, leased.Prefix, leased.Gateway, leased.DNS
		return nil
	}
	return nil
}

// pluginError sets whether a retry can help. It passes the plugins' texts on but never interprets them.
func pluginError(op string, err error) error {
	class := errdefs.Unavailable
	if e, ok := errors.AsType[*types.Error](err); ok && (e.Code == types.ErrInvalidNetworkConfig || e.Code == types.ErrIncompatibleCNIVersion) {
		class = errdefs.FailedPrecondition
	}
	if errors.Is(err, context.Canceled) {
		class = errdefs.Canceled
	}
	return errdefs.New(class, "CNI %s: %w", op, err)
}

// read turns a result into the NIC, and adds what only the link itself shows.
func (n *Network) read(r *record, res *types100.Result) error {
	r.NIC = vm.NIC{Network: n.cfg.Name, Tap: n.tap(*r), NetNS: n.space(*r).Path}
	err := n.space(*r).Do(func() error {
		l, err := netlink.LinkByName(r.link())
		if err != nil {
			return errdefs.New(errdefs.FailedPrecondition, "the CNI plugins did not create link %s: %w", r.link(), err)
		}
		r.NIC.MAC, r.NIC.MTU = l.Attrs().HardwareAddr.String(), l.Attrs().MTU
		return nil
	})
	if err != nil {
		return err
	}
	if fill(&r.NIC, r.link(), res); len(r.NIC.DNS) == 0 {
		r.NIC.DNS = n.resolvers()
	}
	return nil
}

// fill sets nic from a result for link. Plugins are programs of third parties, so any result that can be decoded is accepted,
// and values that make no sense are skipped.
func fill(nic *vm.NIC, link string, res *types100.Result) {
	var ips []*types100.IPConfig
	for _, ip := range res.IPs {
		if ip != nil && (ip.Interface == nil || nameOf(res, *ip.Interface) == link) {
			ips = append(ips, ip)
		}
	}
	address(nic, ips, res.Routes)
	for _, s := range res.DNS.Nameservers {
		if a, err := netip.ParseAddr(s); err == nil {
			nic.DNS = append(nic.DNS, a.String())
		}
	}
}

// nameOf returns the name of the result's interface with index i, "" if there is none.
func nameOf(res *types100.Result, i int) string {
	if i < 0 || i >= len(res.Interfaces) || res.Interfaces[i] == nil {
		return ""
	}
	return res.Interfaces[i].Name
}

func (n *Network) resolvers() []string {
	if n.cfg.DNS != nil {
		return n.cfg.DNS
	}
	var out []string
	for _, a := range host.Resolvers() {
		out = append(out, a.String())
	}
	return out
}

// intact reports whether an attachment's link exists. If not, the attachment is created again.
func (n *Network) intact(r record) (bool, error) {
	if !n.space(r).Exists() {
		return false, nil
	}
	there := false
	err := n.space(r).Do(func() error {
		l, err := host.FindLink(r.link())
		there = l != nil
		return err
	})
	return there, err
}

// check makes the plugins verify an attachment (CHECK) and logs errors. The attachment is kept in any case: creating it again
// would change the MAC and address of a VM that may be hibernated. Also, plugins complain about harmless differences, for
// example the bridge plugin when a port with a lower MAC has joined.
func (n *Network) check(ctx context.Context, r record) {
	list, err := n.known(r)
	if err != nil {
		return // there is no plugin to call
	}
	ctx, cancel := context.WithTimeout(ctx, pluginTime)
	defer cancel()
	err = n.cni.CheckNetworkList(ctx, list, n.runtime(r))
	if err != nil && !errors.Is(err, libcni.ErrorCheckNotSupp) {
		n.log.Warn("cni check failed", "network", n.cfg.Name, "vm", r.ID, "err", err)
	}
}

// known returns the conflist with which the attachment was made; if that is not cached, the current one.
func (n *Network) known(r record) (*libcni.NetworkConfigList, error) {
	b, _, err := n.cni.GetNetworkListCachedConfig(&libcni.NetworkConfigList{Name: n.cfg.Name}, n.runtime(r))
	if err == nil && len(b) > 0 {
		if list, err := libcni.NetworkConfFromBytes(b); err == nil {
			return list, nil
		}
	}
	return n.conflist()
}

// unplug runs DEL, which plugins must allow more than once, and gives a leased address back.
func (n *Network) unplug(ctx context.Context, r record) error {
	list, err := n.known(r)
	if err != nil && !r.Added {
		// ADD was interrupted and its conflist is gone. Removing the namespace removes its links, and we know of nothing else.
		n.log.Warn("incomplete interface removed without its CNI plugins", "network", n.cfg.Name, "vm", r.ID, "err", err)
		return nil
	}
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, pluginTime)
	defer cancel()
	rt := n.runtime(r)
	if !n.space(r).Exists() {
		rt.NetNS = ""
	}
	if err := n.cni.DelNetworkList(ctx, list, rt); err != nil {
		return pluginError("DEL", err)
	}
	if give := n.cfg.Addresses[r.Bridge]; give != nil {
		return give.Unlease(ctx, r.ID, r.Index, r.NIC.MAC)
	}
	return nil
}

// vacate removes the namespace of a VM unless other interfaces of the VM are in it.
func (n *Network) vacate(r record) error {
	s := n.space(r)
	if !s.Exists() {
		return s.Remove() // the file that remains after a reboot
	}
	others := false
	err := s.Do(func() error {
		links, err := host.ListLinks()
		for _, l := range links {
			name := l.Attrs().Name
			others = others || name != r.link() && strings.HasPrefix(name, "eth")
		}
		return err
	})
	if err != nil || others {
		return err
	}
	return s.Remove()
}

// collect makes the plugins drop every attachment except the valid ones (GC, since version 1.1 of CNI).
func (n *Network) collect(ctx context.Context, valid []record) error {
	list, err := n.conflist()
	if err != nil {
		return err
	}
	args := &libcni.GCArgs{}
	for _, r := range valid {
		args.ValidAttachments = append(args.ValidAttachments, types.GCAttachment{ContainerID: string(r.ID), IfName: r.link()})
	}
	ctx, cancel := context.WithTimeout(ctx, pluginTime)
	defer cancel()
	if err := n.cni.GCNetworkList(ctx, list, args); err != nil {
		return fmt.Errorf("network %s: %w", n.cfg.Name, pluginError("GC", err))
	}
	return nil
}
