package session

import (
	"maps"
	"slices"
	"strings"

	"cocoonstack.io/cocoon/internal/guest"
	"cocoonstack.io/cocoon/internal/vm"
)

// This file says what a guest is told about itself when it has booted.

// setupOf returns what the guest is told about itself. It leaves out the names of the host's links and namespaces.
func setupOf(r vm.Record) guest.Setup {
	s := guest.Setup{Hostname: r.Spec.Hostname, Volumes: r.Spec.Volumes, Sysctls: r.Spec.Sysctls, VolumeLayers: layersOf(r), VolumeSerials: serialsOf(r)}
	switch {
	case r.Spec.Sandbox && r.BootContainer == "":
		s.Sandbox = true
		s.Volumes = append(slices.Clip(s.Volumes), vm.Volume{Name: vm.SharedVolume, Kind: vm.VolumeDir, Dir: &vm.HostDir{Path: "/"}})
		s.VolumeSerials = maps.Clone(s.VolumeSerials)
		if s.VolumeSerials == nil {
			s.VolumeSerials = map[string]string{}
		}
		s.VolumeSerials[vm.SharedVolume] = vm.SharedTag
	case len(r.Containers) > 0:
		s.Containers, s.Restart = containersOf(r), r.Spec.Restart
	default:
		s.Process, s.Mounts = new(r.Process.Addressed(r.NICs)), r.Spec.Mounts
	}
	dns := r.Spec.DNS
	for _, n := range vm.GuestNICs(r.Plugged()) {
		n.Tap, n.NetNS, n.Place, n.LinkDown = "", "", 0, false
		if dns != nil && dns.Own {
			n.DNS = nil
		}
		s.NICs = append(s.NICs, n)
		if n.IP != "" {
			s.Hosts = append(s.Hosts, n.IP+" "+strings.Join(r.Spec.HostNames(), " "))
		}
	}
	if n := len(s.NICs); n > 0 && dns != nil {
		s.NICs[n-1].DNS = slices.Concat(s.NICs[n-1].DNS, dns.Servers)
	}
	s.Resolver = dns.Lines()
	for _, h := range r.Spec.Hosts {
		s.Hosts = append(s.Hosts, h.Line())
	}
	return s
}

// layersOf returns the layers of the volumes with the files of images, by their names.
func layersOf(r vm.Record) map[string][]string {
	var out map[string][]string
	for _, v := range r.ImageVolumes {
		if out == nil {
			out = map[string][]string{}
		}
		out[v.Volume] = v.Layers
	}
	return out
}

// serialsOf returns, by their names, the serials of the volumes that are disks, the tags of those that are folders of the node, and for
// those that are folders of servers the name by which servers know the guest. It stays when the guest boots again, so that a server
// releases the locks of the boot before at once.
func serialsOf(r vm.Record) map[string]string {
	var out map[string]string
	set := func(volume, serial string) {
		if out == nil {
			out = map[string]string{}
		}
		out[volume] = serial
	}
	for _, v := range r.Attached {
		set(v.Volume, v.Serial)
	}
	for i, v := range r.Spec.Dirs() {
		set(v.Name, vm.DirTag(i))
	}
	for _, v := range r.Spec.NFSVolumes() {
		set(v.Name, "cocoon-"+string(r.ID))
	}
	return out
}

// containersOf returns what the guest is told about its containers. A guest that has started them only heeds the resources.
func containersOf(r vm.Record) []guest.Container {
	var out []guest.Container
	for i, c := range r.Containers {
		spec := r.Spec.Containers[i]
		out = append(out, guest.Container{
			Name: c.Name, Kind: spec.Kind, Process: c.Process.Addressed(r.NICs), Layers: c.Layers, Mounts: spec.Mounts, Run: c.Status.Next(),
			Hold: spec.Hold, Root: spec.Root, MessagePath: spec.MessagePath, MessageFromLog: spec.MessageFromLog,
			Resources: spec.Resources, Restart: r.Spec.RestartOf(spec),
		})
	}
	return out
}
