package vkcocoon

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/guest"
	"cocoonstack.io/cocoon/internal/image"
	"cocoonstack.io/cocoon/internal/vm"
)

// idle is a Runtime without VMs.
type idle struct{}

func (idle) Launch(context.Context, vm.Spec) (vm.Record, error) { return vm.Record{}, errNone }
func (idle) Start(context.Context, string) (vm.Record, error)   { return vm.Record{}, errNone }
func (idle) Stop(context.Context, string, time.Duration) (vm.Record, error) {
	return vm.Record{}, errNone
}
func (idle) Pause(context.Context, string) (vm.Record, error)   { return vm.Record{}, errNone }
func (idle) Unpause(context.Context, string) (vm.Record, error) { return vm.Record{}, errNone }
func (idle) Reboot(context.Context, string, bool) (vm.Record, error) {
	return vm.Record{}, errNone
}

func (idle) Resize(context.Context, string, vm.Size) (vm.Record, error) {
	return vm.Record{}, errNone
}

func (idle) DumpMemory(context.Context, string, string, string) error { return nil }

func (idle) AttachVolume(context.Context, string, vm.VolumeUse, string) (vm.Record, error) {
	return vm.Record{}, errNone
}

func (idle) DetachVolume(context.Context, string, string) (vm.Record, error) {
	return vm.Record{}, errNone
}

func (idle) AttachNIC(context.Context, string, vm.NICSpec) (vm.Record, error) {
	return vm.Record{}, errNone
}

func (idle) DetachNIC(context.Context, string, string) (vm.Record, error) {
	return vm.Record{}, errNone
}

func (idle) SetLink(context.Context, string, string, bool) (vm.Record, error) {
	return vm.Record{}, errNone
}
func (idle) Remove(context.Context, string, bool) error         { return errNone }
func (idle) Inspect(context.Context, string) (vm.Record, error) { return vm.Record{}, errNone }

func (idle) KillContainer(context.Context, string, string, int, time.Duration) error { return errNone }

func (idle) ReleaseContainer(context.Context, string, string) error { return errNone }

func (idle) AddContainer(context.Context, string, vm.Container) (vm.Record, error) {
	return vm.Record{}, errNone
}

func (idle) StartContainer(context.Context, string, string) (vm.Record, error) {
	return vm.Record{}, errNone
}

func (idle) RemoveContainer(context.Context, string, string) error { return errNone }

func (idle) ResizeContainers(context.Context, string, map[string]vm.Resources) (vm.Record, error) {
	return vm.Record{}, errNone
}

func (idle) UpdateVolume(context.Context, string, string, []vm.VolumeFile) error { return errNone }

func (idle) Pull(context.Context, image.PullRequest, func(image.Progress)) (image.Image, error) {
	return image.Image{}, errNone
}

func (idle) List(context.Context) ([]vm.Record, error) { return nil, nil }

func (idle) Exec(context.Context, string, guest.Exec, guest.Streams) (int, error) { return 0, errNone }

func (idle) Attach(context.Context, string, guest.Attach, guest.Streams) error { return errNone }

func (idle) Forward(context.Context, string, int, guest.Streams) error { return errNone }

func (idle) Stats(context.Context, string) (guest.Stats, error) { return guest.Stats{}, errNone }

func (idle) Logs(context.Context, string, guest.LogOptions, func(guest.LogEntry) error) error {
	return errNone
}

func (idle) Watch(ctx context.Context, _ int64, _ func(vm.Event) error) error {
	<-ctx.Done()
	return ctx.Err()
}

var errNone = errdefs.NotFoundf("no VMs here")

