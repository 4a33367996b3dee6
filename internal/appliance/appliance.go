// Package appliance serves capsule.v1: the API of a machine that runs containers and micro-VMs without Kubernetes.
//
// It is a door. It authenticates each call, checks the caller's role, writes who changed what, and passes the call on: workloads to
// their store, whose followers run them, volumes and images to the node's stores, and the machine itself to System.
package appliance

import (
	"context"
	"crypto/tls"
	"fmt"
	"io"
	"log/slog"
	"net"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/keepalive"

	capsulev1 "cocoonstack.io/cocoon/api/capsule/v1"
	"cocoonstack.io/cocoon/internal/appliance/desired"
	"cocoonstack.io/cocoon/internal/appliance/identity"
	"cocoonstack.io/cocoon/internal/appliance/logins"
	"cocoonstack.io/cocoon/internal/appliance/reconcile"
	"cocoonstack.io/cocoon/internal/journal"
	"cocoonstack.io/cocoon/internal/vm"
)

// DefaultPort is the documented port of the API.
const DefaultPort = "50000"

// maxMessage bounds a message, in bytes. The documented clients send chunks of 1 MiB.
const maxMessage = 4 << 20

// Config configures the door.
type Config struct {
	Listen string   // host:port
	Spool  string   // folder for archives while they are received
	Silent bool     // the machine is not announced on its networks
	Inside []string // interfaces to workloads, on which it is never announced

	Console io.Writer // in front of the machine; nil: nobody is there

	VolumeKind string // kind of new volumes; "": the node chooses

	Ends func() bool // whether the machine ends, not only the daemon; nil: workloads always go on without it
}

// Limits of the end of the machine. Who waits for the daemon waits longer.
const (
	stopLimit = 45 * time.Second // of the grace period of a workload
	endLimit  = 60 * time.Second // of all
)

// Deps is what the door depends on.
type Deps struct {
	Documents journal.Documents
	Identity  *identity.Keeper
	Desired   *desired.Store
	Workloads *reconcile.Reconciler
	Volumes   Volumes
	Images    []ImageStore // of containers and of VMs
	Logins    *logins.Store
	System    System
	Uplink    Uplink                                           // nil: the machine's network is not ours
	Runs      func(ctx context.Context) string                 // returns "kvm", or why micro-VMs are emulated
	Listens   func(ctx context.Context, p vm.PortMapping) bool // whether a program of the machine listens on a port
	Log       *slog.Logger
}

// Door serves the API.
type Door struct {
	cfg       Config
	deps      Deps
	audit     *audit
	announcer *announcer
	ready     chan struct{} // closed when it listens
	addr      net.Addr
}

// New returns a door that is closed.
func New(ctx context.Context, cfg Config, d Deps) (*Door, error) {
	a, err := openAudit(ctx, d.Documents, d.Log)
	if err != nil {
		return nil, err
	}
	return &Door{cfg: cfg, deps: d, audit: a, announcer: &announcer{log: d.Log}, ready: make(chan struct{})}, nil
}

// Addr returns the address on which the door listens, once it does.
func (d *Door) Addr(ctx context.Context) (net.Addr, error) {
	select {
	case <-d.ready:
		return d.addr, nil
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

// Run runs the workloads and serves until ctx ends. Workloads go on then, unless the machine ends. Calls in progress have a moment to end.
func (d *Door) Run(ctx context.Context) error {
	l, err := (&net.ListenConfig{}).Listen(ctx, "tcp", d.cfg.Listen)
	if err != nil {
		return fmt.Errorf("serve the API of the appliance: %w", err)
	}
	d.addr = l.Addr()
	close(d.ready)
	if !d.cfg.Silent {
		go d.announcer.run(ctx, d.announcement(l.Addr()), d.cfg.Inside)
	}
	s := d.server()
	ended := make(chan error, 2)
	go func() { ended <- d.deps.Workloads.Run(ctx) }()
	go func() { ended <- s.Serve(l) }()
	id := d.deps.Identity
	d.deps.Log.Info("the appliance serves its API", "addr", l.Addr().String(), "capsule_id", id.ID(), "short_id", id.ShortID(), "fingerprint", id.Fingerprint(), "adopted", id.Adopted())
	if d.cfg.Console != nil {
		fmt.Fprint(d.cfg.Console, banner(id.ShortID(), id.Fingerprint(), id.Adopted()))
	}
	first := <-ended // the workloads end with ctx
	stop := time.AfterFunc(2*time.Second, s.Stop)
	defer stop.Stop()
	s.GracefulStop()
	if ctx.Err() != nil {
		<-ended //nolint:errcheck // it ends with ctx, too
		d.suspend(ctx)
		return nil
	}
	return fmt.Errorf("the API of the appliance ended by itself: %w", first)
}

// banner tells the person in front of the machine what others cannot know.
func banner(shortID, fingerprint string, adopted bool) string {
	state := "nobody has adopted it"
	if adopted {
		state = "it is adopted"
	}
	return fmt.Sprintf("\n  %s: %s\n%s\n", shortID, state, shownCertificate(fingerprint))
}

// suspend stops the workloads if the machine ends: guests write their file systems, and programs end as they are asked to.
func (d *Door) suspend(ended context.Context) {
	if d.cfg.Ends == nil || !d.cfg.Ends() {
		return
	}
	d.deps.Log.Info("the machine ends: stopping its workloads", "op", "suspend")
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ended), endLimit)
	defer cancel()
	d.deps.Workloads.Suspend(ctx, stopLimit)
}

func (d *Door) server() *grpc.Server {
	s := grpc.NewServer(
		grpc.Creds(credentials.NewTLS(&tls.Config{MinVersion: tls.VersionTLS13, Certificates: []tls.Certificate{d.deps.Identity.Certificate()}})),
		grpc.MaxRecvMsgSize(maxMessage),
		grpc.ConnectionTimeout(20*time.Second),
		grpc.MaxConcurrentStreams(200),
		// The documented clients ask every 15 s whether the machine is still there, also between calls.
		grpc.KeepaliveEnforcementPolicy(keepalive.EnforcementPolicy{MinTime: 5 * time.Second, PermitWithoutStream: true}),
		grpc.KeepaliveParams(keepalive.ServerParameters{Time: time.Minute, Timeout: 20 * time.Second}),
		grpc.UnaryInterceptor(d.unary), grpc.StreamInterceptor(d.stream),
	)
	capsulev1.RegisterCapsuleServiceServer(s, &capsules{door: d})
	capsulev1.RegisterIdentityServiceServer(s, &identities{door: d})
	capsulev1.RegisterWorkloadServiceServer(s, &workloads{door: d})
	capsulev1.RegisterVolumeServiceServer(s, &volumes{door: d})
	capsulev1.RegisterImageServiceServer(s, &images{door: d})
	capsulev1.RegisterNetworkServiceServer(s, &uplinks{door: d})
	return s
}
