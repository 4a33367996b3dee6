package cocoond

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"

	"cocoonstack.io/cocoon/api/contract"
	"cocoonstack.io/cocoon/internal/app/service"
	"cocoonstack.io/cocoon/internal/catalog"
	"cocoonstack.io/cocoon/internal/engine"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/guest/agent"
	"cocoonstack.io/cocoon/internal/guest/qga"
	"cocoonstack.io/cocoon/internal/hypervisor"
	"cocoonstack.io/cocoon/internal/hypervisor/cloudhypervisor"
	"cocoonstack.io/cocoon/internal/hypervisor/fake"
	"cocoonstack.io/cocoon/internal/hypervisor/firecracker"
	"cocoonstack.io/cocoon/internal/hypervisor/jail"
	"cocoonstack.io/cocoon/internal/hypervisor/qemu"
	"cocoonstack.io/cocoon/internal/image/local"
	"cocoonstack.io/cocoon/internal/image/pull"
	"cocoonstack.io/cocoon/internal/image/seed"
	"cocoonstack.io/cocoon/internal/journal/records"
	"cocoonstack.io/cocoon/internal/nodeapi"
	"cocoonstack.io/cocoon/internal/nodeclient"
	"cocoonstack.io/cocoon/internal/snapshot"
	snapshotstore "cocoonstack.io/cocoon/internal/snapshot/local"
	"cocoonstack.io/cocoon/internal/vm"
)

// daemon is everything that can be made without touching the host.
type daemon struct {
	cfg     Config
	log     *slog.Logger
	images  *local.Store
	puller  *pull.Puller
	named   catalog.Named // images
	nets    *networks
	metrics *metrics

	workloads *workloadsOf
	later     *later
}

func newDaemon(cfg Config, log *slog.Logger) (*daemon, error) {
	d := &daemon{cfg: cfg, log: log, metrics: newMetrics(), workloads: &workloadsOf{read: make(chan struct{})}, later: &later{}}
	var err error
	if d.images, err = local.New(local.Config{Dir: filepath.Join(cfg.StateDir, "images"), Log: log.With("component", "image")}); err != nil {
		return nil, err
	}
	if d.puller, err = pull.New(d.pullConfig(), d.images); err != nil {
		return nil, err
	}
	d.named = catalog.Named{Store: d.images, Names: d.puller}
	if d.nets, err = newNetworks(cfg, log); err != nil {
		return nil, err
	}
	if d.nets.bridge != nil {
		d.metrics.registry.MustRegister(networkCollector{d.nets.bridge})
	}
	return d, nil
}

// host is everything that exists once the folders are locked: the common part of run and shutdown.
type host struct {
	engine    *engine.Engine
	records   *records.Keeper
	drivers   map[string]hypervisor.Driver
	snapshots snapshot.Store
	volumes   *volumes
	plugins   *plugins
	close     func()
}

