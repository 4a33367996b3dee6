package convert

import (
	"cmp"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"maps"
	"slices"
	"strings"

	"google.golang.org/protobuf/encoding/protojson"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"cocoonstack.io/cocoon/api/contract"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/vm"
)

// Node is what the sandboxes of a node have in common.
type Node struct {
	Driver  string  // runs the VMs. It must have shared folders and growth. Pods cannot choose another one
	Network string  // of their interface; "" is the default network of the node
	CPUs    int     // of a pod without a limit
	Memory  int64   // bytes of a pod without a limit
	Storage int64   // bytes for what its containers write; 0 is the engine's default
	Most    vm.Size // how large a pod can grow
}

// Sandbox returns the VM of a sandbox, and on whose behalf it is made.
// Errors: InvalidArgument if a VM cannot be what the pod asks for.
func Sandbox(c *cri.PodSandboxConfig, handler string, n Node) (vm.Spec, vm.Owner, error) {
	m := c.GetMetadata()
	if m.GetName() == "" || m.GetNamespace() == "" || m.GetUid() == "" {
		return vm.Spec{}, vm.Owner{}, errdefs.Invalidf("the sandbox needs a name, a namespace and a uid")
	}
	if err := possible(c.GetLinux()); err != nil {
		return vm.Spec{}, vm.Owner{}, fmt.Errorf("pod %s/%s: %w", m.GetNamespace(), m.GetName(), err)
	}
	text, err := protojson.Marshal(c)
	if err != nil {
		return vm.Spec{}, vm.Owner{}, fmt.Errorf("pod %s/%s: keep its configuration: %w", m.GetNamespace(), m.GetName(), err)
	}
	band, err := bandwidth(c.GetAnnotations())
	if err != nil {
		return vm.Spec{}, vm.Owner{}, fmt.Errorf("pod %s/%s: %w", m.GetNamespace(), m.GetName(), err)
	}
	rate, err := contract.ParseDiskRate(c.GetAnnotations())
	if err != nil {
		return vm.Spec{}, vm.Owner{}, fmt.Errorf("pod %s/%s: %w", m.GetNamespace(), m.GetName(), errdefs.As(errdefs.InvalidArgument, err))
	}
	if _, err := contract.ParseBackend(c.GetAnnotations()); err != nil {
		return vm.Spec{}, vm.Owner{}, fmt.Errorf("pod %s/%s: %w", m.GetNamespace(), m.GetName(), errdefs.As(errdefs.InvalidArgument, err))
	}
	parent, err := cgroup(c.GetLinux().GetCgroupParent())
	if err != nil {
		return vm.Spec{}, vm.Owner{}, fmt.Errorf("pod %s/%s: %w", m.GetNamespace(), m.GetName(), err)
	}
	size := c.GetLinux().GetResources()
	s := vm.Spec{
		Name: nameOf(m), Sandbox: true, Driver: n.Driver, CgroupParent: parent, Hostname: c.GetHostname(),
		CPUs: cmp.Or(wholeCPUs(size), n.CPUs), Memory: memory(size, n), Storage: n.Storage, DiskRate: vm.DiskRate(rate),
		NICs:    []vm.NICSpec{{Network: n.Network, Ports: ports(c.GetPortMappings()), Pod: vm.PodName{Namespace: m.GetNamespace(), Name: m.GetName(), UID: m.GetUid()}, Bandwidth: band}},
		Sysctls: sysctls(c.GetLinux().GetSysctls()), DNS: dns(c.GetDnsConfig()),
		Labels: map[string]string{contract.VMLabelCRISandbox: string(text), contract.VMLabelCRIHandler: handler},
	}
	s.Hardware = growth(s.Size(), n.Most)
	return s, vm.Owner{Namespace: m.GetNamespace(), PodUID: m.GetUid()}, nil
}

