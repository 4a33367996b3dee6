package guestagent

import (
	"context"
	"fmt"
	"os"
	"path"
	"strings"
	"time"

	"google.golang.org/grpc"

	guestv1 "cocoonstack.io/cocoon/api/guest/v1"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/vm"
)

// containers returns the containers of the guest, nil when it has none.
func (s *Server) containers() *containers {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.several
}

// setUpContainers makes the rooms of the containers, mounts the volumes in them and starts the containers, unless that
// was done before.
func (s *Server) setUpContainers(ctx context.Context, r *guestv1.SetupRequest) error {
	if all := s.containers(); all != nil {
		all.resizeTo(r.GetContainers())
		return nil
	}
	whole := len(r.GetContainers()) == 1 && r.GetContainers()[0].GetRoot()
	if s.cfg.Rooms == nil && !whole {
		return errdefs.Unsupportedf("this guest's agent does not support containers")
	}
	if s.mainProcess() != nil || r.GetProcess() != nil || len(r.GetMounts()) > 0 {
		return errdefs.Invalidf("a guest with containers cannot have a main process or mounts of its own")
	}
	rooms := map[string]*guestv1.Container{}
	for _, c := range r.GetContainers() {
		if whole {
			rooms["/"] = c
			continue
		}
		folder, err := s.cfg.Rooms.Make(c.GetName(), c.GetLayers(), covers(c.GetProcess()))
		if err != nil {
			return fmt.Errorf("make the file system of container %s: %w", c.GetName(), err)
		}
		rooms[folder] = c
	}
	messages := map[string]message{}
	for folder, c := range rooms {
		if err := s.limit(folder, c); err != nil {
			return fmt.Errorf("container %s: %w", c.GetName(), err)
		}
		m, err := s.messageOf(folder, c)
		if err != nil {
			return fmt.Errorf("container %s: %w", c.GetName(), err)
		}
		messages[c.GetName()] = m
	}
	done, err := s.mount(ctx, r, rooms)
	if err != nil {
		return err
	}
	for folder, c := range rooms {
		makeWorkdir(folder, c.GetProcess())
	}
	if s.cfg.Rooms != nil {
		if err := s.cfg.Rooms.Seal(); err != nil {
			return err
		}
	}
	lacks := map[string]error{}
	for folder, c := range rooms {
		lacks[c.GetName()] = done.lacks[folder]
	}
	all := newContainers(s.procs, s.pace)
	all.groups = done.groups
	for _, c := range r.GetContainers() {
		made, err := s.container(c, r, done.groups)
		if err != nil {
			return fmt.Errorf("container %s: %w", c.GetName(), err)
		}
		made.message, made.lacks = messages[c.GetName()], lacks[c.GetName()]
		all.add(made, max(int(c.GetRun()), 1))
	}
	s.begin(all, all.run)
	return nil
}

// begin makes the containers those of the guest and runs them. run ends with the containers; a power-off ends those.
func (s *Server) begin(all *containers, run func()) {
	s.mu.Lock()
	s.several = all
	close(s.started)
	s.mu.Unlock()
	go run()
}

func (s *Server) container(m *guestv1.Container, r *guestv1.SetupRequest, groups []uint32) (*container, error) {
	c := &container{name: m.GetName(), kind: vm.ContainerKind(m.GetKind()), restart: restartOf(m, r), hold: m.GetHold(), manual: m.GetManual()}
	p := m.GetProcess()
	limits, err := s.limitsFor(p.GetSecurity())
	if err != nil {
		return nil, err
	}
	c.command = command{
		args: p.GetArgs(), env: environ(nil, p.GetEnv()), dir: p.GetWorkdir(), user: p.GetUser(), tty: p.GetTty(),
		stdin: p.GetStdin(), stdinOnce: p.GetStdinOnce(),
		hostname: r.GetHostname(), makeDir: true, groups: groups, limits: limits, ends: parseSignal(p.GetStopSignal()),
		within: func(f func() error) error { return s.cfg.Rooms.Enter(c.name, f) },
	}
	if c.fileKeys = fileKeys(p.GetFileKeys()); len(c.fileKeys) > 0 {
		if s.cfg.Volumes == nil {
			return nil, errNoVolumes()
		}
		c.readFile = s.cfg.Volumes.ReadFile
	}
	if c.root = m.GetRoot(); c.root {
		if c.command.within, err = s.enterMain(p); err != nil {
			return nil, err
		}
	}
	if m.GetOwnPids() || m.GetPidsOf() != "" {
		shown := covers(p)
		c.command.pids, c.pidsOf = pids{own: m.GetOwnPids(), proc: &shown}, m.GetPidsOf()
	}
	c.command.cgroup, c.command.oomScoreAdj = s.groups[c.name], int(m.GetResources().GetOomScoreAdj())
	return c, nil
}

