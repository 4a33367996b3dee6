package vm

import (
	"regexp"
	"slices"

	"cocoonstack.io/cocoon/internal/errdefs"
)

// MaxNICs is how many interfaces a VM can have while it runs, if it gets some later.
const MaxNICs = 9

// NICSpec asks for one network interface.
type NICSpec struct {
	Network string `json:"network,omitempty"` // "" is the node's default network
	MAC     string `json:"mac,omitempty"`     // "" lets the network choose the MAC, which is stable for the VM's name

	Ports []PortMapping `json:"ports,omitempty"` // of the host; they lead to the guest while it runs

	// Policed guests exchange packets only with their host until somebody sets their policies, where the network can enforce
	// policies.
	Policed bool `json:"policed,omitempty"`

	Masquerade Masquerade `json:"masquerade,omitzero"`

	// Place stays while other interfaces come and go: its addresses and its device follow from it. 0: its position in the list. The VM
	// sets it.
	Place int `json:"place,omitempty"`

	LinkDown bool `json:"link_down,omitempty"` // the guest sees no carrier, and no packet passes

	Pod PodName `json:"pod,omitzero"` // whose interface it is, for the network's plugins; it gives the VM no rights

	Bandwidth Bandwidth `json:"bandwidth,omitzero"`
}

// Bandwidth limits what an interface can transfer, if the network has a plugin for that; other networks ignore it, as with a kubelet. 0: no limit.
type Bandwidth struct {
	Ingress int64 `json:"ingress,omitempty"` // bits per second to the guest
	Egress  int64 `json:"egress,omitempty"`  // bits per second from the guest
}

// Limits of a Bandwidth, those of Kubernetes.
const (
	minBandwidth = 1000
	maxBandwidth = 1e15
)

func (b Bandwidth) validate() error {
	for _, n := range []int64{b.Ingress, b.Egress} {
		if n != 0 && (n < minBandwidth || n > maxBandwidth) {
			return errdefs.Invalidf("invalid bandwidth of %d bits per second; use %d to %d", n, minBandwidth, int64(maxBandwidth))
		}
	}
	return nil
}

// PodName names the pod of a VM.
type PodName struct {
	Namespace string `json:"namespace,omitempty"`
	Name      string `json:"name,omitempty"`
	UID       string `json:"uid,omitempty"`
}

var podNameRE = regexp.MustCompile(`^[A-Za-z0-9.-]{0,253}$`)

// validate refuses what could not be the name of a pod, and would be something else among the arguments of a plugin.
func (p PodName) validate() error {
	for _, text := range []string{p.Namespace, p.Name, p.UID} {
		if !podNameRE.MatchString(text) {
			return errdefs.Invalidf("%q names no pod, namespace or uid", text)
		}
	}
	return nil
}

// NIC is a network interface that exists: the network made it, the driver plugs it, the guest agent configures it.
type NIC struct {
	Network string   `json:"network"`
	Tap     string   `json:"tap"`             // link name on the host
	NetNS   string   `json:"netns,omitempty"` // path of the network namespace that holds Tap; "": that of cocoond
	MAC     string   `json:"mac"`
	IP      string   `json:"ip,omitempty"`      // "" when not known (yet)
	Prefix  int      `json:"prefix,omitempty"`  // length of the network prefix in bits
	Gateway string   `json:"gateway,omitempty"` // "" if none
	IPv6    string   `json:"ipv6,omitempty"`    // in addition to IP: one of Addresses, or formed by the guest from its MAC and a router's prefix; "" if none
	DNS     []string `json:"dns,omitempty"`
	MTU     int      `json:"mtu,omitempty"` // bytes; 0 is the guest's default
	DHCP    bool     `json:"dhcp"`          // a DHCP server on this network answers with the same IP, and a DHCPv6 server if there are Addresses

	Addresses []string `json:"addresses,omitempty"` // CIDR; set by the guest itself, in addition to IP
	Routes    []Route  `json:"routes,omitempty"`    // in addition to the route to Gateway

	Inside Inside `json:"inside,omitzero"` // what a masqueraded guest has instead of IP, IPv6, Addresses and Routes
	Place  int    `json:"place,omitempty"` // as in NICSpec

	LinkDown bool `json:"link_down,omitempty"` // as in NICSpec, of the device that is there
}

