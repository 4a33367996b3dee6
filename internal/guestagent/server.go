// Package guestagent is the agent inside a VM: it answers the guest protocol, runs the main process and other commands,
// keeps their output, and powers the machine off.
//
// It serves the listener it is given and leaves the machine itself (addresses, host name, power) to a Machine. It does
// not boot the machine: package boot does. It does not decide about the VM's lifecycle; the node does.
package guestagent

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"sync"
	"time"

	"google.golang.org/grpc"

	"golang.org/x/sys/unix"

	guestv1 "cocoonstack.io/cocoon/api/guest/v1"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/grpcerr"
	"cocoonstack.io/cocoon/internal/guestagent/volumes"
	"cocoonstack.io/cocoon/internal/vm"
)

// Limits on what a host can make the agent hold. Sizes are bytes.
const (
	maxExecs     = 128      // commands and attached sessions at a time
	maxForwards  = 256      // forwarded connections at a time
	maxFollowers = 96       // streams of logs and of container states, at a time
	maxStreams   = 1024     // calls at a time, including waiting ones
	maxMessage   = 4 << 20  // a Setup with a large environment, a volume with its files
	streamWindow = 64 << 10 // unread input per call
	connWindow   = 1 << 20  // unread input of all calls
	logBytes     = 1 << 20  // retained output of the main process
)

// Identity is the identity of a guest: its name and addresses.
type Identity struct {
	Hostname string
	NICs     []vm.NIC
	Hosts    []string // lines for /etc/hosts
	Resolver []string // lines for resolv.conf, besides the name servers
}

// Machine is the machine that the agent runs on.
type Machine interface {
	// Identify gives the machine its name and addresses. It may be called again with different ones.
	Identify(ctx context.Context, id Identity) error
	// Tune applies settings to the kernel in order. Errors: InvalidArgument if the kernel refuses a setting.
	Tune(settings []vm.Sysctl) error
	// Settle finishes work that would otherwise be done after each resume from the state saved now, and runs through
	// what Resume and Forget will need. It changes nothing else.
	Settle(ctx context.Context) error
	// Resume sets up a machine that runs again from saved state, with its links down. Idempotent.
	Resume(ctx context.Context, r Resumption) error
	// SetClock sets the machine's clock to now.
	SetClock(now time.Time) error
	// Forget removes what would restore the identity of a clone's source at the next boot or lease.
	Forget() error
	// Freeze flushes the machine's file systems and blocks further writes; it returns the number of file systems. If it
	// fails, none stays frozen.
	Freeze() (int, error)
	// Thaw ends a freeze and returns how many file systems were frozen.
	Thaw() (int, error)
	// Off ends every process, writes everything to disk and cuts the power. In a VM it does not return.
	Off()
}

// Volumes are the volumes of the machine.
type Volumes interface {
	// Put makes v.Files the content of a volume of files. Idempotent.
	Put(ctx context.Context, v vm.Volume) error
	// Mount makes the volumes and mounts them, once. images are the folders with the files of volumes of images, by name. The key
	// of mounts is the folder that their paths are in. lacks says, by that folder, which parts of an image's files do not exist:
	// these are not mounted. Idempotent.
	Mount(ctx context.Context, volumes []vm.Volume, images map[string]string, mounts map[string][]vm.Mount) (lacks map[string]error, err error)
	// KnownAs sets the name by which NFS servers know the guest. It is called before Mount.
	KnownAs(name string)
	// MountLater makes more mounts, of volumes that Mount has made, in the folder root. Errors: InvalidArgument if there is no such
	// volume.
	MountLater(ctx context.Context, root string, mounts []vm.Mount) error
	// MountImage makes one more mount, of the files of an image in the folder image, in the folder root. Errors: NotFound if the image does
	// not have that part.
	MountImage(root, image string, m vm.Mount) error
	// TakeAway unmounts a folder of the host in all of places. Those of ended are not mounted again.
	// Errors: FailedPrecondition while a program uses it; then nothing has changed.
	TakeAway(ctx context.Context, volume string, places, ended []volumes.Place) (*volumes.Away, error)
	VolumeDisks
	// Message shows a new empty file at a path in folder, and returns that file. It is called before Mount. Idempotent.
	Message(folder, path string) (*os.File, error)
	// DropMessage forgets a file of Message, which nothing shows any more, and closes it.
	DropMessage(f *os.File)
	// ReadFile returns the content of a file in a volume that starts empty. Links do not lead out of the volume.
	// Errors: NotFound; FailedPrecondition if it is no regular file or has more than limit bytes.
	ReadFile(volume, path string, limit int) ([]byte, error)
}

