package cocoond

import (
	"context"
	"errors"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"cocoonstack.io/cocoon/internal/app/assets"
	"cocoonstack.io/cocoon/internal/appliance"
	"cocoonstack.io/cocoon/internal/appliance/containers"
	"cocoonstack.io/cocoon/internal/appliance/desired"
	"cocoonstack.io/cocoon/internal/appliance/logins"
	"cocoonstack.io/cocoon/internal/appliance/workload"
	"cocoonstack.io/cocoon/internal/container"
	"cocoonstack.io/cocoon/internal/container/containerd"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/journal/sqlite"
	hostnet "cocoonstack.io/cocoon/internal/network/host"
	"cocoonstack.io/cocoon/internal/network/netns"
	"cocoonstack.io/cocoon/internal/vm"
	"cocoonstack.io/cocoon/internal/volume/hostmount"
)

// containers makes the driver of containers, and tells the network what they have.
func (a *applianceDoor) containers(ctx context.Context, store *desired.Store, known *logins.Store) (*containers.Driver, *containerd.Runtime, error) {
	d, runtime, err := a.containerDriver(store, known, a.engine.Volumes(), a.log)
	if err != nil {
		return nil, nil, err
	}
	if err := d.Begin(ctx); err != nil {
		return nil, nil, errors.Join(err, runtime.Close())
	}
	return d, runtime, nil
}

func (d *daemon) containerDriver(store *desired.Store, known *logins.Store, volumes containers.Volumes, log *slog.Logger) (*containers.Driver, *containerd.Runtime, error) {
	registries := map[string]containerd.Registry{}
	for name, r := range d.cfg.Images.Registries {
		registries[name] = containerd.Registry{Mirrors: r.Mirrors, CA: r.CA, Insecure: r.Insecure}
	}
	runtime, err := containerd.Open(containerd.Config{
		Socket: d.cfg.Appliance.Containerd, Root: filepath.Join(d.cfg.StateDir, "containers"), State: filepath.Join(d.cfg.RunDir, "containers"), RuncRoot: filepath.Join(d.cfg.RunDir, "runc"),
		Logger: assets.Path("cocoon-container-log"), Registries: registries, Log: log,
	})
	if err != nil {
		return nil, nil, err
	}
	mounter, err := hostmount.New(hostmount.Config{Dir: filepath.Join(d.cfg.RunDir, "mounted"), Log: log})
	if err != nil {
		return nil, nil, errors.Join(err, runtime.Close())
	}
	deps := containers.Deps{
		Runtime: runtime, Namespaces: netns.Folder(filepath.Join(d.cfg.RunDir, "netns")),
		Volumes: volumes, Mounts: mounts{mounter, filepath.Join(d.cfg.RunDir, "mounted")},
		Searches: searches, HostFiles: hostFiles, Dir: filepath.Join(d.cfg.StateDir, "nics"), Log: log,
		Known: store.Names, Auth: known.Find,
	}
	if d.nets.bridge != nil { // not a nil pointer in an interface
		deps.Network = d.nets.bridge
	}
	return containers.New(deps), runtime, nil
}

// searches are the domains in which containers complete names: that of workloads, and those of the machine.
func searches() []string { return append([]string{workload.Domain}, hostnet.Searches()...) }

// endContainers returns a function that ends the containers of the appliance, for good if the machine ends, and otherwise until cocoond
// starts again. It does nothing without an appliance.
func (d *daemon) endContainers(ctx context.Context, h *host) (end func(context.Context, time.Duration) error, release func(), err error) {
	path := filepath.Join(d.cfg.StateDir, applianceState)
	if d.cfg.Appliance.Listen == "" || d.cfg.Appliance.Containerd == "" || !assets.Exists(path) {
		d.workloads.set(nil)
		return func(context.Context, time.Duration) error { return nil }, func() {}, nil
	}
	docs, err := sqlite.OpenDocuments(ctx, path, sqlite.Frozen(d.cfg.frozen))
	if err != nil {
		return nil, nil, err
	}
	store, err := desired.Open(ctx, docs, time.Now, d.log)
	if err != nil {
		return nil, nil, errors.Join(err, docs.Close())
	}
	d.workloads.set(store)
	driver, runtime, err := d.containerDriver(store, logins.Open(filepath.Join(d.cfg.StateDir, applianceLogins)), h.engine.Volumes(), d.log)
	if err != nil {
		return nil, nil, errors.Join(err, docs.Close())
	}
	release = func() { logFailure(d.log, "containers not closed cleanly", errors.Join(runtime.Close(), docs.Close())) }
	return func(ctx context.Context, grace time.Duration) error {
		var wg sync.WaitGroup
		rows := store.List()
		errs := make([]error, len(rows))
		for i, r := range rows {
			wg.Go(func() { errs[i] = driver.End(ctx, r.Name(), min(grace, workload.Grace(r.Workload))) })
		}
		wg.Wait()
		return errors.Join(errs...)
	}, release, nil
}

