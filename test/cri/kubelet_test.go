//go:build cri

package cri

import (
	"fmt"
	"os"
	"regexp"
	"strings"
	"syscall"
	"testing"

	"cocoonstack.io/cocoon/internal/testkit/containerdtest"
	"cocoonstack.io/cocoon/internal/testkit/kubelettest"
	"cocoonstack.io/cocoon/internal/testkit/kubetest"
)

// classes are the runtimes of the node's pods.
const classes = `
apiVersion: node.k8s.io/v1
kind: RuntimeClass
metadata: {name: runc}
handler: runc
---
apiVersion: node.k8s.io/v1
kind: RuntimeClass
metadata: {name: cocoon}
handler: cocoon
overhead: {podFixed: {memory: 256Mi}}
`

// pod is a pod of a runtime with what a kubelet does for it: an init container, a live ConfigMap, a Secret, a folder for two containers, probes,
// limits, a hook, and a message at its end.
const pod = `
apiVersion: v1
kind: ConfigMap
metadata: {name: settings-%[1]s}
data: {key: first}
---
apiVersion: v1
kind: Secret
metadata: {name: secret-%[1]s}
stringData: {token: abc}
---
apiVersion: v1
kind: Pod
metadata: {name: %[1]s}
spec:
  runtimeClassName: %[1]s
  nodeName: ` + kubelettest.Name + `
  terminationGracePeriodSeconds: 1
  initContainers:
  - {name: init, image: "` + containerdtest.BusyBox + `", command: [sh, -c, "cat /settings/key; cp /secret/token /shared/copy"], volumeMounts: [{name: settings, mountPath: /settings}, {name: secret, mountPath: /secret}, {name: shared, mountPath: /shared}]}
  containers:
  - name: web
    image: registry.k8s.io/e2e-test-images/nginx:1.14-2
    readinessProbe: {httpGet: {port: 80}, periodSeconds: 1}
    livenessProbe: {exec: {command: [cat, /settings/key]}, periodSeconds: 2, timeoutSeconds: 5}
    resources: {requests: {cpu: 100m, memory: 32Mi}, limits: {memory: 64Mi}}
    volumeMounts: [{name: settings, mountPath: /settings}, {name: shared, mountPath: /shared}]
  volumes: [{name: settings, configMap: {name: settings-%[1]s}}, {name: secret, secret: {secretName: secret-%[1]s}}, {name: shared, emptyDir: {}}]
---
apiVersion: batch/v1
kind: Job
metadata: {name: job-%[1]s}
spec:
  backoffLimit: 3
  template:
    spec:
      runtimeClassName: %[1]s
      nodeName: ` + kubelettest.Name + `
      restartPolicy: OnFailure
      volumes: [{name: kept, emptyDir: {}}]
      containers:
      - {name: job, image: "` + containerdtest.BusyBox + `", command: [sh, -c, "echo why >/dev/termination-log; test -e /kept/tried || { touch /kept/tried; exit 5; }"], volumeMounts: [{name: kept, mountPath: /kept}]}
`

// TestKubelet: a kubelet runs pods of containerd and pods that are VMs, by one socket, and does the same for both.
func TestKubelet(t *testing.T) {
	d := containerdtest.Start(t)
	o := openDoor(t, d)
	c := kubetest.Up(t, "--with", "")
	n := kubelettest.Start(t, c, o.socket, d.Dir("kubelet"))
	kinds := []string{"runc", "cocoon"}
	c.Kubectl(t, classes, "apply", "-f", "-")
	for _, kind := range kinds {
		c.Kubectl(t, fmt.Sprintf(pod, kind), "apply", "-f", "-")
	}
	text := func(args string) string { return strings.TrimSpace(c.Kubectl(t, "", strings.Fields(args)...)) }
	for _, kind := range kinds {
		c.Kubectl(t, "", "wait", "--for=condition=Ready", "pod/"+kind, "--timeout=180s")
		c.Kubectl(t, "", "wait", "--for=condition=Complete", "job/job-"+kind, "--timeout=180s")
		for _, tt := range []struct{ name, want, args string }{
			{"the log of the init container", "first", "logs " + kind + " -c init"},
			{"a command in the container", kind, "exec " + kind + " -c web -- hostname"},
			{"what the init container left", "abc", "exec " + kind + " -c web -- cat /shared/copy"},
			{"the limit of memory", "64Mi", "get pod " + kind + " -o jsonpath={.status.containerStatuses[0].resources.limits.memory}"},
			{"the exit code of the first run", "5", "get pod -l job-name=job-" + kind + " -o jsonpath={.items[0].status.containerStatuses[0].lastState.terminated.exitCode}"},
			{"the message of the first run", "why", "get pod -l job-name=job-" + kind + " -o jsonpath={.items[0].status.containerStatuses[0].lastState.terminated.message}"},
		} {
			if got := text(tt.args); got != tt.want {
				t.Errorf("%s: %s is %q, want %q", kind, tt.name, got, tt.want)
			}
		}
	}
	if theirs, ours := text("exec runc -c web -- uname -r"), text("exec cocoon -c web -- uname -r"); theirs == ours {
		t.Errorf("the VM has the kernel of the node, %s", ours)
	}
	uid := text("get pod cocoon -o jsonpath={.metadata.uid}")
	pids := hypervisors("cocoon.")
	if len(pids) != 1 {
		t.Errorf("%d processes of the VM", len(pids))
	}
	for _, pid := range pids {
		if in, err := os.ReadFile(fmt.Sprintf("/proc/%d/cgroup", pid)); err != nil || !regexp.MustCompile("(?m):/"+kubelettest.Cgroup+"/kubepods/.*pod"+uid+"/cocoon-[a-z0-9]+$").Match(in) {
			t.Errorf("the VM is not in the cgroup of its pod, but in %s, %v", in, err)
		}
	}
	for from, to := range map[string]string{"runc": "cocoon", "cocoon": "runc"} {
		ip := text("get pod " + to + " -o jsonpath={.status.podIP}")
		c.Kubectl(t, "", "exec", from, "-c", "web", "--", "wget", "-q", "-O", "-", "http://"+ip+"/")
	}

	// Pods outlive their kubelet, and cocoond.
	container := "get pod %s -o jsonpath={.status.containerStatuses[0].containerID}"
	before := map[string]string{}
	for _, kind := range kinds {
		before[kind] = text(fmt.Sprintf(container, kind))
	}
	n.Kill()
	o.stop(syscall.SIGKILL)
	for _, kind := range kinds {
		c.Kubectl(t, "", "patch", "configmap", "settings-"+kind, "--patch", `{"data": {"key": "second"}}`)
	}
	o.start()
	n.Start()
	for _, kind := range kinds {
		kubetest.Eventually(t, "the file of the ConfigMap in "+kind, func() string {
			out, _ := c.TryKubectl(t, "", "exec", kind, "-c", "web", "--", "cat", "/settings/key")
			return out
		}, "second")
		if after := text(fmt.Sprintf(container, kind)); after != before[kind] {
			t.Errorf("%s: the container is %s after the kubelet was killed, before it was %s", kind, after, before[kind])
		}
	}
	c.Kubectl(t, "", "delete", "pod,job", "--all", "--timeout=120s")
}