// open locks the folders, opens the journal and makes the engine. close releases all of it.
func (d *daemon) open(ctx context.Context) (_ *host, err error) {
	if os.Geteuid() != 0 && d.cfg.Driver != fake.Name {
		return nil, errdefs.Preconditionf("cocoond makes taps and starts unprivileged processes and so needs root: run it with sudo")
	}
	var closers []func()
	closeAll := func() {
		for i := len(closers) - 1; i >= 0; i-- {
			closers[i]()
		}
	}
	defer func() {
		if err != nil {
			closeAll()
		}
	}()
	// Hypervisor processes run as other users: they may traverse these folders but not list them.
	netCfg := d.cfg.bridge()
	for _, dir := range []string{d.cfg.StateDir, d.cfg.RunDir, netCfg.StateDir, filepath.Dir(netCfg.LeasePath)} {
		if err := os.MkdirAll(dir, 0o711); err != nil {
			return nil, errdefs.New(errdefs.FailedPrecondition, "make a folder: %w", err)
		}
	}
	lock, err := lockDir(ctx, d.cfg.StateDir)
	if err != nil {
		return nil, err
	}
	closers = append(closers, func() { lock.Close() })
	opened, err := d.settleState(ctx)
	if err != nil {
		return nil, err
	}
	j, err := d.openJournal(ctx)
	if err != nil {
		return nil, err
	}
	closers = append(closers, func() { logFailure(d.log, "journal not closed cleanly", j.Close()) }) //nolint:contextcheck // ctx has ended by then
	if err := opened(); err != nil {
		return nil, err
	}
	if err := d.images.Open(ctx); err != nil {
		return nil, err
	}
	snapshots, err := snapshotstore.New(snapshotstore.Config{Dir: filepath.Join(d.cfg.StateDir, "snapshots"), OwnerOf: ownerOf, Log: d.log.With("component", "snapshot")})
	if err != nil {
		return nil, err
	}
	if err := snapshots.Open(ctx); err != nil {
		return nil, err
	}
	closers = append(closers, func() { logFailure(d.log, "snapshot store not closed cleanly", snapshots.Close()) })
	volumes, err := d.openVolumes(ctx)
	if err != nil {
		return nil, err
	}
	closers = append(closers, func() { logFailure(d.log, "volume stores not closed cleanly", volumes.close()) })
	published, err := d.openPlugins(ctx)
	if err != nil {
		return nil, err
	}
	if published != nil {
		closers = append(closers, func() { logFailure(d.log, "published volumes not closed cleanly", published.Close()) })
	}
	drivers, err := d.drivers()
	if err != nil {
		return nil, err
	}
	hostPaths, err := d.cfg.hostPaths()
	if err != nil {
		return nil, err
	}
	engineCfg := engine.Config{
		StateDir: d.cfg.StateDir, RunDir: d.cfg.RunDir, DefaultDriver: d.cfg.Driver, StandIns: []string{string(contract.BackendCloudHypervisor), string(contract.BackendFirecracker)}, DefaultNetwork: d.nets.first(),
		Kernel: d.present(d.cfg.Guest.Kernel), Initrd: d.present(d.cfg.Guest.Initramfs),
		WindowsDrivers: d.cfg.Guest.WindowsDrivers, VSOCK: d.cfg.Guest.VSOCK,
		Silence:  time.Duration(d.cfg.Guest.SilenceSeconds) * time.Second,
		PoolSize: d.cfg.Pool.Size, PoolMemory: d.cfg.Pool.Memory,
		HostPaths: hostPaths, CloneDirs: d.cfg.CloneDirs, OwnerOf: ownerOf, Others: d.others,
	}
	if published != nil { // not a nil pointer in an interface
		engineCfg.Published = published
	}
	e, err := engine.New(engineCfg, engine.Deps{
		Journal: j, Drivers: drivers, Images: d.named, Networks: d.nets, Agents: agent.Connector{},
		DiskAgents: qga.Connector{}, Seeds: seed.Maker{}, Snapshots: snapshots, Volumes: volumes.Store, Records: j, Log: d.log.With("component", "engine"),
	})
	if err != nil {
		return nil, err
	}
	return &host{engine: e, records: j, drivers: drivers, snapshots: snapshots, volumes: volumes, plugins: &plugins{published, volumes.devices, e}, close: closeAll}, nil
}

// ownerOf is the owner of objects made before owners existed, taken from the labels of a virtual node.
func ownerOf(labels map[string]string) vm.Owner {
	return vm.Owner{Namespace: labels[contract.VMLabelPodNamespace], PodUID: labels[contract.VMLabelPodUID]}
}

// present returns path if it exists, otherwise "": then the engine rejects what needs it, with its own message.
func (d *daemon) present(path string) string {
	if fi, err := os.Stat(path); err != nil || !fi.Mode().IsRegular() {
		d.log.Warn("guest file missing, container images will not boot; `make guest` makes it", "path", path)
		return ""
	}
	return path
}

