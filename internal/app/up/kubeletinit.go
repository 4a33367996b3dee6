package up

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"cocoonstack.io/cocoon/internal/app/kubeletnode"
	"cocoonstack.io/cocoon/internal/atomicfile"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/logging"
	"cocoonstack.io/cocoon/internal/network/host"
)

const (
	stopProgram    = 10 * time.Second // between SIGTERM and SIGKILL of a program of the node
	stopGuestsOf   = 40 * time.Second // for the VMs of the node to stop
	stopContainers = 5 * time.Second  // between SIGTERM and SIGKILL of containers
)

// kubeletCommand is what the supervisor starts as process 1 of the node with a kubelet. With --worker it is the one child of that.
func kubeletCommand(dir func() string) *cobra.Command {
	var worker bool
	cmd := &cobra.Command{
		Use: partKubelet + " --dir DIR", Hidden: true, Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if os.Getpid() != 1 && (!worker || !separate()) {
				return errdefs.Invalidf("%s is started by `cocoon up --kubelet`", partKubelet)
			}
			k := layout{dir()}.kubelet()
			if !worker {
				return k.processOne()
			}
			log, err := logging.New(cmd.ErrOrStderr(), "info", "text")
			if err != nil {
				return err
			}
			ctx, stop := signal.NotifyContext(cmd.Context(), syscall.SIGINT, syscall.SIGTERM)
			defer stop()
			return k.work(ctx, FindAssets(), log)
		},
	}
	cmd.Flags().BoolVar(&worker, "worker", false, "")
	return cmd
}

// separate reports whether this process is in a PID namespace made for it: below that of /proc, which is still the machine's. The worker
// mounts over folders and ends all processes that it sees, which must not happen on the machine itself.
func separate() bool {
	status, err := os.ReadFile("/proc/self/status")
	if err != nil {
		return false
	}
	for line := range strings.Lines(string(status)) {
		if ids, ok := strings.CutPrefix(line, "NSpid:"); ok { // one for each namespace, from that of /proc on (proc(5))
			return len(strings.Fields(ids)) > 1
		}
	}
	return false
}

// processOne holds the node's lock, starts the worker, and reaps every process of the node that has lost its parent. It ends with the
// worker, and the kernel ends all others then.
func (k kubeletLayout) processOne() error {
	lock, err := lockInstance(k.lockFile())
	if err != nil {
		return err
	}
	defer lock.Close()
	stop := make(chan os.Signal, 1)
	signal.Notify(stop, syscall.SIGTERM, syscall.SIGINT)
	worker, err := os.StartProcess("/proc/self/exe", []string{"cocoon", partKubelet, "--worker", "--dir", k.dir}, &os.ProcAttr{Files: []*os.File{nil, os.Stdout, os.Stderr}})
	if err != nil {
		return fmt.Errorf("start the worker of node %s: %w", k.name, err)
	}
	go func() {
		for range stop {
			_ = unix.Kill(worker.Pid, unix.SIGTERM)
		}
	}()
	for {
		var status unix.WaitStatus
		pid, err := unix.Wait4(-1, &status, 0, nil)
		switch {
		case errors.Is(err, unix.EINTR):
		case err != nil:
			return fmt.Errorf("wait for processes of node %s: %w", k.name, err)
		case pid == worker.Pid && (status.Exited() && status.ExitStatus() == 0):
			return nil
		case pid == worker.Pid:
			return errdefs.Unavailablef("node %s has ended: %s", k.name, lastLine(k.log(partKubelet)))
		}
	}
}

// nodeWorker is the worker of the node with a kubelet.
type nodeWorker struct {
	kubeletLayout
	settings Settings
	assets   Assets
	inside   *spawner // in the network of the node
	log      *slog.Logger
	stops    []func()
}

// work makes the node, runs its programs until ctx ends, and then stops what runs there, as a machine that is shut down does.
func (k kubeletLayout) work(ctx context.Context, a Assets, log *slog.Logger) error {
	w := &nodeWorker{kubeletLayout: k, assets: a, log: log, inside: newSpawner()}
	text, err := os.ReadFile(k.settings())
	if err != nil {
		return fmt.Errorf("read settings: %w", err)
	}
	if err := json.Unmarshal(text, &w.settings); err != nil || w.settings.Kubelet == nil {
		return errdefs.DataLossf("%s has no settings of node %s: %w", k.settings(), k.name, err)
	}
	err = w.start(ctx)
	if err == nil {
		<-ctx.Done()
		log.Info("stopping")
	}
	return errors.Join(err, w.stop(ctx))
}

