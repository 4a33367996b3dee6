//go:build cri

package cri

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"cocoonstack.io/cocoon/internal/testkit/containerdtest"
	"cocoonstack.io/cocoon/internal/testkit/kubelettest"
	"cocoonstack.io/cocoon/internal/testkit/kubetest"
)

// counting is a pod that counts its starts in a volume of the node.
const counting = `
apiVersion: v1
kind: Pod
metadata: {name: %[1]s}
spec:
  runtimeClassName: cocoon
  nodeName: ` + kubelettest.Name + `
  terminationGracePeriodSeconds: 1
  containers:
  - {name: main, image: "` + containerdtest.BusyBox + `", command: [sh, -c, "echo start >>/kept/starts; while :; do sleep 1; done"], volumeMounts: [{name: kept, mountPath: /kept}]}
  volumes: [{name: kept, emptyDir: {}}]
`

// TestKubeletEnds: a VM that is killed, a node that loses all its processes, a containerd that is away, and a cocoond that is killed while it
// makes a pod. Each time the pod runs again with its volume, once, and nothing else is left.
func TestKubeletEnds(t *testing.T) {
	d := containerdtest.Start(t)
	o := openDoor(t, d)
	c := kubetest.Up(t, "--with", "")
	n := kubelettest.Start(t, c, o.socket, d.Dir("kubelet"))
	c.Kubectl(t, classes, "apply", "-f", "-")
	c.Kubectl(t, fmt.Sprintf(counting, "kept"), "apply", "-f", "-")
	starts := func(want int) {
		t.Helper()
		kubetest.Eventually(t, "the starts of the container", func() string {
			out, _ := c.TryKubectl(t, "", "exec", "kept", "--", "wc", "-l", "/kept/starts")
			count, _, _ := strings.Cut(out, " ")
			return count
		}, strconv.Itoa(want))
		kubetest.Eventually(t, "the VMs of the node", func() string { return strconv.Itoa(len(machines())) }, "1")
	}
	starts(1)

	kill(machines()) // a VM that crashes
	starts(2)

	n.Kill() // a node that is switched off
	o.stop(syscall.SIGKILL)
	kill(machines())
	o.emptyRunDir()
	o.start()
	n.Start()
	starts(3)

	_, container, _ := strings.Cut(c.Kubectl(t, "", "get", "pod", "kept", "-o", "jsonpath={.status.containerStatuses[0].containerID}"), "://")
	d.Kill() // no containerd
	conn, err := grpc.NewClient("unix:"+o.socket, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	if out, err := cri.NewRuntimeServiceClient(conn).ExecSync(t.Context(), &cri.ExecSyncRequest{ContainerId: container, Cmd: []string{"hostname"}}); err != nil || string(out.GetStdout()) != "kept\n" {
		t.Errorf("without containerd, the VM says %q: %v", out.GetStdout(), err)
	}
	d.Start()

	for i := range 4 { // cocoond is killed in calls of the kubelet
		name := fmt.Sprintf("made-%d", i)
		c.Kubectl(t, fmt.Sprintf(counting, name), "apply", "-f", "-")
		kubetest.Eventually(t, "the kubelet's interest in "+name, func() string { return strconv.FormatBool(strings.Contains(n.Log(), name)) }, "true")
		moment := time.NewTimer(time.Duration(i) * 700 * time.Millisecond) // in another call each time
		<-moment.C
		o.stop(syscall.SIGKILL)
		o.start()
		c.Kubectl(t, "", "wait", "--for=condition=Ready", "pod/"+name, "--timeout=180s")
		kubetest.Eventually(t, "the only start of the container of "+name, func() string {
			out, _ := c.TryKubectl(t, "", "exec", name, "--", "cat", "/kept/starts")
			return strings.TrimSpace(out)
		}, "start")
		kubetest.Eventually(t, "the VMs of the node", func() string { return strconv.Itoa(len(machines())) }, "2")
		c.Kubectl(t, "", "delete", "pod", name, "--timeout=120s")
	}
	c.Kubectl(t, "", "delete", "pod", "--all", "--timeout=120s")
	kubetest.Eventually(t, "the VMs of the node", func() string { return strconv.Itoa(len(machines())) }, "0")
}

// machines returns the processes of the VMs of the test's pods.
func machines() []int { return hypervisors("kept.", "made-") }

// hypervisors returns the processes of VMs whose names begin so.
func hypervisors(names ...string) (pids []int) {
	all, _ := filepath.Glob("/proc/[0-9]*/cmdline")
	for _, file := range all {
		text, _ := os.ReadFile(file)
		if slices.ContainsFunc(names, func(name string) bool { return strings.Contains(string(text), "\x00-name\x00guest="+name) }) {
			pid, _ := strconv.Atoi(filepath.Base(filepath.Dir(file)))
			pids = append(pids, pid)
		}
	}
	return pids
}

// kill ends processes and waits until they have.
func kill(pids []int) {
	for _, pid := range pids {
		fd, err := unix.PidfdOpen(pid, 0)
		if err != nil {
			continue
		}
		_ = unix.PidfdSendSignal(fd, unix.SIGKILL, nil, 0)
		_, _ = unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, int(time.Minute/time.Millisecond)) //nolint:gosec // a file descriptor
		_ = unix.Close(fd)
	}
}
