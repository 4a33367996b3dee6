//go:build vm

package cocoond_test

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/testkit/nfsserver"
	"cocoonstack.io/cocoon/internal/vm"
)

// TestVMNFS: a guest mounts folders of a real NFS server over its own network. It waits for a server that is away and says so, goes on
// when a server comes back, and powers off without one.
func TestVMNFS(t *testing.T) {
	dir, err := filepath.EvalSymlinks(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	for _, err := range []error{os.Chmod(dir, 0o755), os.MkdirAll(dir+"/sub", 0o755), os.WriteFile(dir+"/sub/f", []byte("of-the-server"), 0o644)} {
		if err != nil {
			t.Fatal(err)
		}
	}
	server := nfsserver.New(t, dir)
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("%s", server.Log())
		}
	})
	n := newNode(t, `network: {subnet6: "fd00:88:6::/64"}`)
	folder := func(name, server, path string, readOnly bool, options ...string) vm.Volume {
		return vm.Volume{Name: name, Kind: vm.VolumeNFS, NFS: &vm.NFS{Server: server, Path: path, ReadOnly: readOnly, Options: options}}
	}
	container := func(name string, mounts ...vm.Mount) vm.Container {
		return vm.Container{Name: name, Kind: vm.ContainerApp, Image: demo, Mounts: mounts, Process: vm.Process{Entrypoint: []string{"sleep", "100000"}}}
	}
	spec := vm.Spec{
		Name: "web", Image: demo, CPUs: 1, Memory: 256 << 20, Storage: 64 << 20, NICs: []vm.NICSpec{{}},
		Volumes: []vm.Volume{
			folder("data", nfsserver.Addr, "/data", false), folder("fixed", "files.example", "/data/sub", true), folder("six", nfsserver.Addr6, "/data", false),
			folder("old", nfsserver.Addr, "/data", false, "nfsvers=4.0", "soft", "timeo=20,retrans=1", "noatime"),
		},
		Hosts: []vm.HostEntry{{IP: nfsserver.Addr, Names: []string{"files.example"}}},
		Containers: []vm.Container{
			container("a", vm.Mount{Volume: "data", Path: "/data"}, vm.Mount{Volume: "fixed", Path: "/fixed"}),
			container("b", vm.Mount{Volume: "data", Path: "/look", ReadOnly: true}, vm.Mount{Volume: "data", Path: "/part", SubPath: "made/here"}, vm.Mount{Volume: "old", Path: "/old"}, vm.Mount{Volume: "six", Path: "/six"}),
		},
	}

	if _, err := n.Launch(t.Context(), spec); err != nil {
		t.Fatal(err)
	}
	var r vm.Record
	n.until("it says that it waits", func() bool {
		r, err = n.Inspect(t.Context(), "web")
		return err == nil && r.Reason == vm.ReasonFailedMount
	})
	if r.AgentReady || !strings.Contains(r.Message, "data") || !strings.Contains(r.Message, "refused") {
		t.Errorf("while the server is away: ready %v, %s", r.AgentReady, r.Message)
	}
	server.Start()
	server.Hang() // accepts connections, but answers nothing
	n.until("it says that the server hangs", func() bool {
		r, err = n.Inspect(t.Context(), "web")
		return err == nil && strings.Contains(r.Message, "has not answered")
	})
	server.Continue()
	if r = n.ready("web"); r.Reason != "" || r.Message != "" {
		t.Errorf("mounted, and still %s: %s", r.Reason, r.Message)
	}
	for _, c := range []struct{ container, script, want string }{
		{"a", "echo -n of-a >/data/file; cat /fixed/f; echo x 2>/dev/null >/fixed/x || echo -n ' denied'", "of-the-server denied"},
		{"b", "cat /look/file; echo x 2>/dev/null >/look/x || echo -n ' denied'; echo -n of-b >/part/file", "of-a denied"},
		{"a", "cat /data/made/here/file", "of-b"},
		{"a", "grep -c ' /data nfs4 .*vers=4.2,.*hard' /proc/mounts", "1"},
		{"b", "grep -c ' /old nfs4 .*noatime.*vers=4.0,.*soft' /proc/mounts; cat /old/file", "1\nof-a"},
	} {
		if got := n.shIn("web", c.container, c.script); got != c.want {
			t.Errorf("%s: %s: %q, want %q\n%s", c.container, c.script, got, c.want, n.shIn("web", c.container, "grep nfs4 /proc/mounts"))
		}
	}
	if got := n.shIn("web", "b", "cat /six/file; grep ' /six nfs4 ' /proc/mounts; cat /sys/module/nfs/parameters/nfs4_unique_id"); !strings.HasPrefix(got, "of-a["+nfsserver.Addr6+"]:/data ") || !strings.HasSuffix(got, "cocoon-"+string(r.ID)) {
		t.Errorf("by IPv6, and the name for servers: %s", got)
	}
	if text, err := os.ReadFile(dir + "/made/here/file"); string(text) != "of-b" || err != nil {
		t.Errorf("the server has %q, %v", text, err)
	}
	for what, save := range map[string]func() error{
		"hibernated": func() error { _, err := n.Hibernate(t.Context(), "web", ""); return err },
		"saved":      func() error { _, err := n.SaveSnapshot(t.Context(), "web", vm.SaveSpec{Name: "base"}); return err },
	} {
		if err := save(); !errdefs.IsFailedPrecondition(err) || !strings.Contains(err.Error(), nfsserver.Addr+":/data") {
			t.Errorf("%s: %v", what, err)
		}
	}

	// Another life of the daemon and of the server.
	n.crash()
	n.ready("web")
	server.Kill()
	server.Start()
	if got := n.shIn("web", "a", "echo -n again >/data/file; cat /data/file"); got != "again" {
		t.Errorf("after the server came back: %q", got)
	}

	// A server that is away does not keep the VM from ending.
	n.shIn("web", "a", "echo -n kept >/file; (exec >/data/dirty 2>/dev/null; while :; do echo line; done) & until [ -e /data/dirty ]; do sleep 0.1; done") // no close, which would write it to the server

	server.Kill()
	if r, err = n.Stop(t.Context(), "web", 2*time.Minute); err != nil { // the guest waits 5 s for its server
		t.Fatal(err)
	}
	if r.Reason != vm.ReasonStopped {
		t.Errorf("without its server it did not stop by itself: %s %s", r.Reason, r.Message)
	}
	server.Versions = "0"
	server.Start()
	if _, err := n.Start(t.Context(), "web"); err != nil {
		t.Fatal(err)
	}
	n.ready("web")
	if got := n.shIn("web", "a", "cat /file /data/made/here/file; grep -c ' /data nfs4 .*vers=4.0,' /proc/mounts"); got != "keptof-b1" {
		t.Errorf("started again, with a server of version 4.0: %q", got)
	}
	if err := n.Remove(t.Context(), "web", true); err != nil {
		t.Fatal(err)
	}
	if traces := n.unlisted(); len(traces) > 0 {
		t.Errorf("left: %v", traces)
	}
}
