package cocoond

import (
	"fmt"
	"io"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"time"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/image"
	"cocoonstack.io/cocoon/internal/settings"
	"cocoonstack.io/cocoon/internal/testkit/settingsdoc"
)

// read reads settings of a file with that text.
func read(t *testing.T, text string, env map[string]string, args ...string) Config {
	t.Helper()
	path := filepath.Join(t.TempDir(), "c.yaml")
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	var cfg Config
	if err := settings.New("cocoond", "COCOOND_CONFIG", cfg.settings()).Parse("", append(args, "--config", path), func(k string) string { return env[k] }, io.Discard); err != nil {
		t.Fatal(err)
	}
	return cfg
}

func TestFlagsWinOverTheFile(t *testing.T) {
	cfg := read(t, "stateDir: /file\nrunDir: /run/file\nlog: {level: warn}\nnetwork: {nat: false, bridge: br9, closed: [10.0.0.0/8], open: [10.1.2.3]}\n",
		map[string]string{"COCOOND_STATE_DIR": "/variable", "COCOOND_NETNS": "of-variable"}, "--state-dir", "/flag", "--subnet", "10.1.0.0/24", "--cni-bin-dir", "/a,/b", "--cni-bin-dir", "/c")
	if err := cfg.complete(); err != nil {
		t.Fatal(err)
	}
	b := cfg.bridge()
	for what, pair := range map[string][2]any{
		"flag over file": {cfg.StateDir, "/flag"}, "file": {cfg.RunDir, "/run/file"}, "variable": {b.NetNS, "of-variable"}, "nested file": {cfg.Log.Level, "warn"},
		"default": {cfg.Log.Format, "text"}, "derived": {cfg.Socket, "/run/file/cocoond.sock"},
		"said false": {b.NAT, false}, "not said": {yes(cfg.Network.Enabled), true}, "bridge": {b.Bridge, "br9"}, "nested flag": {b.Subnet, "10.1.0.0/24"},
		"list":   {strings.Join(cfg.Network.CNI.BinDirs, " "), "/a /b /c"},
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

func TestSnapshotForm(t *testing.T) {
	for text, want := range map[string]string{"": formChunks, "snapshotForm: whole": formWhole} {
		if cfg := read(t, text, nil); cfg.complete() != nil || cfg.SnapshotForm != want {
			t.Errorf("%q: %q", text, cfg.SnapshotForm)
		}
	}
	bad := read(t, "snapshotForm: v1", nil)
	if err := bad.complete(); !errdefs.IsInvalid(err) {
		t.Errorf("a form that does not exist: %v", err)
	}
}

func TestDefaultDriver(t *testing.T) {
	for _, driver := range []string{"qemu", "cloud-hypervisor", "firecracker", "fake"} {
		if cfg := read(t, "driver: "+driver, nil); cfg.complete() != nil || cfg.Driver != driver {
			t.Errorf("%s: %q, %v", driver, cfg.Driver, cfg.complete())
		}
	}
	bad := read(t, "driver: xen", nil)
	if err := bad.complete(); !errdefs.IsInvalid(err) {
		t.Errorf("a driver that does not exist: %v", err)
	}
}

func TestDevices(t *testing.T) {
	cfg := read(t, "volumeDevices: [db=/dev/disk/by-id/x=y]", nil)
	if got, err := cfg.devices(); err != nil || cfg.complete() != nil || len(got) != 1 || got["db"] != "/dev/disk/by-id/x=y" {
		t.Errorf("%v, %v", got, err)
	}
	for _, bad := range []string{"db", "db=", "db=sda", "=/dev/sda", "db=/dev/sda, db=/dev/sdb", "db=/dev/sda, two=/dev/sda", "a/b/c=/dev/sda"} {
		cfg := read(t, "volumeDevices: ["+bad+"]", nil)
		if err := cfg.complete(); !errdefs.IsInvalid(err) || !strings.Contains(err.Error(), "volumeDevices") {
			t.Errorf("%s: %v", bad, err)
		}
	}
}

func TestHostPaths(t *testing.T) {
	cfg := read(t, "hostPaths: [/srv/data, prod=/srv/prod, '/mnt/ro:ro']", nil)
	if got, err := cfg.hostPaths(); err != nil || cfg.complete() != nil || len(got) != 3 || got[1].Namespace != "prod" || !got[2].ReadOnly {
		t.Errorf("%v, %v", got, err)
	}
	for _, bad := range []string{"srv", "/srv/../etc", "/srv/, /mnt", "/srv, /srv", "=/srv"} {
		cfg := read(t, "hostPaths: ["+bad+"]", nil)
		if err := cfg.complete(); !errdefs.IsInvalid(err) || !strings.Contains(err.Error(), "hostPaths") {
			t.Errorf("%s: %v", bad, err)
		}
	}
}

func TestVolumePool(t *testing.T) {
	cfg := read(t, "volumePool: vg/pool\nvolumePoolWarn: 70", nil)
	if err := cfg.complete(); err != nil || cfg.VolumePool != (VolumePool{Name: "vg/pool", Warn: 70, Refuse: 90}) {
		t.Errorf("%+v, %v", cfg.VolumePool, err)
	}
	for _, bad := range []string{"volumePool: pool", "volumePool: vg/..", "volumePoolWarn: 95", "volumePoolRefuse: 101", "volumePoolWarn: -1"} {
		cfg := read(t, bad, nil)
		if err := cfg.complete(); !errdefs.IsInvalid(err) || !strings.Contains(err.Error(), "volumePool") {
			t.Errorf("%s: %v", bad, err)
		}
	}
}

func TestImageSettings(t *testing.T) {
	text := "images:\n  mappings: /file\n  downloadProtocol: http\n  regexpTranslation: true\n  stallTimeout: 45s\n" +
		"  registries: {r.example: {mirrors: [m.example], insecure: true}}\n  gc: {interval: 1m, maxAge: 720h, maxSize: 10Gi, high: 70}\n" +
		"  allow: [10.1.0.0/16, files.lan]\n  privateRegistries: false\n  pullCredentialsVerification: AlwaysVerify\n"
	cfg := read(t, text, map[string]string{"VIRTLET_DOWNLOAD_PROTOCOL": "https", "IMAGE_REGEXP_TRANSLATION": "no"}, "--image-regexp-translation", "1")
	if err := cfg.complete(); err != nil {
		t.Fatal(err)
	}
	i := cfg.Images
	for what, pair := range map[string][2]any{
		"file": {i.Mappings, "/file"}, "environment over file": {i.DownloadProtocol, "https"}, "flag over environment": {i.RegexpTranslation, "1"},
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

func TestSettingsAreDocumented(t *testing.T) {
	all := new(Config).settings()
	settingsdoc.Reference(t, "cocoond", all)
	settingsdoc.Example(t, "deploy/systemd/cocoond.env.example", all, "COCOOND_ARGS", "EPOCH_TOKEN", "COCOOND_CONFIG")
}

// Numbers in groups that are read as a whole are texts where a text is expected, and no digit is lost.
func TestNumbersInGroups(t *testing.T) {
	cfg := read(t, "virtualNode: {cpu: 4, nodeName: n1, kubeletPort: 11250}\npool: {size: 4, memory: 9007199254740993}\nqemu: {uidBase: 4000000000}\n", nil)
	if v := cfg.VirtualNode; v == nil || v.CPU != "4" || v.NodeName != "n1" || v.KubeletPort != 11250 || v.MetricsAddr != "" || cfg.Pool.Memory != 1<<53+1 || cfg.QEMU.UIDBase != 4e9 {
		t.Errorf("%+v %+v %+v", v, cfg.Pool, cfg.QEMU)
	}
}

// Each key sets one field, and each field has its key.
func TestEachFieldHasItsKey(t *testing.T) {
	trees := map[string]string{
		"tls": "{cert: a}", "peer": "{ca: a}", "qemu": "{tbSize: 7}", "fake": "{launchMS: 7}", "cloudHypervisor": "{firmware: a}", "firecracker": "{binary: a}", "images.registries": "{h: {insecure: true}}",
		"images.gc": "{high: 7}", "pool": "{size: 7}", "network.routes": "[{to: a}]", "virtualNode": "{}", "cri.size": "{cpus: 7}",
	}
	var bare Config
	settings.Fill(bare.settings())
	free := map[string]bool{}
	leaves("", reflect.ValueOf(bare), func(path, _ string) { free[path] = true })
	for _, s := range bare.settings() {
		value, ok := trees[s.Key]
		switch {
		case ok:
		case s.Value.Type() == "strings":
			value = "[a]"
		case s.Value.Type() == "int":
			value = "7"
		case s.Value.Type() == "string":
			value = "a"
		default:
			value = "true"
		}
		text, end := "", ""
		for part := range strings.SplitSeq(s.Key, ".") {
			text, end = text+"{"+part+": ", end+"}"
		}
		want := map[string]string{}
		leaves("", reflect.ValueOf(bare), func(path, v string) { want[path] = v })
		var changed []string
		leaves("", reflect.ValueOf(read(t, text+value+end+"\n", nil)), func(path, v string) {
			if v != want[path] {
				changed = append(changed, path)
			}
		})
		if len(changed) != 1 || !free[changed[0]] {
			t.Errorf("%s sets %v", s.Key, changed)
			continue
		}
		delete(free, changed[0])
	}
	if len(free) > 0 {
		t.Errorf("no key sets %v", free)
	}
}

// leaves calls f for each field that has a key of its own, with its value as text.
func leaves(path string, v reflect.Value, f func(path, value string)) {
	switch v.Interface().(type) {
	case Config, Guest, NetworkConfig, CNIConfig, Images, VolumePool, CSI, CRI, Appliance, Log:
		for _, field := range reflect.VisibleFields(v.Type()) {
			if field.IsExported() {
				leaves(path+"."+field.Name, v.FieldByIndex(field.Index), f)
			}
		}
	default:
		if v.Kind() == reflect.Pointer && !v.IsNil() {
			v = v.Elem()
		}
		f(path, fmt.Sprintf("%+v", v.Interface()))
	}
}
