//go:build vm

package qemu

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"cocoonstack.io/cocoon/internal/hypervisor"
	"cocoonstack.io/cocoon/internal/proc"
)

// shared is a folder with a part that guests may write to, one that they may read, and a secret that they must not have.
func shared(t *testing.T) (root string, shares []hypervisor.Share) {
	t.Helper()
	root, err := filepath.EvalSymlinks(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	for _, err := range []error{
		os.MkdirAll(root+"/allowed/ro", 0o755), os.WriteFile(root+"/allowed/ro/f", []byte("fixed"), 0o644), os.WriteFile(root+"/secret", []byte("SECRET"), 0o644),
		os.Symlink(root+"/secret", root+"/allowed/ro/link"), os.Symlink("../../secret", root+"/allowed/ro/up"),
	} {
		if err != nil {
			t.Fatal(err)
		}
	}
	return root, []hypervisor.Share{
		{Tag: "rw", Root: root + "/allowed", Path: root + "/allowed/rw/made", Create: true},
		{Tag: "ro", Root: root + "/allowed", Path: root + "/allowed/ro", ReadOnly: true},
	}
}

// told runs a script in the guest and returns what it prints, on one line.
func told(t *testing.T, i hypervisor.Instance, script string) string {
	t.Helper()
	before := strings.Count(consoleOf(t, i), "HEARD sh")
	say(t, i, "sh "+script)
	var out string
	await(t, "the guest answers", func() bool {
		parts := strings.Split(consoleOf(t, i), "HEARD sh")
		var done bool
		out, _, done = strings.Cut(strings.TrimSpace(parts[len(parts)-1]), ".\r")
		if !done {
			out, _, done = strings.Cut(strings.TrimSpace(parts[len(parts)-1])+"\n", ".\n")
		}
		return len(parts) > before+1 && done
	})
	return strings.TrimSpace(out)
}

func serversOf(t *testing.T, p hypervisor.Plan) []*proc.Process {
	t.Helper()
	found, err := testDriver(t).jail.Cgroups.Processes(p.ID, p.Dir, nil)
	if err != nil {
		t.Fatal(err)
	}
	var out []*proc.Process
	for _, f := range found {
		if args, err := proc.Args(f.PID()); err == nil && len(args) > 0 && strings.HasPrefix(args[0], "virtiofsd") {
			out = append(out, f)
			t.Cleanup(func() { f.Close() })
		} else {
			f.Close()
		}
	}
	return out
}

func nothingLeft(t *testing.T, p hypervisor.Plan) {
	t.Helper()
	if traces := left(t, p); len(traces) > 0 {
		t.Errorf("left: %v", traces)
	}
}

func TestShares(t *testing.T) {
	a := needGuest(t)
	root, shares := shared(t)
	p := a.plan(t)
	p.Shares = shares
	d := testDriver(t)
	i, err := d.Launch(t.Context(), p)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = i.Kill(t.Context()) }()
	logged(t, i, "GUEST-READY")
	made := root + "/allowed/rw/made"
	if err := os.WriteFile(made+"/host", []byte("of-the-host"), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct{ script, want string }{
		{"mkdir /w /r; mount -t virtiofs rw /w; mount -t virtiofs ro /r; cat /w/host /r/f", "of-the-hostfixed"},
		{"echo -n of-the-guest >/w/guest; chown 1000:1001 /w/guest; stat -c %u:%g /w/guest", "1000:1001"},
		{"(echo x >/r/x) 2>/dev/null || echo denied; rm -f /r/f 2>/dev/null || echo kept; mount -o remount,rw /r; (echo x >/r/x) 2>/dev/null || echo still; cat /r/f", "denied kept still fixed"},
		{"cat /r/link /r/up 2>/dev/null; ln -s " + root + "/secret /w/link; ln -s ../../../secret /w/up; cat /w/link /w/up 2>/dev/null; ls /w/../w | wc -l; echo end", "4 end"},
		{"mknod /w/sda b 8 0 2>/dev/null || echo none; ls /w/sda 2>/dev/null; echo end", "none end"},
	} {
		if got := told(t, i, c.script); got != c.want {
			t.Errorf("%s: %q, want %q", c.script, got, c.want)
		}
	}
	var st unix.Stat_t
	if text, err := os.ReadFile(made + "/guest"); string(text) != "of-the-guest" || err != nil || unix.Stat(made+"/guest", &st) != nil || st.Uid != 1000 || st.Gid != 1001 {
		t.Errorf("the host sees %q of %d:%d, %v", text, st.Uid, st.Gid, err)
	}
	if _, err := os.Lstat(root + "/allowed/ro/x"); err == nil {
		t.Error("the guest wrote to a read-only folder")
	}

	servers := serversOf(t, p)
	if len(servers) != 4 { // each has a parent without rights
		t.Errorf("%d processes of servers", len(servers))
	}
	for _, s := range servers {
		if uid, err := proc.UID(s.PID()); err != nil || !d.jail.Users.Owns(uid) {
			t.Errorf("a server runs as %d, %v", uid, err)
		}
		status, _ := os.ReadFile(fmt.Sprintf("/proc/%d/status", s.PID()))
		if !strings.Contains(string(status), "NoNewPrivs:\t1") {
			t.Errorf("a server may get rights:\n%s", status)
		}
		if host, _ := os.Readlink("/proc/self/ns/user"); host == "" || linkOf(s, "user") == host || linkOf(s, "net") == linkOf(nil, "net") || linkOf(s, "mnt") == linkOf(nil, "mnt") {
			t.Errorf("a server is in the namespaces of the host")
		}
	}

	// Another process of ours finds all of it again.
	handle := i.Handle()
	if err := i.Close(); err != nil {
		t.Fatal(err)
	}
	d = testDriver(t)
	if i, err = d.Adopt(t.Context(), handle); err != nil {
		t.Fatal(err)
	}
	if got := told(t, i, "echo more >>/w/guest; cat /r/f"); got != "fixed" {
		t.Errorf("after the adoption: %q", got)
	}
	if err := i.Kill(t.Context()); err != nil {
		t.Error(err)
	}
	nothingLeft(t, p)
}

func linkOf(p *proc.Process, namespace string) string {
	pid := "self"
	if p != nil {
		pid = fmt.Sprint(p.PID())
	}
	at, _ := os.Readlink("/proc/" + pid + "/ns/" + namespace)
	return at
}

// TestSharesEnd: a VM ends when it loses a server, and the servers end with their VM, also when nobody of ours is there.
func TestSharesEnd(t *testing.T) {
	a := needGuest(t)
	_, shares := shared(t)
	launch := func(t *testing.T) (hypervisor.Plan, *Driver, hypervisor.Instance) {
		p := a.plan(t)
		p.Shares = shares
		d := testDriver(t)
		i, err := d.Launch(t.Context(), p)
		if err != nil {
			t.Fatal(err)
		}
		return p, d, i
	}
	killOne := func(t *testing.T, p hypervisor.Plan) {
		if err := serversOf(t, p)[0].Kill(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	abandoned := func(t *testing.T, p hypervisor.Plan, i hypervisor.Instance) {
		if exit, err := i.Wait(t.Context()); err != nil || !strings.Contains(exit.Cause, "shares the folder") {
			t.Errorf("%+v, %v", exit, err)
		}
		nothingLeft(t, p)
	}
	t.Run("a server ends", func(t *testing.T) {
		p, _, i := launch(t)
		killOne(t, p)
		abandoned(t, p, i)
	})
	t.Run("a server ends while nobody watches", func(t *testing.T) {
		p, _, i := launch(t)
		if err := i.Close(); err != nil {
			t.Fatal(err)
		}
		killOne(t, p)
		i, err := testDriver(t).Adopt(t.Context(), i.Handle())
		if err != nil {
			t.Fatal(err)
		}
		abandoned(t, p, i)
	})
	t.Run("the VM ends", func(t *testing.T) {
		p, _, i := launch(t)
		logged(t, i, "GUEST-READY")
		say(t, i, "poweroff")
		if exit, err := i.Wait(t.Context()); err != nil || exit.Cause != "" || !exit.GuestShutdown {
			t.Errorf("%+v, %v", exit, err)
		}
		nothingLeft(t, p)
	})
	t.Run("the VM ends while nobody watches", func(t *testing.T) {
		p, d, i := launch(t)
		pid := i.PID()
		if err := i.Close(); err != nil {
			t.Fatal(err)
		}
		if err := unix.Kill(pid, unix.SIGKILL); err != nil {
			t.Fatal(err)
		}
		_, _ = unix.Wait4(pid, nil, 0, nil)
		await(t, "its servers end", func() bool { return len(serversOf(t, p)) == 0 })
		if _, err := d.Adopt(t.Context(), i.Handle()); err == nil {
			t.Error("a VM that has ended is adopted")
		}
		nothingLeft(t, p)
	})
	t.Run("nobody knows it", func(t *testing.T) {
		p, d, i := launch(t)
		if err := i.Close(); err != nil {
			t.Fatal(err)
		}
		if err := d.Reap(t.Context(), p.ID, p.Dir); err != nil {
			t.Error(err)
		}
		nothingLeft(t, p)
	})
}
