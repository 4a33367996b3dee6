//go:build vm || e2e

package deploy_test

import (
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// machine is a systemd that runs as the first process of its own namespaces.
type machine struct {
	t   *testing.T
	pid string // of its systemd
}

func boot(t *testing.T) machine {
	t.Helper()
	mounts, err := os.ReadFile("/proc/self/mounts")
	if err != nil {
		t.Fatal(err)
	}
	var tree string
	for line := range strings.Lines(string(mounts)) {
		if f := strings.Fields(line); len(f) > 2 && f[2] == "cgroup2" {
			tree = f[1]
		}
	}
	if tree == "" {
		tree = t.TempDir()
		if err := unix.Mount("cgroup2", tree, "cgroup2", 0, ""); err != nil {
			t.Fatalf("mount the cgroup v2 tree, which systemd wants: %v", err)
		}
		t.Cleanup(func() { _ = unix.Unmount(tree, unix.MNT_DETACH) })
	}
	group := filepath.Join(tree, fmt.Sprintf("units-test-%d", os.Getpid()))
	if err := os.Mkdir(group, 0o755); err != nil {
		t.Fatal(err)
	}
	var out bytes.Buffer
	cmd := exec.Command("unshare", "--net", "--mount", "--pid", "--fork", "--ipc", "--uts", "--kill-child", "testdata/systemd.sh", t.TempDir(), group, tree)
	cmd.Stdout, cmd.Stderr = &out, &out
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = cmd.Process.Kill() // the kernel then kills everything in the namespace
		_ = cmd.Wait()
		eventually(t, "the cgroups are empty", func() bool {
			_ = exec.Command("find", group, "-depth", "-type", "d", "-exec", "rmdir", "{}", "+").Run()
			_, err := os.Stat(group)
			return os.IsNotExist(err)
		})
	})
	m := machine{t: t}
	eventually(t, "systemd is up", func() bool {
		children, _ := os.ReadFile(fmt.Sprintf("/proc/%d/task/%[1]d/children", cmd.Process.Pid))
		m.pid = strings.TrimSpace(string(children))
		if m.pid == "" {
			return false
		}
		if name, _ := os.ReadFile("/proc/" + m.pid + "/comm"); string(name) != "systemd\n" {
			return false
		}
		state, _ := m.run("systemctl is-active basic.target")
		return state == "active"
	})
	return m
}

// eventually waits until f returns true, and fails the test if it never does.
func eventually(t *testing.T, what string, f func() bool) {
	t.Helper()
	tick := time.Tick(50 * time.Millisecond)
	for end := time.Now().Add(4 * time.Minute); !f(); <-tick {
		if time.Now().After(end) {
			t.Fatalf("never: %s", what)
		}
	}
}

// run runs a script on the machine.
func (m machine) run(script string) (string, error) {
	cmd := exec.Command("nsenter", "--target", m.pid, "--all", "--root", "--wd", "sh", "-c", script)
	cmd.Env = []string{"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL=C"}
	out, err := cmd.CombinedOutput()
	return strings.TrimSpace(string(out)), err
}

func (m machine) must(script string) string {
	m.t.Helper()
	out, err := m.run(script)
	if err != nil {
		journal, _ := m.run("journalctl --no-pager -q -n 40")
		m.t.Fatalf("%s: %v\n%s\n%s", script, err, out, journal)
	}
	return out
}

func (m machine) want(script, want string) {
	m.t.Helper()
	if got := m.must(script); got != want {
		m.t.Errorf("%s\n got %s\nwant %s", script, got, want)
	}
}

// journal waits until unit has logged text.
func (m machine) journal(unit, text string) {
	m.t.Helper()
	eventually(m.t, unit+" says "+text, func() bool {
		out, _ := m.run("journalctl --no-pager -q -u " + unit)
		return strings.Contains(out, text)
	})
}

// status returns fields of a process from the kernel.
func (m machine) status(pid string, keys ...string) string {
	return m.must(fmt.Sprintf(`awk '/^(%s):/ {print $1 $2}' /proc/%s/status`, strings.Join(keys, "|"), pid))
}

func (m machine) main(unit string) string {
	return m.must("systemctl show --value -p MainPID " + unit)
}