func TestSettingsByWeight(t *testing.T) {
	env := map[string]string{
		"VK_NODE_NAME": "by-env", "VK_NODE_POOL": "blue", "VK_RESERVE_PERCENT": "5", "VK_KUBELET_PORT": "10300",
		"VK_ORPHAN_POLICY": "destroy", "KUBECONFIG": "/k", "COCOON_SOCKET": "/s", "VK_LOG_LEVEL": "debug", "VK_NODE_MEM": "64Gi",
	}
	o, err := parse([]string{"--node-name", "by-flag", "--kubelet-port=10400"}, func(k string) string { return env[k] }, &bytes.Buffer{})
	if err != nil {
		t.Fatal(err)
	}
	if o.NodeName != "by-flag" || o.KubeletPort != 10400 || o.Pool != "blue" || o.ReservePercent != 5 || o.Orphans != "destroy" ||
		o.Kubeconfig != "/k" || o.Socket != "/s" || o.LogLevel != "debug" || o.Memory != "64Gi" {
		t.Errorf("%+v", o)
	}
	o, err = parse(nil, func(string) string { return "" }, &bytes.Buffer{})
	if err != nil {
		t.Fatal(err)
	}
	if o.NodeName != "cocoon-pool" || o.KubeletPort != 10250 || o.MetricsAddr != "127.0.0.1:9091" || o.ReservePercent != 20 || o.Pods != 256 ||
		o.Orphans != "alert" || o.LeasesPath != "/var/lib/cocoon/net/leases.json" || o.TLSCert != "/etc/cocoon/vk/tls/vk-kubelet.crt" {
		t.Errorf("defaults: %+v", o)
	}
	var help bytes.Buffer
	if code := Main(t.Context(), []string{"--help"}, func(string) string { return "" }, &help, &help); code != 0 {
		t.Errorf("help ended with %d", code)
	}
	for _, s := range new(options).settings() {
		for _, word := range []string{"$" + s.Env, "--" + s.Flag, s.Key + ":"} {
			if !strings.Contains(help.String(), word) {
				t.Errorf("the help does not tell of %s", word)
			}
		}
	}
}

// Every setting can be given in three ways, and the way with the highest priority wins.
func TestEachSettingInThreeWays(t *testing.T) {
	say := map[string][3]string{"string": {"of-file", "of-env", "of-flag"}, "int": {"11", "12", "13"}, "bool": {"true", "false", "true"}}
	for i, s := range new(options).settings() {
		if s.Flag == "" {
			continue // a secret
		}
		values := say[s.Value.Type()]
		path := filepath.Join(t.TempDir(), "vk.yaml")
		if err := os.WriteFile(path, []byte(s.Key+": "+values[0]+"\n"), 0o600); err != nil {
			t.Fatal(err)
		}
		for n, args := range [][]string{{"--config=" + path}, nil, {"--config=" + path, "--" + s.Flag + "=" + values[2]}} {
			env := func(k string) string {
				switch {
				case k == s.Env && n > 0:
					return values[1]
				case k == "VK_CONFIG" && n == 1:
					return path
				}
				return ""
			}
			o, err := parse(args, env, &bytes.Buffer{})
			if err != nil {
				t.Fatalf("%s: %v", s.Flag, err)
			}
			if got := o.settings()[i].Value.String(); got != values[n] {
				t.Errorf("%s by way %d is %q, not %q", s.Flag, n, got, values[n])
			}
		}
	}
}

// The documented variables have the documented defaults. EPOCH_URL is an exception; docs/compat.md gives the reasons.
func TestDocumentedDefaults(t *testing.T) {
	want := map[string]string{
		"KUBECONFIG": "", "VK_NODE_NAME": "cocoon-pool", "VK_LOG_LEVEL": "info", "EPOCH_URL": "", "EPOCH_CA_CERT": "", "VK_COCOON_BIN": "/usr/local/bin/cocoon",
		"VK_LEASES_PATH": "/var/lib/cocoon/net/leases.json", "VK_ORPHAN_POLICY": "alert",
		"VK_NODE_IP": "", "VK_NODE_POOL": "default", "VK_PROVIDER_ID": "", "VK_TLS_CERT": "/etc/cocoon/vk/tls/vk-kubelet.crt",
		"VK_TLS_KEY": "/etc/cocoon/vk/tls/vk-kubelet.key", "VK_METRICS_ADDR": "127.0.0.1:9091", "VK_RESERVE_PERCENT": "20",
		"VK_NODE_CPU": "", "VK_NODE_MEM": "", "VK_NODE_STORAGE": "", "VK_NODE_HUGEPAGES": "", "VK_NODE_PODS": "256",
	}
	for _, s := range new(options).settings() {
		if d, ok := want[s.Env]; ok && d != s.Default {
			t.Errorf("%s is %q by default, not %q", s.Env, s.Default, d)
		}
		delete(want, s.Env)
	}
	if len(want) > 0 {
		t.Errorf("nobody reads %v", want)
	}
}

