//go:build e2e

package deploy_test

import (
	"path/filepath"
	"strings"
	"testing"

	"cocoonstack.io/cocoon/internal/testkit/need"
)

// The package of kube-proxy is installed on a machine with systemd. The unit starts only with credentials and where nobody else
// serves Services. In its sandbox it makes Services answer, and its removal takes all rules away.
func TestKubeProxyUnit(t *testing.T) {
	need.Root(t)
	bin := filepath.Dir(need.Built(t, "bin/cocoon-up", "make build"))
	need.Built(t, "bin/cocoon", "make build")
	for _, tool := range []string{"dpkg", "dpkg-deb", "unshare", "nsenter", "curl", "nft", "busybox", "/lib/systemd/systemd"} {
		need.Tool(t, tool)
	}
	deb := filepath.Join(t.TempDir(), "kube-proxy.deb")
	t.Setenv("DEB_TEST_BIN", bin)
	t.Setenv("PROGRAMS", bin) // in the machine at /mnt
	run(t, "../hack/deb.sh", "v1.0", deb, "kube-proxy")
	m := boot(t)
	run(t, "cp", deb, "/proc/"+m.pid+"/root/tmp/kube-proxy.deb")
	m.must("dpkg --force-unsafe-io --install /tmp/kube-proxy.deb")

	m.want("systemctl is-enabled cocoon-kube-proxy || true", "disabled")
	m.must("systemctl start cocoon-kube-proxy") // which does nothing: it has no kubeconfig
	m.want("systemctl show -p ActiveState -p ConditionResult cocoon-kube-proxy", "ActiveState=inactive\nConditionResult=no")

	m.must("umask 077; mkdir -p /etc/cocoon; : >/etc/cocoon/kube-proxy.kubeconfig")
	for _, other := range []struct{ comes, goes, says string }{
		{"nft add table ip6 kube-proxy", "nft delete table ip6 kube-proxy", "it has the nftables of a kube-proxy"},
		{"nft add table inet cocoon_services_x", "nft delete table inet cocoon_services_x", "it has the nftables of a cocoon up"},
		{"nft 'add table ip nat; add chain ip nat KUBE-SERVICES'", "nft delete table ip nat", "it has chains of a kubelet or kube-proxy (KUBE-...)"},
		{"ip link add kube-ipvs0 type bridge", "ip link delete kube-ipvs0", "it has the link kube-ipvs0"},
	} {
		m.must(other.comes)
		if out, err := m.run("systemctl start cocoon-kube-proxy"); err == nil {
			t.Errorf("%s: it started: %s", other.comes, out)
		}
		m.journal("cocoon-kube-proxy", "another program serves Services on this machine: "+other.says)
		m.must("systemctl stop cocoon-kube-proxy; " + other.goes)
		m.want("nft list tables", "")
	}

	// A cluster whose only node is at 10.1.2.3, with a Service that leads to a web server there.
	m.must("ip link set lo up; ip address add 10.1.2.3/24 dev lo; ip route add 10.96.0.0/16 dev lo src 10.1.2.3")
	m.must("mkdir /tmp/www; echo hello >/tmp/www/index.html; busybox httpd -p 10.1.2.3:8099 -h /tmp/www")
	m.must("/mnt/cocoon up --dir /tmp/cluster --nodes 0 --detach")
	kubectl := "/mnt/kubectl --kubeconfig /tmp/cluster/kubeconfig "
	m.must("cat >/tmp/service.yaml <<'EOF'" + `
apiVersion: v1
kind: Node
metadata: {name: cocoon-pool}
status: {addresses: [{type: InternalIP, address: 10.1.2.3}]}
---
apiVersion: v1
kind: Service
metadata: {name: web}
spec: {clusterIP: 10.96.7.7, ports: [{port: 80, targetPort: 8099}]}
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: web, labels: {kubernetes.io/service-name: web}}
addressType: IPv4
endpoints: [{addresses: [10.1.2.3], conditions: {ready: true}}]
ports: [{port: 8099}]
EOF
` + kubectl + "apply -f /tmp/service.yaml -f /usr/share/cocoon/examples/kube-proxy/rbac.yaml")
	secret := kubectl + "-n kube-system get secret cocoon-kube-proxy -o "
	eventually(t, "the account has a token", func() bool {
		out, err := m.run(secret + "jsonpath={.data.token}")
		return err == nil && out != ""
	})
	m.must(`set -e
server=$(` + kubectl + `config view -o 'jsonpath={.clusters[0].cluster.server}')
` + secret + `'jsonpath={.data.ca\.crt}' | base64 -d >/tmp/ca.crt
config="/mnt/kubectl config --kubeconfig /etc/cocoon/kube-proxy.kubeconfig"
$config set-cluster cluster --server="$server" --certificate-authority=/tmp/ca.crt --embed-certs
$config set-credentials kube-proxy --token="$(` + secret + `'jsonpath={.data.token}' | base64 -d)"
$config set-context default --cluster=cluster --user=kube-proxy
$config use-context default
chown root:cocoon-kube-proxy /etc/cocoon/kube-proxy.kubeconfig
chmod 640 /etc/cocoon/kube-proxy.kubeconfig`)

	m.must("systemctl start cocoon-kube-proxy")
	answers := func(url string) {
		t.Helper()
		eventually(t, url+" answers", func() bool {
			out, _ := m.run("curl -s -m 5 " + url)
			return out == "hello"
		})
	}
	answers("http://10.96.7.7/")
	m.want("curl -s -o /dev/null -w %{http_code} http://127.0.0.1:10256/healthz", "200")
	if got := m.status(m.main("cocoon-kube-proxy"), "CapEff", "NoNewPrivs", "Seccomp"); got != "CapEff:0000000000001000\nNoNewPrivs:1\nSeccomp:2" { // CAP_NET_ADMIN
		t.Errorf("kube-proxy: %s", got)
	}
	m.want("stat -c %U /proc/$(systemctl show --value -p MainPID cocoon-kube-proxy)", "cocoon-kube-proxy")

	// Its own rules do not keep it from coming back.
	m.must("systemctl kill -s KILL cocoon-kube-proxy")
	eventually(t, "it is back", func() bool {
		out, _ := m.run("systemctl show -p NRestarts -p ActiveState cocoon-kube-proxy")
		return out == "NRestarts=1\nActiveState=active"
	})
	m.must(kubectl + `patch service web --type=merge -p '{"spec":{"ports":[{"port":81,"targetPort":8099}]}}'`)
	answers("http://10.96.7.7:81/")
	for line := range strings.Lines(m.must("journalctl --no-pager -q -u cocoon-kube-proxy")) {
		text := strings.ToLower(line)
		for _, lack := range []string{"permission denied", "operation not permitted", "read-only file system", "forbidden"} {
			if strings.Contains(text, lack) {
				t.Errorf("it lacks a right: %s", line)
			}
		}
	}

	m.must("dpkg --remove cocoon-kube-proxy")
	m.want("systemctl is-active cocoon-kube-proxy || true", "inactive")
	m.want("nft list tables", "")
	m.must("/mnt/cocoon down --dir /tmp/cluster")
}