// nameOf returns the name of the VM of a sandbox in its namespace. Each attempt for a pod has one of its own.
func nameOf(m *cri.PodSandboxMetadata) string {
	const longest = 40
	sum := sha256.Sum256([]byte(m.GetNamespace() + "/" + m.GetName() + "/" + m.GetUid()))
	return fmt.Sprintf("%s.%s.%d", strings.TrimRight(m.GetName()[:min(len(m.GetName()), longest)], "-."), hex.EncodeToString(sum[:5]), m.GetAttempt())
}

// possible refuses what only a process of the node could have.
func possible(l *cri.LinuxPodSandboxConfig) error {
	ns := l.GetSecurityContext().GetNamespaceOptions()
	for _, asked := range []struct {
		what string
		mode cri.NamespaceMode
	}{{"hostNetwork", ns.GetNetwork()}, {"hostPID", ns.GetPid()}, {"hostIPC", ns.GetIpc()}} {
		if asked.mode == cri.NamespaceMode_NODE {
			return errdefs.Invalidf("a VM has no %s, because it has a kernel of its own; remove %s, or the runtimeClassName of the pod", asked.what, asked.what)
		}
	}
	return mappable(ns.GetUsernsOptions())
}

// mappable refuses a mapping of users that no pod can have. A possible one has no effect: the users of a VM are none of the node, and the files of its
// mounts have the owners in it that they have in a container with a mapping.
func mappable(u *cri.UserNamespace) error {
	switch {
	case u == nil || u.GetMode() == cri.NamespaceMode_NODE:
		return nil
	case u.GetMode() != cri.NamespaceMode_POD:
		return errdefs.Invalidf("the users of a pod cannot be those of mode %s; use POD or NODE", u.GetMode())
	}
	for _, m := range [][]*cri.IDMapping{u.GetUids(), u.GetGids()} {
		if len(m) != 1 || m[0].GetContainerId() != 0 || m[0].GetLength() == 0 {
			return errdefs.Invalidf("the users and the groups of a pod have one mapping each, from 0 on")
		}
	}
	return nil
}

// wholeCPUs returns how many CPUs a quota fills; 0: there is none.
func wholeCPUs(r *cri.LinuxContainerResources) int {
	quota, period := r.GetCpuQuota(), cmp.Or(r.GetCpuPeriod(), defaultPeriod)
	if quota <= 0 || period <= 0 {
		return 0
	}
	return int(min((quota+period-1)/period, vm.MaxCPUs))
}

// GuestOverhead is the memory of a guest in bytes that its kernel and its agent need beside the containers.
const GuestOverhead = 64 << 20

// memory returns the size of a guest whose containers may use as much as the pod: whole MiB, as a hypervisor gives and counts them.
func memory(r *cri.LinuxContainerResources, n Node) int64 {
	limit := min(r.GetMemoryLimitInBytes(), vm.MaxMemory)
	if limit <= 0 {
		return n.Memory
	}
	const unit = 1 << 20
	return max((limit+GuestOverhead+unit-1)/unit*unit, vm.MinMemory)
}

// defaultPeriod is the period of a CPU quota that names none, in microseconds, as with runc.
const defaultPeriod = 100_000

func ports(all []*cri.PortMapping) (out []vm.PortMapping) {
	for _, p := range all {
		if p.GetHostPort() == 0 { // the port is only declared
			continue
		}
		out = append(out, vm.PortMapping{
			Protocol: vm.Protocol(strings.ToLower(p.GetProtocol().String())), HostIP: hostIP(p.GetHostIp()),
			HostPort: uint16(p.GetHostPort()), GuestPort: uint16(p.GetContainerPort()), //nolint:gosec // the API server has checked them
		})
	}
	return out
}

// hostIP returns an address of the node; "" stands for all of them.
func hostIP(text string) string {
	if text == "0.0.0.0" || text == "::" {
		return ""
	}
	return text
}

func sysctls(all map[string]string) (out []vm.Sysctl) {
	for _, name := range slices.Sorted(maps.Keys(all)) {
		out = append(out, vm.Sysctl{Name: name, Value: all[name]})
	}
	return out
}

// dns returns how the guest resolves names: the kubelet decides that, not the network.
func dns(c *cri.DNSConfig) *vm.DNS {
	if c == nil {
		return nil
	}
	return &vm.DNS{Servers: c.GetServers(), Own: len(c.GetServers()) > 0, Searches: c.GetSearches(), Options: c.GetOptions()}
}

