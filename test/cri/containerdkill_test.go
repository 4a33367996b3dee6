//go:build cri

package cri

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"cocoonstack.io/cocoon/internal/testkit/containerdtest"
	"cocoonstack.io/cocoon/internal/testkit/kubetest"
)

// lived is a pod whose life is led by calls to the door, one after the other.
type lived struct {
	cri.RuntimeServiceClient
	handler   string
	dir       string // of the node; the container has it at /shared
	pod       *cri.PodSandboxConfig
	profile   string // file of its seccomp profile; "": none
	sandbox   string
	container string
}

func (p *lived) run(ctx context.Context) error {
	r, err := p.RunPodSandbox(ctx, &cri.RunPodSandboxRequest{Config: p.pod, RuntimeHandler: p.handler})
	if err == nil {
		p.sandbox = r.GetPodSandboxId()
	}
	return err
}

func (p *lived) create(ctx context.Context) error {
	config := &cri.ContainerConfig{
		Metadata: &cri.ContainerMetadata{Name: "main"}, Image: &cri.ImageSpec{Image: containerdtest.BusyBox}, LogPath: "main.log",
		Command: []string{"sh", "-c", "trap 'touch /shared/asked' TERM; echo start >>/shared/starts; while :; do sleep 0.1; done"},
		Mounts:  []*cri.Mount{{HostPath: p.dir, ContainerPath: "/shared"}},
		Linux:   &cri.LinuxContainerConfig{SecurityContext: &cri.LinuxContainerSecurityContext{}},
	}
	if p.profile != "" {
		config.Linux.SecurityContext.Seccomp = &cri.SecurityProfile{ProfileType: cri.SecurityProfile_Localhost, LocalhostRef: p.profile}
	}
	r, err := p.CreateContainer(ctx, &cri.CreateContainerRequest{PodSandboxId: p.sandbox, Config: config, SandboxConfig: p.pod})
	if err == nil {
		p.container = r.GetContainerId()
	}
	return err
}

func (p *lived) start(ctx context.Context) error {
	_, err := p.StartContainer(ctx, &cri.StartContainerRequest{ContainerId: p.container})
	return err
}

func (p *lived) exec(ctx context.Context) error {
	_, err := p.ExecSync(ctx, &cri.ExecSyncRequest{ContainerId: p.container, Cmd: []string{"sh", "-c", "touch /shared/command; while test -e /shared/wait; do sleep 0.1; done"}})
	return err
}

func (p *lived) end(ctx context.Context) error {
	seconds := int64(0)
	if exists(filepath.Join(p.dir, "wait")) {
		seconds = 1000
	}
	_, err := p.StopContainer(ctx, &cri.StopContainerRequest{ContainerId: p.container, Timeout: seconds})
	return err
}

func (p *lived) list(ctx context.Context) error {
	l, err := p.ListPodSandbox(ctx, &cri.ListPodSandboxRequest{})
	if err == nil && len(l.GetItems()) != 2 {
		err = fmt.Errorf("%d sandboxes are listed", len(l.GetItems()))
	}
	return err
}

func (p *lived) stop(ctx context.Context) error {
	_, err := p.StopPodSandbox(ctx, &cri.StopPodSandboxRequest{PodSandboxId: p.sandbox})
	return err
}

func (p *lived) remove(ctx context.Context) error {
	_, err := p.RemovePodSandbox(ctx, &cri.RemovePodSandboxRequest{PodSandboxId: p.sandbox})
	if err == nil {
		p.sandbox = ""
	}
	return err
}

