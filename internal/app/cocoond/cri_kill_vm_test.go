//go:build vm

package cocoond_test

import (
	"database/sql"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"
	_ "modernc.org/sqlite" // the journal is read from outside of cocoond

	"cocoonstack.io/cocoon/internal/testkit/need"
	"cocoonstack.io/cocoon/internal/vm"
)

// victim is a pod whose hypervisors are killed, one after the other.
type victim struct {
	*criClient
	pod       *cri.PodSandboxConfig
	sandbox   string // of the last attempt; "": there was none
	container string // "": the sandbox has none
	shared    string // folder of the node that the container has
	process   int    // pidfd of the hypervisor
}

// killing is a call during which the hypervisor of a sandbox is killed.
type killing struct {
	name     string
	prepared func(v *victim) // what the sandbox has before; nil: a container that runs
	frozen   bool            // the hypervisor stands still from before the call, so the call cannot end
	call     func(v *victim) error
	underWay func(v *victim) bool
	want     codes.Code
}

func killings() []killing {
	op := func(want string) func(*victim) bool { return func(v *victim) bool { return v.op() == want } }
	nothing := func(v *victim) { v.until("the hypervisor runs", func() bool { return v.record().PID != 0 }) }
	created := func(v *victim) {
		v.container = v.add("app")
		v.ready(v.id())
	}
	create := func(v *victim) error {
		_, err := v.CreateContainer(v.t.Context(), &cri.CreateContainerRequest{PodSandboxId: v.sandbox, SandboxConfig: v.pod, Config: v.config("late")})
		return err
	}
	return []killing{
		{
			name: "RunPodSandbox", prepared: nothing, call: func(*victim) error { return nil },
			underWay: func(v *victim) bool { return !v.record().AgentReady }, // the guest boots when the call has returned
		},
		{name: "CreateContainer while it boots", prepared: nothing, frozen: true, call: create, underWay: op("add container"), want: codes.FailedPrecondition},
		{name: "CreateContainer", prepared: func(v *victim) { v.ready(v.id()) }, frozen: true, call: create, underWay: op("add container"), want: codes.FailedPrecondition},
		{
			name: "StartContainer", prepared: created, frozen: true, want: codes.FailedPrecondition,
			call: func(v *victim) error {
				_, err := v.StartContainer(v.t.Context(), &cri.StartContainerRequest{ContainerId: v.container})
				return err
			},
			underWay: func(v *victim) bool {
				return exists(filepath.Join(v.logs, v.pod.GetMetadata().GetName(), v.config("app").GetLogPath()))
			},
		},
		{
			name: "ExecSync", want: codes.FailedPrecondition,
			call: func(v *victim) error {
				_, err := v.sync(v.container, 0, "sh", "-c", "touch /shared/command; exec sleep 100000")
				return err
			},
			underWay: func(v *victim) bool { return exists(filepath.Join(v.shared, "command")) },
		},
		{
			name: "StopContainer",
			call: func(v *victim) error {
				_, err := v.StopContainer(v.t.Context(), &cri.StopContainerRequest{ContainerId: v.container, Timeout: 1000})
				return err
			},
			underWay: func(v *victim) bool { return exists(filepath.Join(v.shared, "asked")) },
		},
		{
			name: "RemoveContainer", frozen: true,
			call: func(v *victim) error {
				_, err := v.RemoveContainer(v.t.Context(), &cri.RemoveContainerRequest{ContainerId: v.container})
				if err == nil {
					v.container = ""
				}
				return err
			},
			underWay: op("remove container"),
		},
		{
			name: "UpdateContainerResources", frozen: true, want: codes.FailedPrecondition,
			call: func(v *victim) error {
				_, err := v.UpdateContainerResources(v.t.Context(), &cri.UpdateContainerResourcesRequest{ContainerId: v.container, Linux: &cri.LinuxContainerResources{MemoryLimitInBytes: 64 << 20}})
				return err
			},
			underWay: op("resize containers"),
		},
		{
			name: "UpdatePodSandboxResources", frozen: true, want: codes.FailedPrecondition,
			call: func(v *victim) error {
				_, err := v.UpdatePodSandboxResources(v.t.Context(), &cri.UpdatePodSandboxResourcesRequest{PodSandboxId: v.sandbox, Resources: &cri.LinuxContainerResources{MemoryLimitInBytes: 512 << 20}})
				return err
			},
			underWay: op("grow"),
		},
		{
			name: "StopPodSandbox", call: func(v *victim) error { return v.stop(v.sandbox) },
			underWay: func(v *victim) bool { return v.op() == "stop" || v.record().PID == 0 }, // it kills, too, and is soon over
		},
		{
			name: "RemovePodSandbox", call: func(v *victim) error { return v.remove(v.sandbox) },
			underWay: func(v *victim) bool { return v.op() == "remove" || v.record().PID == 0 },
		},
	}
}

