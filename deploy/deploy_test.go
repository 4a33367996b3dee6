package deploy_test

import (
	"bufio"
	"bytes"
	"io/fs"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"strings"
	"testing"

	"cocoonstack.io/cocoon/internal/testkit/need"
	"cocoonstack.io/cocoon/internal/vm"
)

func run(t *testing.T, name string, args ...string) string {
	t.Helper()
	cmd := exec.Command(name, args...)
	cmd.Env = append(os.Environ(), "BIN="+os.Getenv("DEB_TEST_BIN"), "LC_ALL=C")
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("%s %s: %v\n%s", name, strings.Join(args, " "), err, out)
	}
	return string(out)
}

func write(t *testing.T, path, text string, mode fs.FileMode) {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte(text), mode); err != nil {
		t.Fatal(err)
	}
}

// copyPrograms copies programs of this machine, and the libraries that they load, into root.
func copyPrograms(t *testing.T, root string, programs ...string) {
	t.Helper()
	for _, p := range programs {
		path, err := exec.LookPath(p)
		if err != nil {
			t.Skipf("%s is not here", p)
		}
		files := []string{path}
		for lines := bufio.NewScanner(strings.NewReader(run(t, "ldd", path))); lines.Scan(); {
			for _, word := range strings.Fields(lines.Text()) {
				if strings.HasPrefix(word, "/") {
					files = append(files, word)
				}
			}
		}
		for _, f := range files {
			data, err := os.ReadFile(f)
			if err != nil {
				t.Fatal(err)
			}
			write(t, filepath.Join(root, f), string(data), 0o755)
		}
	}
}

// pack builds a package of that version, with programs that do nothing.
func pack(t *testing.T, version string, which ...string) string {
	t.Helper()
	bin := t.TempDir()
	for _, name := range []string{"cocoon", "cocoond", "capsulectl", "cocoon-container-log", "vk-cocoon", "epoch", "cocoon-up"} {
		write(t, filepath.Join(bin, name), "#!/bin/sh\n# "+version+"\n", 0o755)
	}
	for _, name := range []string{"vmlinux", "initramfs"} {
		write(t, filepath.Join(bin, "guest", name), version, 0o644)
	}
	out := filepath.Join(t.TempDir(), "cocoon.deb")
	t.Setenv("DEB_TEST_BIN", bin)
	run(t, "../hack/deb.sh", append([]string{version, out}, which...)...)
	return out
}

