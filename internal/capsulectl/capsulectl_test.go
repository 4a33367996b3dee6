package capsulectl_test

import (
	"archive/tar"
	"bytes"
	"crypto/ed25519"
	"crypto/x509"
	"encoding/json"
	"encoding/pem"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	capsulev1 "cocoonstack.io/cocoon/api/capsule/v1"
	"cocoonstack.io/cocoon/internal/capsulectl/config"
	"cocoonstack.io/cocoon/internal/capsulewire"
	"cocoonstack.io/cocoon/internal/mdns"
)

func has(t *testing.T, text string, parts ...string) {
	t.Helper()
	for _, p := range parts {
		if !strings.Contains(text, p) {
			t.Errorf("%q is not in:\n%s", p, text)
		}
	}
}

func write(t *testing.T, text string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "f.yaml")
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

func TestAdopt(t *testing.T) {
	m := newMachine(t)
	o := newOperator(t)
	o.fails(2, "--capsule HOST", "adopt")
	o.fails(3, "capsulectl adopt --capsule HOST", "whoami")
	o.fails(130, "the answer was not yes", "--capsule", m.addr, "adopt")
	o.fails(5, "not "+strings.Repeat("0", 64), "--capsule", m.addr, "adopt", "--fingerprint", strings.Repeat("0", 64))
	if entries, err := os.ReadDir(o.env["CAPSULE_CONFIG_DIR"]); err != nil || len(entries) != 0 {
		t.Errorf("something is kept before the operator agreed: %v, %v", entries, err)
	}
	o.stdin = "yes\nmore"
	code, out, errOut := o.run("--capsule", m.addr, "adopt")
	if code != 0 {
		t.Fatalf("%d: %s", code, errOut)
	}
	has(t, errOut, "Compare it with the screen", m.fingerprint[:2]+":"+m.fingerprint[2:4])
	has(t, out, "127.0.0.1 is adopted", capsuleID)
	has(t, o.ok("whoami"), "role        admin", capsuleID)
	has(t, o.ok("context", "list"), "*", "127.0.0.1", m.addr)
	o.ok("--capsule", m.addr, "adopt", "--fingerprint", strings.ToUpper(m.fingerprint)) // again: nothing changes

	other := newOperator(t)
	other.fails(5, "capsulectl key add", "--capsule", m.addr, "adopt", "--yes")
	public := write(t, other.ok("key", "show"))
	has(t, o.ok("key", "list"), "127.0.0.1", "admin")
	kid := strings.TrimSpace(o.ok("key", "add", "--name", "ann", "--role", "operate", public))
	other.ok("--capsule", m.addr, "adopt", "--yes", "--name", "lab")
	has(t, o.ok("key", "list", "-o", "json"), `"name": "ann"`, `"role": "ROLE_OPERATE"`)
	o.fails(2, "view, operate or admin", "key", "add", "--name", "x", "--role", "root", public)
	o.ok("key", "rm", kid)
	o.fails(3, "there is no key", "key", "rm", kid)
	// One kid of 64 begins as a flag does.
	dashed, dashedPublic := "", ed25519.PublicKey(nil)
	for !strings.HasPrefix(dashed, "-") {
		dashedPublic, _, _ = ed25519.GenerateKey(nil)
		dashed = capsulewire.Kid(dashedPublic)
	}
	der, err := x509.MarshalPKIXPublicKey(dashedPublic)
	if err != nil {
		t.Fatal(err)
	}
	o.ok("key", "add", "--name", "eve", "--role", "view", write(t, string(pem.EncodeToMemory(&pem.Block{Type: "PUBLIC KEY", Bytes: der}))))
	o.ok("key", "rm", dashed, "--capsule", m.addr)
	o.fails(3, "there is no key", "key", "rm", dashed)
	o.fails(2, "unknown shorthand", "key", "rm", "-"+strings.Repeat("c", 44))

	another := newMachine(t)
	o.fails(4, "choose another --name", "--capsule", another.addr, "adopt", "--yes", "--name", "127.0.0.1")
	o.ok("--capsule", another.addr, "adopt", "--yes", "--name", "two")
	o.ok("context", "use", "127.0.0.1")
	has(t, o.ok("context", "list", "-o", "json"), `"current": "127.0.0.1"`, `"tls_fingerprint_sha256"`)
	o.ok("context", "rm", "127.0.0.1")
	o.fails(3, "there is no context", "context", "use", "127.0.0.1")
	o.fails(3, "no machine is named", "whoami")
	o.env["CAPSULE_HOST"] = another.addr
	o.ok("whoami")
}

