package nodeclient

import (
	"context"
	"errors"
	"io"
	"strconv"
	"time"

	nodev1 "cocoonstack.io/cocoon/api/node/v1"
	"cocoonstack.io/cocoon/internal/guest"
	"cocoonstack.io/cocoon/internal/nodewire"
	"cocoonstack.io/cocoon/internal/vm"
)

// Create prepares a VM without starting it.
func (c *Client) Create(ctx context.Context, s vm.Spec) (vm.Record, error) {
	return ask(ctx, c, c.vms.Create, &nodev1.CreateRequest{Spec: nodewire.EncodeSpec(s)}, nodewire.DecodeRecord)
}

// Launch creates a VM and starts it; it returns when the guest's CPUs run.
func (c *Client) Launch(ctx context.Context, s vm.Spec) (vm.Record, error) {
	return ask(ctx, c, c.vms.Launch, &nodev1.LaunchRequest{Spec: nodewire.EncodeSpec(s)}, nodewire.DecodeRecord)
}

// Start starts a VM that does not run.
func (c *Client) Start(ctx context.Context, ref string) (vm.Record, error) {
	return ask(ctx, c, c.vms.Start, &nodev1.StartRequest{Ref: ref}, nodewire.DecodeRecord)
}

// Stop asks the guest to stop and kills it after grace; negative means the spec's grace, 0 kills at once.
func (c *Client) Stop(ctx context.Context, ref string, grace time.Duration) (vm.Record, error) {
	return ask(ctx, c, c.vms.Stop, &nodev1.StopRequest{Ref: ref, GraceNs: graceNS(grace)}, nodewire.DecodeRecord)
}

// Restart stops the VM as Stop does and starts it again.
func (c *Client) Restart(ctx context.Context, ref string, grace time.Duration) (vm.Record, error) {
	return ask(ctx, c, c.vms.Restart, &nodev1.RestartRequest{Ref: ref, GraceNs: graceNS(grace)}, nodewire.DecodeRecord)
}

// Reboot starts the guest of a running VM again, with hard at once.
func (c *Client) Reboot(ctx context.Context, ref string, hard bool) (vm.Record, error) {
	return ask(ctx, c, c.vms.Reboot, &nodev1.RebootRequest{Ref: ref, Hard: hard}, nodewire.DecodeRecord)
}

// Pause stops the CPUs of a running VM's guest until Unpause.
func (c *Client) Pause(ctx context.Context, ref string) (vm.Record, error) {
	return ask(ctx, c, c.vms.Pause, &nodev1.PauseRequest{Ref: ref}, nodewire.DecodeRecord)
}

// Unpause resumes the guest of a paused VM.
func (c *Client) Unpause(ctx context.Context, ref string) (vm.Record, error) {
	return ask(ctx, c, c.vms.Unpause, &nodev1.UnpauseRequest{Ref: ref}, nodewire.DecodeRecord)
}

// Remove deletes a VM and everything it owned; a running one needs force.
func (c *Client) Remove(ctx context.Context, ref string, force bool) error {
	return do(ctx, c, c.vms.Remove, &nodev1.RemoveRequest{Ref: ref, Force: force})
}

// RemoveThenExit is Remove for a process that ends soon afterwards and does not close the connection itself. Watchers learn of
// the removal when the kernel has closed it, or a few seconds later. So whoever waits for the end of the process does not
// learn of the removal by a watch first.
func (c *Client) RemoveThenExit(ctx context.Context, ref string, force bool) error {
	return c.Remove(nodewire.SendThenExit(ctx), ref, force)
}

// Inspect returns the record of one VM.
func (c *Client) Inspect(ctx context.Context, ref string) (vm.Record, error) {
	return ask(ctx, c, c.vms.Inspect, &nodev1.InspectRequest{Ref: ref}, nodewire.DecodeRecord)
}

// List returns every record.
func (c *Client) List(ctx context.Context) ([]vm.Record, error) {
	return list(ctx, c, c.vms.List, &nodev1.ListRequest{}, nodewire.DecodeRecord)
}