// restartOf returns what restarts a container of the setup r. A host of an earlier release sends only a policy for all.
func restartOf(m *guestv1.Container, r *guestv1.SetupRequest) vm.Restart {
	own := m.GetRestart()
	if own == nil {
		return vm.Spec{Restart: vm.RestartPolicy(r.GetRestart())}.RestartOf(vm.Container{Kind: vm.ContainerKind(m.GetKind())})
	}
	restart := vm.Restart{Policy: vm.RestartPolicy(own.GetPolicy())}
	for _, rule := range own.GetRules() {
		one := vm.RestartRule{Not: rule.GetNot()}
		for _, code := range rule.GetCodes() {
			one.Codes = append(one.Codes, int(code))
		}
		restart.Rules = append(restart.Rules, one)
	}
	return restart
}

// limit makes the control group of a container with its limits, and shows it in the file system of the container, which is at
// folder. It does nothing if the agent is not alone with the guest. Idempotent. Preconditions: setup is held.
func (s *Server) limit(folder string, m *guestv1.Container) error {
	if _, made := s.groups[m.GetName()]; made || !s.cfg.Init {
		return nil
	}
	security, err := limitsOf(m.GetProcess().GetSecurity())
	if err != nil {
		return err
	}
	want, err := resourcesOf(m.GetResources())
	if err != nil {
		return err
	}
	group := openCgroup(s.cgroups(), m.GetName())
	if want != nil {
		s.procs.scored()
		if err := limitCgroup(group, *want); err != nil {
			return fmt.Errorf("limit its resources: %w", err)
		}
	}
	showCgroup(group, folder, security.privileged())
	s.groups[m.GetName()] = group
	return nil
}

// makeWorkdir makes the working folder of a process whose root will be read-only. Errors are ignored: the start of the
// process reports a missing folder.
func makeWorkdir(folder string, p *guestv1.Process) {
	if !p.GetReadOnlyRoot() {
		return
	}
	if root, err := os.OpenRoot(folder); err == nil {
		_ = root.MkdirAll(strings.TrimLeft(path.Clean(p.GetWorkdir()), "/"), 0o755)
		root.Close()
	}
}

// mainRoom is the room of a main process with a read-only root. No container can have this name.
const mainRoom = ""

// enterMain returns the function that enters the root of the main process; nil when that is the guest's own root.
func (s *Server) enterMain(p *guestv1.Process) (func(func() error) error, error) {
	if !p.GetReadOnlyRoot() {
		return nil, nil
	}
	if s.cfg.Rooms == nil {
		return nil, errdefs.Unsupportedf("this guest's agent does not support a read-only root")
	}
	makeWorkdir("/", p)
	if err := s.cfg.Rooms.Show(mainRoom); err != nil {
		return nil, fmt.Errorf("make the root read-only: %w", err)
	}
	return func(f func() error) error { return s.cfg.Rooms.Enter(mainRoom, f) }, nil
}

// places are the log positions of the containers.
func (p *containers) places() (out []*guestv1.LogPlace) {
	if p == nil {
		return nil
	}
	for _, c := range p.list() {
		run, seq := c.log.place()
		out = append(out, &guestv1.LogPlace{Run: int32(run), Seq: seq, Name: c.name})
	}
	return out
}