func TestWhoIsThere(t *testing.T) {
	m := newMachine(t)
	o := adopted(t, m)
	dir := o.env["CAPSULE_CONFIG_DIR"]
	change := func(fn func(x *config.Context)) {
		t.Helper()
		err := config.Update(t.Context(), dir, func(c *config.Config) error { x := c.Contexts["lab"]; fn(&x); c.Contexts["lab"] = x; return nil })
		if err != nil {
			t.Fatal(err)
		}
	}
	m.denied = "KeyAdd"
	o.fails(5, "an operator with the role admin", "key", "add", "--name", "x", write(t, o.ok("key", "show")))
	change(func(x *config.Context) { x.TLSFingerprint = strings.Repeat("0", 64) })
	o.fails(5, "is not the machine that was adopted", "whoami")
	change(func(x *config.Context) { x.TLSFingerprint, x.CapsuleID = m.fingerprint, "other" })
	o.fails(5, "does not accept this key", "whoami")
	change(func(x *config.Context) { x.Addr = "127.0.0.1:1" })
	o.fails(6, "lab cannot be reached at 127.0.0.1:1", "whoami")
	change(func(x *config.Context) { x.TLSFingerprint = "x" })
	o.fails(2, "adopt it again", "whoami")
}

func TestApply(t *testing.T) {
	m := newMachine(t)
	o := adopted(t, m)
	file := write(t, "name: web\nkind: Container\ncontainer:\n  image: one\n---\nname: data\nkind: Volume\nsize: 1GiB\n")
	if got := o.ok("apply", "-f", file, "--dry-run"); got != "Volume data: created (dry run)\nContainer web: created (dry run)\n" || len(m.workloads)+len(m.volumes) != 0 {
		t.Errorf("dry run: %s", got)
	}
	if got := o.ok("apply", "-f", file, "--wait"); got != "Volume data: created\nContainer web: created\n" {
		t.Errorf("got %s", got)
	}
	if got := o.ok("apply", "-f", file); got != "Volume data: unchanged\nContainer web: unchanged\n" {
		t.Errorf("again: %s", got)
	}
	o.stdin = "name: web\nkind: Container\ncontainer:\n  image: two\n---\nname: data\nkind: Volume\nsize: 2GiB\n"
	if got := o.ok("apply", "-f", "-"); got != "Volume data: changed\n  size: 1G -> 2G\nContainer web: changed\n  container.image: \"one\" -> \"two\"\n  hostname: (unset) -> \"h\"\n" {
		t.Errorf("changed: %s", got)
	}
	o.fails(2, "volumes do not shrink", "apply", "-f", file)
	o.fails(2, "line 4: container.imgae: there is no such field; is it image?", "apply", "-f", write(t, "name: web\nkind: Container\ncontainer:\n  imgae: x\n"))
	o.fails(5, "apply Container web: port 80", "apply", "-f", write(t, "name: web\nkind: Container\ncontainer:\n  image: conflict\n"))
	o.fails(2, "read the manifest", "apply", "-f", "missing.yaml")
	has(t, o.ok("workload", "get", "web"), `"image": "two"`, `"phase": "WORKLOAD_PHASE_RUNNING"`)
	o.stdin = o.ok("workload", "get", "web")
	has(t, o.ok("apply", "-f", "-"), "Container web: unchanged")
}

