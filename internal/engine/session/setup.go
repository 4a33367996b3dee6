package session

import (
	"cocoonstack.io/cocoon/internal/guest"
	"cocoonstack.io/cocoon/internal/vm"
)

// setupOf returns what the guest is told about itself. It leaves out the names of the host's links and namespaces.
func setupOf(r vm.Record) guest.Setup {
	s := guest.Setup{Hostname: r.Spec.Hostname, Volumes: r.Spec.Volumes}
	if len(r.Containers) > 0 {
		s.Containers, s.Restart = containersOf(r), r.Spec.Restart
	} else {
		s.Process, s.Mounts = &r.Process, r.Spec.Mounts
	}
	for _, n := range r.NICs {
		n.Tap, n.NetNS = "", ""
		s.NICs = append(s.NICs, n)
		if n.IP != "" {
			s.Hosts = append(s.Hosts, n.IP+" "+s.Hostname)
		}
	}
	return s
}

// containersOf returns what the guest is told about its containers. A guest that has started them ignores it.
func containersOf(r vm.Record) []guest.Container {
	var out []guest.Container
	for i, c := range r.Containers {
		spec := r.Spec.Containers[i]
		out = append(out, guest.Container{
			Name: c.Name, Kind: spec.Kind, Process: c.Process, Layers: c.Layers, Mounts: spec.Mounts, Run: c.Status.Next(),
			Hold: spec.Hold,
		})
	}
	return out
}
