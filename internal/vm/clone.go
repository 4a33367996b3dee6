package vm

import "maps"

// Clone returns a copy of s that shares no memory with it.
func (s Spec) Clone() Spec {
	s.Labels = maps.Clone(s.Labels)
	s.Offered = cloneSlice(s.Offered)
	s.Process = s.Process.Clone()
	s.NICs = cloneSlice(s.NICs)
	for i := range s.NICs {
		n := &s.NICs[i]
		n.Ports, n.Masquerade.Ports = cloneSlice(n.Ports), cloneSlice(n.Masquerade.Ports)
	}
	if s.CloudInit != nil {
		c := *s.CloudInit
		c.SSHKeys = cloneSlice(c.SSHKeys)
		s.CloudInit = &c
	}
	s.Hardware = s.Hardware.Clone()
	if s.SMBIOS != nil {
		b := *s.SMBIOS
		s.SMBIOS = &b
	}
	s.Volumes = cloneSlice(s.Volumes)
	for i := range s.Volumes {
		s.Volumes[i] = s.Volumes[i].Clone()
	}
	s.Mounts = cloneSlice(s.Mounts)
	s.Sysctls = cloneSlice(s.Sysctls)
	s.Hosts = cloneSlice(s.Hosts)
	for i := range s.Hosts {
		s.Hosts[i].Names = cloneSlice(s.Hosts[i].Names)
	}
	s.DNS = s.DNS.Clone()
	s.Containers = cloneSlice(s.Containers)
	for i := range s.Containers {
		s.Containers[i] = s.Containers[i].Clone()
	}
	return s
}

// Clone returns a copy of v. They share only the bytes of the files, which nobody changes.
func (v Volume) Clone() Volume {
	if v.Group != nil {
		g := *v.Group
		v.Group = &g
	}
	v.Files = cloneSlice(v.Files)
	if v.Disk != nil {
		d := *v.Disk
		v.Disk = &d
	}
	if v.Dir != nil {
		d := *v.Dir
		v.Dir = &d
	}
	if v.HostDisk != nil {
		d := *v.HostDisk
		v.HostDisk = &d
	}
	if v.NFS != nil {
		n := *v.NFS
		n.Options = cloneSlice(n.Options)
		v.NFS = &n
	}
	return v
}

// Clone returns a copy of p that shares no memory with it.
func (p Process) Clone() Process {
	p.Entrypoint = cloneSlice(p.Entrypoint)
	p.Args = cloneSlice(p.Args)
	p.Env = cloneSlice(p.Env)
	p.Security = p.Security.Clone()
	p.FileKeys = cloneSlice(p.FileKeys)
	return p
}

// Clone returns a copy of d that shares no memory with it.
func (d Disk) Clone() Disk {
	if d.Backing != nil {
		b := d.Backing.Clone()
		d.Backing = &b
	}
	return d
}

// Clone returns a copy of r that shares no memory with it.
func (r Record) Clone() Record {
	r.Spec = r.Spec.Clone()
	r.Process = r.Process.Clone()
	r.Disks = cloneSlice(r.Disks)
	for i := range r.Disks {
		r.Disks[i] = r.Disks[i].Clone()
	}
	r.NICs, r.Moving = cloneSlice(r.NICs), cloneSlice(r.Moving)
	for i := range r.NICs {
		n := &r.NICs[i]
		n.DNS, n.Addresses, n.Routes = cloneSlice(n.DNS), cloneSlice(n.Addresses), cloneSlice(n.Routes)
	}
	r.Containers = cloneSlice(r.Containers)
	for i := range r.Containers {
		r.Containers[i] = r.Containers[i].Clone()
	}
	r.Ephemeral = cloneSlice(r.Ephemeral)
	for i := range r.Ephemeral {
		r.Ephemeral[i] = r.Ephemeral[i].Clone()
	}
	r.ImageVolumes = cloneSlice(r.ImageVolumes)
	for i := range r.ImageVolumes {
		r.ImageVolumes[i] = r.ImageVolumes[i].Clone()
	}
	r.Attached = cloneSlice(r.Attached)
	r.Handle = cloneSlice(r.Handle)
	r.SnapshotIDs = cloneSlice(r.SnapshotIDs)
	if r.Resume != nil {
		resume := *r.Resume
		resume.MACs, resume.Volumes = cloneSlice(resume.MACs), cloneSlice(resume.Volumes)
		r.Resume = &resume
	}
	if r.ExitCode != nil {
		code := *r.ExitCode
		r.ExitCode = &code
	}
	return r
}

// cloneSlice copies s. A nil slice stays nil, not empty, so that a clone encodes to the same JSON.
func cloneSlice[T any](s []T) []T {
	if s == nil {
		return nil
	}
	return append(make([]T, 0, len(s)), s...)
}
