//go:build vm

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

	"cocoonstack.io/cocoon/internal/testkit/need"
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

// The package is installed on a machine with systemd, and each daemon runs as its unit says: it reports that it is ready, is
// confined by its sandbox, and does its work in it. A VM outlives all daemons.
func TestUnitsRun(t *testing.T) {
	need.Tun(t)
	need.QEMU(t)
	need.GuestKernel(t)
	bin := filepath.Dir(need.Built(t, "bin/cocoond", "make binaries"))
	demo := need.Built(t, "bin/demo.tar", "make demo-image")
	for _, tool := range []string{"dpkg", "dpkg-deb", "unshare", "nsenter", "curl", "jq", "/lib/systemd/systemd"} {
		need.Tool(t, tool)
	}
	deb := filepath.Join(t.TempDir(), "cocoon.deb")
	t.Setenv("DEB_TEST_BIN", bin)
	run(t, "../hack/deb.sh", "v1.0", deb)

	m := boot(t)
	for from, to := range map[string]string{deb: "cocoon.deb", demo: "demo.tar"} {
		run(t, "cp", from, "/proc/"+m.pid+"/root/tmp/"+to)
	}
	m.must("dpkg --force-unsafe-io --install /tmp/cocoon.deb")
	m.want("systemctl is-active cocoond vk-cocoon epoch || true", "inactive\ninactive\ninactive")

	t.Run("refused", m.with(machine.refused))
	t.Run("cocoond", m.with(machine.cocoond))
	t.Run("vm", m.with(machine.vm))
	t.Run("epoch", m.with(machine.epoch))
	t.Run("vk-cocoon", m.with(machine.vkCocoon))
	t.Run("removal", m.with(machine.removal))
}

func (m machine) with(f func(machine)) func(*testing.T) {
	return func(t *testing.T) { f(machine{t, m.pid}) }
}

// A daemon that lacks a file says which one, and is restarted later. A daemon with an invalid setting is not restarted.
func (m machine) refused() {
	for unit, says := range map[string]string{
		"vk-cocoon": "vk-cocoon: kubeconfig /etc/cocoon/kubeconfig: stat /etc/cocoon/kubeconfig: no such file or directory",
		"epoch":     "token file: open /etc/cocoon/epoch-tokens: no such file or directory",
	} {
		if out, err := m.run("systemctl start " + unit); err == nil || !strings.Contains(out, "journalctl -xeu "+unit) {
			m.t.Errorf("%s started: %s", unit, out)
		}
		m.journal(unit, says)
		m.want("systemctl show --value -p RestartUSec "+unit, "5s")
		m.must("systemctl stop " + unit)
	}
	m.must("echo VK_NODE_PODS=many >/etc/cocoon/vk-cocoon.env")
	if _, err := m.run("systemctl start vk-cocoon"); err == nil {
		m.t.Error("vk-cocoon started with a wrong setting")
	}
	m.want("systemctl show -p ActiveState -p NRestarts -p ExecMainStatus vk-cocoon", "NRestarts=0\nExecMainStatus=2\nActiveState=failed")
	m.must("systemctl stop cocoond") // vk-cocoon requires it
	m.must("echo driver: nonsense >/etc/cocoon/cocoond.yaml; echo COCOOND_ARGS=--config /etc/cocoon/cocoond.yaml >/etc/cocoon/cocoond.env")
	if _, err := m.run("systemctl start cocoond"); err == nil {
		m.t.Error("cocoond started with a wrong setting")
	}
	m.want("systemctl show -p ActiveState -p NRestarts -p ExecMainStatus cocoond", "NRestarts=0\nExecMainStatus=2\nActiveState=failed")
	m.must("rm /etc/cocoon/cocoond.yaml; : >/etc/cocoon/cocoond.env")
}

// status returns fields of a process from the kernel.
func (m machine) status(pid string, keys ...string) string {
	return m.must(fmt.Sprintf(`awk '/^(%s):/ {print $1 $2}' /proc/%s/status`, strings.Join(keys, "|"), pid))
}

func (m machine) main(unit string) string {
	return m.must("systemctl show --value -p MainPID " + unit)
}

func (m machine) cocoond() {
	m.must("systemctl start cocoond")
	m.want("systemctl show -p WatchdogUSec -p Type -p KillMode -p ActiveState cocoond", "Type=notify\nWatchdogUSec=1min\nKillMode=process\nActiveState=active")
	m.want("stat -c '%A %U %G' /run/cocoon/cocoond.sock", "srw-rw---- root cocoon")
	if got := m.status(m.main("cocoond"), "Uid", "Seccomp"); got != "Uid:0\nSeccomp:2" {
		m.t.Errorf("cocoond: %s", got)
	}
	if out := m.must("cocoon doctor"); strings.Contains(out, "\nfail ") {
		m.t.Errorf("doctor: %s", out)
	}
	if out := m.must("cocoon vm list"); !strings.HasPrefix(out, "NAME") {
		m.t.Errorf("vm list: %s", out)
	}
}