func TestApplyWaits(t *testing.T) {
	m := newMachine(t)
	o := adopted(t, m)
	file := write(t, "name: web\nkind: Container\ncontainer: {image: x}\nrestartPolicy: never\n")
	asked := 0
	m.prepares(func(w *capsulev1.Workload) {
		asked++
		s := w.GetStatus()
		s.Ready = asked > 3
		if asked == 1 {
			s.ObservedGeneration, s.Ready = 0, true // of what it was before
		}
	})
	o.ok("apply", "-f", file, "--wait")
	if asked != 4 || len(o.slept) != 3 {
		t.Errorf("asked %d times, %v", asked, o.slept)
	}
	m.prepares(func(w *capsulev1.Workload) {
		w.Status = &capsulev1.WorkloadStatus{
			Phase: capsulev1.WorkloadPhase_WORKLOAD_PHASE_FAILED, ObservedGeneration: w.GetGeneration(), FinishedAtUnix: 5, Reason: "Error", Message: "exit code 1",
		}
	})
	o.fails(5, "web has ended: failed, Error: exit code 1", "apply", "-f", file, "--wait")
	m.prepares(func(w *capsulev1.Workload) { w.Status.Ready, w.Status.Reason = false, "Pulling" })
	o.fails(124, "web is not ready", "apply", "-f", file, "--wait", "--timeout", "1ms")
	m.prepares(func(w *capsulev1.Workload) {
		w.Status = &capsulev1.WorkloadStatus{Phase: capsulev1.WorkloadPhase_WORKLOAD_PHASE_STOPPED, ObservedGeneration: w.GetGeneration(), Reason: "Completed", ExitCode: new(int32)}
	})
	o.ok("apply", "-f", file, "--wait")
}

func TestWorkload(t *testing.T) {
	m := newMachine(t)
	o := adopted(t, m)
	o.stdin = "name: web\nkind: Container\ncontainer: {image: nginx}\n---\nname: vm\nkind: MicroVM\nmicroVm: {kernelPath: /k, rootfsPath: /r}\n"
	o.ok("apply", "-f", "-")
	has(t, o.ok("workload", "list"), "NAME", "web    Container   nginx", "vm     MicroVM     /r")
	var list []struct{ Name string }
	if err := json.Unmarshal([]byte(o.ok("workload", "ls", "-o", "json")), &list); err != nil || len(list) != 2 {
		t.Errorf("%v, %v", list, err)
	}
	o.ok("workload", "stop", "web", "vm")
	o.ok("workload", "start", "web")
	o.ok("workload", "restart", "web")
	o.fails(3, "there is no workload none", "workload", "delete", "none", "web")
	if want := []string{"stop web", "stop vm", "start web", "restart web", "delete web"}; !slices.Equal(m.calls, want) {
		t.Errorf("calls %q", m.calls)
	}
	if got := o.ok("workload", "logs", "-f", "-n", "5", "web"); got != "web LOG_SOURCE_PAYLOAD true 5\n" {
		t.Error(got)
	}
	has(t, o.ok("workload", "logs", "--serial", "vm"), "LOG_SOURCE_SERIAL")
	if got := o.ok("workload", "events", "web", "--after", "6"); got != "7  2026-09-21T14:13:20Z  web  Started  it runs \n" {
		t.Errorf("%q", got)
	}
	has(t, o.ok("workload", "events", "-o", "json"), `"sequence": "1"`)
	has(t, o.ok("__complete", "workload", "logs", ""), "vm\n")
	has(t, o.ok("__complete", "--capsule", ""), "lab\n")
}

