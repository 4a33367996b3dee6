package local

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/cenkalti/backoff/v5"
	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/fsnotify/fsnotify"
	"google.golang.org/grpc"
	registration "k8s.io/kubelet/pkg/apis/pluginregistration/v1"

	"cocoonstack.io/cocoon/internal/csinode"
	"cocoonstack.io/cocoon/internal/errdefs"
)

const (
	maxSockets = 256 // registration sockets that are looked at
	maxFolders = 64  // folders in that of the registration sockets
	maxNodeID  = 256 // bytes
	maxLabels  = 64  // of a topology
)

// pauses are the times of registrations.
type pauses struct {
	call    time.Duration // limit of a call
	slow    time.Duration // for how long a driver that starts may not answer before its registration fails
	first   time.Duration // before the second attempt; the pauses grow
	longest time.Duration // between attempts
	rescan  time.Duration // between looks at the folder of registration sockets, besides those that the kernel causes
}

var defaultPauses = pauses{
	call: 10 * time.Second, slow: 2 * time.Minute, first: 200 * time.Millisecond, longest: 30 * time.Second, rescan: 10 * time.Second,
}

// version is a version of the CSI specification.
type version [3]int

var versions = regexp.MustCompile(`^v?(\d{1,6})\.(\d{1,6})(?:\.(\d{1,6}))?(?:[-+].*)?$`)

// highest returns the highest version 1.x of list; false if there is none.
func highest(list []string) (version, bool) {
	var best version
	for _, text := range list {
		m := versions.FindStringSubmatch(text)
		if m == nil {
			continue
		}
		var v version
		for i := range v {
			v[i], _ = strconv.Atoi(cmp.Or(m[i+1], "0"))
		}
		if v[0] == 1 && slices.Compare(v[:], best[:]) > 0 {
			best = v
		}
	}
	return best, best[0] == 1
}

// registry has the drivers that are registered. It is safe for concurrent use.
type registry struct {
	plugins string
	log     *slog.Logger
	pauses  pauses

	mu      sync.Mutex
	drivers map[string]*driver // by registration socket
	changed chan struct{}
}

// list returns the drivers that serve their names, sorted by name.
func (g *registry) list() []csinode.Driver {
	g.mu.Lock()
	defer g.mu.Unlock()
	best := map[string]*driver{}
	for _, d := range g.drivers {
		if b := best[d.Name]; b == nil || d.beats(b) {
			best[d.Name] = d
		}
	}
	out := make([]csinode.Driver, 0, len(best))
	for _, name := range slices.Sorted(maps.Keys(best)) {
		d := best[name].Driver
		d.Topology = maps.Clone(d.Topology)
		out = append(out, d)
	}
	return out
}

// beats reports whether d serves the name that it has in common with o: the higher version, or else the later registration.
func (d *driver) beats(o *driver) bool {
	return cmp.Or(slices.Compare(d.version[:], o.version[:]), cmp.Compare(d.since, o.since)) > 0
}

// next returns a channel that is closed with the next change.
func (g *registry) next() <-chan struct{} {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.changed
}

// driver returns the registered driver of this name. Errors: Unavailable.
func (g *registry) driver(name string) (*driver, error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	var best *driver
	for _, d := range g.drivers {
		if d.Name == name && (best == nil || d.beats(best)) {
			best = d
		}
	}
	if best == nil {
		return nil, errdefs.Unavailablef("CSI driver %s is not registered on this node; start it", name)
	}
	return best, nil
}

// add registers a driver by its socket, unless ctx has ended. Errors: FailedPrecondition if one with a higher version has the name.
func (g *registry) add(ctx context.Context, socket string, d *driver) error {
	g.mu.Lock()
	defer g.mu.Unlock()
	if err := ctx.Err(); err != nil {
		return err // the socket has gone
	}
	for at, o := range g.drivers {
		if o.Name == d.Name && at != socket && slices.Compare(o.version[:], d.version[:]) > 0 {
			return errdefs.Preconditionf("CSI driver %s is registered with a higher version already; stop that one first", d.Name)
		}
		d.since = max(d.since, o.since+1)
	}
	g.drivers[socket] = d
	g.tell()
	return nil
}

// drop unregisters the driver of a socket, if there is one.
func (g *registry) drop(socket string) {
	g.mu.Lock()
	defer g.mu.Unlock()
	d, ok := g.drivers[socket]
	if !ok {
		return
	}
	delete(g.drivers, socket)
	g.tell()
	g.log.Info("CSI driver unregistered", "driver", d.Name)
}

// tell says that the drivers have changed. Preconditions: g.mu is held.
func (g *registry) tell() {
	close(g.changed)
	g.changed = make(chan struct{})
}

