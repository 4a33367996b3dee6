// Package nodeapi serves the node API: the engine and the image store of this machine, over gRPC on a unix socket
// and, if configured, on TCP with mutual TLS.
//
// It only translates and limits calls; it decides nothing about VMs, images or snapshots, and keeps no state of its own.
package nodeapi

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"net"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"

	nodev1 "cocoonstack.io/cocoon/api/node/v1"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/guest"
	"cocoonstack.io/cocoon/internal/image"
	"cocoonstack.io/cocoon/internal/network"
	"cocoonstack.io/cocoon/internal/nodewire"
	"cocoonstack.io/cocoon/internal/snapshot"
	"cocoonstack.io/cocoon/internal/unixsocket"
	"cocoonstack.io/cocoon/internal/vm"
)

// Limits of one server. A client that exceeds them gets ResourceExhausted or waits; the daemon's memory does not
// grow.
const (
	maxConnections  = 512
	maxCallsPerConn = 1024     // concurrent calls of one connection
	maxStreams      = 4096     // concurrent streaming calls of all connections
	maxMessage      = 16 << 20 // bytes of one message from a client; a spec with the files of its volumes must fit
	outputChunk     = 64 << 10 // bytes of output in one message to a client
	exportChunk     = 256 << 10
	drainTime       = 5 * time.Second
)

// Engine is the VM engine of this machine. Only Deps has all of it; each service takes the parts that it uses.
type Engine interface {
	lifecycle
	rebooter
	reader
	guests
	guest.Containers
	attacher
	states
	saver
	resetter
}

type lifecycle interface {
	Create(ctx context.Context, s vm.Spec) (vm.Record, error)
	Launch(ctx context.Context, s vm.Spec) (vm.Record, error)
	Start(ctx context.Context, ref string) (vm.Record, error)
	Stop(ctx context.Context, ref string, grace time.Duration) (vm.Record, error)
	Restart(ctx context.Context, ref string, grace time.Duration) (vm.Record, error)
	Pause(ctx context.Context, ref string) (vm.Record, error)
	Unpause(ctx context.Context, ref string) (vm.Record, error)
	Remove(ctx context.Context, ref string, force bool) error
}

type rebooter interface {
	Reboot(ctx context.Context, ref string, hard bool) (vm.Record, error)
}

type reader interface {
	Inspect(ctx context.Context, ref string) (vm.Record, error)
	List(ctx context.Context) ([]vm.Record, error)
	Watch(ctx context.Context, after int64, fn func(vm.Event) error) error
}

type guests interface {
	guest.Access
	guest.Displays
	Console(ctx context.Context, ref string) (io.ReadWriteCloser, error)
	Stats(ctx context.Context, ref string) (guest.Stats, error)
	guest.Describes
	guest.Freezes
	guest.LoginAccess
}

type attacher interface {
	Resize(ctx context.Context, ref string, to vm.Size) (vm.Record, error)
	AttachVolume(ctx context.Context, ref string, use vm.VolumeUse, path string) (vm.Record, error)
	DetachVolume(ctx context.Context, ref, volume string) (vm.Record, error)
	DumpMemory(ctx context.Context, ref, volume, file string) error
	AttachNIC(ctx context.Context, ref string, want vm.NICSpec) (vm.Record, error)
	DetachNIC(ctx context.Context, ref, nic string) (vm.Record, error)
	SetLink(ctx context.Context, ref, nic string, down bool) (vm.Record, error)
}

type states interface {
	Clone(ctx context.Context, s vm.CloneSpec) (vm.Record, error)
	Restore(ctx context.Context, ref, snap string) (vm.Record, error)
	Hibernate(ctx context.Context, ref, name string) (vm.Record, error)
	Wake(ctx context.Context, ref string) (vm.Record, error)
}

type saver interface {
	SaveSnapshot(ctx context.Context, ref string, s vm.SaveSpec) (snapshot.Snapshot, error)
	RemoveSnapshot(ctx context.Context, ref string) error
}

type resetter interface {
	Reset(ctx context.Context) error
}

// Snapshots is the catalog of snapshots. Like Engine, it is whole only in Deps.
type Snapshots interface {
	snapshotReader
	carrier
	registry
	imageCloner
}

