package cocoond

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"time"

	capsulev1 "cocoonstack.io/cocoon/api/capsule/v1"
	"cocoonstack.io/cocoon/internal/appliance"
	"cocoonstack.io/cocoon/internal/appliance/desired"
	"cocoonstack.io/cocoon/internal/appliance/identity"
	"cocoonstack.io/cocoon/internal/appliance/logins"
	"cocoonstack.io/cocoon/internal/appliance/machine"
	"cocoonstack.io/cocoon/internal/appliance/microvm"
	"cocoonstack.io/cocoon/internal/appliance/pid1"
	"cocoonstack.io/cocoon/internal/appliance/reconcile"
	"cocoonstack.io/cocoon/internal/catalog"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/journal/sqlite"
	"cocoonstack.io/cocoon/internal/vm"
	"cocoonstack.io/cocoon/internal/volume/lvm"
)

// Files of an appliance in the state folder. The names are those of the documented system.
const (
	applianceState = "state.db"
	applianceReset = "RESET_AUTH"

	applianceLogins = "registries.json" // ours, as those below
	applianceUsed   = "tokens.used"
	applianceFiles  = "files" // a folder that the administrator fills

	// applianceSeal is who the machine is, as its installation said. It is beside the state folder of Cocoon OS.
	applianceSeal = "/perm/firstboot.json"
)

// applianceDoor is the door of an appliance. It opens the state when it runs.
type applianceDoor struct {
	*daemon
	engine *served
	images catalog.Images
	log    *slog.Logger

	opened []io.Closer // what the door uses until it ends
}

// close closes what the door has used.
func (a *applianceDoor) close() {
	for _, c := range a.opened {
		logFailure(a.log, "the door of the appliance was not closed cleanly", c.Close())
	}
	a.opened = nil
}

// Run implements door. A machine whose state cannot be read stays up and says so.
func (a *applianceDoor) Run(ctx context.Context) error {
	defer a.workloads.set(nil)
	err := a.stateIsKept()
	var docs *sqlite.Documents
	if err == nil {
		docs, err = sqlite.OpenDocuments(ctx, filepath.Join(a.cfg.StateDir, applianceState), sqlite.Frozen(a.cfg.frozen))
	}
	if err == nil {
		defer func() { logFailure(a.log, "state of the appliance not closed cleanly", docs.Close()) }()
		var d *appliance.Door
		if d, err = a.open(ctx, docs); err == nil {
			err = d.Run(ctx)
			a.close()
			return err
		}
		a.close()
	}
	a.workloads.set(nil)
	if errdefs.Is(err, errdefs.DataLoss) {
		return appliance.Unreadable(ctx, a.cfg.Appliance.Listen, err, screen(a.log), a.log)
	}
	return a.answerFailure(ctx, err)
}

