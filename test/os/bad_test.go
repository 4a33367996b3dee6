//go:build os

package appliance

import (
	"strings"
	"testing"
	"time"

	"cocoonstack.io/cocoon/internal/appliance/bundle"
)

// bad are updates that do not work, each in another way. Those that fail before their root is used have a small one.
var bad = []struct {
	name string
	push []string // flags
	// change makes the update of the system of the image.
	change func(t *testing.T, files map[string]string)
	says   []string // on the console, in this order
	info   []string // what the machine says afterwards
}{
	{
		name:   "panics",
		change: script(rootFound, rootFound+"; echo c >/proc/sysrq-trigger", true),
		says:   []string{"Kernel panic", "Kernel panic"},
		info:   []string{"did not get as far as its daemon", "sysrq triggered crash"},
	},
	{
		name:   "init exits",
		change: script(rootFound, rootFound+"; exit 3", true),
		says:   []string{"Attempted to kill init", "Attempted to kill init"},
		info:   []string{"did not get as far as its daemon", "Attempted to kill init"},
	},
	{
		name:   "hangs",
		change: script(rootFound, rootFound+"; while :; do :; done", true),
		says:   []string{"capsule.trial=1", "root is", "capsule.trial=1", "root is"},
		info:   []string{"did not get as far as its daemon", "the watchdog restarted the machine"},
	},
	{
		name: "is truncated",
		change: func(_ *testing.T, files map[string]string) {
			root := files[bundle.Root]
			files[bundle.Root] = root[:len(root)/2] + strings.Repeat("\x00", len(root)-len(root)/2)
		},
		says: []string{"this is a trial: restarting", "this is a trial: restarting"},
		info: []string{"did not get as far as its daemon"},
	},
	{
		name:   "loses the network",
		push:   []string{"--policy=auto", "--deadline=3m"},
		change: script(moveDev, "find /sysroot/usr/lib/modules -name 'virtio_net.ko*' -exec rm -f {} +\n"+moveDev, false),
		says:   []string{"ending all processes"},
		info:   []string{"nobody confirmed it in 3m0s", "uplink: no link has an address"},
	},
	{
		name: "has a daemon that hangs",
		change: script(moveDev, inRoot("while sleep 5; do [ -e /run/began ] || touch /run/began; set -- $(ps -o pid,args | grep -v grep | grep cocoond.yaml); "+
			"[ /perm/cocoon/update/trial.json -nt /run/began ] && kill -STOP $1; done", "/dev/console")+moveDev, false),
		says: []string{"the system on trial hangs", "the system on trial hangs"},
		info: []string{"ran, and stopped before somebody confirmed it", "the watchdog restarted the machine"},
	},
}

// script returns a change of the initramfs: another line for one of its script.
func script(line, by string, small bool) func(*testing.T, map[string]string) {
	return func(t *testing.T, files map[string]string) {
		t.Helper()
		files[bundle.Initramfs] = string(initramfs(t, line, by))
		if small {
			files[bundle.Root] = strings.Repeat("x", 8<<20)
		}
	}
}

// Each update that does not work ends on the good slot, without anybody at the console, and the machine says why. Workloads run again, with their data.
func TestBadUpdates(t *testing.T) {
	o, cmd := adopted(t)
	o.serve()
	hash := o.do("workload", "exec", "web", "--", "sha256sum", "/data/blob")
	for i, b := range bad {
		t.Run(b.name, func(t *testing.T) {
			o.t, o.m.t = t, t
			version := "v999." + string(rune('1'+i))
			path := o.dir + "/bad.tar"
			newer(t, path, version, func(files map[string]string) { b.change(t, files) })
			begin := time.Now()
			o.m.from = o.m.now()
			o.do(append([]string{"capsule", "update", "push", path}, b.push...)...)
			pushed := time.Since(begin)
			o.m.waitEach(append(append([]string{"slot b, files"}, b.says...), "slot a, files", "10.0.2.15:50000")...)
			out := o.until(version, "capsule", "info")
			t.Logf("%s to push, %s until it is rolled back", pushed.Round(time.Second), time.Since(begin.Add(pushed)).Round(time.Second))
			for _, want := range append([]string{"active slot      slot_a", "rolled back"}, b.info...) {
				if !strings.Contains(out, want) {
					t.Errorf("the machine does not say %q:\n%s", want, out)
				}
			}
			o.until("running   yes", "workload", "list")
			if got := o.do("workload", "exec", "web", "--", "sha256sum", "/data/blob"); got != hash {
				t.Errorf("the data is another: %q, before %q", got, hash)
			}
		})
	}
	o.t, o.m.t = t, t
	o.m.off(cmd)
}

// One start, one update and one rollback: what CI has time for.
func TestShort(t *testing.T) {
	o, cmd := adopted(t)
	path := o.dir + "/next.tar"
	newer(t, path, "v999.1", func(map[string]string) {})
	begin := time.Now()
	o.do("capsule", "update", "push", path, "--auto-confirm=1")
	t.Logf("%s for an update, from push to confirmed", time.Since(begin).Round(time.Second))
	newer(t, path, "v999.2", func(files map[string]string) { files[bundle.Root] = strings.Repeat("x", 8<<20) })
	begin = time.Now()
	o.m.from = o.m.now()
	o.do("capsule", "update", "push", path)
	o.m.wait(o.m.serial, "slot a, files", "this is a trial: restarting", "this is a trial: restarting", "slot b, files", "10.0.2.15:50000")
	out := o.until("v999.2", "capsule", "info")
	t.Logf("%s for an update that does not start, from push to rolled back", time.Since(begin).Round(time.Second))
	for _, want := range []string{"active slot      slot_b", "version v999.2 did not start"} {
		if !strings.Contains(out, want) {
			t.Errorf("the machine does not say %q:\n%s", want, out)
		}
	}
	o.m.off(cmd)
}
