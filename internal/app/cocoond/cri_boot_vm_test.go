//go:build vm

package cocoond_test

import (
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"cocoonstack.io/cocoon/api/contract"
	"cocoonstack.io/cocoon/internal/testkit/loopdev"
	"cocoonstack.io/cocoon/internal/testkit/need"
)

const demoDisk = "cocoon/disk-demo:latest"

// ticks returns the numbers that the script of the guest has counted in the log at path, and fails if one is missing or is there twice.
func (c *criClient) ticks(path string) (n int) {
	c.t.Helper()
	for _, text := range c.texts(path) {
		_, at, ok := strings.Cut(strings.TrimRight(text, "\r"), "tick ")
		if !ok {
			continue
		}
		if n++; at != fmt.Sprint(n) {
			c.t.Fatalf("tick %s of %s follows %d", at, path, n-1)
		}
	}
	return n
}

// TestVMBootContainer: a container of a disk image is the whole VM. It has the address of the pod, its console is the log of the container, and its end
// is that of the container. Another attempt follows in the same sandbox, with a new disk. cocoond is killed meanwhile.
func TestVMBootContainer(t *testing.T) {
	c, ctx := newCRI(t), t.Context()
	system, err := os.Open(need.Built(t, "bin/guest/disk.img", "make guest"))
	if err != nil {
		t.Fatal(err)
	}
	defer system.Close()
	if _, err := c.ImportImage(ctx, demoDisk, system, nil); err != nil {
		t.Fatal(err)
	}
	device := loopdev.New(t, 16<<20)
	if err := os.WriteFile(device, []byte("of the node\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	p := c.pod("web")
	p.DnsConfig = &cri.DNSConfig{Servers: []string{"10.96.0.10"}}
	p.Annotations = map[string]string{contract.KeyVirtletUserDataScript: "#!/bin/sh\n" +
		"head -n 1 /dev/vdc; (n=0; while :; do n=$((n+1)); echo tick $n; sleep 0.1; done) >/dev/console 2>&1 &\n"}
	sandbox := c.run(p)
	ip := func() string {
		t.Helper()
		st, err := c.PodSandboxStatus(ctx, &cri.PodSandboxStatusRequest{PodSandboxId: sandbox})
		if err != nil || st.GetStatus().GetState() != cri.PodSandboxState_SANDBOX_READY {
			t.Fatalf("the sandbox: %v, %v", st, err)
		}
		return st.GetStatus().GetNetwork().GetIp()
	}
	address := ip()
	files := filepath.Join(c.dir, "hosts")
	if err := os.WriteFile(files, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	config := func(attempt uint32) *cri.ContainerConfig {
		return &cri.ContainerConfig{
			Metadata: &cri.ContainerMetadata{Name: "os", Attempt: attempt}, Image: &cri.ImageSpec{Image: demoDisk}, LogPath: fmt.Sprintf("os/%d.log", attempt), Linux: &cri.LinuxContainerConfig{},
			Envs:    []*cri.KeyValue{{Key: "KUBERNETES_PORT", Value: []byte("tcp://10.96.0.1:443")}},
			Mounts:  []*cri.Mount{{HostPath: files, ContainerPath: "/etc/hosts"}, {HostPath: files, ContainerPath: "/dev/termination-log"}},
			Devices: []*cri.Device{{HostPath: device, ContainerPath: "/dev/data", Permissions: "mrw"}},
		}
	}
	create := func(config *cri.ContainerConfig) (string, error) {
		r, err := c.CreateContainer(ctx, &cri.CreateContainerRequest{PodSandboxId: sandbox, Config: config, SandboxConfig: p})
		return r.GetContainerId(), err
	}

	first := c.create(sandbox, p, "init", "echo prepared")
	if _, err := create(config(0)); status.Code(err) != codes.FailedPrecondition || !strings.Contains(err.Error(), "only container") {
		t.Errorf("beside another container: %v", err)
	}
	c.begin(first)
	if st := c.is(first, cri.ContainerState_CONTAINER_EXITED); st.GetExitCode() != 0 {
		t.Errorf("the container before: %v", st)
	}
	commanded := config(0)
	commanded.Args = []string{"run"}
	if _, err := create(commanded); status.Code(err) != codes.InvalidArgument {
		t.Errorf("with a command: %v", err)
	}

	id, err := create(config(0))
	if err != nil {
		t.Fatal(err)
	}
	if st := c.is(id, cri.ContainerState_CONTAINER_CREATED); st.GetStartedAt() != 0 || st.GetImageId() == "" {
		t.Errorf("created: %v", st)
	}
	if now := ip(); now != address {
		t.Errorf("its address was %s, and is %s", address, now)
	}
	c.begin(id)
	c.is(id, cri.ContainerState_CONTAINER_RUNNING)
	log := filepath.Join(c.logs, "web/os/0.log")
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("the log of the guest:\n%s", strings.Join(c.texts(log), "\n"))
		}
	})
	c.until("the guest counts", func() bool { return c.ticks(log) > 3 })
	if !slices.ContainsFunc(c.texts(log), func(s string) bool { return strings.Contains(s, "of the node") }) {
		t.Errorf("it does not find the device of the node: %q", c.texts(log))
	}
	var page []byte
	c.until("its web server answers at the address of the pod", func() bool {
		r, err := http.Get("http://" + address)
		if err != nil {
			return false
		}
		defer r.Body.Close()
		page, err = io.ReadAll(r.Body)
		return err == nil
	})
	if string(page) != "disk-demo web\n" {
		t.Errorf("the page is %q", page)
	}
	if l, err := c.ListContainers(ctx, &cri.ListContainersRequest{Filter: &cri.ContainerFilter{PodSandboxId: sandbox}}); err != nil || len(l.GetContainers()) != 2 {
		t.Errorf("got %v, %v", l, err)
	}
	if _, err := create(&cri.ContainerConfig{Metadata: &cri.ContainerMetadata{Name: "debug"}, Image: &cri.ImageSpec{Image: demo}, Linux: &cri.LinuxContainerConfig{}}); status.Code(err) != codes.FailedPrecondition {
		t.Errorf("a container in a guest that boots itself: %v", err)
	}

	c.crash()
	c.serves()
	had := c.ticks(log)
	c.until("the log goes on", func() bool { return c.ticks(log) > had+3 })
	if err := os.Rename(log, log+".20261127-120000"); err != nil {
		t.Fatal(err)
	}
	if _, err := c.ReopenContainerLog(ctx, &cri.ReopenContainerLogRequest{ContainerId: id}); err != nil {
		t.Error(err)
	}
	c.until("the new log is written", func() bool { return len(c.texts(log)) > 0 })

	if _, err := c.StopContainer(ctx, &cri.StopContainerRequest{ContainerId: id, Timeout: 60}); err != nil {
		t.Fatal(err)
	}
	if st := c.is(id, cri.ContainerState_CONTAINER_EXITED); st.GetExitCode() != 0 || st.GetReason() != "Completed" || st.GetFinishedAt() < st.GetStartedAt() {
		t.Errorf("stopped: %v", st)
	}
	if now := ip(); now != address { // so a kubelet makes the next attempt in it
		t.Errorf("its address was %s, and is %s", address, now)
	}
	next, err := create(config(1))
	if err != nil {
		t.Fatal(err)
	}
	c.begin(next)
	log = filepath.Join(c.logs, "web/os/1.log")
	c.until("the next attempt counts from the begin", func() bool { return c.ticks(log) > 3 })
	for _, gone := range []string{first, id} {
		if _, err := c.RemoveContainer(ctx, &cri.RemoveContainerRequest{ContainerId: gone}); err != nil {
			t.Error(err)
		}
	}
	c.is(next, cri.ContainerState_CONTAINER_RUNNING)
	if _, err := c.StopContainer(ctx, &cri.StopContainerRequest{ContainerId: next}); err != nil {
		t.Fatal(err)
	}
	if st := c.is(next, cri.ContainerState_CONTAINER_EXITED); st.GetExitCode() != 137 {
		t.Errorf("killed: %v", st)
	}
	if _, err := c.StopPodSandbox(ctx, &cri.StopPodSandboxRequest{PodSandboxId: sandbox}); err != nil {
		t.Error(err)
	}
	if st, err := c.PodSandboxStatus(ctx, &cri.PodSandboxStatusRequest{PodSandboxId: sandbox}); err != nil || st.GetStatus().GetState() != cri.PodSandboxState_SANDBOX_NOTREADY {
		t.Errorf("stopped: %v, %v", st, err)
	}
	if _, err := c.RemovePodSandbox(ctx, &cri.RemovePodSandboxRequest{PodSandboxId: sandbox}); err != nil {
		t.Error(err)
	}
	if all, err := c.List(ctx); err != nil || len(all) != 0 {
		t.Errorf("left: %v, %v", all, err)
	}
}