// resumeRooms updates the rooms of the containers of a resumed guest. Preconditions: setup is held.
func (s *Server) resumeRooms(r Resumption) error {
	p := s.containers()
	if p == nil {
		return nil
	}
	if r.Hostname != "" {
		p.change(func() {
			for _, c := range p.every() { // for their next runs
				c.command.hostname = r.Hostname
			}
		})
	}
	if s.cfg.Rooms == nil {
		return nil
	}
	id := ""
	if r.Clone != nil {
		id = r.Clone.MachineID
	}
	return s.cfg.Rooms.Identify(id)
}

// renewKeys makes new SSH host keys, also in the rooms. Preconditions: setup is held.
func (s *Server) renewKeys(ctx context.Context) error {
	if err := s.keys.renew(ctx, s.procs); err != nil {
		return err
	}
	if s.several == nil {
		return nil
	}
	for _, c := range s.several.list() {
		if c.root {
			continue
		}
		if c.keys == nil {
			c.keys = &hostKeys{root: "/"}
		}
		if err := s.cfg.Rooms.Change(c.name, func() error { return c.keys.renew(ctx, s.procs) }); err != nil {
			return fmt.Errorf("container %s: %w", c.name, err)
		}
	}
	return nil
}

// Containers implements guestv1.GuestServer.
func (s *Server) Containers(_ *guestv1.ContainersRequest, ss grpc.ServerStreamingServer[guestv1.ContainersReply]) error {
	release, err := take(s.followers, "watchers of containers and log readers")
	if err != nil {
		return err
	}
	defer release()
	p := s.containers()
	if p == nil {
		return errdefs.Preconditionf("the guest has no containers")
	}
	for {
		over := isClosed(p.done)
		names, all, changed := p.report()
		reply := &guestv1.ContainersReply{}
		for i, status := range all {
			reply.Containers = append(reply.Containers, encodeStatus(names[i], status))
		}
		if err := ss.Send(reply); err != nil || over {
			return err
		}
		select {
		case <-changed:
		case <-p.done:
		case <-ss.Context().Done():
			return ss.Context().Err()
		}
	}
}

func encodeStatus(name string, s vm.ContainerStatus) *guestv1.ContainerStatus {
	m := &guestv1.ContainerStatus{
		Name: name, State: string(s.State), Reason: s.Reason, Message: clip(s.Message), Restarts: int32(s.Restarts),
		Exit: encodeExit(s.Exit), Last: encodeExit(s.Last),
	}
	if u := s.User; u != nil {
		m.User = &guestv1.ContainerUser{Uid: u.UID, Gid: u.GID, Groups: u.Groups}
	}
	if !s.StartedAt.IsZero() {
		m.StartedUnixNano = s.StartedAt.UnixNano()
	}
	return m
}

// clip limits a message about a container: it may quote a command or be the container's own.
func clip(s string) string {
	return strings.ToValidUTF8(s[:min(len(s), vm.MaxMessage)], "\uFFFD")
}

func encodeExit(x *vm.ContainerExit) *guestv1.ContainerExit {
	if x == nil {
		return nil
	}
	m := &guestv1.ContainerExit{Code: int32(x.Code), Reason: x.Reason, Message: clip(x.Message), FinishedUnixNano: x.FinishedAt.UnixNano()}
	if !x.StartedAt.IsZero() { // it never ran
		m.StartedUnixNano = x.StartedAt.UnixNano()
	}
	return m
}

// containerLogs is Logs for one container.
func (s *Server) containerLogs(r *guestv1.LogsRequest, ss grpc.ServerStreamingServer[guestv1.LogEntry]) error {
	c, err := s.containers().find(r.GetContainer())
	if err != nil {
		return err
	}
	run, after := int(r.GetRun()), r.GetAfter()
	for {
		e, of, err := c.log.next(ss.Context(), run, after)
		if err != nil || of == 0 {
			return err
		}
		run, after = of, e.seq
		if e.seq == 0 { // an entry without seq has no time either
			e.time = time.Now()
		}
		err = ss.Send(&guestv1.LogEntry{Seq: e.seq, TimeUnixNano: e.time.UnixNano(), Stderr: e.stderr, Data: e.data, Run: int32(of)})
		if err != nil {
			return err
		}
	}
}
