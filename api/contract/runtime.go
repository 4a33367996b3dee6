package contract

import (
	"fmt"
	"net/netip"
	"strconv"
	"strings"
)

// VMRuntime is what the node reports about a VM in its pod's annotations.
type VMRuntime struct {
	ID      string
	IP      string // of the guest, in canonical form
	VNCPort int32  // 0: no port
}

// ParseVMRuntime reads a VMRuntime. The error, if any, is an Errors with every bad key.
func ParseVMRuntime(annotations map[string]string) (VMRuntime, error) {
	r := &reader{from: annotations}
	rt := VMRuntime{ID: r.text(KeyID), IP: r.ip(), VNCPort: r.port(KeyVNCPort)}
	return rt, r.errs.err()
}

func (r *reader) ip() string {
	v := r.from[KeyIP]
	if v == "" {
		return ""
	}
	a, err := netip.ParseAddr(v)
	if err != nil || a.Zone() != "" {
		r.bad(KeyIP, "must be an IP address")
		return ""
	}
	return a.String()
}

// VSOCKCID returns the context id of the guest's virtio socket that the node reports; 0 if there is none.
func VSOCKCID(annotations map[string]string) uint32 {
	n, err := strconv.ParseUint(annotations[KeyCID], 10, 32)
	if err != nil {
		return 0
	}
	return uint32(n)
}

// CIDText returns the value of KeyCID; "" for none.
func CIDText(cid uint32) string {
	if cid == 0 {
		return ""
	}
	return strconv.FormatUint(uint64(cid), 10)
}

// KernelSums returns the checksums of the kernel and the initrd of the guest that the node reports; 0: not known, or none.
func KernelSums(annotations map[string]string) (kernel, initrd uint32) {
	first, second, _ := strings.Cut(annotations[KeyKernelSums], ",")
	k, err := strconv.ParseUint(first, 10, 32)
	i, err2 := strconv.ParseUint(second, 10, 32)
	if err != nil || err2 != nil {
		return 0, 0
	}
	return uint32(k), uint32(i)
}

// KernelSumsText returns the value of KeyKernelSums; "" for none.
func KernelSumsText(kernel, initrd uint32) string {
	if kernel == 0 && initrd == 0 {
		return ""
	}
	return fmt.Sprintf("%d,%d", kernel, initrd)
}

// Apply writes rt to annotations: keys of empty fields are removed.
func (rt VMRuntime) Apply(annotations map[string]string) {
	put(annotations, KeyID, rt.ID)
	put(annotations, KeyIP, rt.IP)
	put(annotations, KeyVNCPort, portText(rt.VNCPort))
}

// Hibernate reports whether the annotations ask for a hibernated VM. Only the literal "true" asks for it.
func Hibernate(annotations map[string]string) bool { return annotations[KeyHibernate] == "true" }

// SetHibernate sets or clears the request to hibernate.
func SetHibernate(annotations map[string]string, v bool) {
	put(annotations, KeyHibernate, flagText(v))
}

// Paused reports whether the annotations ask for a paused VM. Only the literal "true" asks for it.
func Paused(annotations map[string]string) bool { return annotations[KeyPaused] == "true" }

// ResolveConnType is how a person reaches the guest: the requested type, else VNC if its port is known, else the default of
// the operating system.
func ResolveConnType(s VMSpec, rt VMRuntime) ConnType {
	switch {
	case s.ConnType != "":
		return s.ConnType
	case rt.VNCPort != 0:
		return ConnVNC
	}
	switch s.OS {
	case OSAndroid:
		return ConnADB
	case OSWindows:
		return ConnRDP
	case OSLinux, OSMacOS, "":
	}
	return ConnSSH
}