func (d *daemon) drivers() (map[string]hypervisor.Driver, error) {
	users, err := jail.NewUsers(cmp.Or(d.cfg.QEMU.UIDBase, jail.DefaultUIDBase), cmp.Or(d.cfg.QEMU.UIDCount, jail.DefaultUIDCount))
	if err != nil {
		return nil, err
	}
	q, err := qemu.New(qemu.Config{Binary: d.cfg.QEMU.Binary, Cgroup: d.cfg.QEMU.Cgroup, Users: users, TBSize: d.cfg.QEMU.TBSize}, d.log)
	if err != nil {
		return nil, err
	}
	ch := cloudhypervisor.Config{Binary: d.cfg.CloudHypervisor.Binary, Cgroup: d.cfg.QEMU.Cgroup, Users: users, Folder: d.cfg.StateDir}
	if path := d.cfg.CloudHypervisor.Firmware; path != "" {
		ch.Firmware = []string{path}
	}
	c, err := cloudhypervisor.New(ch, d.log)
	if err != nil {
		return nil, err
	}
	f, err := firecracker.New(firecracker.Config{Binary: d.cfg.Firecracker.Binary, Cgroup: d.cfg.QEMU.Cgroup, Users: users, Folder: d.cfg.StateDir}, d.log)
	if err != nil {
		return nil, err
	}
	drivers := map[string]hypervisor.Driver{qemu.Name: q, cloudhypervisor.Name: c, firecracker.Name: f}
	if d.cfg.Driver != fake.Name {
		return drivers, nil
	}
	dir := filepath.Join(d.cfg.StateDir, "fake")
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, errdefs.New(errdefs.FailedPrecondition, "make a folder: %w", err)
	}
	machines, err := fake.NewHost(dir)
	if err != nil {
		return nil, err
	}
	behaviour := fake.Behaviour{Launch: ms(d.cfg.Fake.LaunchMS), Shutdown: ms(d.cfg.Fake.ShutdownMS)}
	drivers[fake.Name] = fake.New(fake.Config{Behave: func(hypervisor.Plan) fake.Behaviour { return behaviour }}, machines)
	return drivers, nil
}

func ms(n int) time.Duration { return time.Duration(n) * time.Millisecond }

// run serves until ctx ends. Doors close first, then the engine releases its VMs, which keep running.
func (d *daemon) run(ctx context.Context) error {
	h, err := d.open(ctx)
	if err != nil {
		return d.answerFailure(ctx, err)
	}
	defer h.close()
	if err := d.nets.setup(ctx); err != nil { // links and rules stay, because VMs may use them
		return err
	}
	served, images := d.serve(h), d.clientImages(h.engine)
	deps := nodeapi.Deps{Engine: served, Images: images, Puller: images, Snapshots: served, Volumes: h.engine.Volumes(), Filler: served.filler, Plugins: h.plugins, Host: served.node, Log: d.log}
	api, err := nodeapi.New(nodeapi.Config{Socket: d.cfg.Socket, Group: d.cfg.Group, TCP: d.cfg.Listen, TLS: d.cfg.TLS}, deps)
	if err != nil {
		return err
	}
	doors, err := d.doors(served)
	if err != nil {
		return err
	}
	d.metrics.watch(h.engine)
	d.metrics.registry.MustRegister(imageCollector{d.images, d.puller}, snapshotCollector{h.snapshots}, volumeCollector{h.volumes.Store}, thinPoolCollector{h.volumes.Store}, poolCollector{h.engine}, strayCollector{h.engine})

	outer, octx := errgroup.WithContext(ctx)
	inner, ictx := errgroup.WithContext(context.WithoutCancel(ctx))
	ictx, stopInner := context.WithCancel(ictx)
	defer stopInner()
	inner.Go(func() error { return h.engine.Run(ictx) })
	inner.Go(func() error { return d.nets.run(ictx) })
	inner.Go(func() error { return d.later.run(ictx) })
	inner.Go(func() error { return h.records.Run(ictx) })
	inner.Go(func() error { return h.volumes.run(ictx) })
	inner.Go(func() error { return h.plugins.run(ictx) })
	// The doors must stop when the engine, the networks, the records, the volumes or the plugins stop.
	outer.Go(func() error {
		select {
		case <-ictx.Done():
			return context.Cause(ictx)
		case <-octx.Done():
			return nil
		}
	})
	outer.Go(func() error { return api.Run(octx) })
	outer.Go(func() error { return d.collect(octx, h.engine) })
	outer.Go(func() error { return d.announce(octx, h.engine, api) })
	if d.cfg.MetricsAddr != "" {
		outer.Go(func() error { return d.metrics.serve(octx, d.cfg.MetricsAddr) })
	}
	for _, door := range doors {
		outer.Go(func() error { return door.Run(octx) })
	}
	err = outer.Wait()
	service.Stopping(d.log)
	d.log.Info("stopping; VMs keep running")
	stopInner()
	if innerErr := inner.Wait(); innerErr != nil {
		return innerErr // the cause; err only follows from it
	}
	if errors.Is(err, context.Canceled) && ctx.Err() != nil {
		return nil
	}
	return err
}