func TestExec(t *testing.T) {
	o := adopted(t, newMachine(t))
	if got := o.ok("workload", "exec", "-e", "A=b", "web", "--", "echo", "-n", "x"); got != "-n x b\n" {
		t.Errorf("%q", got)
	}
	code, out, errOut := o.run("workload", "exec", "web", "--", "exit", "42")
	if code != 42 || out != "" || errOut != "to stderr\n" {
		t.Errorf("%d %q %q", code, out, errOut)
	}
	o.stdin = strings.Repeat("0123456789", 20_000)
	if got := o.ok("workload", "exec", "-i", "web", "--", "cat"); got != o.stdin {
		t.Errorf("%d bytes came back", len(got))
	}
	if got := o.ok("workload", "exec", "-it", "web", "cat"); got != o.stdin {
		t.Errorf("%d bytes came back with a terminal", len(got))
	}
	if got := o.ok("workload", "exec", "-n", "web", "--", "cat"); got != "" {
		t.Errorf("without input: %q", got)
	}
	o.fails(1, "without an exit code", "workload", "exec", "web", "--", "vanish")
	o.fails(2, "put -- before that command", "workload", "exec", "web", "ls", "-l")
	o.fails(2, "NAME=VALUE", "workload", "exec", "-e", "A", "web", "--", "echo")
}