func TestBadSettings(t *testing.T) {
	for _, args := range [][]string{
		{"--reserve-percent=101"},
		{"--node-name=Not_A_Name"},
		{"--node-ip=300.1.1.1"},
		{"--kubelet-port=70000"},
		{"--node-cpu=many"},
		{"--node-pods=-1"},
		{"--metrics-addr=nowhere"},
		{"--static-forward-networks=10.0.0.1/8"},
		{"--static-forward-networks=10.0.0.0/8,here"},
		{"--orphan-policy=eat"},
		{"--epoch-url=ftp://epoch"},
		{"--epoch-url=http://me:secret@epoch"},
		{"--epoch-url=http://epoch?x=1"},
		{"--peers=nowhere"},
		{"--peers=node-2:0"},
		{"--log-level=loud"},
		{"--what"},
		{"--no-role=maybe"},
		{"--runtime=guess"},
		{"--config=/dev/null"},
		{"stray"},
	} {
		var out bytes.Buffer
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		args = append(args, "--kubeconfig="+kubeconfig(t, "http://127.0.0.1:1"))
		if code := Main(ctx, args, func(string) string { return "" }, &out, &out); code != 2 {
			t.Errorf("%v ended with %d: %s", args, code, out.String())
		}
		if n := strings.Count(strings.TrimSpace(out.String()), "\n"); n > 0 && !strings.Contains(out.String(), "Usage") && strings.Count(out.String(), "vk-cocoon:") != 1 {
			t.Errorf("%v is not answered by one sentence: %s", args, out.String())
		}
		cancel()
	}
	var out bytes.Buffer
	if code := Main(t.Context(), nil, func(k string) string { return map[string]string{"VK_NODE_PODS": "x"}[k] }, &out, &out); code != 2 {
		t.Errorf("a variable that is no number: %d %s", code, out.String())
	}
	out.Reset()
	if code := Main(t.Context(), []string{"--kubeconfig=/does/not/exist"}, func(string) string { return "" }, &out, &out); code != 1 || !strings.Contains(out.String(), "/does/not/exist") {
		t.Errorf("no kubeconfig: %d %s", code, out.String())
	}
}

func TestPublicRepositories(t *testing.T) {
	for list, want := range map[string]string{
		"": "", " , ": "", "base": "base", "team/base, team/,,v1.2/a_b": "team/base team/ v1.2/a_b",
	} {
		r, err := Config{PublicRepositories: list}.registry()
		if got := strings.Join(r.Public, " "); err != nil || got != want {
			t.Errorf("%q is %q, %v", list, got, err)
		}
	}
	kubeconfig := filepath.Join(t.TempDir(), "kubeconfig")
	text := "{apiVersion: v1, kind: Config, current-context: c, contexts: [{name: c, context: {cluster: c, user: u}}], " +
		"clusters: [{name: c, cluster: {server: 'http://127.0.0.1:1'}}], users: [{name: u, user: {}}]}"
	if err := os.WriteFile(kubeconfig, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, bad := range []string{
		"/", "//", "team//", "/team", "team//base", "base:v2", "team/:v2", "base@sha256:abc", "http://epoch/base", "epoch:8080/base", "*", "team/*", "te am", "base;other", "-base", "base,..",
	} {
		if r, err := (Config{PublicRepositories: bad}).registry(); !errdefs.IsInvalid(err) || !strings.Contains(err.Error(), "public repository") {
			t.Errorf("%q is taken: %q, %v", bad, r.Public, err)
		}
		env := map[string]string{"VK_PUBLIC_REPOSITORIES": bad, "KUBECONFIG": kubeconfig}
		var out bytes.Buffer
		ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second) // for a port that is taken
		code := Main(ctx, nil, func(k string) string { return env[k] }, &out, &out)
		cancel()
		if code == 0 || !strings.Contains(out.String(), "public repository") {
			t.Errorf("a start with %q: %d %s", bad, code, out.String())
		}
	}
	for value, want := range map[string]bool{"": false, "true": true, "false": false} {
		o, err := parse(nil, func(k string) string {
			return map[string]string{"VK_TRUST_OLD_SNAPSHOTS": value, "VK_PUBLIC_REPOSITORIES": "base"}[k]
		}, &bytes.Buffer{})
		if err != nil {
			t.Fatal(err)
		}
		if r, err := o.registry(); err != nil || r.TrustOld != want || strings.Join(r.Public, " ") != "base" {
			t.Errorf("trust %q: %+v, %v", value, r, err)
		}
	}
	if _, err := parse(nil, func(k string) string { return map[string]string{"VK_TRUST_OLD_SNAPSHOTS": "perhaps"}[k] }, &bytes.Buffer{}); err == nil {
		t.Error("VK_TRUST_OLD_SNAPSHOTS=perhaps is taken")
	}
}

