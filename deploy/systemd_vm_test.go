//go:build vm

package deploy_test

import (
	"path/filepath"
	"strings"
	"testing"

	"cocoonstack.io/cocoon/internal/testkit/need"
)

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
