//go:build host

package host

import (
	"strings"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// podRuns: cocoond does what a kubelet asks for. The hypervisor is in the cgroup of the pod, and cannot use more than that.
func podRuns(t *testing.T, m *machine) {
	daemon := m.must("systemctl show -P MainPID cocoond")
	m.must("echo COCOOND_CRI_SOCKET=/run/cocoon/cri.sock >>/etc/cocoon/cocoond.env && systemctl restart cocoond")
	m.eventually("test $(systemctl show -P MainPID cocoond) != " + daemon + " && test -S /run/cocoon/cri.sock && cocoon node info")
	conn, err := grpc.NewClient("unix:"+m.socket("cri", "/run/cocoon/cri.sock"), grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	c, ctx := cri.NewRuntimeServiceClient(conn), t.Context()

	const parent, limit = "/kubepods/burstable/pod1", 600 << 20
	m.must("mkdir -p /sys/fs/cgroup/kubepods/burstable/pod1 && cd /sys/fs/cgroup && for g in . kubepods kubepods/burstable; do echo +memory +cpu +pids >$g/cgroup.subtree_control; done") // as a kubelet does
	m.must(of("echo %d >/sys/fs/cgroup%s/memory.max", limit, parent))
	pod := &cri.PodSandboxConfig{
		Metadata: &cri.PodSandboxMetadata{Name: "web", Namespace: "shop", Uid: "1"}, Hostname: "web", LogDirectory: "/var/log/pods/web",
		Linux: &cri.LinuxPodSandboxConfig{CgroupParent: parent, Resources: &cri.LinuxContainerResources{MemoryLimitInBytes: 128 << 20, CpuPeriod: 100000, CpuQuota: 100000}},
	}
	sandbox, err := c.RunPodSandbox(ctx, &cri.RunPodSandboxRequest{Config: pod, RuntimeHandler: "cocoon"})
	if err != nil {
		t.Fatal(err)
	}
	app, err := c.CreateContainer(ctx, &cri.CreateContainerRequest{PodSandboxId: sandbox.GetPodSandboxId(), SandboxConfig: pod, Config: &cri.ContainerConfig{
		Metadata: &cri.ContainerMetadata{Name: "app"}, Image: &cri.ImageSpec{Image: "demo"}, Command: []string{"sh", "-c", "echo begun; exec sleep 100000"}, LogPath: "app.log",
		Linux: &cri.LinuxContainerConfig{SecurityContext: &cri.LinuxContainerSecurityContext{NamespaceOptions: &cri.NamespaceOption{Pid: cri.NamespaceMode_CONTAINER}}},
	}})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := c.StartContainer(ctx, &cri.StartContainerRequest{ContainerId: app.GetContainerId()}); err != nil {
		t.Fatal(err)
	}
	m.eventually("grep -q begun /var/log/pods/web/app.log")
	out, err := c.ExecSync(ctx, &cri.ExecSyncRequest{ContainerId: app.GetContainerId(), Cmd: []string{"sh", "-c", "tr '\\0' ' ' </proc/1/cmdline"}, Timeout: 60})
	if err != nil || string(out.GetStdout()) != "sleep 100000 " {
		t.Errorf("process 1 of the container: %v, %v", out, err)
	}

	group := "/sys/fs/cgroup" + parent + "/cocoon-" + strings.TrimPrefix(sandbox.GetPodSandboxId(), "vm-")
	m.want("for p in $(cat "+group+"/cgroup.procs); do cat /proc/$p/comm; done | grep -c qemu", "1")
	if used := number(t, m.must(of("cat /sys/fs/cgroup%s/memory.current", parent))); used < 32<<20 || used > limit {
		t.Errorf("the cgroup of the pod has %d bytes", used)
	}
	if out, err := m.run("sh -c 'echo $$ >" + group + "/cgroup.procs; head -c 1G /dev/zero | tail >/dev/null'"); err == nil {
		t.Errorf("a process in the cgroup of the pod took 1 GiB: %s", out)
	}
	if _, err := c.StopPodSandbox(ctx, &cri.StopPodSandboxRequest{PodSandboxId: sandbox.GetPodSandboxId()}); err != nil {
		t.Error(err)
	}
	if _, err := c.RemovePodSandbox(ctx, &cri.RemovePodSandboxRequest{PodSandboxId: sandbox.GetPodSandboxId()}); err != nil {
		t.Error(err)
	}
	if _, err := c.PodSandboxStatus(ctx, &cri.PodSandboxStatusRequest{PodSandboxId: sandbox.GetPodSandboxId()}); status.Code(err) != codes.NotFound {
		t.Errorf("after its removal: %v", err)
	}
	m.want("test -e "+group+" || echo gone", "gone")
	m.must("rmdir /sys/fs/cgroup/kubepods/burstable/pod1 /sys/fs/cgroup/kubepods/burstable /sys/fs/cgroup/kubepods")
	m.want(of(memoryOf, "a"), "memory of a")
}
