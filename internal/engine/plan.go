package engine

import (
	"cmp"
	"context"
	"fmt"
	"os"
	"slices"
	"time"

	"cocoonstack.io/cocoon/internal/cloudinit"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/guest"
	"cocoonstack.io/cocoon/internal/hypervisor"
	"cocoonstack.io/cocoon/internal/image"
	"cocoonstack.io/cocoon/internal/vm"
)

// driverFor returns the name of the driver that runs a VM whose spec names want.
func (n *node) driverFor(ctx context.Context, want string) (string, error) {
	if want == "" || slices.Contains(n.cfg.StandIns, want) && !n.drivers.usable(ctx, want) {
		want = n.cfg.DefaultDriver
	}
	_, err := n.drivers.get(want)
	return want, err
}

// design returns the first record of a VM that driver runs. It decides and validates everything that it can before anything changes.
func (n *node) design(spec vm.Spec, driver string, img image.Image) (vm.Record, error) {
	if img.Type != vm.ImageOCI {
		spec = spec.Bootable()
	} else if spec.CloudInit.OnlyLogin() { // the record shows that it has no effect
		spec.CloudInit = nil
	}
	r := vm.Record{
		ID: vm.NewID(), Spec: withoutFiles(spec), State: vm.StateCreating, Driver: driver,
		ImageType: img.Type, ImageDigest: img.ID, CreatedAt: now(),
	}
	r.UpdatedAt = r.CreatedAt
	// If the node has no default network, a NIC that names no network is dropped; the record shows that.
	r.Spec.NICs = slices.DeleteFunc(slices.Clone(spec.NICs), func(s vm.NICSpec) bool { return n.nics.name(s) == "" })
	for _, s := range r.Spec.NICs {
		if _, err := n.nics.network(s); err != nil {
			return r, err
		}
	}
	var err error
	if r.Boot, err = n.bootOf(r.ID, r.Driver, spec, img.Type); err != nil {
		return r, err
	}
	if h := spec.Hardware; h != nil {
		if _, err := h.Clock.East(r.CreatedAt); err != nil {
			return r, err
		}
	}
	if img.Type != vm.ImageOCI {
		if len(spec.Containers) > 0 {
			return r, errdefs.Invalidf("image %s boots itself, so it cannot be given containers", spec.Image)
		}
		if !spec.Process.Empty() {
			return r, errdefs.Invalidf("image %s boots itself, so it cannot be given a command", spec.Image)
		}
		if len(spec.Process.FileKeys) > 0 {
			return r, errdefs.Invalidf("image %s boots itself, so it cannot have environment variables from files of volumes", spec.Image)
		}
		if v := slices.DeleteFunc(spec.ImageVolumes(), func(v vm.Volume) bool { return ofKernel(spec, v) }); len(v) > 0 {
			return r, errdefs.Invalidf("image %s boots itself, so the files of image %s cannot be mounted in its guest as volume %s", spec.Image, v[0].Image, v[0].Name)
		}
		if v := spec.NFSVolumes(); len(v) > 0 {
			return r, errdefs.Invalidf("image %s boots itself, so %s is not mounted in its guest as volume %s; mount it in the image or with cloud-init", spec.Image, v[0].NFS.Source(), v[0].Name)
		}
		if i := slices.IndexFunc(spec.Mounts, mountsDisk(spec.Volumes)); i >= 0 {
			return r, errdefs.Invalidf("image %s boots itself, so volume %s is not mounted for it; leave out the path or ask for a device, and mount the disk in the guest", spec.Image, spec.Mounts[i].Volume)
		}
		if spec.Process.ReadOnlyRoot {
			return r, errdefs.Invalidf("image %s boots itself, so its root cannot be read-only; leave that out", spec.Image)
		}
		if len(spec.Hosts) > 0 || spec.DNS != nil && !spec.DNS.Offered {
			return r, errdefs.Invalidf("image %s boots itself, so its files for names are its own; set host entries and DNS in the image or with cloud-init", spec.Image)
		}
		if len(spec.Sysctls) > 0 {
			return r, errdefs.Invalidf("image %s boots itself, so its kernel cannot be given sysctls; set them in the image or with cloud-init", spec.Image)
		}
		var c vm.CloudInit
		if spec.CloudInit != nil {
			c = *spec.CloudInit
		}
		return r, cloudinit.Validate(c, cloudinit.MountsOf(spec)...)
	}
	if k := spec.Kernel(); k != nil {
		return r, errdefs.Invalidf("image %s is a container image, which runs on the kernel of its node and not on %s; use a disk image, or %s for a guest without a disk", spec.Image, k.Path, vm.FromVolume(k.Volume))
	}
	if spec.IsWindows() {
		return r, errdefs.Invalidf("image %s is a container image, which runs Linux; use a disk image with Windows, or leave out that the guest is Windows", spec.Image)
	}
	if spec.CloudInit != nil {
		return r, errdefs.Invalidf("image %s is a container image, which has no cloud-init; leave out SSH keys, user data and the like", spec.Image)
	}
	if i := slices.IndexFunc(spec.Volumes, func(v vm.Volume) bool { return v.Label != "" }); i >= 0 {
		return r, errdefs.Invalidf("image %s is a container image, whose guest mounts the files of volume %s; give it a path instead of the label %s", spec.Image, spec.Volumes[i].Name, spec.Volumes[i].Label)
	}
	if len(spec.Containers) > 0 || spec.Sandbox { // each container has its own process
		return r, nil
	}
	if r.Process = spec.Process.Over(img.Config); r.Process.Empty() {
		return r, errdefs.Invalidf("image %s has no entrypoint; give a command", spec.Image)
	}
	if err := r.Process.Allowed(); err != nil {
		return r, fmt.Errorf("vm %s: %w", spec.Name, err)
	}
	return r, nil
}