// others reports whether an id is that of a container of the appliance. It waits until the workloads are known, which needs no engine.
// Errors: DataLoss if they cannot be read.
func (d *daemon) others(ctx context.Context, id vm.ID) (bool, error) {
	if d.cfg.Appliance.Listen == "" || d.cfg.Appliance.Containerd == "" {
		return false, nil
	}
	select {
	case <-d.workloads.read:
	case <-ctx.Done():
		return false, ctx.Err()
	}
	if d.workloads.store == nil {
		return false, errdefs.DataLossf("the workloads of the appliance cannot be read")
	}
	return slices.ContainsFunc(d.workloads.store.Names(), func(name string) bool { return containers.ID(name) == id }), nil
}

// workloadsOf are the workloads of the appliance for those who need to know which exist.
type workloadsOf struct {
	once  sync.Once
	read  chan struct{}  // closed when store is set, or stays nil because they cannot be read
	store *desired.Store // nil: they cannot be read
}

// set says which workloads there are. Only the first call counts.
func (w *workloadsOf) set(s *desired.Store) {
	w.once.Do(func() {
		w.store = s
		close(w.read)
	})
}

// mounts are the volumes of containers that are mounted, each at ROOT/ID/VOLUME.
type mounts struct {
	*hostmount.Mounter
	root string
}

// Mount implements containers.Mounts.
func (m mounts) Mount(ctx context.Context, disk vm.Disk, id vm.ID, volume string, readOnly bool) (string, error) {
	dir := filepath.Join(m.root, string(id), volume)
	_, err := m.Mounter.Mount(ctx, disk, dir, hostmount.Options{ReadOnly: readOnly})
	return dir, err
}

// Unmount implements containers.Mounts.
func (m mounts) Unmount(ctx context.Context, id vm.ID) error {
	dir := filepath.Join(m.root, string(id))
	all, err := os.ReadDir(dir) // also folders on which a daemon that was killed did not mount any more
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	for _, x := range all {
		if err := m.Mounter.Unmount(ctx, filepath.Join(dir, x.Name())); err != nil {
			return err
		}
	}
	if err := os.Remove(dir); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}

// hostFiles are the files of this machine that a container which shares its network sees.
func hostFiles() container.Files {
	read := func(path string) string {
		b, err := os.ReadFile(filepath.Clean(path))
		if err != nil {
			return ""
		}
		return string(b)
	}
	return container.Files{Hosts: read("/etc/hosts"), ResolvConf: read("/etc/resolv.conf")}
}

// containerImages are the images of containers.
type containerImages struct{ *containerd.Runtime }

// List implements appliance.ImageStore.
func (c containerImages) List(ctx context.Context) ([]appliance.Image, error) {
	all, err := c.ListImages(ctx)
	if err != nil {
		return nil, err
	}
	var out []appliance.Image
	for _, i := range all {
		out = append(out, appliance.Image{Name: i.Ref, Digest: i.Digest, Size: i.Size, CreatedUnix: i.CreatedAt.Unix()})
	}
	return out, nil
}

// Import implements appliance.ImageStore.
func (c containerImages) Import(ctx context.Context, names []string, archive *os.File) error {
	for _, name := range names {
		if _, err := archive.Seek(0, 0); err != nil {
			return err
		}
		if _, err := c.ImportImage(ctx, archive, name); err != nil {
			return err
		}
	}
	return nil
}
