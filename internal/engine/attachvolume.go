package engine

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"time"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/guest"
	"cocoonstack.io/cocoon/internal/journal"
	"cocoonstack.io/cocoon/internal/undo"
	"cocoonstack.io/cocoon/internal/vm"
	"cocoonstack.io/cocoon/internal/volume"
)

func (m *machine) attachVolume(ctx context.Context, use vm.VolumeUse, path string) (vm.Record, error) {
	r := m.record()
	if m.volumes == nil {
		return r, errdefs.Unsupportedf("this node keeps no volumes")
	}
	got, err := m.volumes.Get(ctx, use.Ref)
	if err != nil {
		return r, err
	}
	if i := attachedAs(r, got.ID); i >= 0 {
		return r, sameUse(r, i, use, path)
	}
	if err := changeable(r); err != nil {
		return r, err
	}
	if path != "" && r.ImageType != vm.ImageOCI {
		return r, errdefs.Invalidf("its guest boots its own system, so volume %s is not mounted for it; leave out the path, and mount the disk in the guest", got.Name)
	}
	if _, err := got.Admits(r.ID, volume.ModeOf(use)); err != nil {
		return r, fmt.Errorf("volume %s: %w", got.Name, err)
	}
	x := volumeArgs{
		Volume: vm.Volume{Name: nameIn(r.Spec.Volumes, got.Name), Kind: vm.VolumeDisk, Disk: &use}, Path: path,
		Attached: vm.AttachedVolume{ID: got.ID, Serial: volume.Serial(got.ID)},
	}
	x.Attached.Volume = x.Volume.Name
	if err := r.Spec.WithVolume(x.Volume, path).ValidateVolumes(); err != nil {
		return r, err
	}
	if r.State == vm.StateRunning {
		if err := m.attachable(ctx); err != nil {
			return r, err
		}
	}
	return attachOperation.run(ctx, m, &attachment{attaching: attaching{m, x}}, x.json())
}

// attachable refuses to attach volumes to a running guest that cannot take part, for example because it is still booting.
func (m *machine) attachable(ctx context.Context) error {
	if err := awake(m.record()); err != nil {
		return err
	}
	if _, err := m.plugger(); err != nil {
		return err
	}
	run := m.run.Load()
	if run == nil || !run.link.OurAgent() {
		return nil
	}
	_, err := run.link.Attacher(ctx, attachPatience)
	return err
}

// changeable refuses to change which volumes r has.
func changeable(r vm.Record) error {
	switch r.State {
	case vm.StateRunning, vm.StateStopped, vm.StateCreated:
		return nil
	case vm.StateHibernated:
		return errdefs.Preconditionf("it is hibernated, and its guest has to take part; wake the VM first")
	default:
		return broken(r)
	}
}

// sameUse returns an error unless r has its attached volume i as it is asked for.
func sameUse(r vm.Record, i int, use vm.VolumeUse, path string) error {
	name := r.Attached[i].Volume
	at := slices.IndexFunc(r.Spec.Volumes, func(v vm.Volume) bool { return v.Name == name && v.Disk != nil })
	if at >= 0 && volume.ModeOf(*r.Spec.Volumes[at].Disk) == volume.ModeOf(use) && (r.Spec.MountPath(name) == path) {
		return nil
	}
	return errdefs.Existsf("it has that volume already, as %s, in another way; detach it first", name)
}

// nameIn returns a name for one more volume, like want.
func nameIn(volumes []vm.Volume, want string) string {
	name := want
	for n := 2; slices.ContainsFunc(volumes, func(v vm.Volume) bool { return v.Name == name }); n++ {
		suffix := fmt.Sprint("-", n)
		name = want[:min(len(want), vm.MaxNameLength-len(suffix))] + suffix
	}
	return name
}

// volumeArgs are the journal arguments of attaching and detaching a volume.
type volumeArgs struct {
	Volume   vm.Volume         `json:"volume"`
	Path     string            `json:"path,omitempty"` // where the guest mounts it
	Attached vm.AttachedVolume `json:"attached"`
}

func (a volumeArgs) json() []byte {
	b, _ := json.Marshal(a) // strings, numbers and booleans always encode
	return b
}

