package cocoond

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"time"

	"cocoonstack.io/cocoon/internal/csinode"
	csilocal "cocoonstack.io/cocoon/internal/csinode/local"
	"cocoonstack.io/cocoon/internal/engine"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/kube/csi"
	"cocoonstack.io/cocoon/internal/nodeapi"
	"cocoonstack.io/cocoon/internal/nodewire"
	"cocoonstack.io/cocoon/internal/vm"
	"cocoonstack.io/cocoon/internal/volume"
	"cocoonstack.io/cocoon/internal/volume/block"
)

var (
	_ nodeapi.Plugins = (*plugins)(nil)
	_ csi.Node        = (*served)(nil)
)

// plugins publishes volumes of CSI drivers: their folders are for VMs to share, and their devices become volumes of the node.
type plugins struct {
	node    *csilocal.Node // nil: the node is not configured for drivers
	devices *block.Store
	engine  *engine.Engine
}

// openPlugins opens what drivers have published. nil: the node is not configured for drivers.
func (d *daemon) openPlugins(ctx context.Context) (*csilocal.Node, error) {
	if d.cfg.CSI.Plugins == "" {
		return nil, nil
	}
	return csilocal.New(ctx, csilocal.Config{Plugins: d.cfg.CSI.Plugins, Dir: d.cfg.CSI.Dir, Log: d.log.With("component", "csi")})
}

// check checks the settings of CSI drivers.
func (c *CSI) check() error {
	if c.Plugins == "" {
		return nil
	}
	for _, p := range []struct{ key, path string }{{"csiPlugins", c.Plugins}, {"csiDir", c.Dir}} {
		if !filepath.IsAbs(p.path) || filepath.Clean(p.path) != p.path {
			return errdefs.Invalidf("%s: %q is not an absolute path without empty, \".\" and \"..\" parts", p.key, p.path)
		}
	}
	return nil
}

func (p *plugins) run(ctx context.Context) error {
	if p.node == nil {
		<-ctx.Done()
		return nil
	}
	return p.node.Run(ctx)
}

// Drivers returns the registered drivers, and a channel that is closed when they change.
func (p *plugins) Drivers() (now []csinode.Driver, changed <-chan struct{}) {
	if p.node == nil {
		return nil, nil
	}
	changed = p.node.Changed() // first, so that no change is missed
	return p.node.Drivers(), changed
}

// Publish publishes a volume, and makes its device a volume of the node.
func (p *plugins) Publish(ctx context.Context, r csinode.Request) (nodewire.Published, error) {
	if p.node == nil {
		return nodewire.Published{}, errdefs.Preconditionf("volume %s is of CSI driver %s, and this node has no CSI drivers; start cocoond with --csi-plugins", r.Name, r.Driver)
	}
	got, err := p.node.Publish(ctx, r)
	if err != nil || got.Access != csinode.AsDevice {
		return nodewire.Published{Published: got}, err
	}
	v, err := p.devices.Lend(ctx, r.Owner, volume.Spec{Name: lentName(r.Key), Labels: map[string]string{"csi-driver": r.Driver, "csi-handle": r.Handle}}, got.Path)
	return nodewire.Published{Published: got, Volume: v.ID}, err
}

// lentName is the name of the volume of the node that a published device is.
func lentName(k csinode.Key) string {
	return fmt.Sprintf("csi-%x", sha256.Sum256([]byte(k.Holder+"\x00"+k.Name)))[:36]
}

// Unpublish unpublishes a volume that no VM has.
func (p *plugins) Unpublish(ctx context.Context, k csinode.Key) error {
	if p.node == nil {
		return nil
	}
	for _, v := range p.node.List() {
		if v.Holder != k.Holder || v.Name != k.Name || v.Owner.Namespace != k.Owner.Namespace {
			continue
		}
		if err := p.unused(ctx, v); err != nil {
			return err
		}
	}
	if err := p.devices.Return(ctx, k.Owner, lentName(k)); err != nil {
		return err
	}
	return p.node.Unpublish(ctx, k)
}

// releaseLimit is the time in which drivers must release all volumes.
const releaseLimit = 30 * time.Second

// release makes the drivers release all volumes that no running VM has, as far as they answer. The records stay: pods publish their volumes
// again when they start, as after a boot of the machine. The error says what stays published.
func (p *plugins) release(ctx context.Context) error {
	if p.node == nil {
		return nil
	}
	all, err := p.engine.List(vm.OnBehalf(ctx, vm.Owner{}))
	if err != nil {
		return err
	}
	all = slices.DeleteFunc(all, func(r vm.Record) bool { return r.State != vm.StateRunning && r.State != vm.StateCreating })
	ctx, cancel := context.WithTimeout(ctx, releaseLimit)
	defer cancel()
	finding, stop := context.WithCancel(ctx)
	ended := make(chan error, 1)
	go func() { ended <- p.node.Run(finding) }()
	err = p.node.Release(ctx, func(v csinode.Published) error { return p.withdraw(ctx, v, all) })
	stop()
	if err = errors.Join(err, <-ended); err != nil {
		return fmt.Errorf("%w; volumes of CSI drivers stay mounted below %s: do not remove that folder before they are released", err, p.node.Root())
	}
	return nil
}

