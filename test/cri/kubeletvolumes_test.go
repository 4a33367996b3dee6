//go:build cri

package cri

import (
	"bytes"
	"fmt"
	"os"
	"strings"
	"testing"

	"cocoonstack.io/cocoon/internal/testkit/containerdtest"
	"cocoonstack.io/cocoon/internal/testkit/kubelettest"
	"cocoonstack.io/cocoon/internal/testkit/kubetest"
	"cocoonstack.io/cocoon/internal/testkit/loopdev"
)

// disks is a pod with a block device of its node, by a claim, and the files of an image.
const disks = `
apiVersion: v1
kind: PersistentVolume
metadata: {name: disk-%[1]s}
spec:
  capacity: {storage: 16Mi}
  accessModes: [ReadWriteOnce]
  volumeMode: Block
  storageClassName: ""
  claimRef: {namespace: default, name: disk-%[1]s}
  local: {path: %[2]s}
  nodeAffinity: {required: {nodeSelectorTerms: [{matchExpressions: [{key: kubernetes.io/hostname, operator: In, values: [` + kubelettest.Name + `]}]}]}}
---
apiVersion: v1
kind: PersistentVolumeClaim
metadata: {name: disk-%[1]s}
spec: {accessModes: [ReadWriteOnce], volumeMode: Block, storageClassName: "", volumeName: disk-%[1]s, resources: {requests: {storage: 16Mi}}}
---
apiVersion: v1
kind: Pod
metadata: {name: disks-%[1]s}
spec:
  runtimeClassName: %[1]s
  nodeName: ` + kubelettest.Name + `
  terminationGracePeriodSeconds: 1
  volumes: [{name: disk, persistentVolumeClaim: {claimName: disk-%[1]s}}, {name: files, image: {reference: "` + containerdtest.BusyBox + `"}}]
  containers:
  - name: main
    image: "` + containerdtest.BusyBox + `"
    command: [sleep, "100000"]
    volumeDevices: [{name: disk, devicePath: /dev/data}]
    volumeMounts: [{name: files, mountPath: /files}, {name: files, mountPath: /part, subPath: bin}]
`

// users is a pod whose users are none of its node.
const users = `
apiVersion: v1
kind: ConfigMap
metadata: {name: users}
data: {key: value}
---
apiVersion: v1
kind: Pod
metadata: {name: users}
spec:
  runtimeClassName: cocoon
  hostUsers: false
  nodeName: ` + kubelettest.Name + `
  terminationGracePeriodSeconds: 1
  securityContext: {fsGroup: 2000}
  volumes: [{name: settings, configMap: {name: users}}, {name: empty, emptyDir: {}}]
  containers:
  - name: main
    image: "` + containerdtest.BusyBox + `"
    command: [sleep, "100000"]
    securityContext: {runAsUser: 1000}
    volumeMounts: [{name: settings, mountPath: /settings}, {name: empty, mountPath: /empty}]
`

// TestKubeletVolumes: a pod of each runtime has a block device of a claim and the files of an image, and another pod of the other runtime finds on the
// device what was written.
func TestKubeletVolumes(t *testing.T) {
	d := containerdtest.Start(t)
	o := openDoor(t, d)
	c := kubetest.Up(t, "--with", "")
	kubelettest.Start(t, c, o.socket, d.Dir("kubelet"))
	c.Kubectl(t, classes, "apply", "-f", "-")
	c.Kubectl(t, users, "apply", "-f", "-")
	c.Kubectl(t, "", "wait", "--for=condition=Ready", "pod/users", "--timeout=180s")
	if got := c.Kubectl(t, "", "exec", "users", "--", "sh", "-c", "cat /settings/key; echo; id -u; touch /empty/file; stat -c %u:%g /empty/file"); got != "value\n1000\n1000:2000\n" {
		t.Errorf("a pod with hostUsers: false: %q", got)
	}
	dev := loopdev.New(t, 16<<20)
	wrote := ""
	for _, kind := range []string{"runc", "cocoon", "runc"} {
		c.Kubectl(t, fmt.Sprintf(disks, kind, dev), "apply", "-f", "-")
		c.Kubectl(t, "", "wait", "--for=condition=Ready", "pod/disks-"+kind, "--timeout=180s")
		sh := func(script string) string {
			return strings.TrimSpace(c.Kubectl(t, "", "exec", "disks-"+kind, "--", "sh", "-c", script))
		}
		if got := sh("test -b /dev/data && head -c 4 /dev/data | tr -d '\\000'"); got != wrote {
			t.Errorf("%s: the device has %q, want %q", kind, got, wrote)
		}
		wrote = kind[:4]
		sh("echo -n " + wrote + " | dd of=/dev/data conv=fsync,notrunc 2>/dev/null")
		if got := sh("test -x /files/bin/sh && test -e /part/sh && echo there; echo x 2>/dev/null >/files/x || echo denied"); got != "there\ndenied" {
			t.Errorf("%s: the files of the image: %q", kind, got)
		}
		c.Kubectl(t, "", "delete", "pod/disks-"+kind, "pvc/disk-"+kind, "pv/disk-"+kind, "--timeout=120s")
		if text, err := os.ReadFile(dev); err != nil || !bytes.HasPrefix(text, []byte(wrote)) {
			t.Errorf("%s: the device of the node has %q, %v", kind, text[:min(len(text), 8)], err)
		}
	}
}
