//go:build cri

package cri

import (
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"cocoonstack.io/cocoon/internal/testkit/kubetest"
	"cocoonstack.io/cocoon/internal/testkit/need"
)

// TestUpKubelet: `cocoon up --kubelet` makes a node with a kubelet beside the virtual node. A VM, a container and a pod of the virtual node
// reach each other. When the supervisor is killed, the next start has the same pods; when the cluster is stopped, nothing is left.
func TestUpKubelet(t *testing.T) {
	need.Root(t)
	need.Built(t, "bin/containerd/containerd", "make containerd")
	before := outside(t)
	c := kubetest.Up(t, "--nodes", "1", "--with", "", "--kubelet")
	text := func(args string) string { return strings.TrimSpace(c.Kubectl(t, "", strings.Fields(args)...)) }
	if got := text("get nodes -o jsonpath={range.items[*]}{.metadata.name}={.status.conditions[?(@.type==\"Ready\")].status},{end}"); got != "cocoon-kubelet-0=True,cocoon-node-0=True," {
		t.Errorf("the nodes are %q", got)
	}
	for _, file := range []string{"../../examples/kubelet.yaml", "../../examples/pod.yaml"} {
		c.Kubectl(t, "", "apply", "-f", file)
	}
	pods := map[string]string{"vm": "cocoon-kubelet-0", "container": "cocoon-kubelet-0", "hello": "cocoon-node-0"}
	for pod, node := range pods {
		c.Kubectl(t, "", "wait", "--for=condition=Ready", "pod/"+pod, "--timeout=180s")
		if got := text("get pod " + pod + " -o jsonpath={.spec.nodeName}"); got != node {
			t.Errorf("the pod %s is on %s, want %s", pod, got, node)
		}
	}
	host := kernel(t)
	for pod, want := range map[string]bool{"vm": false, "container": true} {
		if got := text("exec " + pod + " -- uname -r"); (got == host) != want {
			t.Errorf("the pod %s has the kernel %s, and the machine has %s", pod, got, host)
		}
	}
	c.Kubectl(t, "", "wait", "--for=condition=Ready", "pod/disk", "--timeout=180s")
	if got := text("logs disk"); !strings.Contains(got, "hello from a script") || !strings.Contains(got, "disk is up, "+text("get pod disk -o jsonpath={.status.podIP}")) {
		t.Errorf("the console of the disk image:\n%s", got)
	}
	if got := text("get pod vm -o jsonpath={.spec.overhead.memory}"); got != "256Mi" {
		t.Errorf("the overhead of the VM is %q", got)
	}
	reach := func(from, addr string) string {
		out, err := c.TryKubectl(t, "", "exec", from, "--", "sh", "-c", `printf 'GET / HTTP/1.0\r\n\r\n' | nc -w 10 `+addr)
		first, _, _ := strings.Cut(out, "\r\n")
		if err != nil {
			return out + err.Error()
		}
		return first
	}
	const ok = "HTTP/1.0 200 OK"
	if got := reach("container", text("get pod disk -o jsonpath={.status.podIP}")+" 80"); !strings.Contains(got, "200 OK") {
		t.Errorf("the container does not reach the disk image: %s", got)
	}
	for from := range pods {
		for to := range pods {
			if got := reach(from, text("get pod "+to+" -o jsonpath={.status.podIP}")+" 8080"); from != to && got != ok {
				t.Errorf("%s does not reach %s: %s", from, to, got)
			}
		}
		kubetest.Eventually(t, "the answer of the Service to "+from, func() string { return reach(from, text("get service vm -o jsonpath={.spec.clusterIP}")+" 80") }, ok)
	}
	examples(t, c)
	for _, log := range []string{"kubelet", "containerd", "cocoond-cocoon-kubelet-0"} {
		if fi, err := os.Stat(filepath.Join(c.Dir, "log", log+".log")); err != nil || fi.Size() == 0 {
			t.Errorf("the log of %s: %v", log, err)
		}
	}

	// The kernel ends what is on the node when its supervisor is killed, as when a machine loses its power.
	if err := syscall.Kill(processOf(t, "up", "--supervise", c.Dir), syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	c.Start(t)
	for _, pod := range []string{"vm", "container"} {
		kubetest.Eventually(t, "an answer of the pod "+pod, func() string {
			out, _ := c.TryKubectl(t, "", "exec", pod, "--", "echo", "back")
			return strings.TrimSpace(out)
		}, "back")
	}

	space := readlink(t, fmt.Sprintf("/proc/%d/ns/pid", processOf(t, "kubelet-node", "--worker", c.Dir)))
	c.Stop(t)
	all, _ := filepath.Glob("/proc/[0-9]*/ns/pid")
	for _, of := range all {
		if got, err := os.Readlink(of); err == nil && got == space {
			t.Errorf("a process of the node is left: %s", of)
		}
	}
	for _, left := range outside(t) {
		if !slices.Contains(before, left) {
			t.Errorf("the node has left %s", left)
		}
	}
}

var (
	podSpecs = regexp.MustCompile(`(?m)^( *)terminationGracePeriodSeconds:.*$`)
	images   = regexp.MustCompile(`(?m)^( *)image:.*$`)
)

// examples runs the examples of the virtual node as VMs of the kubelet: they get its RuntimeClass, and their image is there.
func examples(t *testing.T, c *kubetest.Cluster) {
	t.Helper()
	for _, name := range []string{"deployment", "job", "volumes"} {
		text, err := os.ReadFile("../../examples/" + name + ".yaml")
		if err != nil {
			t.Fatal(err)
		}
		text = images.ReplaceAll(podSpecs.ReplaceAll(text, []byte("${0}\n${1}runtimeClassName: cocoon")), []byte("${0}\n${1}imagePullPolicy: IfNotPresent"))
		c.Kubectl(t, string(text), "apply", "-f", "-")
	}
	c.Kubectl(t, "", "rollout", "status", "deployment/web", "--timeout=180s")
	c.Kubectl(t, "", "wait", "--for=condition=Complete", "job/count", "--timeout=180s")
	c.Kubectl(t, "", "wait", "--for=condition=Ready", "pod/volumes", "--timeout=180s")
	if got := c.Kubectl(t, "", "logs", "job/count"); got != "1\n2\n3\n" {
		t.Errorf("the Job prints %q", got)
	}
	got := c.Kubectl(t, "", "exec", "volumes", "--", "sh", "-c", "cat /etc/greeting/text; echo; cat /run/token/token; echo; grep tier /etc/about/labels; touch /scratch/x /memory/y && echo written")
	if want := "hello from a ConfigMap\nnot-so-secret\ntier=\"example\"\nwritten\n"; got != want {
		t.Errorf("the volumes have %q, want %q", got, want)
	}
	for _, node := range strings.Fields(c.Kubectl(t, "", "get", "pods", "-l", "app=web", "-o", "jsonpath={.items[*].spec.nodeName}")) {
		if node != "cocoon-kubelet-0" {
			t.Errorf("a pod of the Deployment is on %s", node)
		}
	}
	c.Kubectl(t, "", "delete", "deployment/web", "job/count", "pod/volumes", "--timeout=120s")
}

// outside lists what a node of a kubelet has outside of its namespaces: cgroups, links, rules and mounts.
func outside(t *testing.T) []string {
	t.Helper()
	all, _ := filepath.Glob("/sys/fs/cgroup/*/cocoon-kubelet-*")
	two, _ := filepath.Glob("/sys/fs/cgroup/cocoon-kubelet-*")
	for _, args := range [][]string{{"ip", "-brief", "link"}, {"nft", "list", "tables"}, {"cat", "/proc/self/mountinfo"}} {
		out, err := exec.Command(args[0], args[1:]...).Output()
		if err != nil {
			t.Fatalf("%s: %v", args, err)
		}
		all = append(all, strings.Split(string(out), "\n")...)
	}
	return append(all, two...)
}

// processOf returns the process whose arguments after the name of its program begin with words but for the last one, and have that one, too.
func processOf(t *testing.T, words ...string) int {
	t.Helper()
	all, _ := filepath.Glob("/proc/[0-9]*/cmdline")
	for _, file := range all {
		line, _ := os.ReadFile(file) // it may have ended
		args := strings.Split(string(bytes.TrimRight(line, "\x00")), "\x00")
		if len(args) > len(words) && slices.Equal(args[1:len(words)], words[:len(words)-1]) && slices.Contains(args, words[len(words)-1]) {
			pid, err := strconv.Atoi(filepath.Base(filepath.Dir(file)))
			if err != nil {
				t.Fatal(err)
			}
			return pid
		}
	}
	t.Fatalf("no process %s", words)
	return 0
}

func kernel(t *testing.T) string {
	t.Helper()
	out, err := os.ReadFile("/proc/sys/kernel/osrelease")
	if err != nil {
		t.Fatal(err)
	}
	return strings.TrimSpace(string(out))
}

func readlink(t *testing.T, path string) string {
	t.Helper()
	to, err := os.Readlink(path)
	if err != nil {
		t.Fatal(err)
	}
	return to
}