// bootOf returns how the VM id of an image of type t starts in the driver with that name.
func (n *node) bootOf(id vm.ID, driver string, spec vm.Spec, t vm.ImageType) (vm.Boot, error) {
	if t == vm.ImageOCI {
		if n.cfg.Kernel == "" {
			return vm.Boot{}, errdefs.Preconditionf("image %s needs the guest kernel, and none is configured; build it with `make guest`", spec.Image)
		}
		b := vm.Boot{Kernel: n.cfg.Kernel, Initrd: n.cfg.Initrd}
		if len(spec.NFSVolumes()) > 0 {
			b.Cmdline = vm.ArgNFS
		}
		return b, nil
	}
	return n.dirs.bootsKernel(id, spec, vm.Boot{Firmware: cmp.Or(spec.Firmware, n.drivers.firmware(driver))}), nil
}

// startable refuses a start of r that would fail anyway, before anything changes.
func (n *node) startable(r vm.Record) error {
	if _, err := n.drivers.get(r.Driver); err != nil {
		return err
	}
	if _, err := n.sharesOf(r); err != nil {
		return err
	}
	if err := n.designSocket(r); err != nil {
		return err
	}
	if err := n.designHostDisks(r); err != nil {
		return err
	}
	_, err := n.bootOf(r.ID, r.Driver, r.Spec, r.ImageType)
	return err
}

// possible returns an error if the driver of r can never start r. It may run before the interfaces of r exist.
func (n *node) possible(ctx context.Context, r vm.Record) error {
	p := n.planOf(r)
	if len(p.NICs) == 0 {
		for i, s := range r.Spec.NICs {
			p.NICs = append(p.NICs, vm.NIC{Place: r.Spec.Place(i), LinkDown: s.LinkDown})
		}
	}
	return n.drivers.check(ctx, r.Driver, p)
}

// planOf returns what the driver needs to start the VM of r.
func (n *node) planOf(r vm.Record) hypervisor.Plan {
	port := guest.PortCocoon
	if r.ImageType != vm.ImageOCI {
		port = guest.PortQEMU
	}
	p := hypervisor.Plan{
		ID: r.ID, Name: r.Spec.Name, CPUs: r.Spec.CPUs, Memory: r.Spec.Memory, Accel: r.Spec.Accel,
		Boot: r.Boot, SMBIOS: r.Spec.SMBIOS, Graphics: graphics(r), Disks: r.Disks, DiskRate: r.Spec.DiskRate, NICs: r.NICs, BootNICs: r.Spec.BootNICs, Agent: port, FirmwareDir: n.dirs.firmware(r.ID), Dir: n.dirs.run(r.ID),
	}
	p.CgroupParent = r.Spec.CgroupParent
	if h := r.Spec.Hardware; r.ImageType == vm.ImageOCI { // our kernel knows one machine, which may grow
		if r.Spec.CanGrow() {
			p.Topology, p.Growth = h.Topology, h.Growth
		}
	} else if h != nil {
		p.Huge, p.Topology, p.Growth, p.CPU, p.Clock, p.UEFI, p.TPM, p.Watchdog, p.Panic, p.Devices, p.Models = h.HugePages, h.Topology, h.Growth, h.CPU, h.Clock, h.UEFI, h.TPM, h.Watchdog, h.Panic, devicesOf(r, h.Disks), h.NICs
		p.VSOCK = h.VSOCK
		if h.Windows {
			p.Drive = &hypervisor.Drive{}
			if n.missingDrivers(p.Drive) == "" {
				p.Drive.ISO = n.cfg.WindowsDrivers
			}
		}
	}
	return p
}

// missingDrivers says why d, the drive of a Windows guest, is empty although this node has drivers; "" if it need not be. A file that is missing
// stops no VM: its guest runs without.
func (n *node) missingDrivers(d *hypervisor.Drive) string {
	path := n.cfg.WindowsDrivers
	if d == nil || path == "" || d.ISO != "" {
		return ""
	}
	st, err := os.Stat(path)
	switch {
	case err != nil:
		return fmt.Sprintf("its drive for the CD-ROM with drivers is empty: %v; put the file there and start the VM again", err)
	case !st.Mode().IsRegular():
		return fmt.Sprintf("its drive for the CD-ROM with drivers is empty: %s is not a file; put one there and start the VM again", path)
	}
	return ""
}

