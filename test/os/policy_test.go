//go:build os

package appliance

import (
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"cocoonstack.io/cocoon/internal/appliance/bootctl"
	"cocoonstack.io/cocoon/internal/appliance/bundle"
	"cocoonstack.io/cocoon/internal/testkit/need"
)

// info is what the machine says once it says that, or no longer.
func (o *operator) info(words string, said bool) (out string) {
	o.t.Helper()
	o.wait(fmt.Sprintf("what the machine says has %q: %v", words, said), func() bool {
		var err error
		out, err = o.try("capsule", "info")
		return err == nil && strings.Contains(out, words) == said
	})
	return out
}

// A version that may keep itself does so once everything works there, and no operator has to. With the policy both an operator keeps it, but not before everything works.
func TestPolicies(t *testing.T) {
	image := disk(t)
	o, cmd := adoptedDisk(t, image)
	o.do("image", "push", need.Built(t, "bin/demo.tar", "make demo-image"))
	// It is ready by itself at its first start. Later an operator has to see to that.
	o.do("apply", "--wait", "-f", o.file("web.yaml", `name: data
kind: Volume
size: 64MiB
---
name: web
kind: Container
container:
  image: cocoon/demo:latest
  command: [sh, -c]
  args: ["rm -f /ready; [ -e /data/first ] || touch /data/first /ready; exec /usr/bin/server"]
  ports: [{containerPort: 8080, hostPort: 8080}]
  mounts: [{volumeName: data, mountPath: /data}]
readinessProbe: {exec: {command: [sh, -c, "[ -e /ready ]"]}, periodSeconds: 1, timeoutSeconds: 30}
`))
	const failing = "workloads: web ran before the update, and not yet again"
	ready := func() {
		t.Helper()
		o.wait("the workload has started", func() bool { return answers(o.port) })
		o.do("workload", "exec", "web", "--", "touch", "/ready")
	}
	path := filepath.Join(o.dir, "next.tar")

	newer(t, path, "v999.1", func(map[string]string) {})
	begin := time.Now()
	o.m.from = o.m.now()
	o.do("capsule", "update", "push", path, "--policy=auto")
	o.m.wait(o.m.serial, "slot b, files", "10.0.2.15:50000")
	out := o.info(failing, true)
	for _, want := range []string{"active slot      slot_b", "pending slot     slot_b", "unless everything works before"} {
		if !strings.Contains(out, want) {
			t.Errorf("on trial by the policy auto, the machine does not say %q:\n%s", want, out)
		}
	}
	ready()
	out = o.info("pending slot", false)
	t.Logf("%s for an update by the policy auto, from push to kept", time.Since(begin).Round(time.Second))
	if !strings.Contains(out, "active slot      slot_b") || strings.Contains(out, "rolled back") {
		t.Errorf("the machine did not keep what works:\n%s", out)
	}
	if log := o.do("capsule", "audit"); strings.Contains(log, "UpdateConfirm") {
		t.Errorf("somebody has confirmed the update:\n%s", log)
	}

	newer(t, path, "v999.2", func(map[string]string) {})
	begin = time.Now()
	o.m.from = o.m.now()
	o.do("capsule", "update", "push", path, "--policy=both")
	o.m.wait(o.m.serial, "slot a, files", "10.0.2.15:50000")
	out = o.info(failing, true)
	if !strings.Contains(out, "active slot      slot_a") || !strings.Contains(out, "which works when everything does") {
		t.Errorf("on trial by the policy both, the machine says:\n%s", out)
	}
	if out, err := o.try("capsule", "update", "confirm"); err == nil || !strings.Contains(out, "is not kept while this does not hold: "+failing) {
		t.Errorf("confirmed while a workload is not ready: %v, %s", err, out)
	}
	ready()
	if out = o.info("not yet", false); !strings.Contains(out, "pending slot     slot_a") {
		t.Errorf("by the policy both, nobody but an operator keeps an update:\n%s", out)
	}
	if out := o.do("capsule", "update", "confirm"); !strings.Contains(out, "slot_a") {
		t.Errorf("confirmed: %s", out)
	}
	t.Logf("%s for an update by the policy both, from push to kept", time.Since(begin).Round(time.Second))
	if log := o.do("capsule", "audit"); strings.Count(log, "UpdateConfirm") != 2 {
		t.Errorf("two confirmations were asked for:\n%s", log)
	}
	o.m.off(cmd)
	if s := environment(t, image); s.Good != bootctl.A || s.Try != bootctl.None {
		t.Errorf("the environment is %+v", s)
	}
}

