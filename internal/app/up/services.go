package up

import (
	"bytes"
	"context"
	_ "embed"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"strings"
	"text/template"
	"time"

	"cocoonstack.io/cocoon/internal/atomicfile"
	"cocoonstack.io/cocoon/internal/errdefs"
)

// Services are redirected by one kube-proxy for all nodes of the instance, because they share one network namespace. It runs as
// the first node: Services that prefer or demand endpoints of the node itself use those of that node. Guests reach the API server
// and the cluster's DNS by their Services only: both answer on the first node's bridge, where the rules let nothing else in.

const (
	partProxy     = "kube-proxy"
	partDNS       = "coredns"
	dnsUser       = "system:coredns"
	clusterDomain = "cluster.local"

	slicesPath = "/apis/discovery.k8s.io/v1/namespaces/"
)

//go:embed services.yaml
var servicesManifest string

// claimServices decides whether this start serves Services. Only one program can do that in a network namespace.
// Errors: FailedPrecondition if the user asked for Services and they are not possible.
func (in *instance) claimServices() error {
	if len(in.settings.Nodes) == 0 || !in.settings.wantServices() {
		return nil
	}
	began := time.Now()
	why := in.ports.claimServices()
	if why == "" {
		var err error
		if why, err = takeTables(in.layout); err != nil {
			return err
		}
	}
	switch {
	case why == "":
		in.services = true
	case in.settings.Services != nil:
		return errdefs.Preconditionf("Services are not possible here: %s; use --services=false to go without", why)
	default:
		in.report("no Services: "+why, time.Since(began))
	}
	return nil
}

// claimServices reserves Services for this process until it ends. why says who has them already.
func (p *ports) claimServices() (why string) {
	claim, err := net.Listen("unix", "@cocoon-up-services")
	if err != nil {
		return "another instance on this machine serves them" // the name is in use
	}
	p.held = append(p.held, claim)
	return ""
}

// marks is the start of the names of tables that say of kube-proxy's tables that they are an instance's. The tables of a network
// begin in another way.
const marks = "cocoon_services_"

// unitMark is the table by which cocoon-kube-proxy.service says that kube-proxy's tables are its own (deploy/systemd/kube-proxy-claim).
const unitMark = "cocoon_kube_proxy"

func (l layout) marker() string { return marks + instanceID(nodeLayout{layout: l, first: true}) }

// takeTables marks the tables of kube-proxy as ours, and removes what an instance that was killed has left. why says why they
// are not. Preconditions: no other instance serves Services.
func takeTables(l layout) (why string, err error) {
	if _, err := exec.LookPath("nft"); err != nil {
		return "the program nft is missing; install the package nftables", nil //nolint:nilerr // Services are optional
	}
	chains, tables, err := listRules()
	if err != nil {
		return "nftables do not work: " + err.Error(), nil //nolint:nilerr // Services are optional
	}
	if why := otherProxy(chains, tables); why != "" {
		return why, nil
	}
	return "", dropTables(tables, "add table inet "+l.marker())
}

// rule names a table, or a chain in one.
type rule struct {
	Family string `json:"family"`
	Table  string `json:"table"`
	Name   string `json:"name"`
}

// listRules lists the names of all chains and tables.
func listRules() (chains, tables []rule, err error) {
	for what, to := range map[string]*[]rule{"chains": &chains, "tables": &tables} {
		out, err := nft("", "--json", "list", what)
		if err != nil {
			return nil, nil, err
		}
		var list struct {
			All []struct{ Table, Chain *rule } `json:"nftables"`
		}
		if err := json.Unmarshal(out, &list); err != nil {
			return nil, nil, fmt.Errorf("read what nft lists: %w", err)
		}
		for _, one := range list.All {
			if one.Table != nil {
				*to = append(*to, *one.Table)
			}
			if one.Chain != nil {
				*to = append(*to, *one.Chain)
			}
		}
	}
	return chains, tables, nil
}