// TestContainerdKilled kills containerd in each call about a pod of its own. The call, and those that follow, are Unavailable, and so are lists.
// Calls about a VM pod succeed meanwhile. When containerd is back, the call succeeds as a kubelet repeats it, and at the end nothing is left.
func TestContainerdKilled(t *testing.T) {
	d := containerdtest.Start(t)
	o := openDoor(t, d)
	conn, err := grpc.NewClient("unix:"+o.socket, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	pod := func(handler string) *lived {
		dir := d.Dir("life-" + handler)
		p := &lived{RuntimeServiceClient: cri.NewRuntimeServiceClient(conn), handler: handler, dir: dir, pod: &cri.PodSandboxConfig{
			Metadata: &cri.PodSandboxMetadata{Name: "life-" + handler, Namespace: "default", Uid: "uid-" + handler}, LogDirectory: dir,
			Linux: &cri.LinuxPodSandboxConfig{CgroupParent: "/k8s.io"},
		}}
		image := &cri.PullImageRequest{Image: &cri.ImageSpec{Image: containerdtest.BusyBox, RuntimeHandler: handler}, SandboxConfig: p.pod}
		if _, err := cri.NewImageServiceClient(conn).PullImage(t.Context(), image); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(dir, "wait"), nil, 0o600); err != nil {
			t.Fatal(err)
		}
		return p
	}
	k := &kills{d: d, theirs: pod("runc"), vm: pod("cocoon")}
	k.theirs.profile = filepath.Join(d.Dir("seccomp"), "profile.json")
	if err := unix.Mkfifo(k.theirs.profile, 0o600); err != nil {
		t.Fatal(err)
	}
	log := func(what string) func() bool { return func() bool { return strings.Contains(d.Log(), what) } }
	file := func(name string) func() bool {
		return func() bool { return exists(filepath.Join(k.theirs.dir, name)) }
	}
	freed := func() { _ = os.Remove(filepath.Join(k.theirs.dir, "wait")) }

	k.in(t, "RunPodSandbox", (*lived).run, k.address, k.waits)
	k.in(t, "CreateContainer", (*lived).create, k.fifo, func() bool { return k.writer != nil || k.read() })
	k.in(t, "StartContainer", (*lived).start, k.shim, func() bool { return log("StartContainer for \\\"" + k.theirs.container)() })
	k.in(t, "ExecSync", (*lived).exec, func(*testing.T) func() { _ = os.Remove(filepath.Join(k.vm.dir, "wait")); return freed }, file("command"))
	k.in(t, "ListPodSandbox", (*lived).list, func(*testing.T) func() { d.Freeze(); return func() {} }, func() bool { return true })
	if err := os.WriteFile(filepath.Join(k.theirs.dir, "wait"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	k.in(t, "StopContainer", (*lived).end, func(*testing.T) func() { return freed }, file("asked"))
	k.in(t, "StopPodSandbox", (*lived).stop, k.address, k.waits)
	for _, p := range []*lived{k.theirs, k.vm} { // the next attempt is removed while it runs
		old := *p
		p.pod.Metadata.Attempt++
		if err := errors.Join(p.run(t.Context()), old.remove(t.Context())); err != nil {
			t.Fatal(err)
		}
	}
	k.in(t, "RemovePodSandbox", (*lived).remove, k.address, k.waits)
	k.nothing(t.Context(), t)
}

// kills kills containerd in calls.
type kills struct {
	d      *containerdtest.Daemon
	theirs *lived   // a pod of runc
	vm     *lived   // a pod that is a VM
	writer *os.File // of the FIFO that is their container's seccomp profile
}

// in kills containerd while it is in a call about their pod. hold lets it not end the call, until what hold returns is called.
func (k *kills) in(t *testing.T, name string, call func(*lived, context.Context) error, hold func(t *testing.T) (release func()), underWay func() bool) {
	t.Run(name, func(t *testing.T) {
		ctx := t.Context()
		release := hold(t)
		done := make(chan error, 1)
		go func() { done <- call(k.theirs, ctx) }()
		kubetest.Eventually(t, "the call is under way", func() string { return fmt.Sprint(underWay()) }, "true")
		k.vmAnswers(ctx, t, "while containerd does not answer")
		k.d.Kill()
		release()
		if err := <-done; status.Code(err) != codes.Unavailable {
			t.Errorf("the call in which containerd was killed: %v, want Unavailable", err)
		}
		if err := call(k.theirs, ctx); status.Code(err) != codes.Unavailable {
			t.Errorf("the call without containerd: %v, want Unavailable", err)
		}
		if err := k.theirs.list(ctx); status.Code(err) != codes.Unavailable {
			t.Errorf("a list without containerd: %v, want Unavailable", err)
		}
		if err := call(k.vm, ctx); err != nil && name != "ListPodSandbox" {
			t.Errorf("the call about a VM without containerd: %v", err)
		}
		k.vmAnswers(ctx, t, "without containerd")
		k.d.Start()
		k.repeat(ctx, t, call)
		k.once(ctx, t)
	})
}

// vmAnswers asks for the VM, if there is one.
func (k *kills) vmAnswers(ctx context.Context, t *testing.T, when string) {
	t.Helper()
	if k.vm.sandbox == "" {
		return
	}
	if _, err := k.vm.PodSandboxStatus(ctx, &cri.PodSandboxStatusRequest{PodSandboxId: k.vm.sandbox}); err != nil {
		t.Errorf("%s, the VM is not there: %v", when, err)
	}
}

// repeat makes a call again when containerd is back, which the door finds in seconds.
func (k *kills) repeat(ctx context.Context, t *testing.T, call func(*lived, context.Context) error) {
	t.Helper()
	kubetest.Eventually(t, "the repeated call", func() string {
		err := call(k.theirs, ctx)
		if err != nil && status.Code(err) != codes.Unavailable {
			t.Fatalf("the repeated call: %v", err)
		}
		return status.Code(err).String()
	}, codes.OK.String())
}

// once looks whether each pod is there once, and each container has begun once at most. Before, it removes a sandbox that a call has left half made,
// as a kubelet does.
func (k *kills) once(ctx context.Context, t *testing.T) {
	t.Helper()
	for _, i := range k.sandboxes(ctx, t) {
		if half := (&lived{RuntimeServiceClient: k.theirs, sandbox: i.GetId()}); i.GetRuntimeHandler() == "runc" && i.GetId() != k.theirs.sandbox {
			if err := errors.Join(half.stop(ctx), half.remove(ctx)); err != nil || i.GetState() == cri.PodSandboxState_SANDBOX_READY {
				t.Errorf("another sandbox of the pod: %v, %v", i, err)
			}
		}
	}
	have := map[string]int{}
	for _, i := range k.sandboxes(ctx, t) {
		have[i.GetRuntimeHandler()]++
	}
	for _, p := range []*lived{k.theirs, k.vm} {
		if starts, _ := os.ReadFile(filepath.Join(p.dir, "starts")); have[p.handler] > 1 || strings.Count(string(starts), "start") > 1 {
			t.Errorf("the pod %s has %d sandboxes, and its container has started %q", p.handler, have[p.handler], starts)
		}
	}
}

func (k *kills) sandboxes(ctx context.Context, t *testing.T) []*cri.PodSandbox {
	t.Helper()
	l, err := k.vm.ListPodSandbox(ctx, &cri.ListPodSandboxRequest{})
	if err != nil {
		t.Fatal(err)
	}
	return l.GetItems()
}

// nothing looks for what is still there.
func (k *kills) nothing(ctx context.Context, t *testing.T) {
	t.Helper()
	containers, err := k.vm.ListContainers(ctx, &cri.ListContainersRequest{})
	if all := k.sandboxes(ctx, t); err != nil || len(all) > 0 || len(containers.GetContainers()) > 0 {
		t.Errorf("left: %v, %v, %v", all, containers, err)
	}
	base := filepath.Dir(k.d.Networks)
	for _, pattern := range []string{"ipam/pods/10.*", "cocoond/state/vms/*", "cocoond/run/vms/*", "cocoond/run/shared/*", "state/netns/*", "state/io.containerd.runtime.v2.task/k8s.io/*"} {
		if left, err := filepath.Glob(filepath.Join(base, pattern)); err != nil || len(left) > 0 {
			t.Errorf("left: %v, %v", left, err)
		}
	}
	if left := hypervisors("life-"); len(left) > 0 {
		t.Errorf("hypervisors are left: %v", left)
	}
}

// address keeps the plugin that gives and takes addresses waiting.
func (k *kills) address(t *testing.T) (release func()) {
	t.Helper()
	dir := filepath.Join(filepath.Dir(k.d.Networks), "ipam", containerdtest.Pods)
	if err := os.MkdirAll(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	f, err := os.OpenFile(filepath.Join(dir, "lock"), os.O_RDONLY|os.O_CREATE, 0o600)
	if err == nil {
		err = unix.Flock(int(f.Fd()), unix.LOCK_EX) //nolint:gosec // a file descriptor
	}
	if err != nil {
		t.Fatal(err)
	}
	return func() { _ = f.Close() }
}

// waits reports whether a plugin for addresses runs.
func (k *kills) waits() bool {
	all, _ := filepath.Glob("/proc/[0-9]*/exe")
	for _, exe := range all {
		if to, _ := os.Readlink(exe); to == filepath.Join(k.d.Plugins, "host-local") {
			return true
		}
	}
	return false
}

// fifo keeps containerd waiting for a seccomp profile. Who creates the container again has a profile.
func (k *kills) fifo(t *testing.T) (release func()) {
	return func() {
		_ = k.writer.Close()
		if err := errors.Join(os.Remove(k.theirs.profile), os.WriteFile(k.theirs.profile, []byte(`{"defaultAction": "SCMP_ACT_ALLOW"}`), 0o600)); err != nil {
			t.Error(err)
		}
	}
}

// read reports whether containerd reads the profile, and keeps it waiting for the content.
func (k *kills) read() bool {
	f, err := os.OpenFile(k.theirs.profile, os.O_WRONLY|unix.O_NONBLOCK, 0)
	if err == nil {
		k.writer = f
	}
	return err == nil
}

// shim lets the process between containerd and runc stand still.
func (k *kills) shim(t *testing.T) (release func()) {
	all, _ := filepath.Glob("/proc/[0-9]*/cmdline")
	for _, file := range all {
		text, _ := os.ReadFile(file)
		if !strings.Contains(string(text), "containerd-shim-runc-v2\x00") || !strings.Contains(string(text), "\x00"+k.theirs.sandbox+"\x00") {
			continue
		}
		var pid int
		if _, err := fmt.Sscanf(file, "/proc/%d/", &pid); err != nil {
			t.Fatal(err)
		}
		fd, err := unix.PidfdOpen(pid, 0)
		if err == nil {
			err = unix.PidfdSendSignal(fd, unix.SIGSTOP, nil, 0)
		}
		if err != nil {
			t.Fatal(err)
		}
		return func() {
			_ = unix.PidfdSendSignal(fd, unix.SIGCONT, nil, 0)
			_ = unix.Close(fd)
		}
	}
	t.Fatalf("the sandbox %s has no shim", k.theirs.sandbox)
	return nil
}

func exists(path string) bool {
	_, err := os.Stat(path)
	return err == nil
}
