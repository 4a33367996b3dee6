//go:build vm

package cocoond_test

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// criClient is a kubelet's side of a node's CRI socket.
type criClient struct {
	*node
	cri.RuntimeServiceClient
	images cri.ImageServiceClient
	logs   string // folder of the pods' logs
}

// newCRI starts a node with a CRI socket, and with additional settings in YAML for its folder.
func newCRI(t *testing.T, settings ...func(dir string) string) *criClient {
	t.Helper()
	dir, err := os.MkdirTemp("", "cocoond-cri-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	socket := filepath.Join(dir, "cri.sock")
	config := []string{fmt.Sprintf("cri: {socket: %s, containerd: %s/none.sock, size: {memory: 201326592, storage: 134217728}}", socket, dir)}
	for _, s := range settings {
		config = append(config, s(dir))
	}
	c := &criClient{node: newNodeIn(t, dir, config...), logs: filepath.Join(dir, "logs")}
	conn, err := grpc.NewClient("unix:"+socket, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	c.RuntimeServiceClient, c.images = cri.NewRuntimeServiceClient(conn), cri.NewImageServiceClient(conn)
	c.serves()
	return c
}

// in is the same client in a subtest.
func (c *criClient) in(t *testing.T) *criClient {
	n, sub := *c.node, *c
	n.t, sub.node = t, &n
	return &sub
}

// serves waits until the socket answers.
func (c *criClient) serves() {
	c.t.Helper()
	c.until("CRI is served", func() bool {
		_, err := c.PodSandboxStatus(c.t.Context(), &cri.PodSandboxStatusRequest{PodSandboxId: "vm-none"})
		return status.Code(err) == codes.NotFound
	})
}

func (c *criClient) pod(name string) *cri.PodSandboxConfig {
	return &cri.PodSandboxConfig{
		Metadata: &cri.PodSandboxMetadata{Name: name, Namespace: "shop", Uid: "uid-" + name}, Hostname: name, LogDirectory: filepath.Join(c.logs, name),
		Linux: &cri.LinuxPodSandboxConfig{},
	}
}

// run makes the sandbox of a pod.
func (c *criClient) run(p *cri.PodSandboxConfig) string {
	c.t.Helper()
	r, err := c.RunPodSandbox(c.t.Context(), &cri.RunPodSandboxRequest{Config: p, RuntimeHandler: "cocoon"})
	if err != nil {
		c.t.Fatal(err)
	}
	return r.GetPodSandboxId()
}

// scripted is the configuration of a container that runs a script.
func scripted(name, script string, mounts ...*cri.Mount) *cri.ContainerConfig {
	return &cri.ContainerConfig{
		Metadata: &cri.ContainerMetadata{Name: name}, Image: &cri.ImageSpec{Image: demo}, Command: []string{"sh", "-c", script}, LogPath: name + "/0.log",
		Mounts: mounts, Linux: &cri.LinuxContainerConfig{SecurityContext: &cri.LinuxContainerSecurityContext{
			NamespaceOptions: &cri.NamespaceOption{Pid: cri.NamespaceMode_CONTAINER}, // as kubelets do
		}},
	}
}

// create makes a container that runs a script.
func (c *criClient) create(sandbox string, p *cri.PodSandboxConfig, name, script string, mounts ...*cri.Mount) string {
	c.t.Helper()
	return c.createAs(sandbox, p, scripted(name, script, mounts...))
}

func (c *criClient) createAs(sandbox string, p *cri.PodSandboxConfig, config *cri.ContainerConfig) string {
	c.t.Helper()
	r, err := c.CreateContainer(c.t.Context(), &cri.CreateContainerRequest{PodSandboxId: sandbox, Config: config, SandboxConfig: p})
	if err != nil {
		c.t.Fatal(err)
	}
	return r.GetContainerId()
}

func (c *criClient) begin(id string) {
	c.t.Helper()
	if _, err := c.StartContainer(c.t.Context(), &cri.StartContainerRequest{ContainerId: id}); err != nil {
		c.t.Fatal(err)
	}
}

// is waits until a container is in a state, and returns its status.
func (c *criClient) is(id string, want cri.ContainerState) (st *cri.ContainerStatus) {
	c.t.Helper()
	c.until(id+" is "+want.String(), func() bool {
		r, err := c.ContainerStatus(c.t.Context(), &cri.ContainerStatusRequest{ContainerId: id})
		st = r.GetStatus()
		return err == nil && st.GetState() == want
	})
	return st
}

func (c *criClient) sync(id string, timeout int64, cmd ...string) (*cri.ExecSyncResponse, error) {
	return c.ExecSync(c.t.Context(), &cri.ExecSyncRequest{ContainerId: id, Cmd: cmd, Timeout: timeout})
}

// texts are the lines of a log without their times.
func (c *criClient) texts(path string) (out []string) {
	b, _ := os.ReadFile(path)
	for line := range strings.Lines(string(b)) {
		if _, text, ok := strings.Cut(strings.TrimSuffix(line, "\n"), " "); ok {
			out = append(out, text)
		}
	}
	return out
}

// volumes starts a container with the mounts of a kubelet: a Secret that changes, a folder to write to, and two files.
func (c *criClient) volumes(sandbox string, p *cri.PodSandboxConfig) {
	c.t.Helper()
	root := filepath.Join(c.dir, "volumes")
	write := func(name, text string) string {
		c.t.Helper()
		path := filepath.Join(root, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			c.t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
			c.t.Fatal(err)
		}
		return path
	}
	point := func(to string) { // as a kubelet replaces all files at once
		c.t.Helper()
		next, current := filepath.Join(root, "secret/..tmp"), filepath.Join(root, "secret/..data")
		if err := os.Symlink(to, next); err != nil {
			c.t.Fatal(err)
		}
		if err := os.Rename(next, current); err != nil {
			c.t.Fatal(err)
		}
	}
	write("secret/..1/key", "old\n")
	point("..1")
	if err := os.Symlink("..data/key", filepath.Join(root, "secret/key")); err != nil {
		c.t.Fatal(err)
	}
	write("tree/file", "above\n")
	write("other/file", "below\n")
	for _, tree := range []string{"tree", "fixed"} {
		sub := filepath.Join(root, tree, "sub")
		if err := os.MkdirAll(sub, 0o755); err != nil {
			c.t.Fatal(err)
		}
		if err := unix.Mount(filepath.Join(root, "other"), sub, "", unix.MS_BIND, ""); err != nil {
			c.t.Fatal(err)
		}
	}
	hosts, message := write("hosts", "10.0.0.9 friend\n"), write("message", "")
	write("private/other", "of nobody's business\n")
	id := c.create(sandbox, p, "volumes", "sleep 100000",
		&cri.Mount{HostPath: filepath.Join(root, "secret"), ContainerPath: "/secret", Readonly: true}, &cri.Mount{HostPath: hosts, ContainerPath: "/etc/hosts"},
		&cri.Mount{HostPath: filepath.Join(root, "empty"), ContainerPath: "/empty"}, &cri.Mount{HostPath: message, ContainerPath: "/dev/termination-log"},
		&cri.Mount{HostPath: filepath.Join(root, "tree"), ContainerPath: "/tree", Readonly: true},
		&cri.Mount{HostPath: filepath.Join(root, "fixed"), ContainerPath: "/fixed", Readonly: true, RecursiveReadOnly: true})
	c.begin(id)
	sh := func(script string) string {
		c.t.Helper()
		out, err := c.sync(id, 60, "sh", "-c", script)
		if err != nil {
			c.t.Fatalf("%s: %v", script, err)
		}
		return string(out.GetStdout()) + string(out.GetStderr())
	}
	if got := sh("cat /secret/key /etc/hosts; echo mine >/empty/file; echo the end >/dev/termination-log"); got != "old\n10.0.0.9 friend\n" {
		c.t.Errorf("got %q", got)
	}
	if got, err := os.ReadFile(filepath.Join(root, "empty/file")); err != nil || string(got) != "mine\n" {
		c.t.Errorf("the file on the node is %q, %v", got, err)
	}
	if got := sh("echo x >/secret/key && echo written"); strings.Contains(got, "written") {
		c.t.Errorf("it wrote to a mount that is read-only: %q", got)
	}
	if got := sh("cat /tree/file /tree/sub/file /fixed/sub/file; echo x 2>/dev/null >/tree/x || echo fixed; echo x >/tree/sub/x && echo open; echo x 2>/dev/null >/fixed/sub/y || echo fixed"); got != "above\nbelow\nbelow\nfixed\nopen\nfixed\n" {
		c.t.Errorf("what is mounted below a folder: %q", got)
	}
	write("secret/..2/key", "new\n")
	point("..2")
	c.until("the guest sees the new secret", func() bool { return sh("cat /secret/key") == "new\n" })
	if got := sh("find / -xdev -name other 2>/dev/null; ls /"); strings.Contains(got, "/other") {
		c.t.Errorf("it sees more than its mounts: %q", got)
	}
	if _, err := c.StopContainer(c.t.Context(), &cri.StopContainerRequest{ContainerId: id}); err != nil {
		c.t.Error(err)
	}
	c.is(id, cri.ContainerState_CONTAINER_EXITED)
	if got, err := os.ReadFile(message); err != nil || string(got) != "the end\n" {
		c.t.Errorf("the message of its end is %q, %v", got, err)
	}
	if _, err := c.RemoveContainer(c.t.Context(), &cri.RemoveContainerRequest{ContainerId: id}); err != nil {
		c.t.Error(err)
	}
	for _, tree := range []string{"tree", "fixed"} { // still there
		if err := unix.Unmount(filepath.Join(root, tree, "sub"), 0); err != nil {
			c.t.Errorf("the mount of the node: %v", err)
		}
	}
	if b, err := os.ReadFile("/proc/self/mountinfo"); err != nil || strings.Contains(string(b), root) {
		c.t.Errorf("a mount is left, or %v", err)
	}
}

// TestVMKubelet does with a VM pod what a kubelet does, while there is no containerd, and kills cocoond meanwhile.
func TestVMKubelet(t *testing.T) {
	c, ctx := newCRI(t), t.Context()
	p := c.pod("web")
	p.Linux.CgroupParent = fmt.Sprintf("/cocoon-cri-%d/burstable/poduid-web", os.Getpid())
	sandbox := c.run(p)
	if again := c.run(p); again != sandbox {
		t.Errorf("the same attempt has two sandboxes, %s and %s", sandbox, again)
	}
	st, err := c.PodSandboxStatus(ctx, &cri.PodSandboxStatusRequest{PodSandboxId: sandbox})
	if err != nil || st.GetStatus().GetState() != cri.PodSandboxState_SANDBOX_READY || st.GetStatus().GetNetwork().GetIp() == "" {
		t.Fatalf("got %v, %v", st, err)
	}
	app := c.create(sandbox, p, "app", "n=0; while :; do n=$((n+1)); echo count $n; sleep 0.1; done")
	if got := c.is(app, cri.ContainerState_CONTAINER_CREATED); got.GetStartedAt() != 0 || got.GetImageId() == "" {
		t.Errorf("created: %v", got)
	}
	if _, err := c.sync(app, 0, "true"); status.Code(err) != codes.FailedPrecondition {
		t.Errorf("a command before the start: %v", err)
	}
	c.begin(app)
	if got := c.is(app, cri.ContainerState_CONTAINER_RUNNING); got.GetLogPath() != filepath.Join(c.logs, "web/app/0.log") || got.GetStartedAt() == 0 {
		t.Errorf("running: %v", got)
	}
	if _, err := c.StartContainer(ctx, &cri.StartContainerRequest{ContainerId: app}); status.Code(err) != codes.FailedPrecondition {
		t.Errorf("a second start: %v", err)
	}

	all, err := c.List(ctx)
	if err != nil || len(all) != 1 {
		t.Fatalf("got %v, %v", all, err)
	}
	group := p.Linux.CgroupParent + "/cocoon-" + string(all[0].ID) + "\n"
	if in, err := os.ReadFile(fmt.Sprintf("/proc/%d/cgroup", all[0].PID)); err != nil || !strings.Contains(string(in), group) {
		t.Errorf("its hypervisor is not in the cgroup of the pod, but in %s, %v", in, err)
	}

	c.volumes(sandbox, p)
	c.disks(sandbox, p)

	job := c.create(sandbox, p, "job", "echo out; echo err >&2; exit 7")
	c.begin(job)
	if got := c.is(job, cri.ContainerState_CONTAINER_EXITED); got.GetExitCode() != 7 || got.GetReason() != "Error" || got.GetFinishedAt() < got.GetStartedAt() || got.GetStartedAt() < got.GetCreatedAt() {
		t.Errorf("ended: %v", got)
	}
	c.until("the log of the job is whole", func() bool {
		lines := c.texts(filepath.Join(c.logs, "web/job/0.log"))
		return len(lines) == 2 && slices.Contains(lines, "stdout F out") && slices.Contains(lines, "stderr F err")
	})

	debugger := scripted("debugger", "exec sleep 100000")
	debugger.Linux.SecurityContext.NamespaceOptions = &cri.NamespaceOption{Pid: cri.NamespaceMode_TARGET, TargetId: "cocoon-none"}
	if _, err := c.CreateContainer(ctx, &cri.CreateContainerRequest{PodSandboxId: sandbox, Config: debugger, SandboxConfig: p}); status.Code(err) != codes.NotFound {
		t.Errorf("the processes of an unknown container: %v", err)
	}
	debugger.Linux.SecurityContext.NamespaceOptions.TargetId = app
	beside := c.createAs(sandbox, p, debugger)
	c.begin(beside)
	const counter = "grep -l 'ech[o] count' /proc/[0-9]*/cmdline"
	for _, id := range []string{app, beside} {
		if out, err := c.sync(id, 60, "sh", "-c", counter); err != nil || string(out.GetStdout()) != "/proc/1/cmdline\n" {
			t.Errorf("%s sees %q, %v", id, out.GetStdout(), err)
		}
	}
	if _, err := c.RemoveContainer(ctx, &cri.RemoveContainerRequest{ContainerId: beside}); err != nil {
		t.Error(err)
	}
	if out, err := c.sync(app, 60, "sh", "-c", "hostname; echo wrong >&2; exit 3"); err != nil || string(out.GetStdout()) != "web\n" || string(out.GetStderr()) != "wrong\n" || out.GetExitCode() != 3 {
		t.Errorf("got %v, %v", out, err)
	}
	if _, err := c.sync(app, 1, "sleep", "1000"); status.Code(err) != codes.DeadlineExceeded {
		t.Errorf("a command that takes too long: %v", err)
	}
	if out, err := c.sync(app, 60, "sh", "-c", "pgrep -f 'sleep 1000' | wc -l"); err != nil || strings.TrimSpace(string(out.GetStdout())) != "0" {
		t.Errorf("it still runs: %v, %v", out, err)
	}
	if _, err := c.ListPodSandbox(ctx, &cri.ListPodSandboxRequest{}); status.Code(err) != codes.Unavailable {
		t.Errorf("a list without containerd: %v", err)
	}
	if l, err := c.ListContainers(ctx, &cri.ListContainersRequest{Filter: &cri.ContainerFilter{PodSandboxId: sandbox}}); err != nil || len(l.GetContainers()) != 2 {
		t.Errorf("got %v, %v", l, err)
	}
	if s, err := c.ContainerStats(ctx, &cri.ContainerStatsRequest{ContainerId: app}); err != nil || s.GetStats().GetMemory().GetWorkingSetBytes().GetValue() == 0 || s.GetStats().GetMemory().GetPsi() == nil {
		t.Errorf("got %v, %v", s, err)
	}
	const size = 8 << 20
	if out, err := c.sync(app, 60, "sh", "-c", fmt.Sprintf("head -c %d /dev/urandom >/written && sync", size)); err != nil || out.GetExitCode() != 0 {
		t.Errorf("got %v, %v", out, err)
	}
	c.until("what the container has written is counted", func() bool {
		s, err := c.ContainerStats(ctx, &cri.ContainerStatsRequest{ContainerId: app})
		if err != nil {
			t.Fatal(err)
		}
		used := s.GetStats().GetWritableLayer().GetUsedBytes().GetValue()
		return used >= size && used < 2*size
	})

	c.crash()
	c.serves()
	log := filepath.Join(c.logs, "web/app/0.log")
	had := len(c.texts(log))
	c.until("the log goes on", func() bool { return len(c.texts(log)) > had+5 })
	for i, text := range c.texts(log) {
		if want := fmt.Sprintf("stdout F count %d", i+1); text != want {
			t.Fatalf("line %d of the log is %q, want %q", i+1, text, want)
		}
	}
	if got := c.is(job, cri.ContainerState_CONTAINER_EXITED); got.GetExitCode() != 7 {
		t.Errorf("after the crash: %v", got)
	}

	if err := os.Rename(log, log+".20261127-120000"); err != nil {
		t.Fatal(err)
	}
	if _, err := c.ReopenContainerLog(ctx, &cri.ReopenContainerLogRequest{ContainerId: app}); err != nil {
		t.Error(err)
	}
	c.until("the new log is written", func() bool { return len(c.texts(log)) > 0 })

	for range 2 {
		if _, err := c.StopContainer(ctx, &cri.StopContainerRequest{ContainerId: app, Timeout: 1}); err != nil {
			t.Error(err)
		}
	}
	if got := c.is(app, cri.ContainerState_CONTAINER_EXITED); got.GetExitCode() != 137 && got.GetExitCode() != 143 {
		t.Errorf("stopped: %v", got)
	}
	for range 2 {
		if _, err := c.RemoveContainer(ctx, &cri.RemoveContainerRequest{ContainerId: job}); err != nil {
			t.Error(err)
		}
	}
	for range 2 {
		if _, err := c.StopPodSandbox(ctx, &cri.StopPodSandboxRequest{PodSandboxId: sandbox}); err != nil {
			t.Error(err)
		}
	}
	if st, err := c.PodSandboxStatus(ctx, &cri.PodSandboxStatusRequest{PodSandboxId: sandbox}); err != nil || st.GetStatus().GetState() != cri.PodSandboxState_SANDBOX_NOTREADY || st.GetStatus().GetNetwork().GetIp() != "" {
		t.Errorf("stopped: %v, %v", st, err)
	}
	if _, err := c.CreateContainer(ctx, &cri.CreateContainerRequest{PodSandboxId: sandbox, SandboxConfig: p, Config: &cri.ContainerConfig{Metadata: &cri.ContainerMetadata{Name: "late"}, Image: &cri.ImageSpec{Image: demo}}}); status.Code(err) != codes.FailedPrecondition {
		t.Errorf("a container in a stopped sandbox: %v", err)
	}
	for range 2 {
		if _, err := c.RemovePodSandbox(ctx, &cri.RemovePodSandboxRequest{PodSandboxId: sandbox}); err != nil {
			t.Error(err)
		}
	}
	if all, err := c.List(ctx); err != nil || len(all) != 0 {
		t.Errorf("left: %v, %v", all, err)
	}
	if left, err := filepath.Glob("/sys/fs/cgroup/*" + p.Linux.CgroupParent); err != nil || len(left) > 0 {
		t.Errorf("left: %v, %v", left, err)
	}
	if _, err := c.ContainerStatus(ctx, &cri.ContainerStatusRequest{ContainerId: app}); status.Code(err) != codes.NotFound {
		t.Errorf("a container that is gone: %v", err)
	}
}
