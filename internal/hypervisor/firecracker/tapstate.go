package firecracker

import (
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"cocoonstack.io/cocoon/internal/errdefs"
)

// tapState is all that a tap loses when it moves to another network namespace: whether it is up, its bridge and its settings there, its settings of IPv6, and what is done
// to packets that come in (tc), there and at the links to which it redirects. It keeps its name, alias, MTU, hardware address and queue length. Rules of nftables that
// name it stay, but not chains of the family netdev.
type tapState struct {
	link   netlink.Link
	up     bool
	port   *netlink.Protinfo // on a bridge
	vlans  []*nl.BridgeVlanInfo
	sysctl map[string]string
	inputs []input
}

// input is what is done to packets that come in at a link.
type input struct {
	link    netlink.Link
	qdisc   netlink.Qdisc
	filters []netlink.Filter
}

// readLink reads a tap in the namespace of this thread.
// Errors: FailedPrecondition if it does not exist, Unsupported if it has what cannot be put back.
func readLink(name string) (*tapState, error) {
	found, err := netlink.LinkByName(name)
	if err != nil {
		return nil, errdefs.Preconditionf("look for tap %s: %w", name, err)
	}
	l := &tapState{link: found, up: found.Attrs().Flags&net.FlagUp != 0, sysctl: map[string]string{}}
	for _, key := range []string{"disable_ipv6", "addr_gen_mode", "accept_ra"} {
		value, err := os.ReadFile(ipv6Setting(name, key))
		if err == nil {
			l.sysctl[key] = strings.TrimSpace(string(value))
		} else if !errors.Is(err, os.ErrNotExist) { // the kernel has no IPv6
			return nil, fmt.Errorf("look at tap %s: %w", name, err)
		}
	}
	if err := l.readPort(); err != nil {
		return nil, fmt.Errorf("look at tap %s: %w", name, err)
	}
	if err := l.readInputs(); err != nil {
		return nil, fmt.Errorf("look at tap %s: %w", name, err)
	}
	return l, nil
}

func ipv6Setting(name, key string) string {
	return filepath.Join("/proc/sys/net/ipv6/conf", name, key)
}

func (l *tapState) readPort() error {
	master := l.link.Attrs().MasterIndex
	if master == 0 {
		return nil
	}
	of, err := netlink.LinkByIndex(master)
	if err != nil {
		return err
	}
	bridge, ok := of.(*netlink.Bridge)
	if !ok {
		return errdefs.Unsupportedf("it belongs to %s of kind %s, to which Firecracker cannot connect; put it on a bridge", of.Attrs().Name, of.Type())
	}
	port, err := netlink.LinkGetProtinfo(l.link)
	if err != nil {
		return err
	}
	l.port = &port
	if bridge.VlanFiltering == nil || !*bridge.VlanFiltering {
		return nil
	}
	all, err := netlink.BridgeVlanList()
	l.vlans = all[int32(l.link.Attrs().Index)]
	return err
}

// readInputs reads the input of the tap, and those of links to which it redirects, as they may redirect to it.
func (l *tapState) readInputs() error {
	own, err := readInput(l.link)
	if err != nil || own == nil {
		return err
	}
	l.inputs = append(l.inputs, *own)
	seen := map[int]bool{l.link.Attrs().Index: true}
	for _, f := range own.filters {
		for _, to := range redirects(f) {
			if seen[to] {
				continue
			}
			seen[to] = true
			peer, err := netlink.LinkByIndex(to)
			if err != nil {
				return err
			}
			in, err := readInput(peer)
			if err != nil {
				return err
			}
			if in != nil {
				l.inputs = append(l.inputs, *in)
			}
		}
	}
	return nil
}

// redirects returns the links to which f redirects.
func redirects(f netlink.Filter) (to []int) {
	if u, ok := f.(*netlink.U32); ok {
		for _, a := range u.Actions {
			if m, ok := a.(*netlink.MirredAction); ok {
				to = append(to, m.Ifindex)
			}
		}
	}
	return to
}

func readInput(at netlink.Link) (*input, error) {
	qdiscs, err := netlink.QdiscList(at)
	if err != nil {
		return nil, err
	}
	for _, q := range qdiscs {
		if q.Attrs().Parent != netlink.HANDLE_INGRESS {
			continue
		}
		if q.Type() != "ingress" {
			return nil, errdefs.Unsupportedf("%s has a queue of kind %s, which Firecracker's driver cannot put back", at.Attrs().Name, q.Type())
		}
		in := &input{link: at, qdisc: q}
		filters, err := netlink.FilterList(at, q.Attrs().Handle)
		if err != nil {
			return nil, err
		}
		for _, f := range filters {
			u, ok := f.(*netlink.U32)
			if !ok {
				return nil, errdefs.Unsupportedf("%s has a filter of kind %s, which Firecracker's driver cannot put back", at.Attrs().Name, f.Type())
			}
			if u.Sel != nil { // otherwise it is a table of filters, which the kernel makes itself
				u.Handle = 0
				in.filters = append(in.filters, u)
			}
		}
		return in, nil
	}
	return nil, nil
}

