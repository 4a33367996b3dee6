package engine

import (
	"errors"
	"slices"
	"time"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/image"
	"cocoonstack.io/cocoon/internal/snapshot"
	"cocoonstack.io/cocoon/internal/vm"
)

// maxEphemeral is how many added containers one VM may have at a time, including ended ones.
const maxEphemeral = 64

// plugged returns the places for the layers of one more image in a guest with these disks: the serials of its layers, and
// the disks to plug. A layer that the guest has already gets no disk.
func plugged(disks, layers []vm.Disk) (serials []string, add []vm.Disk, err error) {
	byPath, free, used := map[string]string{}, portsOf(disks), map[string]bool{}
	for _, d := range disks {
		used[d.Serial] = true
		if d.Role == vm.RoleLayer {
			byPath[d.Path] = d.Serial
		}
	}
	number := 0
	for _, d := range layers {
		serial, have := byPath[d.Path]
		if !have {
			for used[image.SerialContainerLayer(number)] {
				number++
			}
			serial = image.SerialContainerLayer(number)
			port, err := free.take()
			if err != nil {
				return nil, nil, err
			}
			d.Serial, d.Port = serial, port
			used[serial], byPath[d.Path] = true, serial
			add = append(add, d)
		}
		serials = append(serials, serial)
	}
	return serials, add, nil
}

// withoutPlugged returns the disks that a guest has when it boots: all but those of added containers.
func withoutPlugged(disks []vm.Disk) []vm.Disk {
	added := func(d vm.Disk) bool { return d.Port != 0 && d.Role != vm.RoleVolume }
	if !slices.ContainsFunc(disks, added) {
		return disks
	}
	return slices.DeleteFunc(slices.Clone(disks), added)
}

// endedWith returns the added containers of a guest that has ended at that time.
func endedWith(all []vm.Ephemeral, at time.Time) []vm.Ephemeral {
	all = slices.Clone(all)
	for i := range all {
		r := &all[i].Record
		r.Layers = nil
		all[i].Volumes = slices.Clone(all[i].Volumes)
		for j := range all[i].Volumes {
			all[i].Volumes[j].Layers = nil
		}
		if r.Status.State == vm.ContainerTerminated {
			continue
		}
		r.Status.State = vm.ContainerRunning
		r.Status = r.Status.Cut(at)
	}
	return all
}

// over returns the containers of below, with those of top instead of those of the same name.
func over(below, top []vm.Ephemeral) []vm.Ephemeral {
	out := slices.DeleteFunc(slices.Clone(below), func(e vm.Ephemeral) bool { return find(top, e.Record.Name) >= 0 })
	return append(out, top...)
}

// find returns the index of the container called name; -1: there is none.
func find(all []vm.Ephemeral, name string) int {
	return slices.IndexFunc(all, func(e vm.Ephemeral) bool { return e.Record.Name == name })
}

// ephemeralIn returns the added containers of a VM that resumes from x. A VM that boots has none. A snapshot from elsewhere
// may say anything.
func ephemeralIn(x snapshot.Snapshot, live bool) ([]vm.Ephemeral, error) {
	if !live {
		return nil, nil
	}
	out := x.Record.Clone().Ephemeral
	if len(out) > maxEphemeral {
		return nil, errdefs.DataLossf("snapshot %s is damaged: %d containers were added to its VM; at most %d are possible", x.Name, len(out), maxEphemeral)
	}
	for i := range out {
		e := &out[i]
		err := errors.Join(e.Spec.ValidateEphemeral(), e.Spec.ValidateIn(x.Record.Spec.Volumes))
		own := len(e.Spec.Volumes)+len(e.Volumes) > 0 // only sandboxes have those
		if err != nil || own || e.Spec.Name != e.Record.Name || find(out, e.Record.Name) != i {
			return nil, errdefs.DataLossf("snapshot %s is damaged: container %q, which was added to its VM, is not valid", x.Name, e.Record.Name)
		}
		e.Record.ImageManifest = ""
	}
	return out, nil
}

// bootEnded returns the containers of r, whose process has ended, with the end of the one that it boots. The exit code is that of a VM of a disk
// image elsewhere: 0 for an orderly end, 137 for any other.
func bootEnded(r vm.Record, was []vm.Ephemeral, at time.Time) []vm.Ephemeral {
	i := find(was, r.BootContainer)
	if r.BootContainer == "" || i < 0 || was[i].Record.Status.State != vm.ContainerRunning {
		return r.Ephemeral
	}
	out := slices.Clone(r.Ephemeral)
	s := was[i].Record.Status
	x := vm.ContainerExit{Reason: vm.ContainerCompleted, StartedAt: s.StartedAt, FinishedAt: at}
	if r.Reason != vm.ReasonPoweredOff && r.Reason != vm.ReasonStopped {
		x.Code, x.Reason, x.Message = vm.LostExitCode, vm.ContainerError, r.Message
	}
	s.State, s.Reason, s.Message, s.Exit = vm.ContainerTerminated, x.Reason, "", &x
	out[i].Record.Status = s
	return out
}

// bootStarted returns the containers of r, whose process has just started, with the start of the one that it boots.
func bootStarted(r vm.Record, at time.Time) []vm.Ephemeral {
	i := find(r.Ephemeral, r.BootContainer)
	if r.BootContainer == "" || i < 0 {
		return r.Ephemeral
	}
	out := slices.Clone(r.Ephemeral)
	out[i].Record.Status = vm.ContainerStatus{State: vm.ContainerRunning, StartedAt: at}
	return out
}