// VolumeDisks are the volumes that are disks of the volume store.
type VolumeDisks interface {
	// Attach makes v, a disk that was plugged, usable, and mounts it at a path in each of places; with "" it only waits for the
	// disk. It is called after Mount. After an error it is mounted nowhere. Idempotent.
	Attach(ctx context.Context, v vm.Volume, path string, places []volumes.Place) error
	// Detach unmounts a volume in all of places, and makes the kernel forget its disk. It is no error if there is none. Errors:
	// FailedPrecondition while a program uses the volume; then nothing has changed.
	Detach(ctx context.Context, volume, serial string, places []volumes.Place) error
	// Grow waits until the kernel sees size bytes on the disk of a volume, and grows its mounted file system. Idempotent.
	// Errors: Unavailable if the kernel does not see them.
	Grow(ctx context.Context, volume, serial string, size int64) error
	// Usage returns what the mounted file systems have, by name.
	Usage() map[string]unix.Statfs_t
}

// Config configures a Server.
type Config struct {
	Version string
	Init    bool    // the agent is PID 1: it reaps every process
	Volumes Volumes // nil: the machine has none and refuses them
	Rooms   Rooms   // nil: the machine cannot have containers and refuses them

	Links func() error // gives the kernel bridges and pairs of interfaces; nil: it has what it has
}

// Server is the agent. Its zero value is not usable; see New.
type Server struct {
	guestv1.UnimplementedGuestServer
	cfg     Config
	machine Machine
	procs   *procs
	pace    restartPace
	log     *ring

	execs     chan struct{} // one token per running command and per attached session
	forwards  chan struct{}
	followers chan struct{}
	off       chan time.Duration // grace of a requested power-off

	freezer freezer

	cgroups func() *int // the root of the guest's control groups

	setup   sync.Mutex      // held during a change of the guest's identity
	groups  map[string]*int // of the containers, by name; nil: none; guarded by setup
	resumed resumedAs       // guarded by setup
	keys    hostKeys        // guarded by setup
	forget  *time.Timer     // guarded by setup; nil: there was never anything to forget

	mu       sync.Mutex
	setUp    bool
	hostname string
	main     *mainProcess
	several  *containers   // instead of main; nil without containers
	started  chan struct{} // closed when main or several is set
	attached int           // attached sessions; each gets the end of its process
	unshown  chan struct{} // closed and replaced when attached changes
	waiting  int           // Wait calls running or answered: hosts that may acknowledge the exit
	acked    chan struct{} // closed by AckExit
}

// New returns a server for machine.
func New(cfg Config, machine Machine) *Server {
	return &Server{
		cfg: cfg, machine: machine,
		procs:     newProcs(cfg.Init),
		pace:      kubernetesPace,
		log:       newRing(logBytes),
		execs:     make(chan struct{}, maxExecs),
		forwards:  make(chan struct{}, maxForwards),
		followers: make(chan struct{}, maxFollowers),
		off:       make(chan time.Duration, 1),
		keys:      hostKeys{root: "/"},
		cgroups:   sync.OnceValue(openCgroups),
		groups:    map[string]*int{},
		unshown:   make(chan struct{}),
		started:   make(chan struct{}),
		acked:     make(chan struct{}),
	}
}