// In cocoond's sandbox, a VM has what it needs: taps, rules, cgroup and user. It keeps running however the daemon ends.
func (m machine) vm() {
	m.must("cocoon image import cocoon/demo:latest /tmp/demo.tar")
	m.must("cocoon vm run --name web --cpu 1 --memory 128M cocoon/demo:latest")
	ip := m.must("cocoon vm inspect web | jq -r .network_configs[0].address.ip")
	eventually(m.t, "the VM serves", func() bool {
		_, err := m.run("curl -sf -o /dev/null -m 5 http://" + ip + ":8080/healthz")
		return err == nil
	})
	pid := m.must("cocoon vm inspect web | jq .pid")
	if got := m.status(pid, "CapEff", "CapBnd", "NoNewPrivs", "Seccomp"); got != "CapEff:0000000000000000\nCapBnd:0000000000000000\nNoNewPrivs:1\nSeccomp:2" {
		m.t.Errorf("QEMU: %s", got)
	}
	if uid := m.status(pid, "Uid"); uid == "Uid:0" {
		m.t.Error("QEMU runs as root")
	}
	m.want("cut -d: -f3 /proc/"+pid+"/cgroup | grep -c ^/cocoon/", "1")
	m.want("cat /proc/"+pid+"/oom_score_adj", "0")
	boot := m.must("cocoon vm exec web -- cat /proc/sys/kernel/random/boot_id")

	m.must("systemctl restart cocoond")
	m.must("systemctl kill --kill-who=main -s KILL cocoond")
	eventually(m.t, "cocoond is back", func() bool {
		out, _ := m.run("systemctl show -p NRestarts -p ActiveState cocoond")
		return out == "NRestarts=1\nActiveState=active"
	})
	m.want("cocoon vm exec web -- cat /proc/sys/kernel/random/boot_id", boot)
	m.want("cocoon vm inspect web | jq .pid", pid)
}

func (m machine) epoch() {
	m.must("umask 077; echo a-token >/etc/cocoon/epoch-tokens; chown epoch: /etc/cocoon/epoch-tokens")
	m.must("systemctl start epoch")
	if got := m.status(m.main("epoch"), "NoNewPrivs", "Seccomp"); got != "NoNewPrivs:1\nSeccomp:2" {
		m.t.Errorf("epoch: %s", got)
	}
	m.want("stat -c %U /proc/$(systemctl show --value -p MainPID epoch)/exe /var/lib/epoch", "epoch\nepoch")
	m.want("curl -s -o /dev/null -w %{http_code} http://127.0.0.1:8080/v2/", "401")
}

// The API server does not answer. vk-cocoon waits for it, serves what it can, and reaches cocoond over the socket.
func (m machine) vkCocoon() {
	m.must(`: >/etc/cocoon/vk-cocoon.env; umask 077; cat >/etc/cocoon/kubeconfig <<'EOF'
{"apiVersion": "v1", "kind": "Config", "current-context": "c", "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
 "clusters": [{"name": "c", "cluster": {"server": "https://127.0.0.1:1"}}], "users": [{"name": "u", "user": {"token": "t"}}]}
EOF
chown vk-cocoon: /etc/cocoon/kubeconfig`)
	m.must("systemctl start --no-block vk-cocoon")
	m.servesMetrics()
	if got := m.status(m.main("vk-cocoon"), "CapEff", "NoNewPrivs", "Seccomp"); got != "CapEff:0000000000002000\nNoNewPrivs:1\nSeccomp:2" { // CAP_NET_RAW
		m.t.Errorf("vk-cocoon: %s", got)
	}
	if out := m.must("journalctl --no-pager -q -u vk-cocoon"); strings.Contains(out, "cannot be pinged") || strings.Contains(out, "does not answer, VMs are reached") {
		m.t.Errorf("vk-cocoon lacks something: %s", out)
	}

	// Without a kubeconfig, it uses the service account of the pod that it runs in.
	m.must(`systemctl stop vk-cocoon; rm /etc/cocoon/kubeconfig
printf '%s\n' KUBECONFIG= KUBERNETES_SERVICE_HOST=127.0.0.1 KUBERNETES_SERVICE_PORT=1 >/etc/cocoon/vk-cocoon.env
mkdir -p /run/secrets/kubernetes.io/serviceaccount; echo a-token >/run/secrets/kubernetes.io/serviceaccount/token`)
	m.must("systemctl start --no-block vk-cocoon")
	m.servesMetrics()
}

func (m machine) servesMetrics() {
	m.t.Helper()
	eventually(m.t, "vk-cocoon serves its metrics", func() bool {
		out, _ := m.run("curl -s http://127.0.0.1:9091/metrics")
		return strings.Contains(out, "vk_cocoon_node_memory_used_bytes ")
	})
	m.want("systemctl show -p ActiveState -p NRestarts vk-cocoon", "NRestarts=0\nActiveState=activating")
}

// The package is removed and its daemons are stopped, but the VM stays.
func (m machine) removal() {
	pid := m.must("cocoon vm inspect web | jq .pid")
	m.must("dpkg --remove cocoon")
	m.want("systemctl is-active cocoond vk-cocoon epoch || true", "inactive\ninactive\ninactive")
	m.must("test -d /proc/" + pid)
}