func volumeArgsOf(in journal.Intent) (args volumeArgs, err error) {
	if err := json.Unmarshal(in.Args, &args); err != nil || args.Attached.ID == "" || args.Volume.Disk == nil {
		return args, errdefs.DataLossf("the arguments of its unfinished %s are damaged", in.Op)
	}
	return args, nil
}

// attachPatience is how long attaching and detaching wait for a guest that is between two sessions. Nothing else can be done with the
// VM meanwhile.
const attachPatience = 10 * time.Second

// attaching is what attaching and detaching a volume have in common.
type attaching struct {
	*machine
	volumeArgs
}

// own attaches the volume in the store, and returns its disk at the place that it has on record, or at a new one.
func (a *attaching) own(ctx context.Context) (d vm.Disk, size int64, err error) {
	r := a.record()
	got, d, err := a.volumes.Attach(vm.OnBehalf(ctx, r.Owner), string(a.Attached.ID), a.id, volume.ModeOf(*a.Volume.Disk))
	if err != nil {
		return d, 0, fmt.Errorf("volume %s: %w", a.Volume.Name, err)
	}
	d.Serial, d.Role, d.Port = a.Attached.Serial, vm.RoleVolume, portOf(r.Disks, a.Attached.Serial)
	if d.Port == 0 {
		d.Port, err = portsOf(r.Disks).take()
	}
	return d, got.Size, err
}

// insert plugs the disk into the running guest, and has its agent mount it.
func (a *attaching) insert(ctx context.Context, d vm.Disk) error {
	plugger, err := a.plugger()
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, a.cfg.AgentTimeout)
	defer cancel()
	return endedProcess(plugger.PlugDisk(ctx, d))
}

// mount has the agent of the running guest mount the volume. told reports whether the agent may have done anything.
func (a *attaching) mount(ctx context.Context) (told bool, err error) {
	run := a.run.Load()
	if run == nil {
		return false, errdefs.Preconditionf("its process has ended")
	}
	if !run.link.OurAgent() {
		return false, nil
	}
	agent, err := run.link.Attacher(ctx, attachPatience)
	if err != nil {
		return false, err
	}
	v := a.Volume.Clone()
	v.Disk.Ref = a.Attached.Serial
	err = agent.AttachVolume(ctx, v, a.Path)
	return !errdefs.Is(err, errdefs.Unsupported), err
}

// unmount has the agent of the running guest unmount the volume. Another agent only says whether the guest has mounted it.
func (a *attaching) unmount(ctx context.Context, patience time.Duration) error {
	run := a.run.Load()
	if run == nil {
		return nil
	}
	if !run.link.OurAgent() {
		return a.unused(ctx, run)
	}
	agent, err := run.link.Attacher(ctx, patience)
	if err != nil {
		return err
	}
	return agent.DetachVolume(ctx, a.Volume.Name, a.Attached.Serial)
}

// unused refuses to take a disk that is mounted in a guest which boots its own system. A guest that cannot be asked may have it
// mounted.
func (a *attaching) unused(ctx context.Context, run *run) error {
	agent, _, _ := run.link.Peek()
	reporter, ok := agent.(guest.MountReporter)
	if !ok {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, attachPatience)
	defer cancel()
	at, err := reporter.Mounts(ctx, a.Attached.Serial)
	if err != nil {
		a.log.Info("guest does not say whether a volume is mounted", "vm", a.id, "volume", a.Volume.Name, "err", err)
	}
	if len(at) > 0 {
		return errdefs.Preconditionf("its guest has mounted volume %s at %.200q; unmount it there first", a.Volume.Name, at[0])
	}
	return nil
}

// remove unplugs the disk from the running guest. It waits a limited time for the guest to release it.
func (a *attaching) remove(ctx context.Context) error {
	plugger, err := a.plugger()
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, a.cfg.AgentTimeout)
	defer cancel()
	if err := plugger.UnplugDisk(ctx, a.Attached.Serial); !errdefs.IsNotFound(err) {
		return err
	}
	return nil // its process has ended
}

