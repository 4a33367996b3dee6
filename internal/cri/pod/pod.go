// Package pod is the RuntimeService of CRI for pods that are VMs.
//
// It translates and keeps nothing: sandboxes and containers are those of the engine. Other sandboxes are not its concern.
package pod

import (
	"context"
	"log/slog"
	"slices"
	"strings"
	"time"

	"golang.org/x/sync/errgroup"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"cocoonstack.io/cocoon/internal/cri/convert"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/guest"
	"cocoonstack.io/cocoon/internal/guest/console"
	"cocoonstack.io/cocoon/internal/image"
	"cocoonstack.io/cocoon/internal/vm"
)

// Engine is the part of the VM engine that pods need.
type Engine interface {
	guest.Access
	guest.ConsoleOpener
	Saver
	Create(ctx context.Context, s vm.Spec) (vm.Record, error)
	Start(ctx context.Context, ref string) (vm.Record, error)
	Stop(ctx context.Context, ref string, grace time.Duration) (vm.Record, error)
	Remove(ctx context.Context, ref string, force bool) error
	Resize(ctx context.Context, ref string, to vm.Size) (vm.Record, error)
	ReleaseNICs(ctx context.Context, ref string) (vm.Record, error)
	Inspect(ctx context.Context, ref string) (vm.Record, error)
	List(ctx context.Context) ([]vm.Record, error)
	Watch(ctx context.Context, after int64, fn func(vm.Event) error) error
	Stats(ctx context.Context, ref string) (guest.Stats, error)

	// AddBootContainer adds a container whose image boots itself, so that it is the whole guest.
	AddBootContainer(ctx context.Context, ref string, c vm.Container, g vm.GuestBoot) (vm.Record, error)
	AddContainer(ctx context.Context, ref string, c vm.Container) (vm.Record, error)
	StartContainer(ctx context.Context, ref, container string) (vm.Record, error)
	KillContainer(ctx context.Context, ref, container string, run int, grace time.Duration) error
	RemoveContainer(ctx context.Context, ref, container string) error
	ResizeContainers(ctx context.Context, ref string, want map[string]vm.Resources) (vm.Record, error)
}

// Images makes sure that the image of a container is there.
type Images interface {
	// Ensure returns the image that a container of the namespace names, which is pulled if it is missing.
	Ensure(ctx context.Context, namespace string, image *cri.ImageSpec) (image.Image, error)
}

// Service implements the RuntimeService for VM pods.
type Service struct {
	cri.UnimplementedRuntimeServiceServer

	engine Engine
	images Images
	node   convert.Node
	store  string
	log    *slog.Logger
	logs   *followers
	serial console.Consoles // of guests that boot themselves
	urls   *urls
	life   context.Context //nolint:containedctx // of what goes on after a call
}

// Deps is what a Service depends on.
type Deps struct {
	Engine Engine
	Images Images
	Node   convert.Node
	Store  string // folder of the image store, by which a kubelet knows the file system of what containers write
	Log    *slog.Logger
}

// New returns a Service. What goes on after a call, such as the writing of logs, ends with life.
func New(life context.Context, d Deps) (*Service, error) {
	s := &Service{engine: d.Engine, images: d.Images, node: d.Node, store: d.Store, log: d.Log, life: life, logs: newFollowers(life, d.Engine, d.Log)}
	var err error
	s.urls, err = newURLs(s)
	return s, err
}

// Run serves the streams of exec, attach and port-forward, and writes the logs of containers.
// Preconditions: the engine has recovered.
func (s *Service) Run(ctx context.Context) error {
	s.dropCheckpoints(ctx)
	g, gctx := errgroup.WithContext(ctx)
	g.Go(func() error { return s.urls.run(gctx) })
	g.Go(func() error { return s.followAll(gctx) })
	return g.Wait()
}

// followAll writes the logs of containers from when they start, those that run already included, until ctx ends.
func (s *Service) followAll(ctx context.Context) error {
	for {
		err := s.engine.Watch(ctx, -1, func(ev vm.Event) error { //nolint:contextcheck // logs end with the daemon
			s.logs.watch(ev)
			return nil
		})
		switch {
		case ctx.Err() != nil:
			return nil //nolint:nilerr // it ends with ctx
		case !errdefs.IsFailedPrecondition(err): // else it fell behind, and begins with all VMs again
			return err
		}
	}
}

// sandboxes returns the VMs that are sandboxes.
func (s *Service) sandboxes(ctx context.Context) (out []vm.Record, err error) {
	all, err := s.engine.List(ctx)
	if err != nil {
		return nil, err
	}
	for _, r := range all {
		if convert.IsSandbox(r) {
			out = append(out, r)
		}
	}
	return out, nil
}

// Has reports whether a pod has a sandbox here.
func (s *Service) Has(ctx context.Context, pod *cri.PodSandboxMetadata) bool {
	all, err := s.sandboxes(ctx)
	return err == nil && pod.GetUid() != "" && slices.ContainsFunc(all, func(r vm.Record) bool {
		return r.Owner == vm.Owner{Namespace: pod.GetNamespace(), PodUID: pod.GetUid()}
	})
}

// sandbox returns the VM of a sandbox; id may be the beginning of its id.
// Errors: NotFound, InvalidArgument if several begin so.
func (s *Service) sandbox(ctx context.Context, id string) (vm.Record, error) {
	machine, _, err := convert.ParseID(id)
	if err != nil {
		return vm.Record{}, err
	}
	if vm.ID(machine).Valid() {
		r, err := s.engine.Inspect(ctx, machine)
		if err == nil && !convert.IsSandbox(r) {
			err = errdefs.NotFoundf("no VM pod has the id %q", id)
		}
		return r, err
	}
	all, err := s.sandboxes(ctx)
	if err != nil {
		return vm.Record{}, err
	}
	var found []vm.Record
	for _, r := range all {
		if strings.HasPrefix(string(r.ID), machine) {
			found = append(found, r)
		}
	}
	switch len(found) {
	case 0:
		return vm.Record{}, errdefs.NotFoundf("no VM pod has the id %q", id)
	case 1:
		return found[0], nil
	default:
		return vm.Record{}, errdefs.Invalidf("%d VM pods have an id that begins with %q; give more of it", len(found), id)
	}
}

// container returns a container and the VM that it is in; id may be the beginning of its id.
// Errors: as for sandbox.
func (s *Service) container(ctx context.Context, id string) (vm.Record, vm.Ephemeral, error) {
	_, name, err := convert.ParseID(id)
	if err != nil {
		return vm.Record{}, vm.Ephemeral{}, err
	}
	r, err := s.sandbox(ctx, id)
	if err != nil {
		return r, vm.Ephemeral{}, err
	}
	var found []vm.Ephemeral
	for _, e := range r.Ephemeral {
		if name != "" && strings.HasPrefix(e.Spec.Name, name) {
			found = append(found, e)
		}
	}
	switch len(found) {
	case 0:
		return r, vm.Ephemeral{}, errdefs.NotFoundf("no container of a VM pod has the id %q", id)
	case 1:
		return r, found[0], nil
	default:
		return r, vm.Ephemeral{}, errdefs.Invalidf("%d containers have an id that begins with %q; give more of it", len(found), id)
	}
}

// gone turns NotFound into success: stopping and removing what is gone is no error.
func gone(err error) error {
	if errdefs.IsNotFound(err) {
		return nil
	}
	return err
}