// restore puts back what the tap had, in the namespace of this thread, to which it has come back.
func (l *tapState) restore() error {
	name := l.link.Attrs().Name
	now, err := netlink.LinkByName(name)
	if err != nil {
		return err
	}
	for key, value := range l.sysctl { // first, so that it has no address for a moment
		if err := os.WriteFile(ipv6Setting(name, key), []byte(value), 0); err != nil && key == "disable_ipv6" {
			return err
		}
	}
	if err := l.restorePort(now); err != nil {
		return fmt.Errorf("put it on its bridge: %w", err)
	}
	if l.up {
		if err := netlink.LinkSetUp(now); err != nil {
			return err
		}
	}
	for _, in := range l.inputs {
		if err := in.restore(l.link.Attrs().Index, now); err != nil {
			return fmt.Errorf("filters at %s: %w", in.link.Attrs().Name, err)
		}
	}
	return nil
}

func (l *tapState) restorePort(now netlink.Link) error {
	if l.port == nil {
		return nil
	}
	if err := netlink.LinkSetMasterByIndex(now, l.link.Attrs().MasterIndex); err != nil {
		return err
	}
	fresh, err := netlink.LinkGetProtinfo(now)
	if err != nil {
		return err
	}
	for _, s := range []struct {
		was, is bool
		set     func(netlink.Link, bool) error
	}{
		{l.port.Isolated, fresh.Isolated, netlink.LinkSetIsolated},
		{l.port.Learning, fresh.Learning, netlink.LinkSetLearning},
		{l.port.Flood, fresh.Flood, netlink.LinkSetFlood},
		{l.port.Hairpin, fresh.Hairpin, netlink.LinkSetHairpin},
		{l.port.Guard, fresh.Guard, netlink.LinkSetGuard},
		{l.port.FastLeave, fresh.FastLeave, netlink.LinkSetFastLeave},
		{l.port.RootBlock, fresh.RootBlock, netlink.LinkSetRootBlock},
		{l.port.ProxyArp, fresh.ProxyArp, netlink.LinkSetBrProxyArp},
		{l.port.ProxyArpWiFi, fresh.ProxyArpWiFi, netlink.LinkSetBrProxyArpWiFi},
		{l.port.NeighSuppress, fresh.NeighSuppress, netlink.LinkSetBrNeighSuppress},
	} {
		if s.was != s.is {
			if err := s.set(now, s.was); err != nil {
				return err
			}
		}
	}
	return l.restoreVLANs(now)
}

func (l *tapState) restoreVLANs(now netlink.Link) error {
	if l.vlans == nil {
		return nil
	}
	all, err := netlink.BridgeVlanList()
	if err != nil {
		return err
	}
	for _, v := range all[int32(now.Attrs().Index)] {
		if err := netlink.BridgeVlanDel(now, v.Vid, v.PortVID(), v.EngressUntag(), false, true); err != nil {
			return err
		}
	}
	for _, v := range l.vlans {
		if err := netlink.BridgeVlanAdd(now, v.Vid, v.PortVID(), v.EngressUntag(), false, true); err != nil {
			return err
		}
	}
	return nil
}

// restore puts the filters of a link back. was is the index that the tap had, and tap what it is now.
func (in input) restore(was int, tap netlink.Link) error {
	index := in.link.Attrs().Index
	if index == was {
		index = tap.Attrs().Index
	}
	in.qdisc.Attrs().LinkIndex = index
	if err := netlink.QdiscAdd(in.qdisc); err != nil && !errors.Is(err, unix.EEXIST) {
		return err
	}
	at, err := netlink.LinkByIndex(index)
	if err != nil {
		return err
	}
	now, err := netlink.FilterList(at, in.qdisc.Attrs().Handle)
	if err != nil {
		return err
	}
	for _, f := range now { // those that redirected to the tap lead nowhere
		if u, ok := f.(*netlink.U32); ok && u.Sel == nil {
			continue
		}
		if err := netlink.FilterDel(f); err != nil && !errors.Is(err, unix.ENOENT) {
			return err
		}
	}
	for _, f := range in.filters {
		u, ok := f.(*netlink.U32)
		if !ok {
			continue
		}
		u.LinkIndex = index
		for n, a := range u.Actions {
			m, ok := a.(*netlink.MirredAction)
			if !ok {
				continue
			}
			to := m.Ifindex
			if to == was {
				to = tap.Attrs().Index
			}
			u.Actions[n] = netlink.NewMirredAction(to)
			if m.MirredAction != netlink.TCA_EGRESS_REDIR {
				m.Ifindex = to
				m.Index = 0
				u.Actions[n] = m
			}
		}
		u.RedirIndex = 0
		if err := netlink.FilterAdd(u); err != nil {
			return err
		}
	}
	return nil
}
