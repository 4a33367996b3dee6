//go:build cri

package cri

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"cocoonstack.io/cocoon/internal/testkit/containerdtest"
	"cocoonstack.io/cocoon/internal/testkit/kubelettest"
	"cocoonstack.io/cocoon/internal/testkit/kubetest"
)

// lives are pods whose containers have an order, fail, and are changed while they run.
const lives = `
apiVersion: v1
kind: Pod
metadata: {name: order-%[1]s}
spec:
  runtimeClassName: %[1]s
  nodeName: ` + kubelettest.Name + `
  terminationGracePeriodSeconds: 5
  volumes: [{name: shared, emptyDir: {}}]
  initContainers:
  - {name: one, image: "` + containerdtest.BusyBox + `", command: [sh, -c, "echo one >>/shared/order"], volumeMounts: [{name: shared, mountPath: /shared}]}
  - name: side
    image: "` + containerdtest.BusyBox + `"
    restartPolicy: Always
    command: [sh, -c, "trap 'echo side-ends >>/shared/order; exit 0' TERM; echo side >>/shared/order; sleep 2; touch /shared/ready; while :; do sleep 1; done"]
    startupProbe: {exec: {command: [test, -e, /shared/ready]}, periodSeconds: 1, timeoutSeconds: 20, failureThreshold: 60}
    volumeMounts: [{name: shared, mountPath: /shared}]
  - {name: two, image: "` + containerdtest.BusyBox + `", command: [sh, -c, "test -e /shared/ready; echo two >>/shared/order"], volumeMounts: [{name: shared, mountPath: /shared}]}
  containers:
  - name: main
    image: "` + containerdtest.BusyBox + `"
    command: [sh, -c, "echo main >>/shared/order; trap 'exit 0' TERM; while :; do sleep 1; done"]
    lifecycle: {postStart: {exec: {command: [sh, -c, "echo hook >>/shared/hook"]}}, preStop: {exec: {command: [sh, -c, "echo stops >>/shared/order"]}}}
    resources: {requests: {cpu: 100m, memory: 32Mi}, limits: {cpu: 200m, memory: 64Mi}}
    resizePolicy: [{resourceName: cpu, restartPolicy: NotRequired}, {resourceName: memory, restartPolicy: NotRequired}]
    volumeMounts: [{name: shared, mountPath: /shared}]
---
apiVersion: v1
kind: Pod
metadata: {name: sick-%[1]s}
spec:
  runtimeClassName: %[1]s
  nodeName: ` + kubelettest.Name + `
  terminationGracePeriodSeconds: 30
  containers:
  - name: sick
    image: "` + containerdtest.BusyBox + `"
    command: [sh, -c, "trap 'exit 7' TERM; while :; do sleep 1; done"]
    livenessProbe: {exec: {command: [sh, -c, "exit 3"]}, periodSeconds: 1, failureThreshold: 2, timeoutSeconds: 20}
  - name: greedy
    image: "` + containerdtest.BusyBox + `"
    command: [sh, -c, "tail /dev/zero"]
    resources: {limits: {memory: 24Mi}}
---
apiVersion: v1
kind: Pod
metadata: {name: grows-%[1]s}
spec:
  runtimeClassName: %[1]s
  nodeName: ` + kubelettest.Name + `
  terminationGracePeriodSeconds: 1
  containers:
  - name: main
    image: "` + containerdtest.BusyBox + `"
    command: [sleep, "100000"]
    resources: {requests: {cpu: 50m, memory: 32Mi}, limits: {cpu: 500m, memory: 64Mi}}
---
apiVersion: v1
kind: Pod
metadata: {name: shares-%[1]s}
spec:
  runtimeClassName: %[1]s
  nodeName: ` + kubelettest.Name + `
  terminationGracePeriodSeconds: 1
  shareProcessNamespace: true
  containers:
  - {name: one, image: "` + containerdtest.BusyBox + `", command: [sleep, "100001"]}
  - {name: two, image: "` + containerdtest.BusyBox + `", command: [sleep, "100002"]}
`

