//go:build cri

package cri

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"cocoonstack.io/cocoon/internal/testkit/containerdtest"
	"cocoonstack.io/cocoon/internal/testkit/kubelettest"
	"cocoonstack.io/cocoon/internal/testkit/kubetest"
	"cocoonstack.io/cocoon/internal/testkit/need"
	"cocoonstack.io/cocoon/internal/testkit/ociimage"
)

// boots are pods of disk images: a small system that is up in seconds, and a cloud image with cloud-init and an agent.
const boots = `
apiVersion: v1
kind: ConfigMap
metadata: {name: given}
data: {key: first}
---
apiVersion: v1
kind: Pod
metadata:
  name: small
  annotations: {VirtletCloudInitUserDataScript: "#!/bin/sh\necho the script ran\n"}
spec:
  runtimeClassName: cocoon
  nodeName: ` + kubelettest.Name + `
  terminationGracePeriodSeconds: 30
  initContainers:
  - {name: init, image: "` + containerdtest.BusyBox + `", command: [sh, -c, "echo prepared"]}
  containers:
  - name: os
    image: registry.k8s.io/e2e-test-images/disk-demo:1
    readinessProbe: {httpGet: {port: 80}, periodSeconds: 1}
---
apiVersion: v1
kind: Pod
metadata:
  name: cloud
  annotations:
    VirtletRootVolumeSize: 3Gi
    VirtletCloudInitUserData: "write_files: [{path: /etc/own, content: of the annotation}]"
spec:
  runtimeClassName: cocoon
  nodeName: ` + kubelettest.Name + `
  terminationGracePeriodSeconds: 60
  volumes: [{name: given, configMap: {name: given}}, {name: empty, emptyDir: {}}]
  containers:
  - name: os
    image: registry.k8s.io/e2e-test-images/debian:12
    resources: {limits: {cpu: "1", memory: 512Mi}}
    readinessProbe: {exec: {command: [test, -e, /etc/own]}, periodSeconds: 2, timeoutSeconds: 20}
    volumeMounts: [{name: given, mountPath: /srv/given}, {name: empty, mountPath: /srv/empty}]
`

// containerDisk is an image with the disk of a file of this checkout.
func containerDisk(t *testing.T, path, command string) ociimage.Image {
	t.Helper()
	data, err := os.ReadFile(need.Built(t, path, command))
	if err != nil {
		t.Fatal(err)
	}
	return ociimage.Image{Layers: []ociimage.Layer{ociimage.Of(ociimage.Entry{Name: "disk/" + filepath.Base(path), Body: string(data), Mode: 0o644})}}
}