// A newer version upgrades the schema of the state, but not while it is on trial. A version before it, which is started instead of it later, has the state from before the
// update again, and can be kept and updated.
func TestStateGoesBack(t *testing.T) {
	image := disk(t)
	o, cmd := adoptedDisk(t, image)
	o.serve()
	hash := o.do("workload", "exec", "web", "--", "sha256sum", "/data/blob")
	root := later(t)
	path := filepath.Join(o.dir, "later.tar")
	update := func(version string) {
		t.Helper()
		newer(t, path, version, func(files map[string]string) {
			files[bundle.Root] = root
			// After its trial it has no network. It restarts when its daemon has opened the state.
			files[bundle.Initramfs] = string(initramfs(t, moveDev, `if [ -z "$trial" ]; then`+"\nfind /sysroot/usr/lib/modules -name 'virtio_net.ko*' -exec rm -f {} +\n"+
				inRoot(`until grep -q "the appliance serves its API" /run/log/cocoond.log; do sleep 1; done; echo "the state is open"; kill -TERM 1`, "/dev/console")+"fi\n"+moveDev))
		})
	}
	restored := func() bool {
		return strings.Contains(o.do("capsule", "logs"), "the state is again what it was before the update")
	}

	update("v999.1")
	o.m.from = o.m.now()
	o.do("capsule", "update", "push", path, "--deadline=1m")
	o.m.waitEach("slot b, files", "ending all processes", "slot a, files", "10.0.2.15:50000")
	out := o.until("v999.1", "capsule", "info")
	if !strings.Contains(out, "nobody confirmed it in 1m0s") {
		t.Errorf("after a trial:\n%s", out)
	}
	o.until("running   yes", "workload", "list")
	if restored() {
		t.Error("a version on trial has upgraded the state")
	}

	update("v999.2")
	o.do("capsule", "update", "push", path, "--auto-confirm=1")
	o.until("active slot      slot_b", "capsule", "info")
	o.do("apply", "--wait", "-f", o.file("after.yaml", "name: after\nkind: Container\ncontainer: {image: cocoon/demo:latest, command: [/usr/bin/server]}\n"))
	o.m.off(cmd)
	kept := environment(t, image)
	if kept.Good != bootctl.B {
		t.Fatalf("the environment is %+v", kept)
	}
	m, _ := firmware(t, image, false, o.forwards()...)
	m.wait(m.serial, "slot b, files", "the state is open", "reboot: Restarting system")
	<-m.ended

	// The good slot loses its kernel.
	do(t, "mdel", "-i", image+"@@1M", "::/vmlinuz_b-"+kept.Files.B)
	o.m, cmd = firmware(t, image, true, o.forwards()...)
	o.m.wait(o.m.serial, "slot b does not start", "slot a, files", "10.0.2.15:50000")
	out = o.until("slot b is the good one, and did not start", "capsule", "info")
	t.Logf("%s from power on to the operator's first answer, with the state of before", time.Since(o.m.begin).Round(time.Second))
	if !strings.Contains(out, "active slot      slot_a") {
		t.Errorf("the machine says:\n%s", out)
	}
	if !restored() {
		t.Errorf("the log:\n%s", o.do("capsule", "logs"))
	}
	o.until("running   yes", "workload", "list")
	if log := o.do("capsule", "logs"); !strings.Contains(log, "belongs to no known workload") || !strings.Contains(log, "workload=after") {
		t.Errorf("the container of a workload that is not known any more is not reported:\n%s", log)
	}
	if list := o.do("workload", "list"); strings.Contains(list, "after") || !strings.Contains(list, "web") {
		t.Errorf("workloads:\n%s", list)
	}
	if got := o.do("workload", "exec", "web", "--", "sha256sum", "/data/blob"); got != hash {
		t.Errorf("the data is another: %q, before %q", got, hash)
	}

	// What the newer version has written is kept, and the copy goes when everything works.
	o.do("apply", "--wait", "-f", o.file("look.yaml", "name: look\nkind: Container\ncontainer: {image: cocoon/demo:latest, command: [sleep, '3600'], hostBindPaths: ['/perm/cocoon:/state:ro']}\n"))
	if got := strings.TrimSpace(o.do("workload", "exec", "look", "--", "sh", "-c", "cat /state/state.db.replaced-*/state.db* | tr '\\000' '\\n' | grep -c 'TABLE of_a_later_version'")); got == "0" {
		t.Error("the state of the newer version is not kept")
	}
	o.wait("the copy goes", func() bool {
		out, err := o.try("workload", "exec", "look", "--", "sh", "-c", "[ -e /state/update/copy ] || echo gone")
		return err == nil && strings.Contains(out, "gone")
	})

	// The operator keeps the slot that runs, and the other one can be written again.
	if out, err := o.try("capsule", "update", "push", path); err == nil || !strings.Contains(out, "slot b is the good one") {
		t.Errorf("an update over the good slot: %v, %s", err, out)
	}
	if out := o.do("capsule", "update", "confirm"); !strings.Contains(out, "slot_a") {
		t.Errorf("kept: %s", out)
	}
	o.info("slot b is the good one", false)
	newer(t, path, "v999.3", func(map[string]string) {})
	if out := o.do("capsule", "update", "push", path); !strings.Contains(out, "v999.3 from slot_b") {
		t.Errorf("the next update: %s", out)
	}
	o.m.off(cmd)
	if s := environment(t, image); s.Good != bootctl.A || s.Try != bootctl.B {
		t.Errorf("the environment is %+v", s)
	}
}