// withdraw lets go of a volume that no VM of running has.
func (p *plugins) withdraw(ctx context.Context, v csinode.Published, running []vm.Record) error {
	user := func(vm.Record) bool { return false }
	if v.Access == csinode.AsFolder {
		user = func(r vm.Record) bool { return shares(r, v) }
	} else if lent, _, err := p.devices.Lent(ctx, v.Owner, lentName(v.Key)); err == nil {
		user = func(r vm.Record) bool {
			return slices.ContainsFunc(lent.Attachments, func(a volume.Attachment) bool { return a.VM == r.ID })
		}
	} else if !errdefs.IsNotFound(err) {
		return err
	}
	if at := slices.IndexFunc(running, user); at >= 0 {
		return errdefs.Preconditionf("VM %s has it and runs; stop that VM first", running[at].Owner.Qualify(running[at].Spec.Name))
	}
	return p.devices.Withdraw(ctx, v.Owner, lentName(v.Key))
}

// unused returns FailedPrecondition if a VM shares the folder of v.
func (p *plugins) unused(ctx context.Context, v csinode.Published) error {
	all, err := p.engine.List(vm.OnBehalf(ctx, vm.Owner{}))
	if err != nil {
		return err
	}
	if at := slices.IndexFunc(all, func(r vm.Record) bool { return shares(r, v) }); at >= 0 {
		return errdefs.Preconditionf("volume %s of CSI driver %s cannot be unpublished: VM %s has it; remove that VM first", v.Name, v.Driver, all[at].Owner.Qualify(all[at].Spec.Name))
	}
	return nil
}

// shares reports whether the VM of r shares the folder of v.
func shares(r vm.Record, v csinode.Published) bool {
	return slices.ContainsFunc(r.Spec.Dirs(), func(d vm.Volume) bool { return d.Dir.Published && d.Dir.Path == v.Path })
}

// List returns what is published for the owner of ctx, or all for the operator.
func (p *plugins) List(ctx context.Context) ([]nodewire.Published, error) {
	if p.node == nil {
		return nil, nil
	}
	who := vm.Behalf(ctx)
	var out []nodewire.Published
	for _, v := range p.node.List() {
		if !who.Operator() && v.Owner.Namespace != who.Namespace {
			continue
		}
		one := nodewire.Published{Published: v}
		if v.Access == csinode.AsDevice {
			lent, here, err := p.devices.Lent(ctx, v.Owner, lentName(v.Key))
			switch {
			case err == nil:
				one.Volume, one.Ready = lent.ID, v.Ready && here
			case errdefs.IsNotFound(err): // publishing was interrupted
				one.Ready = false
			default:
				return nil, err
			}
		}
		out = append(out, one)
	}
	return out, nil
}

// Usage returns how full a published volume is.
func (p *plugins) Usage(ctx context.Context, k csinode.Key) (csinode.Usage, error) {
	if p.node == nil {
		return csinode.Usage{}, errdefs.NotFoundf("volume %s is not published", k.Name)
	}
	return p.node.Usage(ctx, k)
}

// Grow grows a published volume on this node, and the disk of the VM that has its device.
func (p *plugins) Grow(ctx context.Context, k csinode.Key, size int64) (int64, error) {
	if p.node == nil {
		return 0, errdefs.NotFoundf("volume %s is not published", k.Name)
	}
	size, err := p.node.Grow(ctx, k, size)
	if err != nil {
		return 0, err
	}
	has, err := p.devices.Measure(ctx, k.Owner, lentName(k)) // some drivers leave the device as it is
	switch {
	case errdefs.IsNotFound(err): // a folder
		return size, nil
	case err != nil:
		return 0, err
	}
	_, err = p.engine.Volumes().Grow(vm.OnBehalf(ctx, k.Owner), k.Owner.Qualify(lentName(k)), has)
	return size, err
}

// WatchDrivers implements csi.Node for a virtual node in this process.
func (s *served) WatchDrivers(ctx context.Context, fn func([]csinode.Driver) error) error {
	for {
		now, changed := s.plugins.Drivers()
		if err := fn(now); err != nil {
			return err
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// PublishVolume implements csi.Node.
func (s *served) PublishVolume(ctx context.Context, r csinode.Request) (nodewire.Published, error) {
	return s.plugins.Publish(ctx, r)
}

// UnpublishVolume implements csi.Node.
func (s *served) UnpublishVolume(ctx context.Context, k csinode.Key) error {
	return s.plugins.Unpublish(ctx, k)
}

// ListPublished implements csi.Node.
func (s *served) ListPublished(ctx context.Context) ([]nodewire.Published, error) {
	return s.plugins.List(ctx)
}

// GrowPublished implements csi.Node.
func (s *served) GrowPublished(ctx context.Context, k csinode.Key, size int64) (int64, error) {
	return s.plugins.Grow(ctx, k, size)
}

// PublishedUsage implements csi.Node.
func (s *served) PublishedUsage(ctx context.Context, k csinode.Key) (csinode.Usage, error) {
	return s.plugins.Usage(ctx, k)
}
