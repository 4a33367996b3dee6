package cocoond

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/spf13/pflag"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/image"
)

func TestFlagsWinOverTheFile(t *testing.T) {
	path := filepath.Join(t.TempDir(), "c.yaml")
	if err := os.WriteFile(path, []byte("stateDir: /file\nrunDir: /run/file\nlog: {level: warn}\nnetwork: {nat: false, bridge: br9, closed: [10.0.0.0/8], open: [10.1.2.3]}\n"), 0o600); err != nil {
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
		"closed": {strings.Join(b.Closed, ","), "10.0.0.0/8"}, "open": {strings.Join(b.Open, ","), "10.1.2.3"},
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

func TestImageSettings(t *testing.T) {
	path := filepath.Join(t.TempDir(), "c.yaml")
	text := "images:\n  mappings: /file\n  downloadProtocol: http\n  regexpTranslation: true\n  stallTimeout: 45s\n" +
		"  registries: {r.example: {mirrors: [m.example], insecure: true}}\n  gc: {interval: 1m, maxAge: 720h, maxSize: 10Gi, high: 70}\n" +
		"  allow: [10.1.0.0/16, files.lan]\n  privateRegistries: false\n  pullCredentialsVerification: AlwaysVerify\n"
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	cfg, err := load(path)
	if err != nil {
		t.Fatal(err)
	}
	cfg.environment(func(name string) string {
		return map[string]string{"VIRTLET_DOWNLOAD_PROTOCOL": "https", "IMAGE_REGEXP_TRANSLATION": "no"}[name]
	})
	var flags Config
	fs := pflag.NewFlagSet("", pflag.ContinueOnError)
	flags.flags(fs)
	if err := fs.Parse([]string{"--image-regexp-translation", "1"}); err != nil {
		t.Fatal(err)
	}
	if err := override(&cfg, fs); err != nil {
		t.Fatal(err)
	}
	if err := cfg.complete(); err != nil {
		t.Fatal(err)
	}
	i := cfg.Images
	for what, pair := range map[string][2]any{
		"file": {i.Mappings, "/file"}, "environment over file": {i.DownloadProtocol, "https"}, "flag over environment": {i.RegexpTranslation, setting("1")},
		"duration": {i.stall, 45 * time.Second}, "interval": {i.every, time.Minute}, "registry": {i.Registries["r.example"].Mirrors[0], "m.example"},
		"networks": {i.reach.URLs.Networks[0].String(), "10.1.0.0/16"}, "hosts": {i.reach.Registries.Hosts[0], "files.lan"},
		"private registries": {i.reach.Registries.Private, false}, "verification": {i.Verification, "AlwaysVerify"},
		"limits": {i.limits, image.GCLimits{MinAge: 2 * time.Minute, MaxAge: 720 * time.Hour, MaxSize: 10 << 30, High: 70, Low: 70}},
	} {
		if pair[0] != pair[1] {
			t.Errorf("%s: %v, want %v", what, pair[0], pair[1])
		}
	}
	for name, bad := range map[string]Images{
		"duration": {StallTimeout: "45"}, "negative": {GC: GC{MinAge: "-1s"}}, "size": {GC: GC{MaxSize: "big"}}, "order": {GC: GC{High: 50, Low: 60}},
		"percent": {GC: GC{High: 101}}, "pulls": {MaxParallelPulls: -1}, "interval": {GC: GC{Interval: "never"}},
		"allow": {Allow: []string{"10.1.2.3/16"}}, "verification": {Verification: "Sometimes"},
	} {
		if err := bad.complete(); !errdefs.IsInvalid(err) {
			t.Errorf("%s: %v", name, err)
		}
	}
	off := Images{GC: GC{Interval: "off"}}
	if err := off.complete(); err != nil || off.every != 0 || off.limits.High != 85 || off.limits.Low != 80 || off.Mappings != DefaultMappings ||
		!off.reach.Registries.Private || off.reach.URLs.Private {
		t.Errorf("%+v, %v", off, err)
	}
}