// Run serves l until ctx ends or a requested power-off is done. It closes l.
func (s *Server) Run(ctx context.Context, l net.Listener) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	var wg sync.WaitGroup
	defer wg.Wait()
	if s.cfg.Init {
		wg.Go(func() { s.procs.reap(ctx) })
	}
	defer s.forgetNever()
	if p, ok := l.(plainListener); ok {
		p.HandlePlain(func(m []byte) []byte { return s.plain(ctx, m) })
	}
	srv := grpc.NewServer(
		grpc.MaxConcurrentStreams(maxStreams),
		grpc.MaxRecvMsgSize(maxMessage),
		grpc.StaticStreamWindowSize(streamWindow),
		grpc.StaticConnWindowSize(connWindow),
		grpc.MaxHeaderListSize(16<<10),
		grpc.UnaryInterceptor(unary),
		grpc.StreamInterceptor(stream),
	)
	guestv1.RegisterGuestServer(srv, s)
	served := make(chan error, 1)
	wg.Go(func() { served <- srv.Serve(thawing{Listener: l, thaw: s.thaw}) })
	defer srv.Stop()

	select {
	case <-ctx.Done():
		return nil
	case err := <-served:
		return fmt.Errorf("serve the guest channel: %w", err)
	case grace := <-s.off:
		_, _ = s.thaw() // a process blocked by a freeze cannot end
		s.stopAll(ctx, grace)
		s.showAll(ctx)
		farewell(srv)
		s.machine.Off()
		return nil
	}
}

// farewellPatience limits how long a power-off waits for replies to reach the host.
const farewellPatience = 300 * time.Millisecond

// unary and stream convert every error to its gRPC status.
func unary(ctx context.Context, req any, _ *grpc.UnaryServerInfo, h grpc.UnaryHandler) (any, error) {
	reply, err := h(ctx, req)
	return reply, grpcerr.ToStatus(err)
}

func stream(srv any, ss grpc.ServerStream, _ *grpc.StreamServerInfo, h grpc.StreamHandler) error {
	return grpcerr.ToStatus(h(srv, ss))
}

// take gets one of a limited number of tokens, or fails when all are taken.
func take(tokens chan struct{}, what string) (release func(), err error) {
	select {
	case tokens <- struct{}{}:
		return func() { <-tokens }, nil
	default:
		return nil, errdefs.Exhaustedf("the guest already serves %d %s; end one of them first", cap(tokens), what)
	}
}

// Setup implements guestv1.GuestServer.
func (s *Server) Setup(ctx context.Context, r *guestv1.SetupRequest) (*guestv1.SetupReply, error) {
	s.setup.Lock()
	defer s.setup.Unlock()
	if err := s.mayWrite(); err != nil {
		return nil, err
	}
	first := s.mainProcess() == nil && s.containers() == nil       // after that programs of the guest may have changed clock and kernel
	if now := r.GetNowUnixNano(); first && now > 0 && s.cfg.Init { // the kernel has read it from the machine in whole seconds
		if err := s.machine.SetClock(time.Unix(0, now)); err != nil {
			return nil, err
		}
	}
	if err := s.machine.Identify(ctx, identity(r)); err != nil {
		return nil, fmt.Errorf("set up the guest: %w", err)
	}
	s.setHostname(r.GetHostname())
	if first {
		if err := s.tune(r.GetSysctls()); err != nil {
			return nil, err
		}
	}
	begin := s.setUpMain
	switch {
	case r.GetSandbox():
		begin = s.setUpSandbox
	case len(r.GetContainers()) > 0:
		begin = s.setUpContainers
	}
	if err := begin(ctx, r); err != nil {
		if w, ok := errors.AsType[volumes.Waiting](err); ok {
			return &guestv1.SetupReply{Waiting: w.Error()}, nil
		}
		return nil, err
	}
	s.mu.Lock()
	s.setUp = true
	s.mu.Unlock()
	return &guestv1.SetupReply{}, nil
}

// tune applies settings to the kernel.
func (s *Server) tune(settings []*guestv1.Sysctl) error {
	if len(settings) == 0 {
		return nil
	}
	var spec vm.Spec
	for _, m := range settings {
		spec.Sysctls = append(spec.Sysctls, vm.Sysctl{Name: m.GetName(), Value: m.GetValue()})
	}
	if err := spec.ValidateSysctls(); err != nil {
		return err
	}
	return s.machine.Tune(spec.Sysctls)
}