// TestVMKilledInCalls kills the hypervisor of a pod while each call about it is under way. The call ends, the sandbox is not ready, its
// containers have ended, nothing of it stays when it is removed, and the next attempt of the pod runs, until it is killed in the next call.
func TestVMKilledInCalls(t *testing.T) {
	if _, err := os.Stat("/usr/lib/cni/bridge"); err != nil {
		need.Tool(t, "the CNI plugin bridge")
	}
	all := newCRI(t, func(dir string) string {
		conf := filepath.Join(dir, "cni")
		if err := os.Mkdir(conf, 0o755); err != nil {
			t.Fatal(err)
		}
		text := fmt.Sprintf(`{"cniVersion": "1.0.0", "name": "pods", "plugins": [{"type": "bridge", "bridge": "kills0", "isGateway": true,
			"ipam": {"type": "host-local", "dataDir": "%s/ipam", "ranges": [[{"subnet": "10.124.0.0/24"}]], "routes": [{"dst": "0.0.0.0/0"}]}}]}`, dir)
		if err := os.WriteFile(filepath.Join(conf, "10-pods.conflist"), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		return fmt.Sprintf("network: {mode: cni, cni: {confDir: %s}}", conf)
	})
	v := &victim{criClient: all, pod: all.pod("victim"), shared: filepath.Join(all.dir, "shared")}
	v.pod.Linux.CgroupParent = fmt.Sprintf("/cocoon-kills-%d/pod", os.Getpid())
	if err := os.Mkdir(v.shared, 0o755); err != nil {
		t.Fatal(err)
	}
	v.sandbox = v.run(v.pod)
	for _, k := range killings() {
		t.Run(k.name, func(t *testing.T) {
			v.criClient = all.in(t)
			v.killed(k)
		})
	}
	t.Run("before the hypervisor is on record", func(t *testing.T) {
		v.criClient = all.in(t)
		v.killedUnborn()
	})
	if left, err := filepath.Glob(fmt.Sprintf("/sys/fs/cgroup/*/cocoon-kills-%d", os.Getpid())); err != nil || len(left) > 0 {
		t.Errorf("left: %v, %v", left, err)
	}
}

// killed kills the hypervisor of the last attempt, and begins the next one.
func (v *victim) killed(k killing) {
	t, ctx := v.t, v.t.Context()
	if k.prepared != nil {
		k.prepared(v)
	} else {
		v.container = v.runs("app")
	}
	first, err := v.Inspect(ctx, v.id())
	if err != nil {
		t.Fatal(err)
	}
	if v.process, err = unix.PidfdOpen(first.PID, 0); err != nil {
		t.Fatal(err)
	}
	defer unix.Close(v.process)
	if k.frozen {
		v.signal(unix.SIGSTOP)
	}
	done := make(chan error, 1)
	go func() { done <- k.call(v) }()
	v.until("the call is under way", func() bool { return k.underWay(v) })
	v.signal(unix.SIGKILL)
	if err := <-done; status.Code(err) != k.want {
		t.Errorf("the call: %v, want %s", err, k.want)
	}

	if k.name != "RemovePodSandbox" {
		v.ended()
	}
	old := v.sandbox
	for range 2 {
		if err := v.stop(old); err != nil {
			t.Error(err)
		}
	}
	v.pod.Metadata.Attempt++
	if v.sandbox, v.container = v.run(v.pod), ""; v.sandbox == old {
		t.Fatalf("the next attempt has the sandbox of the last one, %s", old)
	}
	for range 2 {
		if err := v.remove(old); err != nil {
			t.Error(err)
		}
	}
	if left := v.left(first.ID); len(left) > 0 {
		t.Errorf("left of the last attempt: %v", left)
	}
	if all, err := v.List(ctx); err != nil || len(all) != 1 || string(all[0].ID) != v.id() {
		t.Errorf("beside the next attempt: %v, %v", all, err)
	}
}

// killedUnborn kills a hypervisor as soon as it is a process. Until it is on record, its start fails, and the first container starts the guest
// again; after that, the sandbox is not ready.
func (v *victim) killedUnborn() {
	if err := v.remove(v.sandbox); err != nil {
		v.t.Fatal(err)
	}
	v.pod.Metadata.Attempt++
	v.sandbox = v.run(v.pod)
	v.until("there is a hypervisor", func() bool {
		for _, pid := range v.processes() {
			var err error
			if v.process, err = unix.PidfdOpen(pid, 0); err == nil {
				return true
			}
		}
		return false
	})
	defer unix.Close(v.process)
	v.signal(unix.SIGKILL)
	v.until("the start has ended", func() bool { return v.op() == "" })
	var ready bool
	v.until("the sandbox is as it stays", func() bool {
		r := v.record()
		ready = r.State == vm.StateCreated
		return r.State != vm.StateRunning
	})
	v.t.Logf("killed before it was on record: %v", ready)
	if ready {
		v.container = v.runs("app")
		if all := v.processes(); len(all) != 1 {
			v.t.Errorf("the hypervisors are %v", all)
		}
	} else {
		v.ended()
	}
	for _, call := range []func(string) error{v.stop, v.remove} {
		if err := call(v.sandbox); err != nil {
			v.t.Error(err)
		}
	}
	if left := v.left(vm.ID(v.id())); len(left) > 0 {
		v.t.Errorf("left: %v", left)
	}
}

// processes are the hypervisors of the sandbox.
func (v *victim) processes() (pids []int) {
	groups, _ := filepath.Glob("/proc/[0-9]*/cgroup")
	for _, file := range groups {
		group, _ := os.ReadFile(file)
		program, _ := os.Readlink(filepath.Join(filepath.Dir(file), "exe"))
		if !strings.HasPrefix(filepath.Base(program), "qemu-system-") || !strings.Contains(string(group), "/cocoon-"+v.id()) {
			continue
		}
		if pid, err := strconv.Atoi(filepath.Base(filepath.Dir(file))); err == nil {
			pids = append(pids, pid)
		}
	}
	return pids
}

// ended waits until the sandbox is not ready. Then its containers have ended, and calls about them succeed or say why not.
func (v *victim) ended() {
	t, ctx := v.t, v.t.Context()
	v.until("the sandbox is not ready", func() bool {
		r, err := v.PodSandboxStatus(ctx, &cri.PodSandboxStatusRequest{PodSandboxId: v.sandbox})
		return err == nil && r.GetStatus().GetState() == cri.PodSandboxState_SANDBOX_NOTREADY
	})
	all, err := v.ListContainers(ctx, &cri.ListContainersRequest{Filter: &cri.ContainerFilter{PodSandboxId: v.sandbox}})
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range all.GetContainers() {
		r, err := v.ContainerStatus(ctx, &cri.ContainerStatusRequest{ContainerId: c.GetId()})
		st := r.GetStatus()
		if err != nil || st.GetState() != cri.ContainerState_CONTAINER_EXITED || st.GetReason() == "" || st.GetExitCode() == 0 || st.GetFinishedAt() < st.GetCreatedAt() {
			t.Errorf("container %s: %v, %v", c.GetMetadata().GetName(), st, err)
		}
		if _, err := v.sync(c.GetId(), 0, "true"); status.Code(err) != codes.FailedPrecondition {
			t.Errorf("a command in a container that has ended: %v", err)
		}
		if _, err := v.StopContainer(ctx, &cri.StopContainerRequest{ContainerId: c.GetId()}); err != nil {
			t.Error(err)
		}
	}
	if len(all.GetContainers()) == 1 != (v.container != "") {
		t.Errorf("it has the containers %v", all.GetContainers())
	}
}

// op is the operation on the sandbox that the journal has as under way.
func (v *victim) op() string {
	v.t.Helper()
	db, err := sql.Open("sqlite", "file:"+filepath.Join(v.dir, "state/journal.db")+"?mode=ro&_pragma=busy_timeout(10000)")
	if err != nil {
		v.t.Fatal(err)
	}
	defer db.Close()
	var op sql.NullString
	if err := db.QueryRowContext(v.t.Context(), "SELECT op FROM vms WHERE id = ?", v.id()).Scan(&op); err != nil && err != sql.ErrNoRows {
		v.t.Fatal(err)
	}
	return op.String
}

func (v *victim) id() string { return strings.TrimPrefix(v.sandbox, "vm-") }

// record is that of the sandbox, empty when it is gone.
func (v *victim) record() vm.Record {
	r, _ := v.Inspect(v.t.Context(), v.id())
	return r
}

func (v *victim) signal(s syscall.Signal) {
	v.t.Helper()
	if err := unix.PidfdSendSignal(v.process, s, nil, 0); err != nil && err != unix.ESRCH {
		v.t.Fatal(err)
	}
}

// config is that of a container that ignores that it is asked to end.
func (v *victim) config(name string) *cri.ContainerConfig {
	return &cri.ContainerConfig{
		Metadata: &cri.ContainerMetadata{Name: name}, Image: &cri.ImageSpec{Image: demo}, LogPath: fmt.Sprintf("%s/%d.log", name, v.pod.GetMetadata().GetAttempt()),
		Command: []string{"sh", "-c", "trap 'touch /shared/asked' TERM; touch /shared/runs; while :; do sleep 0.1; done"},
		Mounts:  []*cri.Mount{{HostPath: v.shared, ContainerPath: "/shared"}}, Linux: &cri.LinuxContainerConfig{},
	}
}

func (v *victim) add(name string) string {
	v.t.Helper()
	r, err := v.CreateContainer(v.t.Context(), &cri.CreateContainerRequest{PodSandboxId: v.sandbox, Config: v.config(name), SandboxConfig: v.pod})
	if err != nil {
		v.t.Fatal(err)
	}
	return r.GetContainerId()
}

// runs starts a container, which has set its trap when this returns.
func (v *victim) runs(name string) string {
	v.t.Helper()
	mark := filepath.Join(v.shared, "runs")
	if err := os.RemoveAll(mark); err != nil {
		v.t.Fatal(err)
	}
	id := v.add(name)
	v.begin(id)
	v.until("the container runs", func() bool { return exists(mark) })
	return id
}

func (v *victim) stop(sandbox string) error {
	_, err := v.StopPodSandbox(v.t.Context(), &cri.StopPodSandboxRequest{PodSandboxId: sandbox})
	return err
}

func (v *victim) remove(sandbox string) error {
	_, err := v.RemovePodSandbox(v.t.Context(), &cri.RemovePodSandboxRequest{PodSandboxId: sandbox})
	return err
}

// left are the traces of a VM on the node: processes, files, mounts, network namespaces and cgroups.
func (v *victim) left(id vm.ID) (found []string) {
	v.t.Helper()
	for _, pattern := range []string{"state/vms/" + string(id), "run/vms/" + string(id), "run/shared/" + string(id), "ipam/pods/10.*"} {
		hits, _ := filepath.Glob(filepath.Join(v.dir, pattern))
		found = append(found, hits...)
	}
	for _, pattern := range []string{"/run/netns/*" + string(id) + "*", "/sys/fs/cgroup/*" + v.pod.Linux.CgroupParent + "/cocoon-" + string(id)} {
		hits, _ := filepath.Glob(pattern)
		found = append(found, hits...)
	}
	processes, _ := filepath.Glob("/proc/[0-9]*/c[mg][dr]*") // cmdline and cgroup
	for _, file := range append(processes, "/proc/self/mountinfo") {
		if text, _ := os.ReadFile(file); strings.Contains(string(text), string(id)) {
			found = append(found, file)
		}
	}
	return slices.DeleteFunc(found, func(s string) bool { // the address of the next attempt
		text, _ := os.ReadFile(s)
		return strings.Contains(s, "/ipam/") && !strings.Contains(string(text), string(id))
	})
}

func exists(path string) bool {
	_, err := os.Stat(path)
	return err == nil
}