// Watch calls fn with every change after a revision until ctx ends or fn fails; with a negative revision it first
// reports what exists as ADDED.
func (c *Client) Watch(ctx context.Context, after int64, fn func(vm.Event) error) error {
	return follow(ctx, c, c.vms.Watch, &nodev1.WatchRequest{After: after}, func(m *nodev1.Event) error { return fn(nodewire.DecodeEvent(m)) })
}

// Logs calls fn with the entries of a VM's log.
func (c *Client) Logs(ctx context.Context, ref string, o guest.LogOptions, fn func(guest.LogEntry) error) error {
	return follow(ctx, c, c.vms.Logs, nodewire.EncodeLogOptions(ref, o), func(m *nodev1.LogEntry) error { return fn(nodewire.DecodeLogEntry(m)) })
}

// Stats returns the guest's use of resources.
func (c *Client) Stats(ctx context.Context, ref string) (guest.Stats, error) {
	return ask(ctx, c, c.vms.Stats, &nodev1.StatsRequest{Ref: ref}, nodewire.DecodeStats)
}

// Describe asks the guest what it is.
func (c *Client) Describe(ctx context.Context, ref string) (guest.Description, error) {
	return ask(ctx, c, c.vms.Describe, &nodev1.DescribeRequest{Ref: ref}, nodewire.DecodeDescription)
}

// Freeze freezes the file systems of the guest until Thaw, and at most for a time.
func (c *Client) Freeze(ctx context.Context, ref string, most time.Duration) error {
	_, err := ask(ctx, c, c.vms.Freeze, &nodev1.FreezeRequest{Ref: ref, MostMs: most.Milliseconds()}, func(*nodev1.FreezeResponse) struct{} { return struct{}{} })
	return err
}

// Thaw ends a freeze, and reports whether the file systems were frozen until now.
func (c *Client) Thaw(ctx context.Context, ref string) (held bool, err error) {
	return ask(ctx, c, c.vms.Thaw, &nodev1.ThawRequest{Ref: ref}, (*nodev1.ThawResponse).GetHeld)
}

// SetLogins sets passwords and SSH keys in the guest.
func (c *Client) SetLogins(ctx context.Context, ref string, l guest.Logins) error {
	return do(ctx, c, c.vms.SetLogins, nodewire.EncodeLogins(ref, l))
}

// UpdateVolume replaces the content of a volume of files.
func (c *Client) UpdateVolume(ctx context.Context, ref, volume string, files []vm.VolumeFile) error {
	return do(ctx, c, c.vms.UpdateVolume, &nodev1.UpdateVolumeRequest{Ref: ref, Volume: volume, Files: nodewire.EncodeVolumeFiles(files)})
}

// KillContainer ends a run of one container, the current one when run is 0, and returns when it has ended; grace is as
// for Stop. The restart policy decides whether another run follows.
func (c *Client) KillContainer(ctx context.Context, ref, container string, run int, grace time.Duration) error {
	return do(ctx, c, c.vms.KillContainer, &nodev1.KillContainerRequest{Ref: ref, Container: container, Run: int64(run), GraceNs: graceNS(grace)})
}

// ReleaseContainer lets the containers start that wait for this one.
func (c *Client) ReleaseContainer(ctx context.Context, ref, container string) error {
	return do(ctx, c, c.vms.ReleaseContainer, &nodev1.ReleaseContainerRequest{Ref: ref, Container: container})
}

// AddContainer starts one more container in a running VM; see guest.Containers.
func (c *Client) AddContainer(ctx context.Context, ref string, add vm.Container) (vm.Record, error) {
	return ask(ctx, c, c.vms.AddContainer, &nodev1.AddContainerRequest{Ref: ref, Container: nodewire.EncodeContainer(add)}, nodewire.DecodeRecord)
}

