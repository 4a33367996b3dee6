package cocoond

import (
	"context"
	"fmt"
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
	"cocoonstack.io/cocoon/internal/appliance/reconcile"
	"cocoonstack.io/cocoon/internal/catalog"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/journal/sqlite"
	"cocoonstack.io/cocoon/internal/volume/lvm"
)

// Files of an appliance in the state folder. The names are those of the documented system.
const (
	applianceState = "state.db"
	applianceReset = "RESET_AUTH"

	applianceLogins = "registries.json" // ours
)

// applianceDoor is the door of an appliance. It opens the state when it runs.
type applianceDoor struct {
	*daemon
	engine *served
	images catalog.Images
	log    *slog.Logger
}

// Run implements door. A machine whose state cannot be read stays up and says so.
func (a *applianceDoor) Run(ctx context.Context) error {
	defer a.workloads.set(nil)
	docs, err := sqlite.OpenDocuments(ctx, filepath.Join(a.cfg.StateDir, applianceState))
	if err == nil {
		defer func() { logFailure(a.log, "state of the appliance not closed cleanly", docs.Close()) }()
		var d *appliance.Door
		if d, err = a.open(ctx, docs); err == nil {
			return d.Run(ctx)
		}
	}
	a.workloads.set(nil)
	if errdefs.Is(err, errdefs.DataLoss) {
		return appliance.Unreadable(ctx, a.cfg.Appliance.Listen, err, a.log)
	}
	return err
}

func (a *applianceDoor) open(ctx context.Context, docs *sqlite.Documents) (*appliance.Door, error) {
	who, err := identity.Open(ctx, identity.Config{
		Documents: docs, Reset: filepath.Join(a.cfg.StateDir, applianceReset), Age: age(), Now: time.Now, Log: a.log,
	})
	if err != nil {
		return nil, err
	}
	store, err := desired.Open(ctx, docs, time.Now, a.log)
	if err != nil {
		return nil, err
	}
	boot, err := machine.BootID()
	if err != nil {
		return nil, err
	}
	a.workloads.set(store)
	system, err := a.system(ctx, docs)
	if err != nil {
		return nil, err
	}
	known := logins.Open(filepath.Join(a.cfg.StateDir, applianceLogins))
	drivers := map[capsulev1.WorkloadKind]reconcile.Driver{
		capsulev1.WorkloadKind_WORKLOAD_KIND_MICRO_VM: microvm.New(a.engine, a.engine, known.Find, filepath.Join(a.cfg.StateDir, "logs"), a.log),
	}
	images := []appliance.ImageStore{vmImages{a.images}}
	if a.cfg.Appliance.Containerd != "" {
		d, runtime, err := a.containers(ctx, store, known)
		if err != nil {
			return nil, err
		}
		drivers[capsulev1.WorkloadKind_WORKLOAD_KIND_CONTAINER] = d
		images = append(images, containerImages{runtime})
	}
	kind := ""
	if a.cfg.VolumePool.Name != "" {
		kind = lvm.Kind
	}
	return appliance.New(ctx, appliance.Config{
		VolumeKind: kind,
		Listen:     a.cfg.Appliance.Listen, Spool: filepath.Join(a.cfg.StateDir, "spool"), Silent: a.cfg.Appliance.Silent, Inside: []string{a.cfg.Network.Bridge},
	}, appliance.Deps{
		Documents: docs, Identity: who, Desired: store, Log: a.log,
		Workloads: reconcile.New(reconcile.Config{Desired: store, Drivers: drivers, Boot: boot, Now: time.Now, Log: a.log}),
		Volumes:   applianceVolumes{a.engine.Volumes()}, Images: images, Logins: known,
		System: system,
	})
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