// otherProxy says which program already redirects Services on this machine, "" if there is none.
func otherProxy(chains, tables []rule) string {
	const node = "this machine is the node of another cluster: "
	proxy, ours := false, false
	for _, t := range tables {
		proxy = proxy || isProxys(t)
		ours = ours || isMarker(t)
		if t.Family == "inet" && t.Name == unitMark {
			return node + "it has the mark of cocoon-kube-proxy.service"
		}
	}
	if proxy && !ours {
		return node + "it has the nftables of a kube-proxy"
	}
	for _, c := range chains {
		if strings.HasPrefix(c.Name, "KUBE-") {
			return node + "it has the chain " + c.Name
		}
	}
	for _, save := range []string{"iptables-legacy-save", "ip6tables-legacy-save"} { // nft does not show these rules
		if out, err := exec.Command(save).Output(); err == nil && bytes.Contains(out, []byte("\n:KUBE-")) {
			return node + save + " lists chains of it"
		}
	}
	for _, link := range []string{"kube-ipvs0", "cilium_host"} {
		if _, err := net.InterfaceByName(link); err == nil {
			return node + "it has the link " + link
		}
	}
	return ""
}

func isProxys(t rule) bool { return t.Name == "kube-proxy" && (t.Family == "ip" || t.Family == "ip6") }

func isMarker(t rule) bool { return t.Family == "inet" && strings.HasPrefix(t.Name, marks) }

// dropTables removes kube-proxy's tables and every mark on them, and then does more, all in one step.
func dropTables(tables []rule, more ...string) error {
	var script []string
	for _, t := range tables {
		if isProxys(t) || isMarker(t) {
			script = append(script, "delete table "+t.Family+" "+t.Name)
		}
	}
	script = append(script, more...)
	if len(script) == 0 {
		return nil
	}
	_, err := nft(strings.Join(script, "\n")+"\n", "-f", "-")
	return err
}

// dropServices removes kube-proxy's rules if they are this instance's. Preconditions: its kube-proxy has ended.
func dropServices(l layout) error {
	if _, err := exec.LookPath("nft"); err != nil {
		return nil //nolint:nilerr // without it there were no Services
	}
	_, tables, err := listRules()
	if err != nil {
		return nil //nolint:nilerr // as above
	}
	for _, t := range tables {
		if isMarker(t) && t.Name == l.marker() {
			return dropTables(tables)
		}
	}
	return nil
}

func nft(script string, args ...string) ([]byte, error) {
	cmd := exec.Command("nft", args...)
	var out, errOut bytes.Buffer
	cmd.Stdin, cmd.Stdout, cmd.Stderr = strings.NewReader(script), &out, &errOut
	if err := cmd.Run(); err != nil {
		text, _, _ := strings.Cut(strings.TrimSpace(errOut.String()), "\n")
		return nil, fmt.Errorf("nft %s: %w: %s", strings.Join(args, " "), err, text)
	}
	return out.Bytes(), nil
}

// runServices starts what serves Services and their names, or removes what an earlier start has registered.
func (in *instance) runServices(ctx context.Context, launch func(child) <-chan error, also func(stop func())) error {
	if !in.services {
		return errors.Join(in.api.remove(ctx, "/api/v1/namespaces/default/endpoints/kubernetes"),
			in.api.remove(ctx, slicesPath+"default/endpointslices/kubernetes"), in.api.remove(ctx, slicesPath+"kube-system/endpointslices/kube-dns"))
	}
	began := time.Now()
	addr := in.settings.Nodes[0].Address
	relay, err := startRelay(ctx, addr, net.JoinHostPort(nodeIP, fmt.Sprint(in.settings.APIPort)))
	if err != nil {
		return err
	}
	also(relay.Close)
	proxy, dns := in.proxy(), in.dns(addr)
	if err := errors.Join(proxy.prepare(), dns.prepare()); err != nil {
		return err
	}
	list, err := serviceManifests(addr, relay.Port(), in.settings.DNSPort)
	if err != nil {
		return err
	}
	if err := in.install(ctx, list, in.controlPlane(), nil); err != nil {
		return err
	}
	proxyEnded, dnsEnded := launch(proxy.child), launch(dns.child)
	if err := in.await(ctx, proxy.child, proxyEnded, proxy.ready); err != nil {
		return err
	}
	if err := in.await(ctx, dns.child, dnsEnded, dns.ready); err != nil {
		return err
	}
	in.report("Services and their names answer", time.Since(began))
	return nil
}

// serviceManifests are the endpoints of the API server's Service, and the Service of the cluster's DNS with its endpoints and
// rights.
func serviceManifests(addr string, apiPort, dnsPort int) ([]manifest, error) {
	t, err := template.New("services").Parse(servicesManifest)
	if err != nil {
		return nil, fmt.Errorf("read manifest of Services: %w", err)
	}
	var text bytes.Buffer
	err = t.Execute(&text, map[string]any{"Address": addr, "APIPort": apiPort, "DNSPort": dnsPort, "DNSAddress": dnsIP, "DNSUser": dnsUser})
	if err != nil {
		return nil, fmt.Errorf("render manifest of Services: %w", err)
	}
	return manifests(text.Bytes())
}