type snapshotReader interface {
	GetSnapshot(ctx context.Context, ref string) (snapshot.Snapshot, error)
	ListSnapshots(ctx context.Context) ([]snapshot.Snapshot, error)
	PublishSnapshot(ctx context.Context, ref string, namespaces []string) (snapshot.Snapshot, error)
}

type carrier interface {
	ExportSnapshot(ctx context.Context, ref string, w io.Writer) error
	ExportSnapshotDir(ctx context.Context, ref, dir string) error
	ImportSnapshot(ctx context.Context, name, description string, r io.Reader, progress func(bytes int64)) (snapshot.Snapshot, error)
	ImportSnapshotDir(ctx context.Context, name, description, dir string) (snapshot.Snapshot, error)
}

type registry interface {
	PushSnapshot(ctx context.Context, ref, to string, auth snapshot.Auth, progress func(snapshot.Progress)) (snapshot.Snapshot, error)
	PullSnapshot(ctx context.Context, from, name string, auth snapshot.Auth, progress func(snapshot.Progress)) (snapshot.Snapshot, error)
	PullSnapshotEarly(ctx context.Context, from, name string, auth snapshot.Auth, progress func(snapshot.Progress)) (snapshot.Snapshot, error)
	TagDigest(ctx context.Context, ref string, auth snapshot.Auth) (string, error)
	DeleteTag(ctx context.Context, ref string, auth snapshot.Auth) error
	CheckRegistry(ctx context.Context, ref string, auth snapshot.Auth) error
}

type imageCloner interface {
	CloneWithImage(ctx context.Context, s vm.CloneSpec, auth []image.RegistryAuth) (vm.Record, error)
}

// Images is the catalog of images.
type Images interface {
	Import(ctx context.Context, name string, r io.Reader, progress func(bytes int64)) (image.Image, error)
	Get(ctx context.Context, ref string) (image.Image, error)
	List(ctx context.Context) ([]image.Image, error)
	Remove(ctx context.Context, ref string) error
	Export(ctx context.Context, ref string, w io.Writer) error
	Push(ctx context.Context, r image.PushRequest, progress func(image.Progress)) (image.Image, error)
	Collect(ctx context.Context, limits image.GCLimits) (image.Collected, error)
}

// Host answers questions about the machine and the daemon itself.
type Host interface {
	Info(ctx context.Context) (nodewire.NodeInfo, error)
	Doctor(ctx context.Context) ([]nodewire.Check, error)
	TeardownNetworks(ctx context.Context) error
	Strays(ctx context.Context) ([]vm.Stray, error)
	AdoptStray(ctx context.Context, ref, name string) (vm.Record, error)
	RemoveStray(ctx context.Context, ref string) error
	KeptFirmware(ctx context.Context) ([]vm.KeptFirmware, error)
	DropFirmware(ctx context.Context, k vm.KeptFirmware) error
	Police(ctx context.Context, p network.Policies) error
}

// Config says where to serve.
type Config struct {
	Socket string // path of the unix socket; its folder must exist
	Group  string // owner group of the socket if it exists on this host; otherwise only root may connect
	TCP    string // host:port, "" for no TCP; needs TLS
	TLS    TLS
}

// Deps is what the server depends on.
type Deps struct {
	Engine    Engine
	Images    Images
	Puller    image.Puller
	Snapshots Snapshots    // nil: no snapshots
	Volumes   Volumes      // nil: no volumes
	Filler    VolumeFiller // nil: no volumes from images
	Plugins   Plugins      // nil: no volumes of CSI drivers
	Host      Host
	Log       *slog.Logger
}

// Server serves the node API.
type Server struct {
	cfg     Config
	deps    Deps
	log     *slog.Logger
	tls     credentials.TransportCredentials
	streams chan struct{} // one token per streaming call
	closing chan struct{}
	ready   chan struct{}

	removals removals // of all connections
}

// New checks the configuration. It reads the certificates; Run opens the sockets.
func New(cfg Config, deps Deps) (*Server, error) {
	s := &Server{
		cfg: cfg, deps: deps, log: deps.Log.With("component", "nodeapi"),
		streams: make(chan struct{}, maxStreams), closing: make(chan struct{}), ready: make(chan struct{}),
	}
	if cfg.Socket == "" {
		return nil, errdefs.Invalidf("the node API needs the path of a socket")
	}
	if cfg.TCP == "" {
		return s, nil
	}
	creds, err := cfg.TLS.credentials()
	if err != nil {
		return nil, err
	}
	s.tls = creds
	return s, nil
}