// The package is installed in a separate root, upgraded, removed and purged. Files that an admin changed, and VMs, stay.
func TestPackage(t *testing.T) {
	need.Root(t)
	for _, tool := range []string{"dpkg", "dpkg-deb", "systemd-analyze", "ldd", "bash"} {
		if _, err := exec.LookPath(tool); err != nil {
			t.Skipf("%s is not here", tool)
		}
	}
	root := t.TempDir()
	if err := os.Chmod(root, 0o755); err != nil { // the users of the services read it
		t.Fatal(err)
	}
	for _, dir := range []string{"bin", "sbin", "lib", "lib64"} { // the same layout as Debian
		if err := os.MkdirAll(filepath.Join(root, "usr", dir), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.Symlink("usr/"+dir, filepath.Join(root, dir)); err != nil {
			t.Fatal(err)
		}
	}
	copyPrograms(t, root, "sh", "systemd-sysusers", "systemd-tmpfiles")
	for path, text := range map[string]string{"dev/null": "", "var/lib/dpkg/status": "", "var/lib/dpkg/available": "", "etc/passwd": "root:x:0:0::/root:/bin/sh\n", "etc/group": "root:x:0:\n"} {
		write(t, filepath.Join(root, path), text, 0o644)
	}
	for _, dir := range []string{"var/lib/dpkg/info", "var/lib/dpkg/updates", "var/lib/dpkg/triggers", "tmp"} {
		if err := os.MkdirAll(filepath.Join(root, dir), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	at := func(p string) string { return filepath.Join(root, p) }
	dpkg := func(args ...string) {
		run(t, "dpkg", append([]string{"--root=" + root, "--force-depends", "--force-confdef", "--force-confold", "--log=/dev/null"}, args...)...)
	}
	read := func(p string) string {
		data, err := os.ReadFile(at(p))
		if err != nil {
			t.Fatal(err)
		}
		return string(data)
	}
	dpkg("--install", pack(t, "v1.0-3-gabcdef"), pack(t, "v1.0-3-gabcdef", "kube-proxy"))
	if p, g := read("etc/passwd"), read("etc/group"); !strings.Contains(p, "\nvk-cocoon:") || !strings.Contains(p, "\nepoch:") || !strings.Contains(p, "\ncocoon-kube-proxy:") || !strings.Contains(g, "\ncocoon:") || !strings.Contains(g, ":vk-cocoon\n") {
		t.Errorf("users and groups:\n%s%s", p, g)
	}
	if st, err := os.Stat(at("etc/cocoon/vk/tls")); err != nil || st.Mode().Perm() != 0o750 {
		t.Errorf("folder of keys: %v, %v", st, err)
	}
	if st, err := os.Stat(at("etc/cocoon/vk-cocoon.env")); err != nil || st.Mode().Perm() != 0o640 {
		t.Errorf("settings that may hold a token: %v, %v", st, err)
	}
	if _, err := os.Stat(at("etc/systemd/system/multi-user.target.wants")); err == nil {
		t.Error("the installation enabled a service")
	}
	t.Run("udev", func(t *testing.T) { udevRule(t, root) })
	t.Run("units", func(t *testing.T) { units(t, root) })

	write(t, at("etc/cocoon/vk-cocoon.env"), "VK_NODE_NAME=mine\n", 0o640)
	write(t, at("var/lib/cocoon/journal.db"), "vms", 0o600)
	dpkg("--install", pack(t, "v1.1"), pack(t, "v1.1", "kube-proxy"))
	if read("etc/cocoon/vk-cocoon.env") != "VK_NODE_NAME=mine\n" || !strings.Contains(read("usr/local/bin/cocoond"), "v1.1") {
		t.Error("the upgrade kept the old program or lost the settings")
	}
	dpkg("--remove", "cocoon", "cocoon-kube-proxy")
	if _, err := os.Stat(at("usr/local/bin/cocoond")); err == nil {
		t.Error("the removal left the programs")
	}
	dpkg("--purge", "cocoon", "cocoon-kube-proxy")
	if read("var/lib/cocoon/journal.db") != "vms" {
		t.Error("the purge touched VMs")
	}
}

// udevRule checks that the rule of udev is for volumes only, and where udev can use it.
func udevRule(t *testing.T, root string) {
	rules, err := filepath.Glob(filepath.Join(root, "usr/lib/udev/rules.d/*"))
	if err != nil || len(rules) != 1 {
		t.Fatalf("rules of udev: %v, %v", rules, err)
	}
	if name := filepath.Base(rules[0]); name <= "56-lvm.rules" || name >= "60-" {
		t.Errorf("%s is not between the rules that name a volume and those that read it", name)
	}
	text, err := os.ReadFile(rules[0])
	if err != nil {
		t.Fatal(err)
	}
	_, rest, _ := strings.Cut(string(text), `ENV{DM_LV_NAME}=="`)
	pattern, rest, _ := strings.Cut(rest, `", `)
	for name, want := range map[string]bool{"cocoon-" + string(vm.NewID()): true, "cocoon-data": false, "root": false} {
		if got, err := path.Match(pattern, name); err != nil || got != want {
			t.Errorf("the rule is for %s: %v, %v", name, got, err)
		}
	}
	if want := `ENV{DM_UDEV_DISABLE_DISK_RULES_FLAG}="1", ENV{DM_UDEV_DISABLE_OTHER_RULES_FLAG}="1", OPTIONS:="nowatch"` + "\n"; rest != want {
		t.Errorf("the rule does %q, want %q", rest, want)
	}
}

// units checks the units with systemd-analyze, and limits their exposure by systemd's own score (10 is full access).
func units(t *testing.T, root string) {
	for unit, limit := range map[string]string{"cocoond.service": "80", "vk-cocoon.service": "20", "epoch.service": "20", "cocoon-kube-proxy.service": "20"} {
		path := filepath.Join(root, "usr/lib/systemd/system", unit)
		run(t, "systemd-analyze", "security", "--offline=true", "--threshold="+limit, path)
		text, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		// verify requires that the programs exist at the unit's paths.
		local := filepath.Join(t.TempDir(), unit)
		write(t, local, string(bytes.ReplaceAll(text, []byte("/usr/local/"), []byte(root+"/usr/local/"))), 0o644)
		out, err := exec.Command("systemd-analyze", "verify", "--recursive-errors=no", local).CombinedOutput()
		if err != nil || strings.Contains(string(out), unit+":") {
			t.Errorf("%s: %v\n%s", unit, err, out)
		}
		if unit == "cocoon-kube-proxy.service" {
			continue // it is Kubernetes' own program, which does not report to systemd and has no VMs to spare
		}
		for _, want := range []string{"KillMode=process", "Type=notify", "WatchdogSec="} {
			if !strings.Contains(string(text), want) {
				t.Errorf("%s lacks %s", unit, want)
			}
		}
	}
}