// devicesOf returns the devices by which the guest of r sees its disks, by the serials of the disks.
func devicesOf(r vm.Record, by map[string]vm.DiskDevice) map[string]vm.DiskDevice {
	seeds := []string{vm.DiskOfSeed}
	for _, v := range r.Spec.Volumes {
		if v.Label != "" {
			seeds = append(seeds, v.Name) // in the order of their disks
		}
	}
	out := map[string]vm.DiskDevice{}
	for _, d := range r.Disks {
		name := ""
		switch {
		case d.Port != 0: // plugged while the guest ran
		case d.Role == vm.RoleCidat && len(seeds) > 0:
			name, seeds = seeds[0], seeds[1:]
		case d.Role == vm.RoleVolume:
			if at := slices.IndexFunc(r.Attached, func(a vm.AttachedVolume) bool { return a.Serial == d.Serial }); at >= 0 {
				name = r.Attached[at].Volume
			}
		case d.Role == vm.RoleHost:
			for i, v := range r.Spec.HostDisks() {
				if vm.HostDiskSerial(i) == d.Serial {
					name = v.Name
				}
			}
		case d.Role == vm.RoleCOW:
			name = vm.DiskOfImage
		}
		if dev, ok := by[name]; ok {
			out[d.Serial] = dev
		}
	}
	return out
}

// started changes r to the record of a VM whose process runs.
func started(r *vm.Record, handle []byte, pid int, at time.Time) {
	if !r.StartedAt.IsZero() {
		r.Restarts++
	}
	r.State, r.Handle, r.PID, r.StartedAt, r.Paused, r.Frozen = vm.StateRunning, handle, pid, at, "", false
	r.FirstBooted = true
	r.AgentReady, r.ExitCode, r.Reason, r.Message = false, nil, "", ""
	r.Ephemeral = bootStarted(*r, at)
}

// stopped changes r to the record of a VM whose process has ended.
func stopped(r *vm.Record, how ending, at time.Time) {
	had := r.Ephemeral
	defer func() { r.Ephemeral = bootEnded(*r, had, at) }() // its end has the reason of the VM
	r.State, r.Handle, r.PID, r.AgentReady, r.StoppedAt, r.Paused, r.Frozen, r.CID = vm.StateStopped, nil, 0, false, at, "", false, 0
	r.Containers = eachContainer(r.Containers, func(s vm.ContainerStatus) vm.ContainerStatus { return s.Cut(at) })
	r.Ephemeral, r.Disks = endedWith(r.Ephemeral, at), withoutPlugged(r.Disks)
	r.Spec, r.Moving = r.Spec.Booted(), nil
	if vm.Passing(r.Reason) {
		r.Reason, r.Message = "", ""
	}
	switch {
	case r.Reason != "": // set while it ran: the main process exited or could not start
	case how.killed:
		r.Reason, r.Message = vm.ReasonKilled, "it was killed"
	case how.asked:
		r.Reason = vm.ReasonStopped
	case how.lost:
		r.Reason, r.Message = vm.ReasonLost, "it ended while cocoond was not running"
	case how.exit.Cause != "":
		r.Reason, r.Message = vm.ReasonCrashed, how.exit.Cause
	case how.exit.GuestShutdown:
		r.Reason = vm.ReasonPoweredOff
	case how.exit.GuestReset:
		r.Reason, r.Message = vm.ReasonCrashed, "the guest panicked or reset itself"
	default:
		r.Reason, r.Message = vm.ReasonCrashed, crash(how.exit)
	}
}

func crash(x hypervisor.Exit) string {
	switch {
	case x.Signal != 0:
		return fmt.Sprintf("the hypervisor process died of signal %d", x.Signal)
	case x.Code >= 0:
		return fmt.Sprintf("the hypervisor process ended with code %d", x.Code)
	}
	return "the hypervisor process died"
}

// awake refuses what needs the guest of r while it is paused.
func awake(r vm.Record) error {
	if r.State == vm.StateRunning && r.Paused != "" {
		return errdefs.Preconditionf("it is paused; unpause it first")
	}
	return nil
}

// netted refuses a sandbox whose interfaces were given back.
func netted(r vm.Record) error {
	if r.Spec.Sandbox && len(r.Spec.NICs) > 0 && len(r.NICs) == 0 {
		return errdefs.Preconditionf("its interfaces were given back, so it does not start again; create another sandbox")
	}
	return nil
}

// broken explains why r can only be removed.
func broken(r vm.Record) error {
	return errdefs.Preconditionf("it is in state %s (%s); remove it", r.State, r.Message)
}

// mountsDisk reports whether a mount is of the file system of one of volumes that is a disk.
func mountsDisk(volumes []vm.Volume) func(vm.Mount) bool {
	return func(m vm.Mount) bool {
		return slices.ContainsFunc(volumes, func(v vm.Volume) bool { return v.Name == m.Volume && v.Kind == vm.VolumeDisk && !m.Device })
	}
}