// run is Node.Run.
func (g *registry) run(ctx context.Context) error {
	if err := os.MkdirAll(g.plugins, 0o750); err != nil {
		return fmt.Errorf("make the folder in which CSI drivers register: %w", err)
	}
	ctx, cancel := context.WithCancel(ctx)
	w := watch{registry: g, tasks: map[string]task{}}
	defer w.wg.Wait()
	defer cancel()
	var events <-chan fsnotify.Event
	var errs <-chan error
	if notify, err := fsnotify.NewWatcher(); err != nil {
		g.log.Warn("CSI drivers are found later than usual: no inotify", "err", err)
	} else {
		defer notify.Close()
		w.notify, events, errs = notify, notify.Events, notify.Errors
	}
	tick := time.NewTicker(g.pauses.rescan)
	defer tick.Stop()
	for {
		w.scan(ctx)
		for changed := false; !changed; {
			select {
			case <-ctx.Done():
				return nil
			case e := <-events:
				changed = e.Op&^fsnotify.Chmod != 0
			case err := <-errs:
				g.log.Warn("watch of the folder in which CSI drivers register failed", "path", g.plugins, "err", err)
				changed = true
			case <-tick.C:
				changed = true
			}
		}
	}
}

// watch has a task for each registration socket.
type watch struct {
	registry *registry
	notify   *fsnotify.Watcher // nil: there is none
	tasks    map[string]task
	wg       sync.WaitGroup
}

type task struct {
	file   inode
	cancel context.CancelFunc
}

// inode tells a socket from a later one of the same name.
type inode struct {
	dev, ino    uint64
	sec, nanose int64
}

// scan starts and ends tasks, so that each socket has one.
func (w *watch) scan(ctx context.Context) {
	found := w.sockets()
	for path, t := range w.tasks {
		if found[path] != t.file {
			t.cancel()
			w.registry.drop(path)
			delete(w.tasks, path)
		}
	}
	for path, file := range found {
		if _, ok := w.tasks[path]; ok {
			continue
		}
		ctx, cancel := context.WithCancel(ctx)
		w.tasks[path] = task{file: file, cancel: cancel}
		w.wg.Go(func() { w.registry.register(ctx, path) })
	}
}

// sockets returns the registration sockets, in the folder and in those that are in it.
func (w *watch) sockets() map[string]inode {
	found := map[string]inode{}
	folders := []string{w.registry.plugins}
	for i := 0; i < len(folders); i++ {
		if w.notify != nil {
			_ = w.notify.Add(folders[i]) // the regular look finds what is not watched
		}
		list, err := os.ReadDir(folders[i])
		if err != nil && !errors.Is(err, os.ErrNotExist) {
			w.registry.log.Warn("folder in which CSI drivers register cannot be read", "path", folders[i], "err", err)
		}
		for _, f := range list {
			path := filepath.Join(folders[i], f.Name())
			switch {
			case strings.HasPrefix(f.Name(), "."):
			case f.IsDir() && i == 0 && len(folders) <= maxFolders:
				folders = append(folders, path)
			case f.Type() == os.ModeSocket && len(found) < maxSockets:
				if info, err := f.Info(); err == nil {
					if st, ok := info.Sys().(*syscall.Stat_t); ok {
						found[path] = inode{dev: st.Dev, ino: st.Ino, sec: st.Mtim.Sec, nanose: st.Mtim.Nsec}
					}
				}
			}
		}
	}
	return found
}

// register tries to register the driver of a socket until that works or ctx ends.
func (g *registry) register(ctx context.Context, socket string) {
	last := ""
	_, err := backoff.Retry(ctx, func() (struct{}, error) {
		return struct{}{}, g.tryRegister(ctx, socket)
	}, backoff.WithBackOff(g.growing()), backoff.WithMaxElapsedTime(0), backoff.WithNotify(func(err error, _ time.Duration) {
		if text := err.Error(); text != last && ctx.Err() == nil {
			g.log.Warn("CSI driver does not register", "path", socket, "err", err)
			last = text
		}
	}))
	if err != nil && !errors.Is(err, errOtherType) && ctx.Err() == nil {
		g.log.Warn("CSI driver is refused until its socket is a new one", "path", socket, "err", err)
	}
}

func (g *registry) growing() backoff.BackOff {
	b := backoff.NewExponentialBackOff()
	b.InitialInterval, b.MaxInterval = g.pauses.first, g.pauses.longest
	return b
}

// errOtherType says that a plug-in is none of CSI.
var errOtherType = errors.New("the plug-in is not a CSI driver")