func TestWhereSnapshotsAreKept(t *testing.T) {
	dir := t.TempDir()
	token, empty, ca := filepath.Join(dir, "token"), filepath.Join(dir, "empty"), filepath.Join(dir, "ca")
	for path, text := range map[string]string{token: "from-file\n", empty: "\n", ca: "no certificate"} {
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	for url, want := range map[string]string{"": "", "http://epoch:8080/": "http://epoch:8080", "epoch.example/team": "epoch.example/team"} {
		r, err := Config{EpochURL: url, EpochTokenFile: token, Peers: "node-2:7777, node-3:7777,"}.registry()
		if err != nil || r.URL != want || r.Auth.Token != "from-file" || strings.Join(r.Peers, " ") != "node-2:7777 node-3:7777" {
			t.Errorf("%q: %+v, %v", url, r, err)
		}
	}
	if r, err := (Config{EpochToken: "from-env", EpochTokenFile: token}).registry(); err != nil || r.Auth.Token != "from-env" {
		t.Errorf("%v", err)
	}
	for _, c := range []Config{{EpochTokenFile: empty}, {EpochTokenFile: "/does/not/exist"}, {EpochToken: "two words"}, {EpochCACert: ca}, {EpochURL: "http://me:hunter2@epoch"}} {
		_, err := c.registry()
		if err == nil || strings.Contains(err.Error(), "hunter2") || strings.Contains(err.Error(), "two words") {
			t.Errorf("%+v: %v", c, err)
		}
	}
	env := map[string]string{"EPOCH_TOKEN": "s3cret", "EPOCH_URL": "http://epoch"}
	o, err := parse(nil, func(k string) string { return env[k] }, &bytes.Buffer{})
	if err != nil || o.EpochToken != "s3cret" || o.EpochURL != "http://epoch" {
		t.Errorf("of the environment: %v", err)
	}
	c := Config{EpochURL: "http://mine"}
	c.Environment(func(k string) string { return "of " + k })
	if c.EpochURL != "http://mine" || c.EpochToken != "of EPOCH_TOKEN" || c.Peers != "of VK_PEERS" {
		t.Errorf("%+v", c)
	}
	text, err := json.Marshal(o.Config)
	if err != nil || bytes.Contains(text, []byte("s3cret")) {
		t.Errorf("the configuration as text holds the token: %v", err)
	}
}

func kubeconfig(t *testing.T, server string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "kubeconfig")
	text := fmt.Sprintf(`{apiVersion: v1, kind: Config, clusters: [{name: c, cluster: {server: %q}}], contexts: [{name: c, context: {cluster: c}}], current-context: c}`, server)
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

func freePort(t *testing.T) (int, net.Listener) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	return l.Addr().(*net.TCPAddr).Port, l
}

func TestATakenPortIsSaid(t *testing.T) {
	port, l := freePort(t)
	defer l.Close()
	n, err := New(Config{Kubeconfig: kubeconfig(t, "http://127.0.0.1:1"), BindAddress: "127.0.0.1", KubeletPort: port, RootDir: t.TempDir()}, idle{}, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	if err := n.Run(t.Context()); !errdefs.IsFailedPrecondition(err) || !strings.Contains(err.Error(), "choose another port") {
		t.Errorf("error %v", err)
	}
}

// The node waits for an API server that answers only errors: it neither gives up nor hangs when it is told to stop.
func TestAnAbsentServerIsWaitedFor(t *testing.T) {
	var asked atomic.Int64
	enough := make(chan struct{})
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		if asked.Add(1) == 4 {
			close(enough)
		}
		http.Error(w, "not yet", http.StatusServiceUnavailable)
	}))
	defer srv.Close()
	port, l := freePort(t)
	l.Close()
	n, err := New(Config{Kubeconfig: kubeconfig(t, srv.URL), BindAddress: "127.0.0.1", KubeletPort: port, RootDir: t.TempDir()}, idle{}, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- n.Run(ctx) }()
	select {
	case <-enough:
	case err := <-ended:
		t.Fatalf("gave up: %v", err)
	case <-time.After(time.Minute):
		t.Fatal("did not ask again")
	}
	cancel()
	select {
	case err := <-ended:
		if err != nil && !errors.Is(err, context.Canceled) {
			t.Error(err)
		}
	case <-time.After(time.Minute):
		t.Fatal("did not stop")
	}
}

func TestNewChecks(t *testing.T) {
	log := slog.New(slog.DiscardHandler)
	if _, err := New(Config{}, nil, log); !errdefs.IsInvalid(err) {
		t.Errorf("without a runtime: %v", err)
	}
	n, err := New(Config{}, idle{}, log)
	if err != nil || n.cfg.NodeName != "cocoon-pool" || n.cfg.KubeletPort != 10250 {
		t.Errorf("%v, %+v", err, n)
	}
}