// later makes the root of a version after that of the image: the schema of its daemon has one more step.
func later(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	source := need.Built(t, "internal/journal/sqlite/documents.go", "git checkout")
	text := string(must(os.ReadFile(source)))
	changed := strings.Replace(text, "return []string{ddl.String()}", "return []string{ddl.String(), `CREATE TABLE of_a_later_version (name TEXT)`}", 1)
	if changed == text {
		t.Fatalf("%s has other steps", source)
	}
	file, overlay := filepath.Join(dir, "documents.go"), filepath.Join(dir, "overlay.json")
	for name, content := range map[string][]byte{file: []byte(changed), overlay: must(json.Marshal(map[string]any{"Replace": map[string]string{source: file}}))} {
		if err := os.WriteFile(name, content, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	tree, root := filepath.Join(dir, "tree"), filepath.Join(dir, "root")
	do(t, "unsquashfs", "-no-progress", "-no-xattrs", "-d", tree, need.Built(t, "bin/os/rootfs.sqsh", "make os-image"))
	build := exec.CommandContext(t.Context(), need.Tool(t, "go"), "build", "-overlay", overlay, "-ldflags", "-s -w", "-o", filepath.Join(tree, "usr/bin/cocoond"), "./cmd/cocoond")
	build.Dir = filepath.Dir(need.Built(t, "go.mod", "git checkout"))
	build.Env = append(os.Environ(), "GOWORK=off", "CGO_ENABLED=0", "GOFLAGS=-trimpath")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("build a later daemon: %v\n%s", err, out)
	}
	do(t, "mksquashfs", tree, root, "-noappend", "-all-root", "-no-xattrs", "-comp", "zstd", "-Xcompression-level", "1", "-b", "256K", "-quiet", "-no-progress")
	return string(must(os.ReadFile(root)))
}