// setUpMain mounts the volumes and starts the main process, unless that was done before.
func (s *Server) setUpMain(ctx context.Context, r *guestv1.SetupRequest) error {
	done, err := s.mount(ctx, r, nil)
	if err = errors.Join(err, done.lacks["/"]); err != nil {
		return err
	}
	if s.cfg.Rooms != nil {
		if err := s.cfg.Rooms.Seal(); err != nil {
			return err
		}
	}
	if p := r.GetProcess(); p != nil && s.mainProcess() == nil {
		within, err := s.enterMain(p)
		if err != nil {
			return err
		}
		limits, err := s.limitsFor(p.GetSecurity())
		if err != nil {
			return err
		}
		m, err := startMain(s.procs, s.log, command{
			args: p.GetArgs(), env: environ(nil, p.GetEnv()), dir: p.GetWorkdir(), user: p.GetUser(), tty: p.GetTty(),
			stdin: p.GetStdin(), stdinOnce: p.GetStdinOnce(),
			hostname: r.GetHostname(), makeDir: true, groups: done.groups, within: within, limits: limits, ends: parseSignal(p.GetStopSignal()),
		})
		if err != nil {
			return fmt.Errorf("start the main process: %w", err)
		}
		s.mu.Lock()
		s.main = m
		close(s.started)
		s.mu.Unlock()
	}
	return nil
}

func identity(r *guestv1.SetupRequest) Identity {
	return Identity{Hostname: r.GetHostname(), NICs: nics(r.GetNics()), Hosts: r.GetHosts(), Resolver: r.GetResolver()}
}

func nics(list []*guestv1.NIC) []vm.NIC {
	var out []vm.NIC
	for _, n := range list {
		nic := vm.NIC{
			MAC: n.GetMac(), IP: n.GetIp(), Prefix: int(n.GetPrefix()),
			Gateway: n.GetGateway(), DNS: n.GetDns(), MTU: int(n.GetMtu()), Addresses: n.GetAddresses(),
		}
		for _, r := range n.GetRoutes() {
			nic.Routes = append(nic.Routes, vm.Route{To: r.GetTo(), Via: r.GetVia()})
		}
		out = append(out, nic)
	}
	return out
}

// setHostname sets the host name for the environment of later commands.
func (s *Server) setHostname(name string) {
	if name == "" {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.hostname = name
}

// processOf returns the main process of a container, or of the guest if the name is empty; nil if the latter does not run.
func (s *Server) processOf(container string) (*mainProcess, error) {
	if container != "" {
		return s.containers().running(container)
	}
	return s.mainProcess(), nil
}

func (s *Server) mainProcess() *mainProcess {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.main
}

// Info implements guestv1.GuestServer.
func (s *Server) Info(context.Context, *guestv1.InfoRequest) (*guestv1.InfoReply, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return &guestv1.InfoReply{
		Version: s.cfg.Version, BootId: bootID(), UptimeMs: uptime().Milliseconds(),
		Abilities: []string{guestv1.AbilityFileKeys, guestv1.AbilitySandbox, guestv1.AbilitySystemCalls},
		SetUp:     s.setUp, Process: s.main != nil && !s.main.child.ended() || s.several != nil && !isClosed(s.several.done),
	}, nil
}

// ackPatience is how long a guest that is powering off lets a waiting host fetch and record the exit code.
const ackPatience = time.Second

// Logs implements guestv1.GuestServer.
func (s *Server) Logs(r *guestv1.LogsRequest, ss grpc.ServerStreamingServer[guestv1.LogEntry]) error {
	release, err := take(s.followers, "log readers")
	if err != nil {
		return err
	}
	defer release()
	if r.GetContainer() != "" {
		return s.containerLogs(r, ss)
	}
	after := r.GetAfter()
	for {
		e, more, err := s.log.next(ss.Context(), after)
		if err != nil || !more {
			return err
		}
		after = e.seq
		err = ss.Send(&guestv1.LogEntry{Seq: e.seq, TimeUnixNano: e.time.UnixNano(), Stderr: e.stderr, Data: e.data})
		if err != nil {
			return err
		}
	}
}

// Stats implements guestv1.GuestServer.
func (s *Server) Stats(context.Context, *guestv1.StatsRequest) (*guestv1.StatsReply, error) {
	reply, err := readStats("/proc", "/")
	if err != nil {
		return nil, errors.Join(errors.New("read the guest's resources"), err)
	}
	written := func(string) (bytes, inodes int64, known bool) { return 0, 0, false }
	if s.cfg.Rooms != nil {
		written = s.cfg.Rooms.Written
	}
	reply.Containers = s.containers().usage(written)
	if s.cfg.Volumes != nil {
		reply.Volumes = volumeStats(s.cfg.Volumes.Usage())
	}
	return reply, nil
}