func TestCopy(t *testing.T) {
	m := newMachine(t)
	o := adopted(t, m)
	src := t.TempDir()
	if err := os.MkdirAll(filepath.Join(src, "assets", "img"), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(src, "assets", "a"), []byte("x"), 0o600); err != nil {
		t.Fatal(err)
	}
	o.ok("cp", filepath.Join(src, "assets"), "web:/srv/")
	if want := []string{"web:/srv/", "assets/", "assets/a", "assets/img/"}; !slices.Equal(m.copied, want) {
		t.Errorf("copied %q", m.copied)
	}
	for _, tc := range [][]string{{"a", "b"}, {"a:/x", "b:/y"}, {"web:etc", "."}, {src, "web:x"}, {"/", "web:/x"}, {"web:/", "."}, {"./nothing", "web:/x"}} {
		o.fails(2, "", append([]string{"cp"}, tc...)...)
	}
	var archive bytes.Buffer
	w := tar.NewWriter(&archive)
	for _, h := range []tar.Header{
		{Name: "etc/", Typeflag: tar.TypeDir, Mode: 0o755},
		{Name: "etc/f", Typeflag: tar.TypeReg, Mode: 0o600, Size: 3000},
		{Name: "etc/evil", Typeflag: tar.TypeSymlink, Linkname: "/etc/passwd"},
	} {
		if err := w.WriteHeader(&h); err != nil {
			t.Fatal(err)
		}
		if _, err := w.Write(bytes.Repeat([]byte("y"), int(h.Size))); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	m.sends = archive.Bytes()
	dst := t.TempDir()
	for arg, file := range map[string]string{dst: "etc/f", dst + "/copy": "copy/f", dst + "/new/": "new/etc/f"} {
		_, _, errOut := o.run("cp", "web:/etc", arg)
		has(t, errOut, "etc/evil is left out")
		if data, err := os.ReadFile(filepath.Join(dst, file)); err != nil || len(data) != 3000 {
			t.Errorf("%s: %d bytes, %v", file, len(data), err)
		}
	}
	o.fails(3, "there is no /missing", "cp", "web:/missing", dst+"/made")
	if _, err := os.Stat(dst + "/made"); err == nil {
		t.Error("a folder was made for nothing")
	}
	o.fails(1, "tar failed", "cp", "web:/broken/etc", dst+"/b")
	m.sends = m.sends[:1000]
	o.fails(1, "unexpected EOF", "cp", "web:/etc", dst+"/c")
}

func TestVolumesAndImages(t *testing.T) {
	o := adopted(t, newMachine(t))
	has(t, o.ok("volume", "create", "--size", "1GiB", "data"), "data  1G  /dev/x/data")
	o.ok("volume", "create", "small", "--size", "64")
	o.fails(4, "there is a volume data", "volume", "create", "data")
	o.fails(2, "not from 32 MiB", "volume", "create", "x", "--size", "1K")
	has(t, o.ok("volume", "list"), "data    1G", "small   64M")
	has(t, o.ok("volume", "get", "data"), `"sizeBytes": "1073741824"`)
	has(t, o.ok("volume", "resize", "data", "2G"), "data  2G")
	o.fails(5, "web names the volume", "volume", "delete", "data")
	o.ok("volume", "delete", "--force", "data")
	has(t, o.ok("volume", "list", "-o", "json"), `"small"`)

	o.stdin = strings.Repeat("x", 3<<20)
	if got := o.ok("image", "push", "-"); got != "app:dev\n" {
		t.Error(got)
	}
	o.ok("image", "push", write(t, "tar"))
	o.fails(2, "read missing.tar", "image", "push", "missing.tar")
	has(t, o.ok("image", "list"), "app:dev   sha256:abcdef012345   1M")
}

func TestMachine(t *testing.T) {
	m := newMachine(t)
	o := adopted(t, m)
	has(t, o.ok("capsule", "info"), "hostname         lab", "memory           3G of 4G used (75%)", "up               1h1m1s", "s from here)")
	has(t, o.ok("capsule", "info", "-o", "json"), `"capsuleVersion": "v1"`)
	m.infos = []*capsulev1.GetInfoResponse{{PendingSlot: "slot_b", PendingDeadlineUnix: 1600, LocalTimeUnix: 1000}}
	has(t, o.ok("capsule", "info"), "slot_b, goes back in 10m0s without")
	has(t, o.ok("capsule", "logs", "-f", "-n", "3"), "daemon true 3")
	has(t, o.ok("capsule", "audit"), "ann", "192.0.2.1", "bob [2J", "PermissionDenied")
	if got := o.ok("capsule", "audit", "-n", "1"); strings.Contains(got, "ann") {
		t.Error(got)
	}
	has(t, o.ok("capsule", "reboot"), "lab: reboots")
	code, out, errOut := o.run("capsule", "debug", "--", "exit", "3")
	if code != 3 || out != "" {
		t.Errorf("%d %q %q", code, out, errOut)
	}
	if len(m.workloads) != 0 {
		t.Error("the debug container is still there")
	}
	o.ok("capsule", "debug", "--keep", "-i", "tools", "--", "echo", "x")
	if w := m.workloads["capsule-debug"]; !w.GetContainer().GetPrivileged() || w.GetContainer().GetImage() != "tools" {
		t.Errorf("%v", w)
	}
}

func TestUpdate(t *testing.T) {
	m := newMachine(t)
	o := adopted(t, m)
	bundle := write(t, strings.Repeat("bundle", 400_000))
	has(t, o.ok("capsule", "update", "push", bundle), "boots v2 from slot_b", "capsule update confirm")
	m.pushed = 0
	o.fails(2, "the bundle has no signature", "capsule", "update", "push", write(t, "unsigned"+strings.Repeat("x", 8<<20)))
	old := &capsulev1.GetInfoResponse{ActiveSlot: "slot_a", PendingSlot: "slot_b"}
	trial := &capsulev1.GetInfoResponse{ActiveSlot: "slot_b", PendingSlot: "slot_b"}
	back := &capsulev1.GetInfoResponse{ActiveSlot: "slot_a"}

	for name, tc := range map[string]struct {
		infos []*capsulev1.GetInfoResponse
		code  int
		says  string
	}{
		"good":             {[]*capsulev1.GetInfoResponse{old, nil, nil, trial, trial, trial, trial}, 0, "keeps v2"},
		"went back":        {[]*capsulev1.GetInfoResponse{old, nil, back, back}, 5, "it went back"},
		"dies in the soak": {[]*capsulev1.GetInfoResponse{trial, trial, nil}, 6, "stopped answering"},
		"leaves":           {[]*capsulev1.GetInfoResponse{trial, back}, 5, "it left the new system"},
		"never comes":      {make([]*capsulev1.GetInfoResponse, 200), 124, "did not come back"},
	} {
		m.pushed, m.infos, m.confirmed, o.slept = 0, tc.infos, false, nil
		code, out, errOut := o.run("capsule", "update", "push", bundle, "--auto-confirm=12")
		if code != tc.code || !strings.Contains(out+errOut, tc.says) || m.confirmed != (tc.code == 0) {
			t.Errorf("%s: %d %s%s", name, code, out, errOut)
		}
		if name == "good" && !slices.Equal(o.slept[3:], []time.Duration{5 * time.Second, 5 * time.Second, 2 * time.Second}) {
			t.Errorf("it watched for %v", o.slept)
		}
	}
	has(t, o.ok("capsule", "update", "confirm"), "lab keeps v2 in slot_b")
	o.fails(2, "read the bundle", "capsule", "update", "push", "missing.tar")
}

func TestDiscover(t *testing.T) {
	m := newMachine(t)
	o := adopted(t, m)
	if _, _, errOut := o.run("discover"); !strings.Contains(errOut, "No machine answered") {
		t.Error(errOut)
	}
	o.found = []mdns.Entry{
		{Instance: "lab", Addr: m.addr, CapsuleID: capsuleID, ShortID: "capsule-a3f2", Adopted: true, Mode: mdns.ModeRuntime},
		{Instance: "new", Addr: "127.0.0.1:1", CapsuleID: "2", ShortID: "capsule-0002", Mode: mdns.ModeRuntime},
		{Instance: "usb", Addr: m.addr, CapsuleID: "3", ShortID: "capsule-0003", Mode: mdns.ModeInstaller, TargetDisk: "/dev/sda", TargetSize: 1 << 40},
		{Instance: "two", Addr: m.addr, CapsuleID: "4", ShortID: "capsule-0004", Mode: mdns.ModeInstaller, Targets: []string{"/dev/sdb", "/dev/sda"}},
		{Instance: "nil", Addr: m.addr, CapsuleID: "5", ShortID: "capsule-0005", Mode: mdns.ModeInstaller},
	}
	has(t, o.ok("discover"), "installer for /dev/sda, /dev/sdb ", "installer for no disk ", "context lab", m.fingerprint[:2]+":"+m.fingerprint[2:4], "127.0.0.1:1 (no answer)   new", "installer for /dev/sda (1T)")
	var rows []struct {
		Instance    string
		Fingerprint string
		Unreachable bool
	}
	if err := json.Unmarshal([]byte(o.ok("discover", "--json", "--unadopted")), &rows); err != nil || len(rows) != 1 || rows[0].Instance != "new" || !rows[0].Unreachable {
		t.Errorf("%+v, %v", rows, err)
	}
	if got := o.ok("discover", "--installers"); strings.Contains(got, "lab") || !strings.Contains(got, "usb") {
		t.Error(got)
	}
	o.fails(2, "", "discover", "--installers", "--unadopted")
}

func TestInstall(t *testing.T) {
	m := newMachine(t)
	o := newOperator(t)
	o.fails(2, "--addr HOST", "install")
	o.fails(3, "no installer called capsule-a3f2", "install", "capsule-a3f2")
	o.found = []mdns.Entry{{Instance: "usb", Addr: m.addr, CapsuleID: "3", ShortID: "capsule-a3f2", Mode: mdns.ModeInstaller}}
	o.fails(2, "/dev/sda (1T); /dev/sdb", "install", "capsule-a3f2", "--yes", "--target", "/dev/sdc")
	o.fails(130, "the answer was not yes", "install", "capsule-a3f2", "--fingerprint", m.fingerprint)
	o.fails(1, "without a result", "install", "--addr", m.addr, "--yes", "--target", "/dev/sdb", "--no-seal")
	o.stdin = "yes\nyes\n"
	code, out, errOut := o.run("install", "capsule-a3f2", "--name", "lab")
	if code != 0 {
		t.Fatalf("%d %s", code, errOut)
	}
	has(t, errOut, "Compare it", "Everything on /dev/sda (1T)", "verify", "write_slot_a")
	has(t, out, "lab is the current context")
	if want := []string{"install /dev/sdb false ", "install /dev/sda true "}; !slices.Equal(m.calls, want) {
		t.Errorf("%q", m.calls)
	}
	o.ok("whoami")
	o.fails(4, "choose another --name", "install", "capsule-a3f2", "--yes", "--name", "lab")
}

// A disk with data needs --reinstall and the code of the console, a blank one neither.
func TestInstallOverData(t *testing.T) {
	m := newMachine(t)
	m.disks = []*capsulev1.InstallDisk{
		{Path: "/dev/sda", SizeBytes: 1 << 40, Model: "Fast", Serial: "S1", Holds: "an installed Cocoon OS"}, {Path: "/dev/sdb", SizeBytes: 16 << 30},
	}
	o := newOperator(t)
	install := []string{"install", "--addr", m.addr, "--fingerprint", m.fingerprint}
	o.fails(2, "/dev/sda (1T, Fast, S1); /dev/sdb (16G)", append(install, "--target", "/dev/sdc")...)
	o.fails(5, "/dev/sda (1T, Fast, S1) holds an installed Cocoon OS; add --reinstall", append(install, "--yes")...)
	o.fails(2, "--code-file", append(install, "--yes", "--reinstall")...)
	o.fails(2, "read the code", append(install, "--yes", "--reinstall", "--code-file", "missing")...)
	o.stdin = "yes\n \n"
	o.fails(2, "there is no code", append(install, "--reinstall")...)
	if len(m.calls) != 0 {
		t.Errorf("it was installed: %q", m.calls)
	}
	o.stdin = "yes\nABCDE-FGHJK\n"
	code, _, errOut := o.run(append(install, "--reinstall", "--name", "one")...)
	if code != 0 {
		t.Fatal(errOut)
	}
	has(t, errOut, "Everything on /dev/sda (1T, Fast, S1) will be lost; it holds an installed Cocoon OS.")
	m.open = true
	var result struct{ CapsuleID string }
	if err := json.Unmarshal([]byte(o.ok(append(install, "--yes", "--reinstall", "--name", "two", "-o", "json")...)), &result); err != nil || result.CapsuleID != capsuleID {
		t.Errorf("%+v, %v", result, err)
	}
	if want := []string{"install /dev/sda true ABCDE-FGHJK", "install /dev/sda true "}; !slices.Equal(m.calls, want) {
		t.Errorf("%q", m.calls)
	}
}

func TestGrowDisk(t *testing.T) {
	m := newMachine(t)
	o := adopted(t, m)
	m.grown = 16 << 30
	m.infos = []*capsulev1.GetInfoResponse{{DiskTotalBytes: 32 << 30, BootDisk: "/dev/sda", DiskGrowableBytes: 16 << 30}}
	has(t, o.ok("capsule", "info"), "32G /dev/sda, of which 16G are not used: `capsulectl capsule grow-disk`")
	has(t, o.ok("capsule", "grow-disk"), "lab: 16G more; the state has 7G and the pool of volumes 20G")
	has(t, o.ok("capsule", "grow-disk", "--yes", "-o", "json"), `"grownBytes": "17179869184"`)
}

func TestWords(t *testing.T) {
	o := newOperator(t)
	for _, args := range [][]string{{}, {"workload"}, {"capsule", "update"}, {"apply", "--help"}, {"exit-codes"}, {"completion", "bash"}, {"version"}} {
		if got := o.ok(args...); len(got) < 10 {
			t.Errorf("%q: %q", args, got)
		}
	}
	o.fails(2, "unknown command", "wrokload")
	o.fails(2, "unknown flag", "workload", "list", "--nothing")
	o.fails(2, "UTF-8", "workload", "get", "a\xff")
}
