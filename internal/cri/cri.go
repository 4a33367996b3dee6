// Package cri is the door for a kubelet: one socket in front of containerd. Pods whose RuntimeClass names a handler of ours become VMs.
// Calls about all other pods go to containerd byte for byte. So does every call that this package does not know.
//
// The package chooses who answers, and joins the lists of both sides. Package pod has the VM pods, and package image their images.
package cri

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"golang.org/x/sync/errgroup"
	"google.golang.org/grpc"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"cocoonstack.io/cocoon/internal/cri/convert"
	"cocoonstack.io/cocoon/internal/cri/image"
	"cocoonstack.io/cocoon/internal/cri/pod"
	"cocoonstack.io/cocoon/internal/cri/relay"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/unixsocket"
)

// maxConnections limits how many clients are connected at a time.
const maxConnections = 256

// drainTime is how long calls may go on after the end.
const drainTime = 5 * time.Second

// Config says where to serve and whom to ask.
type Config struct {
	Socket     string   // path of our socket; its folder must exist
	Containerd string   // path of containerd's socket
	Handlers   []string // runtime handlers of VM pods
	ImageDir   string   // folder of the images of VM pods
	Node       convert.Node
}

// Deps is what the server depends on.
type Deps struct {
	Engine    pod.Engine
	Images    image.Store
	Recovered <-chan struct{} // closed when the engine knows its VMs
	Log       *slog.Logger
}

// Server serves CRI.
type Server struct {
	cfg    Config
	deps   Deps
	log    *slog.Logger
	remote *relay.Remote
	router router
	calls  map[string]call // by full method
	ready  chan struct{}
}

// New checks the configuration. Run opens the socket, and nothing connects to containerd before a call needs it.
func New(cfg Config, d Deps) (*Server, error) {
	switch {
	case cfg.Socket == "" || cfg.Containerd == "":
		return nil, errdefs.Invalidf("CRI needs a socket of its own and that of containerd")
	case cfg.Socket == cfg.Containerd:
		return nil, errdefs.Invalidf("the socket of CRI, %s, is that of containerd; choose another path", cfg.Socket)
	case len(cfg.Handlers) == 0:
		return nil, errdefs.Invalidf("CRI needs the name of a runtime handler for VM pods")
	}
	return &Server{cfg: cfg, deps: d, log: d.Log.With("component", "cri"), ready: make(chan struct{})}, nil
}

// Ready is closed when the socket accepts.
func (s *Server) Ready() <-chan struct{} { return s.ready }

// Run serves until ctx ends. It may be called once.
func (s *Server) Run(ctx context.Context) error {
	select { // before, it would say that there are no sandboxes
	case <-s.deps.Recovered:
	case <-ctx.Done():
		return nil
	}
	var err error
	if s.remote, err = relay.Dial(s.cfg.Containerd); err != nil {
		return err
	}
	defer s.remote.Close()
	images := image.New(s.deps.Images, s.cfg.ImageDir)
	pods, err := pod.New(ctx, pod.Deps{Engine: s.deps.Engine, Images: images, Node: s.cfg.Node, Store: s.cfg.ImageDir, Log: s.log})
	if err != nil {
		return err
	}
	s.router = router{handlers: s.cfg.Handlers, images: images, pods: pods}
	s.calls = calls(runtimeService{pods, s.cfg.Handlers}, images)

	l, err := unixsocket.Listen(ctx, s.cfg.Socket, "")
	if err != nil {
		return err
	}
	server := grpc.NewServer(grpc.ForceServerCodecV2(relay.NewCodec()), grpc.UnknownServiceHandler(s.handle),
		grpc.MaxRecvMsgSize(relay.MaxMessage), grpc.MaxSendMsgSize(relay.MaxMessage))
	g, gctx := errgroup.WithContext(ctx)
	g.Go(func() error { return pods.Run(gctx) })
	g.Go(func() error {
		if err := server.Serve(unixsocket.Limit(l, maxConnections)); err != nil && !errors.Is(err, grpc.ErrServerStopped) {
			return fmt.Errorf("serve CRI on %s: %w", s.cfg.Socket, err)
		}
		return nil
	})
	g.Go(func() error {
		<-gctx.Done()
		stop(server)
		return nil
	})
	close(s.ready)
	return g.Wait()
}

// stop gives calls a few seconds to end.
func stop(server *grpc.Server) {
	done := make(chan struct{})
	go func() {
		defer close(done)
		server.GracefulStop()
	}()
	t := time.NewTimer(drainTime)
	defer t.Stop()
	select {
	case <-done:
	case <-t.C:
		server.Stop()
	}
}

// runtimeService adds to the VM pods what is about the whole runtime.
type runtimeService struct {
	*pod.Service
	handlers []string
}

// Status names our runtime handlers. The conditions are containerd's. A VM is its own user namespace: none of its users is one of the node, and the files
// of its mounts have the owners that they have in a pod with a mapping.
func (r runtimeService) Status(context.Context, *cri.StatusRequest) (*cri.StatusResponse, error) {
	out := &cri.StatusResponse{}
	for _, h := range r.handlers {
		out.RuntimeHandlers = append(out.RuntimeHandlers, &cri.RuntimeHandler{Name: h, Features: &cri.RuntimeHandlerFeatures{RecursiveReadOnlyMounts: true, UserNamespaces: true}})
	}
	return out, nil
}
