package config

import (
	"flag"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

var update = flag.Bool("update", false, "rewrite golden files")

func load(t *testing.T, file string) *Config {
	t.Helper()
	data, err := os.ReadFile(filepath.Join("testdata", file))
	if err != nil {
		t.Fatal(err)
	}
	c, err := Parse(data, "/etc/cocoon")
	if err != nil {
		t.Fatal(err)
	}
	return c
}

func TestArgs(t *testing.T) {
	for _, name := range []string{"minimal", "full"} {
		c := load(t, name+".yaml")
		got := strings.Join(slices.Concat(
			[]string{"etcd"}, c.EtcdArgs(),
			[]string{"kube-apiserver"}, c.APIServerArgs(),
			[]string{"kube-controller-manager"}, c.ControllerManagerArgs(),
			[]string{"kube-scheduler"}, c.SchedulerArgs(),
		), "\n") + "\n"
		golden := filepath.Join("testdata", name+".args")
		if *update {
			if err := os.WriteFile(golden, []byte(got), 0o644); err != nil {
				t.Fatal(err)
			}
		}
		want, err := os.ReadFile(golden)
		if err != nil {
			t.Fatal(err)
		}
		if got != string(want) {
			t.Errorf("%s: flags differ from %s (-update rewrites it):\n%s", name, golden, got)
		}
	}
}

func TestArgsLeaveConfigAlone(t *testing.T) {
	c := load(t, "full.yaml")
	before := maps.Clone(c.APIServer.ExtraArgs)
	first := c.APIServerArgs()
	if !slices.Equal(first, c.APIServerArgs()) || !maps.Equal(before, c.APIServer.ExtraArgs) {
		t.Error("a second call gives something else")
	}
}

func TestParseRefuses(t *testing.T) {
	valid, err := os.ReadFile("testdata/minimal.yaml")
	if err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct{ name, add, want string }{
		{"unknown key", "securPort: 1", "securPort"},
		{"key given twice", "dataDir: other", "already set"},
		{"process-wide flag", "apiServer: {extraArgs: {v: '4'}}", "v applies to the whole process"},
		{"address of etcd", "etcd: {extraArgs: {listen-client-urls: 'http://0.0.0.0:2379'}}", "listen-client-urls"},
		{"dashes", "apiServer: {extraArgs: {--event-ttl: 2h}}", "without dashes"},
		{"bind address", "bindAddress: localhost", "bindAddress"},
		{"advertised loopback", "advertiseAddress: 127.0.0.1", "cannot be the endpoint"},
		{"service range", "serviceCIDR: 10.96.0.0", "serviceCIDR"},
		{"log format", "logFormat: xml", "logFormat"},
		{"socket name", "etcdSocket: /" + strings.Repeat("x", 107), "107"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			_, err := Parse([]byte(string(valid)+tt.add+"\n"), "/")
			if err == nil || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("error %v does not mention %q", err, tt.want)
			}
		})
	}
}

func TestParseReportsAllMissingKeys(t *testing.T) {
	_, err := Parse([]byte("securePort: 6443"), "/")
	if err == nil {
		t.Fatal("accepted")
	}
	for _, key := range []string{
		"dataDir", "pki.serving.cert", "pki.frontProxy.client.key", "pki.serviceAccount.publicKeys", "scheduler.kubeconfig",
	} {
		if !strings.Contains(err.Error(), key+" is required") {
			t.Errorf("error does not mention %s: %v", key, err)
		}
	}
}

func TestExternalSchedulerNeedsNoKubeconfig(t *testing.T) {
	valid, err := os.ReadFile("testdata/minimal.yaml")
	if err != nil {
		t.Fatal(err)
	}
	without := strings.Replace(string(valid), "scheduler:\n  kubeconfig: scheduler.kubeconfig\n", "", 1)
	if _, err := Parse([]byte(without), "/"); err == nil {
		t.Error("a control plane without a scheduler is taken by mistake")
	}
	if _, err := Parse([]byte(without+"externalScheduler: true\n"), "/"); err != nil {
		t.Error(err)
	}
}

func TestAdvertisesTheBoundAddress(t *testing.T) {
	valid, err := os.ReadFile("testdata/minimal.yaml")
	if err != nil {
		t.Fatal(err)
	}
	for bind, want := range map[string]string{
		"192.0.2.1": "192.0.2.1", "127.0.0.1": "", "0.0.0.0": "", "169.254.1.1": "", "2001:db8::1": "2001:db8::1",
	} {
		c, err := Parse([]byte(string(valid)+"bindAddress: \""+bind+"\"\n"), "/")
		if err != nil {
			t.Fatal(err)
		}
		if c.AdvertiseAddress != want {
			t.Errorf("bound to %s, advertises %q, want %q", bind, c.AdvertiseAddress, want)
		}
	}
}

func TestLoadResolvesPathsAgainstFile(t *testing.T) {
	data, err := os.ReadFile("testdata/minimal.yaml")
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	file := filepath.Join(dir, "config.yaml")
	if err := os.WriteFile(file, data, 0o600); err != nil {
		t.Fatal(err)
	}
	c, err := Load(file)
	if err != nil {
		t.Fatal(err)
	}
	if want := filepath.Join(dir, "pki/ca.crt"); c.PKI.ServingCA != want {
		t.Errorf("servingCA = %s, want %s", c.PKI.ServingCA, want)
	}
}
