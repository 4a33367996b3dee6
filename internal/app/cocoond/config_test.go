package cocoond

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/spf13/pflag"

	"cocoonstack.io/cocoon/internal/errdefs"
)

func TestFlagsWinOverTheFile(t *testing.T) {
	path := filepath.Join(t.TempDir(), "c.yaml")
	if err := os.WriteFile(path, []byte("stateDir: /file\nrunDir: /run/file\nlog: {level: warn}\nnetwork: {nat: false, bridge: br9}\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	cfg, err := load(path)
	if err != nil {
		t.Fatal(err)
	}
	var flags Config
	fs := pflag.NewFlagSet("", pflag.ContinueOnError)
	flags.flags(fs)
	if err := fs.Parse([]string{"--state-dir", "/flag", "--subnet", "10.1.0.0/24"}); err != nil {
		t.Fatal(err)
	}
	if err := override(&cfg, fs); err != nil {
		t.Fatal(err)
	}
	if err := cfg.complete(); err != nil {
		t.Fatal(err)
	}
	b := cfg.bridge()
	for what, pair := range map[string][2]any{
		"flag over file": {cfg.StateDir, "/flag"}, "file": {cfg.RunDir, "/run/file"}, "nested file": {cfg.Log.Level, "warn"},
		"default": {cfg.Log.Format, "text"}, "derived": {cfg.Socket, "/run/file/cocoond.sock"},
		"said false": {b.NAT, false}, "not said": {yes(cfg.Network.Enabled), true}, "bridge": {b.Bridge, "br9"}, "nested flag": {b.Subnet, "10.1.0.0/24"},
	} {
		if pair[0] != pair[1] {
			t.Errorf("%s: got %v, want %v", what, pair[0], pair[1])
		}
	}
}

func TestMetricsStayOnLoopback(t *testing.T) {
	for addr, ok := range map[string]bool{
		"": true, "127.0.0.1:9090": true, "localhost:0": true, "[::1]:1": true,
		":9090": false, "0.0.0.0:9090": false, "10.0.0.1:1": false, "[::]:1": false, "127.0.0.1": false, "example.org:80": false,
	} {
		if err := loopback(addr); (err == nil) != ok || err != nil && !errdefs.IsInvalid(err) {
			t.Errorf("loopback(%q): %v", addr, err)
		}
	}
}