// announce reports that the daemon is ready: VMs are recovered and clients are served.
func (d *daemon) announce(ctx context.Context, e *engine.Engine, api *nodeapi.Server) error {
	for _, ready := range []<-chan struct{}{e.Recovered(), api.Ready()} {
		select {
		case <-ready:
		case <-ctx.Done():
			return nil
		}
	}
	d.log.Info("ready", "op", "start", "socket", d.cfg.Socket)
	service.Ready(d.log)
	// Alive means that a client gets an answer: the socket accepts, the API can serve, the engine is not stuck.
	return service.Watchdog(ctx, func(ctx context.Context) error {
		c, err := nodeclient.Dial(d.cfg.Socket)
		if err != nil {
			return err
		}
		defer c.Close()
		_, err = c.List(ctx)
		return err
	}, d.log)
}

// shutdown ends every VM, with at most grace for each, makes CSI drivers release their volumes, and takes the network down. The network
// need not be up or able to come up. The daemon must not be running.
func (d *daemon) shutdown(ctx context.Context, grace time.Duration) error {
	h, err := d.open(ctx)
	if err != nil {
		return err
	}
	defer h.close()
	endContainers, release, err := d.endContainers(ctx, h) // before the engine asks what they have
	if err != nil {
		return err
	}
	defer release()
	runCtx, stop := context.WithCancel(context.WithoutCancel(ctx))
	ended := make(chan error, 1)
	go func() { ended <- h.engine.Run(runCtx) }()
	var unreleased error // does not keep the network
	err = d.stopAll(ctx, h.engine, grace, ended)
	if err == nil {
		err = endContainers(ctx, grace)
	}
	if err == nil {
		unreleased = h.plugins.release(ctx)
		err = d.newNode(h).noStrayTaps(ctx)
	}
	stop()
	if runErr := <-ended; err == nil {
		err = runErr
	}
	if err == nil {
		err = d.nets.teardown(ctx)
	}
	return errors.Join(unreleased, err)
}

func (d *daemon) stopAll(ctx context.Context, e *engine.Engine, grace time.Duration, ended chan error) error {
	select {
	case <-e.Recovered():
	case err := <-ended:
		ended <- err
		return errors.Join(err, errdefs.Unavailablef("the engine did not start"))
	case <-ctx.Done():
		return ctx.Err()
	}
	all, err := e.List(ctx)
	if err != nil {
		return err
	}
	var wg sync.WaitGroup
	errs := make([]error, len(all))
	for i, r := range all {
		if r.State != vm.StateRunning {
			continue
		}
		wg.Go(func() {
			if _, err := e.Stop(ctx, string(r.ID), min(grace, r.Spec.StopGrace)); err != nil && !errdefs.IsFailedPrecondition(err) {
				errs[i] = fmt.Errorf("stop VM %s: %w", r.Spec.Name, err)
			}
		})
	}
	wg.Wait()
	return errors.Join(errs...)
}