// IsSandbox reports whether a VM is a sandbox of CRI.
func IsSandbox(r vm.Record) bool { return r.Spec.Labels[contract.VMLabelCRISandbox] != "" }

// Config returns the configuration with which the sandbox was made.
func Config(r vm.Record) *cri.PodSandboxConfig {
	var c cri.PodSandboxConfig
	if err := (protojson.UnmarshalOptions{DiscardUnknown: true}).Unmarshal([]byte(r.Spec.Labels[contract.VMLabelCRISandbox]), &c); err != nil {
		return &cri.PodSandboxConfig{Metadata: &cri.PodSandboxMetadata{Name: r.Spec.Name, Namespace: r.Owner.Namespace, Uid: r.Owner.PodUID}}
	}
	return &c
}

// StandIn says in one sentence that the VM of a sandbox runs in another hypervisor than the one that its pod asks for; "" if it does not.
func StandIn(r vm.Record) string {
	want := Config(r).GetAnnotations()[contract.KeyBackend]
	if want == "" || want == r.Driver {
		return ""
	}
	return fmt.Sprintf("VM %s runs in %s, which stands in for %s", r.Spec.Name, r.Driver, want)
}

// Ready reports whether the sandbox has its network and can have containers. One whose guest was a container that has ended can have another one.
func Ready(r vm.Record) bool {
	again := r.State == vm.StateStopped && r.BootContainer != "" && r.Reason != vm.ReasonLost
	return (r.State == vm.StateRunning || r.State == vm.StateCreated || again) && len(r.NICs) > 0
}

func sandboxState(r vm.Record) cri.PodSandboxState {
	if Ready(r) {
		return cri.PodSandboxState_SANDBOX_READY
	}
	return cri.PodSandboxState_SANDBOX_NOTREADY
}

// Listed returns the sandbox as in a list.
func Listed(r vm.Record) *cri.PodSandbox {
	c := Config(r)
	return &cri.PodSandbox{
		Id: SandboxID(r.ID), Metadata: c.GetMetadata(), State: sandboxState(r), CreatedAt: r.CreatedAt.UnixNano(),
		Labels: c.GetLabels(), Annotations: c.GetAnnotations(), RuntimeHandler: r.Spec.Labels[contract.VMLabelCRIHandler],
	}
}

// SandboxStatus returns the state of the sandbox.
func SandboxStatus(r vm.Record) *cri.PodSandboxStatus {
	c := Config(r)
	s := &cri.PodSandboxStatus{
		Id: SandboxID(r.ID), Metadata: c.GetMetadata(), State: sandboxState(r), CreatedAt: r.CreatedAt.UnixNano(), Network: network(r),
		Linux:  &cri.LinuxPodSandboxStatus{Namespaces: &cri.Namespace{Options: c.GetLinux().GetSecurityContext().GetNamespaceOptions()}},
		Labels: c.GetLabels(), Annotations: c.GetAnnotations(), RuntimeHandler: r.Spec.Labels[contract.VMLabelCRIHandler],
	}
	return s
}

// Address returns the first address of the pod; "": it has none.
func Address(r vm.Record) string { return network(r).GetIp() }

// network returns the addresses of the pod, that of its guest's first interface first.
func network(r vm.Record) *cri.PodSandboxNetworkStatus {
	out := &cri.PodSandboxNetworkStatus{}
	if len(r.NICs) == 0 {
		return out
	}
	n := r.NICs[0]
	all := []string{n.IP, n.IPv6}
	for _, cidr := range n.Addresses {
		address, _, _ := strings.Cut(cidr, "/")
		all = append(all, address)
	}
	seen := map[string]bool{"": true}
	for _, a := range all {
		switch {
		case seen[a]:
			continue
		case out.Ip == "":
			out.Ip = a
		default:
			out.AdditionalIps = append(out.AdditionalIps, &cri.PodIP{Ip: a})
		}
		seen[a] = true
	}
	return out
}