func (w *nodeWorker) start(ctx context.Context) error {
	if err := w.mount(); err != nil {
		return err
	}
	if err := w.inside.do(func() error { return unix.Unshare(unix.CLONE_NEWNET) }); err != nil {
		return fmt.Errorf("make the network namespace of node %s: %w", w.name, err)
	}
	if err := errors.Join(w.removeLink(), w.connect(*w.settings.Kubelet, w.inside), w.applyRules()); err != nil {
		return err
	}
	if err := w.reachAPI(ctx); err != nil {
		return err
	}
	if err := errors.Join(kubeletnode.MakeCgroup(w.podCgroup()), os.MkdirAll(filepath.Dir(w.criSocket()), 0o700)); err != nil {
		return err
	}

	run := w.runtime(w.assets)
	containerd := child{
		name: "containerd", path: run.Program("containerd"), args: []string{"--config", w.runtimeConfig()}, log: w.layout.log("containerd"), stop: stopProgram,
		env: []string{"PATH=" + run.Programs + ":" + os.Getenv("PATH")},
	}
	if err := w.launch(ctx, containerd, run.Socket()); err != nil {
		return err
	}
	if err := w.importImages(ctx, run); err != nil {
		return err
	}
	name := w.suffixed("cocoond")
	if err := w.launch(ctx, child{name: name, path: w.assets.Daemon, args: []string{"--config", w.daemonConfig()}, log: w.layout.log(name), stop: stopDaemon}, w.criSocket()); err != nil {
		return err
	}
	if err := w.importDemos(ctx, w.assets); err != nil {
		return err
	}
	kubelet := w.program(pki{dir: w.join("pki")}, w.settings)
	return w.launch(ctx, child{
		name: "kubelet", path: w.assets.ControlPlane, args: append(kubelet.Args(w.kubeletConfig(), userRoot), "--node-labels", kubeletLabels), log: w.layout.log("kubelet"), stop: stopProgram,
	}, "")
}

// launch keeps a program running in the node's network, and waits until it serves the socket, if any.
func (w *nodeWorker) launch(ctx context.Context, c child, socket string) error {
	ended := make(chan error, 1)
	cctx, cancel := context.WithCancel(context.WithoutCancel(ctx))
	var wg sync.WaitGroup
	wg.Go(func() { w.inside.keep(cctx, c, w.log, ended) })
	w.stops = append(w.stops, func() { cancel(); wg.Wait() })
	if socket == "" {
		return nil
	}
	return (&instance{}).await(ctx, c, ended, func(ctx context.Context) bool {
		conn, err := (&net.Dialer{}).DialContext(ctx, "unix", socket)
		if err == nil {
			conn.Close()
		}
		return err == nil
	})
}

// reachAPI relays connections of the node to the API server. The server listens on loopback of this machine, and the relay at the same address in
// the node.
func (w *nodeWorker) reachAPI(ctx context.Context) error {
	addr := net.JoinHostPort(nodeIP, strconv.Itoa(w.settings.APIPort))
	var ln net.Listener
	if err := w.inside.do(func() (err error) {
		ln, err = net.Listen("tcp", addr)
		return err
	}); err != nil {
		return fmt.Errorf("listen for the kubelet on %s: %w", addr, err)
	}
	w.stops = append(w.stops, relayOn(ctx, ln, addr).Close)
	return nil
}

// importImages gives containerd the images that need no network.
func (w *nodeWorker) importImages(ctx context.Context, run kubeletnode.Runtime) error {
	began := time.Now()
	ctr := func(args ...string) error {
		cmd := exec.CommandContext(ctx, run.Program("ctr"), append([]string{"--address", run.Socket(), "--namespace", "k8s.io", "images"}, args...)...)
		out, err := cmd.CombinedOutput()
		if err != nil {
			return fmt.Errorf("ctr images %s: %w: %s", strings.Join(args, " "), err, out)
		}
		return nil
	}
	if err := errors.Join(ctr("import", w.assets.Pause), ctr("import", w.assets.DemoImage), ctr("tag", "--force", demoImage, "docker.io/"+demoImage)); err != nil {
		return err
	}
	w.log.Info("images imported", "dur", time.Since(began))
	return nil
}