// Ready is closed when every listener accepts.
func (s *Server) Ready() <-chan struct{} { return s.ready }

// Run serves until ctx ends. Then it ends streams at once and gives other calls a few seconds to finish. It may be
// called once.
func (s *Server) Run(ctx context.Context) error {
	unixListener, err := unixsocket.Listen(ctx, s.cfg.Socket, s.cfg.Group)
	if err != nil {
		return err
	}
	type listening struct {
		server   *grpc.Server
		listener net.Listener
	}
	all := []listening{{s.server(peerCredentials{log: s.log}), unixsocket.Limit(unixListener, maxConnections)}}
	if s.cfg.TCP != "" {
		l, err := (&net.ListenConfig{}).Listen(ctx, "tcp", s.cfg.TCP)
		if err != nil {
			unixListener.Close()
			return errdefs.New(errdefs.FailedPrecondition, "listen on %s: %w", s.cfg.TCP, err)
		}
		all = append(all, listening{s.server(s.tls), unixsocket.Limit(l, maxConnections)})
	}

	var wg sync.WaitGroup
	failed := make(chan error, len(all))
	for _, l := range all {
		wg.Go(func() {
			if err := l.server.Serve(l.listener); err != nil && !errors.Is(err, grpc.ErrServerStopped) {
				failed <- errdefs.New(errdefs.Internal, "serve the node API on %s: %w", l.listener.Addr(), err)
			}
		})
	}
	close(s.ready)
	select {
	case <-ctx.Done():
	case err = <-failed:
	}
	close(s.closing)
	for _, l := range all {
		drain(l.server)
	}
	wg.Wait()
	return err
}

// drain stops a server and gives calls in progress drainTime. The engine itself finishes or undoes what it has begun.
func drain(g *grpc.Server) {
	t := time.AfterFunc(drainTime, g.Stop)
	defer t.Stop()
	g.GracefulStop()
}

func (s *Server) server(creds credentials.TransportCredentials) *grpc.Server {
	g := grpc.NewServer(
		grpc.Creds(creds),
		grpc.MaxConcurrentStreams(maxCallsPerConn),
		grpc.MaxRecvMsgSize(maxMessage),
		grpc.UnaryInterceptor(s.unary),
		grpc.StreamInterceptor(s.stream),
		grpc.WaitForHandlers(true),
		grpc.StatsHandler(endings{}),
	)
	e, sn := s.deps.Engine, s.deps.Snapshots
	nodev1.RegisterVMsServer(g, &vms{life: e, records: e, guests: e, containers: e, attacher: e, states: e, snapshots: sn, removals: &s.removals})
	nodev1.RegisterImagesServer(g, &images{store: s.deps.Images, puller: s.deps.Puller})
	if sn != nil {
		nodev1.RegisterSnapshotsServer(g, &snapshots{vms: e, snapshotReader: sn, carrier: sn, registry: sn})
	}
	if v := s.deps.Volumes; v != nil {
		nodev1.RegisterVolumesServer(g, &volumes{store: v, filler: s.deps.Filler})
	}
	if p := s.deps.Plugins; p != nil {
		nodev1.RegisterPluginsServer(g, &plugins{node: p})
	}
	nodev1.RegisterNodeServer(g, &node{host: s.deps.Host, engine: e})
	return g
}

// answer encodes what a call returned, unless it failed.
func answer[V, M any](encode func(V) M) func(V, error) (M, error) {
	return func(v V, err error) (m M, _ error) {
		if err != nil {
			return m, err
		}
		return encode(v), nil
	}
}

// sendAll sends what a call returned, each as one message, unless it failed.
func sendAll[V, M any](stream grpc.ServerStreamingServer[M], encode func(V) *M) func([]V, error) error {
	return func(all []V, err error) error {
		if err != nil {
			return err
		}
		for _, v := range all {
			if err := stream.Send(encode(v)); err != nil {
				return err
			}
		}
		return nil
	}
}