// TestKubeletBoots: a disk image is a pod of a kubelet: a VM that boots itself, with the pod's address, probes, logs, console, commands and volumes. When
// it powers off, the kubelet starts it again.
func TestKubeletBoots(t *testing.T) {
	d := containerdtest.Start(t)
	d.Registry.Push("registry.k8s.io/e2e-test-images/disk-demo:1", containerDisk(t, "bin/guest/disk.img", "make guest"))
	d.Registry.Push("registry.k8s.io/e2e-test-images/debian:12", containerDisk(t, "bin/cloudimg.qcow2", "make cloudimg"))
	o := openDoor(t, d)
	c := kubetest.Up(t, "--with", "")
	kubelettest.Start(t, c, o.socket, d.Dir("kubelet"))
	c.Kubectl(t, classes, "apply", "-f", "-")
	c.Kubectl(t, boots, "apply", "-f", "-")
	text := func(args string) string { return strings.TrimSpace(c.Kubectl(t, "", strings.Fields(args)...)) }
	get := func(args ...string) func() string {
		return func() string {
			out, err := c.TryKubectl(t, "", args...)
			if err != nil {
				return err.Error()
			}
			return strings.TrimSpace(out)
		}
	}

	c.Kubectl(t, "", "wait", "--for=condition=Ready", "pod/small", "--timeout=180s")
	if got := text("logs small -c init"); got != "prepared" {
		t.Errorf("the log of the init container is %q", got)
	}
	ip := text("get pod small -o jsonpath={.status.podIP}")
	for _, want := range []string{"the script ran", "disk-demo: small is up, " + ip} {
		if got := text("logs small"); !strings.Contains(got, want) {
			t.Errorf("the log has no %q:\n%s", want, got)
		}
	}
	if got := page(t, c, "small"); got != "disk-demo small" {
		t.Errorf("by port-forward it says %q", got)
	}
	typed(t, c, "small", "echo typed-$((1+1))", "typed-2")
	typed(t, c, "small", "echo typed-$((1+2)); poweroff -f", "typed-3")
	kubetest.Eventually(t, "the end of the first run", get("get", "pod", "small", "-o", "jsonpath={.status.containerStatuses[0].restartCount} {.status.containerStatuses[0].lastState.terminated.exitCode} {.status.containerStatuses[0].lastState.terminated.reason}"), "1 0 Completed")
	c.Kubectl(t, "", "wait", "--for=condition=Ready", "pod/small", "--timeout=180s")
	if got := text("get pod small -o jsonpath={.status.podIP}"); got != ip {
		t.Errorf("its address was %s, and is %s", ip, got)
	}
	if got := text("logs small --previous"); !strings.Contains(got, "typed-2") {
		t.Errorf("the log of the first run:\n%s", got)
	}

	c.Kubectl(t, "", "wait", "--for=condition=Ready", "pod/cloud", "--timeout=420s")
	if got := text("exec cloud -- sh -c hostname;cat</etc/own"); got != "cloud\nof the annotation" {
		t.Errorf("a command says %q", got)
	}
	kubetest.Eventually(t, "the file of the ConfigMap", get("exec", "cloud", "--", "cat", "/srv/given/key"), "first")
	c.Kubectl(t, "", "patch", "configmap", "given", "--patch", `{"data": {"key": "second"}}`)
	kubetest.Eventually(t, "the new file of the ConfigMap", get("exec", "cloud", "--", "cat", "/srv/given/key"), "second")
	kubetest.Eventually(t, "a file in the emptyDir", get("exec", "cloud", "--", "sh", "-c", "echo mine >/srv/empty/file && grep -c 'virtiofs' /etc/fstab"), "3") // and the token of the service account
	c.Kubectl(t, "", "delete", "pod", "--all", "--timeout=180s")
	if pids := hypervisors("small.", "cloud."); len(pids) != 0 {
		t.Errorf("hypervisors are left: %v", pids)
	}
}

// page returns what the web server of a pod says by a port-forward.
func page(t *testing.T, c *kubetest.Cluster, pod string) string {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), need.Built(t, "bin/kubectl", "make kubectl"), "--kubeconfig", filepath.Join(c.Dir, "kubeconfig"), "port-forward", "pod/"+pod, ":80")
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() { _ = cmd.Process.Kill(); _ = cmd.Wait() }()
	line, err := bufio.NewReader(out).ReadString('\n')
	if err != nil {
		t.Fatal(err)
	}
	var port int
	if _, err := fmt.Sscanf(line, "Forwarding from 127.0.0.1:%d", &port); err != nil {
		t.Fatalf("%q: %v", line, err)
	}
	r, err := http.Get(fmt.Sprintf("http://127.0.0.1:%d/", port))
	if err != nil {
		t.Fatal(err)
	}
	defer r.Body.Close()
	var text strings.Builder
	if _, err := bufio.NewReader(r.Body).WriteTo(&text); err != nil {
		t.Fatal(err)
	}
	return strings.TrimSpace(text.String())
}

// typed types a line into the console of a pod, and waits until the guest has written something.
func typed(t *testing.T, c *kubetest.Cluster, pod, line, want string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, need.Built(t, "bin/kubectl", "make kubectl"), "--kubeconfig", filepath.Join(c.Dir, "kubeconfig"), "attach", "-i", pod)
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() { _ = cmd.Process.Kill(); _ = cmd.Wait() }()
	if _, err := io.WriteString(in, line+"\n"); err != nil {
		t.Fatal(err)
	}
	for seen := bufio.NewScanner(out); seen.Scan(); {
		if strings.Contains(seen.Text(), want) {
			return
		}
	}
	t.Fatalf("the console of %s does not say %s", pod, want)
}