// mount gives the node a /proc and a /run of its own, hides what a kubelet uses whatever its configuration says, and gives it name
// servers that it can reach. The machine sees none of it.
func (w *nodeWorker) mount() error {
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return fmt.Errorf("separate the mounts of node %s: %w", w.name, err)
	}
	resolv, err := filepath.EvalSymlinks(resolvConf)
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("find %s: %w", resolvConf, err)
	}
	text, err := os.ReadFile(resolvConf)
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("read %s: %w", resolvConf, err)
	}
	ours := w.folder("resolv.conf")
	if err := atomicfile.WriteFile(ours, reachable(text), 0o644); err != nil {
		return err
	}
	all := [][3]string{{"proc", "proc", "/proc"}, {"tmpfs", "tmpfs", "/run"}}
	for _, dir := range kubeletnode.Fixed {
		if dir == userRoot {
			all = append(all, [3]string{"", w.folder("kubelet"), dir})
		} else {
			all = append(all, [3]string{"tmpfs", "tmpfs", dir})
		}
	}
	if resolv != "" && !strings.HasPrefix(resolv, "/run/") {
		all = append(all, [3]string{"", ours, resolv})
	}
	for _, m := range all {
		flags, data := uintptr(unix.MS_NOSUID|unix.MS_NODEV), ""
		switch m[0] {
		case "":
			flags = unix.MS_BIND
		case "tmpfs":
			data = "mode=755"
		}
		if err := unix.Mount(m[1], m[2], m[0], flags, data); err != nil {
			return fmt.Errorf("mount %s of node %s: %w", m[2], w.name, err)
		}
	}
	if !strings.HasPrefix(resolv, "/run/") {
		return nil
	}
	if err := os.MkdirAll(filepath.Dir(resolv), 0o755); err != nil {
		return fmt.Errorf("make the folder of %s: %w", resolv, err)
	}
	return atomicfile.WriteFile(resolv, reachable(text), 0o644)
}

// reachable returns the host's resolv.conf without name servers on loopback, which is another one here.
func reachable(text []byte) []byte {
	var b strings.Builder
	for _, a := range host.Resolvers() {
		fmt.Fprintf(&b, "nameserver %s\n", a)
	}
	for line := range strings.Lines(string(text)) {
		if f := strings.Fields(line); len(f) > 1 && (f[0] == "search" || f[0] == "options") {
			b.WriteString(strings.TrimSpace(line) + "\n")
		}
	}
	return []byte(b.String())
}

// stop stops the programs, and then VMs and containers. What does not stop in time ends with the node.
func (w *nodeWorker) stop(ctx context.Context) error {
	for i := len(w.stops) - 1; i >= 0; i-- {
		w.stops[i]()
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), stopGuestsOf)
	defer cancel()
	var failed error
	shutdown := exec.CommandContext(ctx, w.assets.Daemon, "shutdown", "--config", w.daemonConfig(), "--log-level", "error")
	shutdown.Stdout, shutdown.Stderr = os.Stderr, os.Stderr
	if err := w.inside.start(shutdown); err == nil {
		failed = shutdown.Wait()
	}
	_ = unix.Kill(-1, unix.SIGTERM) // all but process 1 and this one
	limit := time.NewTimer(stopContainers)
	defer limit.Stop()
	tick := time.NewTicker(50 * time.Millisecond)
	defer tick.Stop()
	for len(containers()) > 0 {
		select {
		case <-tick.C:
		case <-limit.C:
			return failed
		}
	}
	return failed
}

// containers returns the processes of the node that are neither of its own programs nor shims, which wait for containerd.
func containers() (pids []int) {
	own := map[int]bool{1: true, os.Getpid(): true}
	all, _ := filepath.Glob("/proc/[0-9]*/comm")
	for _, file := range all {
		name, err := os.ReadFile(file)
		pid, _ := strconv.Atoi(filepath.Base(filepath.Dir(file)))
		if err == nil && !own[pid] && !strings.HasPrefix(string(name), "containerd-shim") {
			pids = append(pids, pid)
		}
	}
	return pids
}