func (in *instance) proxy() part {
	config, kubeconfig := in.config("kube-proxy.yaml"), in.config("kube-proxy.kubeconfig")
	healthz := fmt.Sprintf("%s:%d", nodeIP, in.settings.ProxyHealthPort)
	return part{
		child: child{
			name: partProxy, path: in.opts.Assets.ControlPlane, args: []string{partProxy, "--config=" + config},
			log: in.layout.log(partProxy), stop: stopPart,
		},
		prepare: func() error {
			return errors.Join(writeKubeconfig(kubeconfig, in.pki, in.settings, partProxy), writeYAML(config, proxyConfig(in.settings, kubeconfig)))
		},
		ready: func(ctx context.Context) bool { return answers(ctx, "http://"+healthz+"/healthz") },
	}
}

// proxyConfig is kube-proxy's file. NodePorts are at the addresses of the nodes only, which are those of the bridges. Connection
// tracking stays as the machine has it.
func proxyConfig(s Settings, kubeconfig string) object {
	var addresses []string
	for _, n := range s.Nodes {
		addresses = append(addresses, n.Address+"/32")
	}
	return object{
		"apiVersion":         "kubeproxy.config.k8s.io/v1alpha1",
		"kind":               "KubeProxyConfiguration",
		"mode":               "nftables",
		"hostnameOverride":   s.Nodes[0].Name,
		"clientConnection":   object{"kubeconfig": kubeconfig},
		"healthzBindAddress": fmt.Sprintf("%s:%d", nodeIP, s.ProxyHealthPort),
		"metricsBindAddress": fmt.Sprintf("%s:%d", nodeIP, s.ProxyMetricsPort),
		"nodePortAddresses":  addresses,
		"detectLocalMode":    "InterfaceNamePrefix",
		"detectLocal":        object{"interfaceNamePrefix": "cocoon"},
		"conntrack":          object{"maxPerCore": 0, "min": 0, "tcpEstablishedTimeout": "0s", "tcpCloseWaitTimeout": "0s"},
	}
}

func (in *instance) dns(addr string) part {
	config, kubeconfig := in.config("Corefile"), in.config("coredns.kubeconfig")
	ready := fmt.Sprintf("%s:%d", nodeIP, in.settings.DNSReadyPort)
	return part{
		child: child{
			name: partDNS, path: in.opts.Assets.ControlPlane, args: []string{partDNS, "--conf", config},
			log: in.layout.log(partDNS), stop: stopPart,
		},
		prepare: func() error {
			if err := writeKubeconfig(kubeconfig, in.pki, in.settings, partDNS); err != nil {
				return err
			}
			host, err := os.ReadFile(resolvConf)
			if err != nil && !errors.Is(err, os.ErrNotExist) {
				return fmt.Errorf("read the host's name servers: %w", err)
			}
			return atomicfile.WriteFile(config, corefile(in.settings, addr, kubeconfig, host), 0o600)
		},
		ready: func(ctx context.Context) bool { return answers(ctx, "http://"+ready+"/ready") },
	}
}

const resolvConf = "/etc/resolv.conf"

// corefile is CoreDNS's file. Names outside of the cluster are those that the host knows, if it has a name server.
func corefile(s Settings, addr, kubeconfig string, host []byte) []byte {
	var b bytes.Buffer
	fmt.Fprintf(&b, `.:%d {
	bind %s
	errors
	ready %s:%d
	prometheus %s:%d
	kubernetes %s in-addr.arpa ip6.arpa {
		kubeconfig %q
		pods verified
		fallthrough in-addr.arpa ip6.arpa
		ttl 30
	}
	cache 30
`, s.DNSPort, addr, nodeIP, s.DNSReadyPort, nodeIP, s.DNSMetricsPort, clusterDomain, kubeconfig)
	for line := range strings.Lines(string(host)) {
		if f := strings.Fields(line); len(f) > 1 && f[0] == "nameserver" {
			fmt.Fprintf(&b, "\tforward . %s {\n\t\tmax_concurrent 1000\n\t}\n\tloop\n", resolvConf)
			break
		}
	}
	b.WriteString("}\n")
	return b.Bytes()
}