// summary returns the containers of a pod of which the kubelet's summary has CPU, memory and the writable layer.
func summary(t *testing.T, c *kubetest.Cluster, pod string) string {
	t.Helper()
	text, err := c.TryKubectl(t, "", "get", "--raw", "/api/v1/nodes/"+kubelettest.Name+"/proxy/stats/summary")
	if err != nil {
		return text
	}
	type number = struct{ UsedBytes, WorkingSetBytes, UsageCoreNanoSeconds uint64 }
	var all struct {
		Pods []struct {
			PodRef     struct{ Name string }
			Containers []struct {
				Name                string
				CPU, Memory, Rootfs number
			}
		}
	}
	if err := json.Unmarshal([]byte(text), &all); err != nil {
		return err.Error()
	}
	var told []string
	for _, p := range all.Pods {
		for _, one := range p.Containers {
			if p.PodRef.Name == pod && one.Rootfs.UsedBytes > 0 && one.Memory.WorkingSetBytes > 0 && one.CPU.UsageCoreNanoSeconds > 0 {
				told = append(told, one.Name)
			}
		}
	}
	slices.Sort(told)
	return strings.Join(told, " ")
}

// mainProgram prints where the program of the container main is among the processes.
const mainProgram = "grep -l 'ech[o] main' /proc/[0-9]*/cmdline 2>/dev/null || true"

// static is a pod that only the kubelet knows.
const static = `
apiVersion: v1
kind: Pod
metadata: {name: static}
spec:
  runtimeClassName: cocoon
  terminationGracePeriodSeconds: 1
  containers:
  - {name: web, image: registry.k8s.io/e2e-test-images/nginx:1.14-2, readinessProbe: {httpGet: {port: 80}, periodSeconds: 1}}
`

