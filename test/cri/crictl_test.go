//go:build cri

package cri

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"cocoonstack.io/cocoon/internal/testkit/containerdtest"
	"cocoonstack.io/cocoon/internal/testkit/kubetest"
)

// TestCrictl runs the verbs of crictl, first for a pod of containerd and then for one that is a VM. Both answer the same.
func TestCrictl(t *testing.T) {
	d := containerdtest.Start(t)
	o := openDoor(t, d)
	crictl := func(args ...string) string {
		t.Helper()
		return strings.TrimSpace(d.Crictl(append([]string{"--runtime-endpoint", "unix://" + o.socket, "--image-endpoint", "unix://" + o.socket}, args...)...))
	}
	has := func(text string, words ...string) {
		t.Helper()
		for _, w := range words {
			if !strings.Contains(text, w) {
				t.Errorf("%q is missing in:\n%s", w, text)
			}
		}
	}
	has(crictl("version"), "RuntimeName:  containerd")
	has(crictl("info"), `"name": "cocoon"`, `"name": "runc"`)
	has(crictl("imagefsinfo"), "usedBytes")
	for _, kind := range []string{"runc", "cocoon"} {
		t.Run(kind, func(t *testing.T) {
			dir := d.Dir("crictl-" + kind)
			pod, container := filepath.Join(dir, "pod.json"), filepath.Join(dir, "container.json")
			for file, text := range map[string]string{
				pod: `{"metadata": {"name": "talk", "namespace": "default", "uid": "uid-` + kind + `", "attempt": 1}, "hostname": "talk", "log_directory": "` + dir + `",
					"labels": {"kind": "` + kind + `"}, "linux": {"cgroup_parent": "/k8s.io"}}`,
				container: `{"metadata": {"name": "main"}, "image": {"image": "` + containerdtest.BusyBox + `"}, "log_path": "main.log", "linux": {"resources": {"memory_limit_in_bytes": 67108864}},
					"command": ["sh", "-c", "trap 'exit 4' TERM; echo begins; while :; do sleep 1; done"]}`,
			} {
				if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
					t.Fatal(err)
				}
			}
			sandbox := crictl("runp", "--runtime", kind, pod)
			if isVM := strings.HasPrefix(sandbox, "vm-"); isVM != (kind == "cocoon") {
				t.Fatalf("the sandbox has the id %s", sandbox)
			}
			crictl("pull", "--pod-config", pod, containerdtest.BusyBox)
			id := crictl("create", sandbox, container, pod)
			has(crictl("ps", "--all", "--pod", sandbox), "Created", "main")
			crictl("start", id)
			has(crictl("ps", "--id", id), "Running", "main")
			has(crictl("pods", "--label", "kind="+kind), "Ready", "talk", kind)
			has(crictl("inspectp", sandbox), `"state": "SANDBOX_READY"`, `"ip": "`, `"kind": "`+kind+`"`)
			has(crictl("inspect", id), `"state": "CONTAINER_RUNNING"`, `"logPath": "`+filepath.Join(dir, "main.log")+`"`)
			if got := crictl("exec", "--sync", id, "hostname"); got != "talk" {
				t.Errorf("exec prints %q", got)
			}
			if got := crictl("exec", id, "sh", "-c", "echo streamed"); got != "streamed" {
				t.Errorf("exec by a stream prints %q", got)
			}
			kubetest.Eventually(t, "the log", func() string { return crictl("logs", id) }, "begins")
			if err := os.Rename(filepath.Join(dir, "main.log"), filepath.Join(dir, "old.log")); err != nil {
				t.Fatal(err)
			}
			crictl("logs", "--reopen", id)
			if _, err := os.Stat(filepath.Join(dir, "main.log")); err != nil {
				t.Errorf("no new log: %v", err)
			}
			has(crictl("stats", id), "main", id[:13])
			has(crictl("statsp", sandbox), "talk")
			crictl("update", "--memory", "100663296", id)
			has(crictl("inspect", id), `"memoryLimitInBytes": "100663296"`)
			crictl("stop", "--timeout", "20", id)
			has(crictl("inspect", id), `"state": "CONTAINER_EXITED"`, `"exitCode": 4`)
			crictl("rm", id)
			if left := crictl("ps", "--all", "--quiet", "--pod", sandbox); left != "" {
				t.Errorf("the container %s is left", left)
			}
			crictl("stopp", sandbox)
			has(crictl("inspectp", sandbox), `"state": "SANDBOX_NOTREADY"`)
			crictl("rmp", sandbox)
			if left := crictl("pods", "--quiet", "--label", "kind="+kind); left != "" {
				t.Errorf("the sandbox %s is left", left)
			}
		})
	}
	has(crictl("images"), "busybox")
	crictl("rmi", containerdtest.BusyBox)
	if left := crictl("images"); strings.Contains(left, "busybox") {
		t.Errorf("the image is left:\n%s", left)
	}
}