// Route is one route of a guest.
type Route struct {
	To  string `json:"to"`            // CIDR
	Via string `json:"via,omitempty"` // "" for a destination on the link
}

// PlaceOf returns the place of the i-th of nics: that on record, or else its position.
func PlaceOf(nics []NIC, i int) int {
	if p := nics[i].Place; p != 0 {
		return p
	}
	return i
}

// Place returns the place of the i-th interface of s.
func (s Spec) Place(i int) int {
	if p := s.NICs[i].Place; p != 0 {
		return p
	}
	return i
}

// Width returns how many places for interfaces the guest of s had when it booted. The places that it got later are behind it.
func (s Spec) Width() int {
	if s.BootNICs > 0 {
		return s.BootNICs
	}
	width := 0
	for i := range s.NICs {
		width = max(width, s.Place(i)+1)
	}
	return width
}

// FreePlace returns the first place for one more interface of s.
// Errors: ResourceExhausted, FailedPrecondition if s has no interface: the first one is there from the beginning.
func (s Spec) FreePlace() (int, error) {
	switch {
	case len(s.NICs) == 0:
		return 0, errdefs.Preconditionf("it was created without a network interface, so it gets none; create it again with one")
	case len(s.NICs) >= MaxNICs:
		return 0, errdefs.Exhaustedf("it has %d network interfaces, and no place for another one", len(s.NICs))
	}
	used := map[int]bool{0: true}
	for i := range s.NICs {
		used[s.Place(i)] = true
	}
	place := 1
	for used[place] {
		place++
	}
	return place, nil
}

// WithNIC returns s with one more interface, which is virtio. running says that its guest runs and gets it now.
func (s Spec) WithNIC(n NICSpec, running bool) Spec {
	if running {
		s.BootNICs = s.Width()
	}
	if s.Hardware != nil && len(s.Hardware.NICs) > 0 && len(s.Hardware.NICs) == len(s.NICs) {
		s.Hardware = s.Hardware.Clone()
		s.Hardware.NICs = append(s.Hardware.NICs, NICVirtio)
	}
	if n.Place == len(s.NICs) { // that is its position
		n.Place = 0
	}
	s.NICs = append(slices.Clip(s.NICs), n)
	return s
}

// WithoutNIC returns s without its i-th interface. The others stay in their places.
func (s Spec) WithoutNIC(i int, running bool) Spec {
	if running {
		s.BootNICs = s.Width()
	}
	if s.Hardware != nil && i < len(s.Hardware.NICs) {
		s.Hardware = s.Hardware.Clone()
		s.Hardware.NICs = slices.Delete(s.Hardware.NICs, i, i+1)
	}
	var rest []NICSpec
	for at, n := range s.NICs {
		if at == i {
			continue
		}
		n.Place = s.Place(at)
		if n.Place == len(rest) {
			n.Place = 0
		}
		rest = append(rest, n)
	}
	s.NICs = rest
	return s
}

// NICIn returns the index of the interface of s in a place; -1: there is none.
func (s Spec) NICIn(place int) int {
	for i := range s.NICs {
		if s.Place(i) == place {
			return i
		}
	}
	return -1
}

// NICOn returns the index of the further interface of s that ref names: by its network, or by its hardware address in nics. Errors: NotFound,
// InvalidArgument for the first interface.
func (s Spec) NICOn(ref string, nics []NIC) (int, error) {
	for i, n := range s.NICs {
		named := ref != "" && (n.Network == ref || i < len(nics) && (nics[i].MAC == ref || nics[i].Network == ref))
		switch {
		case named && i > 0:
			return i, nil
		case named && i < len(nics) && nics[i].MAC == ref:
			return 0, errdefs.Invalidf("it is the first interface, whose address is that of the VM; remove the VM instead")
		}
	}
	return 0, errdefs.NotFoundf("it has no further network interface on %q", ref)
}