func (a *applianceDoor) open(ctx context.Context, docs *sqlite.Documents) (*appliance.Door, error) {
	if machine.Slot() != "" {
		if err := identity.Unseal(ctx, docs, applianceSeal, time.Now(), a.log); err != nil {
			return nil, err
		}
	}
	who, err := identity.Open(ctx, identity.Config{
		Documents: docs, Reset: filepath.Join(a.cfg.StateDir, applianceReset), Used: filepath.Join(a.cfg.StateDir, applianceUsed), Age: age(), Now: time.Now, Log: a.log,
	})
	if err != nil {
		return nil, err
	}
	a.opened = append(a.opened, who)
	store, err := desired.Open(ctx, docs, time.Now, a.log)
	if err != nil {
		return nil, err
	}
	boot, err := machine.BootID()
	if err != nil {
		return nil, err
	}
	a.workloads.set(store)
	if a.nets.bridge != nil {
		a.nets.bridge.SetZone(workloadNames{store})
	}
	known := logins.Open(filepath.Join(a.cfg.StateDir, applianceLogins))
	files := filepath.Join(a.cfg.StateDir, applianceFiles)
	if err := os.MkdirAll(files, 0o700); err != nil {
		return nil, fmt.Errorf("make the folder for kernels of VMs: %w", err)
	}
	drivers := map[capsulev1.WorkloadKind]reconcile.Driver{
		capsulev1.WorkloadKind_WORKLOAD_KIND_MICRO_VM: microvm.New(microvm.Deps{
			Engine: a.engine, Images: a.engine, Files: ownKernels{files, a.images}, Auth: known.Find,
			Logs: filepath.Join(a.cfg.StateDir, "logs"), Log: a.log, Hypervisors: a.engine.node.usable,
		}),
	}
	images := []appliance.ImageStore{vmImages{a.images}}
	if a.cfg.Appliance.Containerd != "" {
		d, runtime, err := a.containers(ctx, store, known)
		if err != nil {
			return nil, err
		}
		a.opened = append(a.opened, runtime)
		drivers[capsulev1.WorkloadKind_WORKLOAD_KIND_CONTAINER] = d
		images = append(images, containerImages{runtime})
	}
	system, err := a.system(ctx, docs, gates{
		listen: a.cfg.Appliance.Listen, bridge: a.cfg.Network.Bridge, stateDir: a.cfg.StateDir, fingerprint: who.Fingerprint(), boot: boot,
		docs: docs, desired: store, containers: drivers[capsulev1.WorkloadKind_WORKLOAD_KIND_CONTAINER],
	})
	if err != nil {
		return nil, err
	}
	kind := ""
	if a.cfg.VolumePool.Name != "" {
		kind = lvm.Kind
	}
	return appliance.New(ctx, appliance.Config{
		VolumeKind: kind, Ends: a.machineEnds, Console: screen(a.log),
		Listen: a.cfg.Appliance.Listen, Spool: filepath.Join(a.cfg.StateDir, "spool"), Silent: a.cfg.Appliance.Silent, Inside: []string{a.cfg.Network.Bridge},
	}, appliance.Deps{
		Documents: docs, Identity: who, Desired: store, Log: a.log,
		Workloads: reconcile.New(reconcile.Config{Desired: store, Drivers: drivers, Boot: boot, Now: time.Now, Log: a.log}),
		Volumes:   applianceVolumes{a.engine.Volumes()}, Images: images, Logins: known,
		System: system, Uplink: a.uplink(), Listens: a.listens, Runs: a.runs,
	})
}

// runs says how micro-VMs run.
func (a *applianceDoor) runs(ctx context.Context) string {
	d := a.engine.node.driver(ctx, a.cfg.Driver)
	if d.Accel == string(vm.AccelKVM) {
		return d.Accel
	}
	return cmp.Or(d.Error, d.Why)
}

// machineEnds reports whether process 1 ends the daemon because it ends the machine.
func (a *applianceDoor) machineEnds() bool {
	_, err := os.Lstat(filepath.Join(a.cfg.RunDir, pid1.EndingFile))
	return err == nil
}

// age returns how old the machine is. On another operating system than Cocoon's own that is the daemon: nobody reboots a laptop to try
// an appliance.
func age() func() time.Duration {
	if machine.Slot() != "" {
		return machine.Uptime
	}
	began := time.Now()
	return func() time.Duration { return time.Since(began) }
}

// vmImages are the images of VMs.
type vmImages struct{ catalog.Images }

// List implements appliance.ImageStore.
func (v vmImages) List(ctx context.Context) ([]appliance.Image, error) {
	all, err := v.Images.List(ctx)
	if err != nil {
		return nil, err
	}
	var out []appliance.Image
	for _, i := range all {
		out = append(out, appliance.Image{Name: i.Name, Digest: i.ID, Size: i.Size, CreatedUnix: i.CreatedAt.Unix()})
	}
	return out, nil
}

// Import implements appliance.ImageStore.
func (v vmImages) Import(ctx context.Context, names []string, archive *os.File) error {
	for _, name := range names {
		if _, err := archive.Seek(0, 0); err != nil {
			return fmt.Errorf("read the image %s again: %w", name, err)
		}
		if _, err := v.Images.Import(ctx, name, archive, nil); err != nil {
			return err
		}
	}
	return nil
}