// TestKubeletLives: what a kubelet does with containers in their lives, it does with those of a VM: the order of init containers and
// sidecars, hooks, probes that fail, a limit that is too low, a container for debugging, a resize in place, and static pods.
func TestKubeletLives(t *testing.T) {
	d := containerdtest.Start(t)
	o := openDoor(t, d)
	c := kubetest.Up(t, "--with", "")
	n := kubelettest.Start(t, c, o.socket, d.Dir("kubelet"))
	c.Kubectl(t, classes, "apply", "-f", "-")
	kinds := []string{"runc", "cocoon"}
	for _, kind := range kinds {
		c.Kubectl(t, fmt.Sprintf(lives, kind), "apply", "-f", "-")
	}
	if err := os.WriteFile(filepath.Join(n.Manifests(), "static.yaml"), []byte(static), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, kind := range kinds {
		c.Kubectl(t, "", "wait", "--for=condition=Ready", "pod/order-"+kind, "--timeout=180s")
		get := func(args ...string) func() string {
			return func() string {
				out, err := c.TryKubectl(t, "", args...)
				if err != nil {
					return err.Error()
				}
				return strings.TrimSpace(out)
			}
		}
		kubetest.Eventually(t, "the order of the containers of "+kind, get("exec", "order-"+kind, "-c", "main", "--", "cat", "/shared/order", "/shared/hook"), "one\nside\ntwo\nmain\nhook")
		sick := "jsonpath={.status.containerStatuses[?(@.name=='sick')].lastState.terminated.exitCode}"
		kubetest.Eventually(t, "the exit code of a container of "+kind+" whose probe fails", get("get", "pod", "sick-"+kind, "-o", sick), "7")
		greedy := "jsonpath={.status.containerStatuses[?(@.name=='greedy')].lastState.terminated.reason}"
		kubetest.Eventually(t, "the end of a container of "+kind+" whose limit is too low", get("get", "pod", "sick-"+kind, "-o", greedy), "OOMKilled")

		c.Kubectl(t, "", "debug", "order-"+kind, "--image="+containerdtest.BusyBox, "--target=main", "-c", "debugger", "--", "sh", "-c", "hostname; "+mainProgram)
		ended := "jsonpath={.status.ephemeralContainerStatuses[0].state.terminated.exitCode}"
		kubetest.Eventually(t, "the end of the debugger of "+kind, get("get", "pod", "order-"+kind, "-o", ended), "0")
		if got := get("logs", "order-"+kind, "-c", "debugger")(); got != "order-"+kind+"\n/proc/1/cmdline" {
			t.Errorf("%s: the debugger says %q", kind, got)
		}
		if got := get("exec", "order-"+kind, "-c", "side", "--", "sh", "-c", mainProgram)(); got != "" {
			t.Errorf("%s: the sidecar sees the program of another container: %q", kind, got)
		}
		c.Kubectl(t, "", "wait", "--for=condition=Ready", "pod/shares-"+kind, "--timeout=180s")
		if got := get("exec", "shares-"+kind, "-c", "one", "--", "sh", "-c", "grep -l '10000[12]' /proc/[0-9]*/cmdline 2>/dev/null | wc -l")(); got != "2" {
			t.Errorf("%s: a container of a pod that shares its processes sees %q of two", kind, got)
		}
	}

	kubetest.Eventually(t, "what containers have written and need, as the kubelet says", func() string { return summary(t, c, "order-cocoon") }, "main side")

	// The node of the tests may be unable to do this for runc.
	c.Kubectl(t, "", "patch", "pod", "order-cocoon", "--subresource", "resize", "--patch", `{"spec": {"containers": [{"name": "main", "resources": {"limits": {"cpu": "400m", "memory": "96Mi"}}}]}}`)
	kubetest.Eventually(t, "the resources of the resized container", func() string {
		out, _ := c.TryKubectl(t, "", "get", "pod", "order-cocoon", "-o", "jsonpath={.status.containerStatuses[0].resources.limits.cpu} {.status.containerStatuses[0].resources.limits.memory} {.status.containerStatuses[0].restartCount}")
		return out
	}, "400m 96Mi 0")
	c.Kubectl(t, "", "wait", "--for=condition=Ready", "pod/grows-cocoon", "--timeout=180s")
	checkpoints(t, c)
	inside := func() string {
		out, _ := c.TryKubectl(t, "", "exec", "grows-cocoon", "--", "sh", "-c", "grep -c ^processor /proc/cpuinfo; awk '/MemTotal/ {print ($2 > 250000)}' /proc/meminfo")
		return strings.Join(strings.Fields(out), " ")
	}
	kubetest.Eventually(t, "the size of the VM before it grows", inside, "1 0")
	c.Kubectl(t, "", "patch", "pod", "grows-cocoon", "--subresource", "resize", "--patch", `{"spec": {"containers": [{"name": "main", "resources": {"limits": {"cpu": "2", "memory": "300Mi"}}}]}}`)
	kubetest.Eventually(t, "the size of the VM", inside, "2 1")
	kubetest.Eventually(t, "the resources in the status of the pod that grows", func() string {
		out, _ := c.TryKubectl(t, "", "get", "pod", "grows-cocoon", "-o", "jsonpath={.status.containerStatuses[0].resources.limits.cpu} {.status.containerStatuses[0].resources.limits.memory} {.status.containerStatuses[0].restartCount}")
		return out
	}, "2 300Mi 0")

	c.Kubectl(t, "", "wait", "--for=condition=Ready", "pod/static-"+kubelettest.Name, "--timeout=120s")
	if err := os.Remove(filepath.Join(n.Manifests(), "static.yaml")); err != nil {
		t.Fatal(err)
	}
	c.Kubectl(t, "", "wait", "--for=delete", "pod/static-"+kubelettest.Name, "--timeout=120s")
	c.Kubectl(t, "", "delete", "pod", "--all", "--timeout=120s")
}

// checkpoints asks the kubelet for a checkpoint of a VM pod, which runs on.
func checkpoints(t *testing.T, c *kubetest.Cluster) {
	t.Helper()
	out := c.Kubectl(t, "", "create", "--raw", "/api/v1/nodes/"+kubelettest.Name+"/proxy/checkpoint/default/grows-cocoon/main", "-f", "/dev/null")
	var made struct {
		Items []string `json:"items"`
	}
	if err := json.Unmarshal([]byte(out), &made); err != nil || len(made.Items) != 1 {
		t.Fatalf("the kubelet answers %q, %v", out, err)
	}
	if fi, err := os.Stat(made.Items[0]); err != nil || fi.Mode().Perm() != 0o600 || fi.Size() < 1<<20 {
		t.Errorf("the checkpoint is %v, %v", fi, err)
	}
	if got := c.Kubectl(t, "", "get", "pod", "grows-cocoon", "-o", "jsonpath={.status.containerStatuses[0].ready} {.status.containerStatuses[0].restartCount}"); got != "true 0" {
		t.Errorf("after its checkpoint the container is %q", got)
	}
}