// NICBy returns the index of the interface of s that ref names: by its hardware address in nics, or by its network, on which no other interface is.
// Errors: NotFound, InvalidArgument if several interfaces are on the network.
func (s Spec) NICBy(ref string, nics []NIC) (int, error) {
	at := -1
	for i, n := range nics[:min(len(nics), len(s.NICs))] {
		switch {
		case ref == "":
		case n.MAC == ref:
			return i, nil
		case n.Network == ref && at >= 0:
			return 0, errdefs.Invalidf("it has several network interfaces on %s; name one by its hardware address, such as %s", ref, n.MAC)
		case n.Network == ref:
			at = i
		}
	}
	if at < 0 {
		return 0, errdefs.NotFoundf("it has no network interface on %q", ref)
	}
	return at, nil
}

// WithLink returns s with the link of its i-th interface down, or up.
func (s Spec) WithLink(i int, down bool) Spec {
	s.NICs = slices.Clone(s.NICs)
	s.NICs[i].LinkDown = down
	return s
}

// WithLink returns r with the link of the device of its i-th interface down, or up.
func (r Record) WithLink(i int, down bool) Record {
	r.NICs = slices.Clone(r.NICs)
	r.NICs[i].LinkDown = down
	return r
}

// WithNIC returns r with one more interface, which exists as nic.
func (r Record) WithNIC(want NICSpec, nic NIC, running bool) Record {
	r.Spec = r.Spec.WithNIC(want, running)
	nic.Place = r.Spec.NICs[len(r.Spec.NICs)-1].Place
	r.NICs = append(slices.Clip(r.NICs), nic)
	if r.Resume != nil && len(r.Resume.MACs) > 0 { // the guest will have no other
		resume := *r.Resume
		resume.MACs = append(slices.Clip(resume.MACs), nic.MAC)
		r.Resume = &resume
	}
	return r
}

// WithoutNIC returns r without its i-th interface.
func (r Record) WithoutNIC(i int, running bool) Record {
	place := r.Spec.Place(i)
	r.Spec = r.Spec.WithoutNIC(i, running)
	r.NICs = slices.Delete(slices.Clone(r.NICs), i, i+1)
	for at := range r.NICs {
		r.NICs[at].Place = r.Spec.NICs[at].Place
	}
	if r.Resume != nil && i < len(r.Resume.MACs) {
		resume := *r.Resume
		resume.MACs = slices.Delete(slices.Clone(resume.MACs), i, i+1)
		r.Resume = &resume
	}
	return r.Settled(place)
}

// Settled returns r with an interface that is no longer Moving.
func (r Record) Settled(place int) Record {
	r.Moving = slices.DeleteFunc(slices.Clone(r.Moving), func(p int) bool { return p == place })
	if len(r.Moving) == 0 {
		r.Moving = nil
	}
	return r
}

// Unsettled returns r with an interface that is Moving.
func (r Record) Unsettled(place int) Record {
	r = r.Settled(place)
	r.Moving = append(slices.Clip(r.Moving), place)
	return r
}

// Plugged returns the interfaces of r that its guest has.
func (r Record) Plugged() (out []NIC) {
	for i, n := range r.NICs {
		if !slices.Contains(r.Moving, PlaceOf(r.NICs, i)) {
			out = append(out, n)
		}
	}
	return out
}

// SameNICs reports whether the guests of s and o have the same interfaces in the same places.
func (s Spec) SameNICs(o Spec) bool {
	if len(s.NICs) != len(o.NICs) {
		return false
	}
	for i := range s.NICs {
		if s.Place(i) != o.Place(i) || i > 0 && s.NICs[i].Network != o.NICs[i].Network {
			return false
		}
	}
	return true
}

// unplaced returns s with its interfaces in the places of their positions.
func (s Spec) unplaced() Spec {
	s.BootNICs, s.NICs = 0, slices.Clone(s.NICs)
	for i := range s.NICs {
		s.NICs[i].Place = 0
	}
	return s
}

// InOrderOf returns want in the order in which a guest has its interfaces on the same networks; as it is, if the networks differ. The first stays first.
func InOrderOf(want []NICSpec, has []NIC) []NICSpec {
	if len(want) != len(has) || len(want) == 0 {
		return want
	}
	rest, out := slices.Clone(want[1:]), want[:1:1]
	for _, n := range has[1:] {
		at := slices.IndexFunc(rest, func(w NICSpec) bool { return w.Network == n.Network })
		if at < 0 {
			return want
		}
		out, rest = append(out, rest[at]), slices.Delete(rest, at, at+1)
	}
	return out
}