// Resize makes a running VM as large as to says. It takes nothing away.
func (c *Client) Resize(ctx context.Context, ref string, to vm.Size) (vm.Record, error) {
	return ask(ctx, c, c.vms.Resize, &nodev1.ResizeRequest{Ref: ref, Cpus: int32(min(max(to.CPUs, 0), vm.MaxCPUs+1)), Memory: to.Memory}, nodewire.DecodeRecord)
}

// AttachVolume gives a VM, running or stopped, a volume of the volume store; a guest of a container image mounts it at path.
func (c *Client) AttachVolume(ctx context.Context, ref string, use vm.VolumeUse, path string) (vm.Record, error) {
	return ask(ctx, c, c.vms.AttachVolume, &nodev1.AttachVolumeRequest{Ref: ref, Volume: nodewire.EncodeVolumeUse(use), Path: path}, nodewire.DecodeRecord)
}

// DetachVolume takes a volume from a VM.
func (c *Client) DetachVolume(ctx context.Context, ref, volume string) (vm.Record, error) {
	return ask(ctx, c, c.vms.DetachVolume, &nodev1.DetachVolumeRequest{Ref: ref, Volume: volume}, nodewire.DecodeRecord)
}

// DumpMemory writes the memory of a running VM to a volume, as the file with that name.
func (c *Client) DumpMemory(ctx context.Context, ref, volume, file string) error {
	return do(ctx, c, c.vms.DumpMemory, &nodev1.DumpMemoryRequest{Ref: ref, Volume: volume, File: file})
}

// AttachNIC gives a VM, running or stopped, one more interface.
func (c *Client) AttachNIC(ctx context.Context, ref string, want vm.NICSpec) (vm.Record, error) {
	return ask(ctx, c, c.vms.AttachNIC, &nodev1.AttachNICRequest{Ref: ref, Nic: nodewire.EncodeNICSpec(want)}, nodewire.DecodeRecord)
}

// DetachNIC takes an interface that is not the first from a VM: that on a network, or with a hardware address.
func (c *Client) DetachNIC(ctx context.Context, ref, nic string) (vm.Record, error) {
	return ask(ctx, c, c.vms.DetachNIC, &nodev1.DetachNICRequest{Ref: ref, Nic: nic}, nodewire.DecodeRecord)
}

// SetLink sets the link of an interface of a VM down, or up: that on a network, or with a hardware address.
func (c *Client) SetLink(ctx context.Context, ref, nic string, down bool) (vm.Record, error) {
	return ask(ctx, c, c.vms.SetLink, &nodev1.SetLinkRequest{Ref: ref, Nic: nic, Down: down}, nodewire.DecodeRecord)
}

// StartContainer starts a container that was added to a running VM and waits for it; see guest.Containers.
func (c *Client) StartContainer(ctx context.Context, ref, container string) (vm.Record, error) {
	return ask(ctx, c, c.vms.StartContainer, &nodev1.StartContainerRequest{Ref: ref, Container: container}, nodewire.DecodeRecord)
}

// RemoveContainer removes a container that was added to a VM; see guest.Containers.
func (c *Client) RemoveContainer(ctx context.Context, ref, container string) error {
	return do(ctx, c, c.vms.RemoveContainer, &nodev1.RemoveContainerRequest{Ref: ref, Container: container})
}

// ResizeContainers changes what containers of a running VM may use; see guest.Containers.
func (c *Client) ResizeContainers(ctx context.Context, ref string, want map[string]vm.Resources) (vm.Record, error) {
	return ask(ctx, c, c.vms.ResizeContainers, &nodev1.ResizeContainersRequest{Ref: ref, Containers: nodewire.EncodeResized(want)}, nodewire.DecodeRecord)
}

func graceNS(grace time.Duration) *int64 {
	if grace < 0 {
		return nil
	}
	return new(int64(grace))
}

func isEOF(err error) bool { return errors.Is(err, io.EOF) }

func itoa(fd uintptr) string { return strconv.FormatUint(uint64(fd), 10) }