// attached changes r to the record of a VM that has the volume on the disk d.
func (a *attaching) attached(r *vm.Record, d vm.Disk, size int64) {
	x := a.Attached
	x.Size = size
	r.Spec = r.Spec.WithVolume(a.Volume, a.Path)
	r.Attached, r.Disks = append(slices.Clip(r.Attached), x), append(withoutDisk(r.Disks, d.Serial), d)
}

// attachment gives a VM a volume. The store records it first. From then on the record has the disk, so that a guest that ends or is
// adopted meanwhile is known to have it, and in the end it has the volume.
type attachment struct {
	attaching
	told bool // the guest may have mounted it
	disk vm.Disk
	size int64 // bytes
}

var attachOperation = operation[*attachment]{
	name: opAttachVolume, told: true, recall: recallAttachment,
	steps: []step[*attachment]{
		{word: stepAttach, run: (*attachment).attach, undo: (*attachment).undo, recover: (*attachment).recover, lasting: true},
		{word: stepPlug, run: (*attachment).plug, undo: (*attachment).undo, recover: (*attachment).recover, lasting: true},
		{word: stepJoin, run: (*attachment).join, undo: (*attachment).undo, recover: (*attachment).recover, lasting: true},
	},
}

func recallAttachment(m *machine, in journal.Intent) (*attachment, error) {
	args, err := volumeArgsOf(in)
	return &attachment{attaching: attaching{m, args}, told: true}, err
}

func (a *attachment) attach(ctx context.Context) (outcome, error) {
	if err := a.durable(ctx); err != nil { // the store's record survives a power cut, so this operation must, too
		return outcome{}, err
	}
	var err error
	if a.disk, a.size, err = a.own(ctx); err != nil {
		return outcome{}, err
	}
	return outcome{change: func(r *vm.Record) { r.Disks = append(withoutDisk(r.Disks, a.disk.Serial), a.disk) }}, nil
}

func (a *attachment) plug(ctx context.Context) (outcome, error) {
	if a.record().State != vm.StateRunning {
		return outcome{}, nil
	}
	return outcome{}, a.insert(ctx, a.disk)
}

func (a *attachment) join(ctx context.Context) (outcome, error) {
	if a.record().State == vm.StateRunning {
		told, err := a.mount(ctx)
		a.told = a.told || told
		if err != nil {
			return outcome{}, err
		}
	}
	return outcome{synced: true, change: func(r *vm.Record) { a.attached(r, a.disk, a.size) }}, nil
}

// undo takes the volume back. If the guest does not give the disk back, the VM keeps the volume.
func (a *attachment) undo(ctx context.Context, cause error) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), undo.Limit)
	defer cancel()
	if err := a.takeBack(ctx); err != nil {
		a.log.Warn("volume that was not attached stays with its vm", "vm", a.id, "err", err)
		a.settleFailed(ctx, opAttachVolume, func(r *vm.Record) {
			if a.disk.Serial != "" && attachedAs(*r, a.Attached.ID) < 0 {
				a.attached(r, a.disk, 0)
			}
		})
		return fmt.Errorf("%w; the VM keeps volume %s, because it could not be taken back: %w; detach it", cause, a.Volume.Name, err)
	}
	a.settleFailed(ctx, opAttachVolume, func(r *vm.Record) { r.Disks = withoutDisk(r.Disks, a.Attached.Serial) })
	return cause
}

// takeBack ends what the operation has begun.
func (a *attachment) takeBack(ctx context.Context) error {
	if a.runs() && a.disk.Serial != "" {
		if a.told {
			if err := a.unmount(ctx, 0); err != nil {
				return err
			}
		}
		if err := a.remove(ctx); err != nil {
			return err
		}
	}
	return a.releaseVolume(ctx, a.Attached.ID, a.id)
}

// recover goes on where the earlier process of the engine ended. A VM that does not run is as before.
func (a *attachment) recover(ctx context.Context) (next string, err error) {
	runs, err := a.readopt(ctx)
	if err != nil {
		return "", err
	}
	if runs {
		return stepAttach, nil
	}
	if err := a.releaseVolume(ctx, a.Attached.ID, a.id); err != nil {
		return "", err
	}
	return "", a.settle(ctx, func(r *vm.Record) { r.Disks = withoutDisk(r.Disks, a.Attached.Serial) })
}
