//go:build cri

package containerdtest

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"cocoonstack.io/cocoon/internal/proc"
	"cocoonstack.io/cocoon/internal/testkit/ociimage"
)

func TestPodsOutliveContainerd(t *testing.T) {
	var dir string
	var ids []string
	t.Run("containerd", func(t *testing.T) {
		d := Start(t)
		dir = d.dir
		d.Registry.Push("example.org/team/mine:v1", ociimage.Image{Layers: []ociimage.Layer{ociimage.Of(ociimage.File("mine", ""))}})
		d.Crictl("pull", "example.org/team/mine:v1")
		id := run(t, d)
		if got := d.Crictl("exec", id, "cat", "/etc/hostname"); strings.TrimSpace(got) == "" {
			t.Error("the container has no name")
		}
		for how, end := range map[string]func(){"killed": d.Kill, "stopped": d.Stop} {
			end()
			if len(d.processes()) == 0 {
				t.Errorf("no process of the pod is left when containerd is %s", how)
			}
			d.Start()
			if got := strings.TrimSpace(d.Crictl("ps", "--quiet", "--state", "Running", "--no-trunc")); got != id {
				t.Errorf("after containerd was %s, %q runs, want %s", how, got, id)
			}
		}
		if ids = d.containers(); len(ids) != 2 {
			t.Errorf("there are the containers %v, want two", ids)
		}
		d.Kill()
	})
	if dir == "" {
		return
	}
	if _, err := os.Stat(dir); err == nil {
		t.Error("files are left of a containerd that was killed:", dir)
	}
	if left := proc.MountsBelow(dir); len(left) > 0 {
		t.Error("mounts are left:", left)
	}
	for _, id := range ids {
		if left, _ := filepath.Glob("/sys/fs/cgroup/*/k8s.io/" + id); len(left) > 0 {
			t.Error("cgroups are left:", left)
		}
	}
}

// run runs a pod and returns the id of its container.
func run(t *testing.T, d *Daemon) string {
	t.Helper()
	files := d.Dir("pods")
	pod, container := filepath.Join(files, "pod.json"), filepath.Join(files, "container.json")
	for path, text := range map[string]string{
		pod:       `{"metadata": {"name": "one", "namespace": "default", "uid": "u1"}, "hostname": "one", "linux": {}}`,
		container: `{"metadata": {"name": "shell"}, "image": {"image": "` + BusyBox + `"}, "command": ["sleep", "1000"], "linux": {}}`,
	} {
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	return strings.TrimSpace(d.Crictl("run", "--with-pull", container, pod))
}

func TestNothingIsLeftOfAKilledTest(t *testing.T) {
	const env = "CONTAINERDTEST_TOLD"
	if told := os.Getenv(env); told != "" {
		d := Start(t)
		run(t, d)
		if err := os.WriteFile(told, []byte(strings.Join(append(d.containers(), d.dir), "\n")), 0o600); err != nil {
			t.Fatal(err)
		}
		_ = syscall.Kill(os.Getpid(), syscall.SIGKILL)
		return
	}
	told := filepath.Join(t.TempDir(), "told")
	cmd := exec.Command("/proc/self/exe", "-test.run=^"+t.Name()+"$")
	cmd.Env = append(os.Environ(), env+"="+told)
	log, err := os.Create(told + ".log")
	if err != nil {
		t.Fatal(err)
	}
	defer log.Close()
	cmd.Stdout, cmd.Stderr = log, log // no pipe, which would wait for containerd
	_ = cmd.Run()
	text, err := os.ReadFile(told)
	if err != nil {
		out, _ := os.ReadFile(log.Name())
		t.Fatalf("the test was not killed: %v\n%s", err, out)
	}
	words := strings.Fields(string(text))
	ids, dir := words[:len(words)-1], words[len(words)-1]
	if len(ids) != 2 {
		t.Fatalf("the killed test had the containers %v, want two", ids)
	}
	if !eventually(func() bool { _, err := os.Stat(dir); return err != nil }) {
		t.Errorf("%s is left", dir)
	}
	if left := (&Daemon{dir: dir, Runtime: runtime(dir, programs(t))}).processes(); len(left) > 0 {
		t.Errorf("processes are left: %v", left)
	}
	for _, id := range ids {
		if left, _ := filepath.Glob("/sys/fs/cgroup/*/k8s.io/" + id); len(left) > 0 {
			t.Error("cgroups are left:", left)
		}
	}
}