// tryRegister registers the driver of a socket, and tells it whether that worked.
func (g *registry) tryRegister(ctx context.Context, socket string) error {
	var info *registration.PluginInfo
	if err := g.ask(ctx, socket, func(ctx context.Context, c registration.RegistrationClient) (err error) {
		info, err = c.GetInfo(ctx, &registration.InfoRequest{})
		return err
	}); err != nil {
		return fmt.Errorf("ask the plug-in who it is: %w", err)
	}
	if info.GetType() != registration.CSIPlugin {
		return backoff.Permanent(errOtherType)
	}
	d, err := g.meet(ctx, socket, info)
	if err == nil {
		err = g.add(ctx, socket, d)
	}
	if err == nil {
		g.log.Info("CSI driver registered", "driver", d.Name)
	}
	state := &registration.RegistrationStatus{PluginRegistered: err == nil}
	if err != nil {
		state.Error = err.Error()
	}
	if told := g.ask(ctx, socket, func(ctx context.Context, c registration.RegistrationClient) error {
		_, err := c.NotifyRegistrationStatus(ctx, state)
		return err
	}); told != nil && ctx.Err() == nil {
		g.log.Warn("plug-in cannot be told whether it is registered", "path", socket, "err", told)
	}
	return err
}

func (g *registry) ask(ctx context.Context, socket string, f func(context.Context, registration.RegistrationClient) error) error {
	err := call(ctx, socket, g.pauses.call, func(ctx context.Context, conn grpc.ClientConnInterface) error {
		return f(ctx, registration.NewRegistrationClient(conn))
	})
	return classify(ctx, err, nil)
}

// meet checks what a plug-in says of itself, and asks the driver the rest. A driver that starts may take some time.
func (g *registry) meet(ctx context.Context, socket string, info *registration.PluginInfo) (*driver, error) {
	d := &driver{Driver: csinode.Driver{Name: info.GetName()}, endpoint: cmp.Or(info.GetEndpoint(), socket)}
	if err := checkDriverName(d.Name); err != nil {
		return nil, backoff.Permanent(err)
	}
	var ok bool
	if d.version, ok = highest(info.GetSupportedVersions()); !ok {
		return nil, backoff.Permanent(errdefs.Unsupportedf("CSI driver %s supports no version 1.x of CSI; use a newer driver", d.Name))
	}
	if !filepath.IsAbs(d.endpoint) || strings.IndexByte(d.endpoint, 0) >= 0 || len(d.endpoint) > 4096 {
		return nil, backoff.Permanent(errdefs.Invalidf("endpoint %.200q of CSI driver %s is not the absolute path of a unix socket", d.endpoint, d.Name))
	}
	_, err := backoff.Retry(ctx, func() (struct{}, error) {
		return struct{}{}, g.interview(ctx, d)
	}, backoff.WithBackOff(g.growing()), backoff.WithMaxElapsedTime(g.pauses.slow))
	return d, err
}

// interview asks a driver for its name of this machine and what it can do.
func (g *registry) interview(ctx context.Context, d *driver) error {
	switch info, err := os.Stat(d.endpoint); {
	case err != nil:
		return errdefs.Unavailablef("endpoint of CSI driver %s: %w", d.Name, err)
	case info.Mode().Type() != os.ModeSocket:
		return backoff.Permanent(errdefs.Invalidf("endpoint %.200q of CSI driver %s is not a unix socket", d.endpoint, d.Name))
	}
	var me *csi.NodeGetInfoResponse
	if err := d.node(ctx, "NodeGetInfo", g.pauses.call, nil, func(ctx context.Context, c csi.NodeClient) (err error) {
		me, err = c.NodeGetInfo(ctx, &csi.NodeGetInfoRequest{})
		return err
	}); err != nil {
		return err
	}
	if err := checkText("its name of this node", me.GetNodeId(), maxNodeID); err != nil {
		return backoff.Permanent(fmt.Errorf("CSI driver %s: %w", d.Name, err))
	}
	topology := me.GetAccessibleTopology().GetSegments()
	if len(topology) > maxLabels {
		return backoff.Permanent(errdefs.Invalidf("CSI driver %s: its topology has %d labels; %d are the limit", d.Name, len(topology), maxLabels))
	}
	for k, v := range topology {
		if err := errors.Join(checkText("its topology key", k, 317), checkText("its topology value", cmp.Or(v, "-"), 63)); err != nil { // as labels of nodes
			return backoff.Permanent(fmt.Errorf("CSI driver %s: %w", d.Name, err))
		}
	}
	var able *csi.NodeGetCapabilitiesResponse
	if err := d.node(ctx, "NodeGetCapabilities", g.pauses.call, nil, func(ctx context.Context, c csi.NodeClient) (err error) {
		able, err = c.NodeGetCapabilities(ctx, &csi.NodeGetCapabilitiesRequest{})
		return err
	}); err != nil {
		return err
	}
	d.NodeID, d.Topology, d.MaxVolumes = me.GetNodeId(), topology, max(0, me.GetMaxVolumesPerNode())
	d.can = map[csi.NodeServiceCapability_RPC_Type]bool{}
	for _, c := range able.GetCapabilities() {
		d.can[c.GetRpc().GetType()] = true
	}
	return nil
}
