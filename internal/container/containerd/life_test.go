//go:build cri

package containerd

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"cocoonstack.io/cocoon/internal/container"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/testkit/need"
	"cocoonstack.io/cocoon/internal/testkit/netns"
	"cocoonstack.io/cocoon/internal/testkit/ociimage"
	"cocoonstack.io/cocoon/internal/vm"
)

func TestLife(t *testing.T) {
	r := start(t)
	ctx := t.Context()
	s := r.sh("life", "echo $0 $GREETING; cat /proc/sys/kernel/hostname; touch /kept; exit 7")
	s.Args, s.Env, s.Labels = []string{"arg"}, []vm.EnvVar{{Name: "GREETING", Value: "hello world"}}, map[string]string{"hash": "abc"}
	if err := r.Create(ctx, s); err != nil {
		t.Fatal(err)
	}
	if err := r.Create(ctx, s); !errdefs.IsAlreadyExists(err) {
		t.Errorf("creating it again: %v", err)
	}
	c, err := r.Inspect(ctx, "life")
	if err != nil || c.State.Phase != container.Created || c.Spec.Labels["hash"] != "abc" || !strings.HasPrefix(c.Digest, "sha256:") {
		t.Errorf("created: %+v, %v", c, err)
	}
	before := time.Now()
	if err := r.Start(ctx, "life"); err != nil {
		t.Fatal(err)
	}
	st := r.ended("life")
	if st.Phase != container.Exited || st.ExitCode != 7 || st.StartedAt.Before(before) || st.FinishedAt.Before(st.StartedAt) || st.OOMKilled {
		t.Errorf("ended: %+v", st)
	}
	if got := r.log("life", container.LogOptions{Tail: -1}); got != "arg hello world\nlife\n" {
		t.Errorf("log: %q", got)
	}
	if err := r.Start(ctx, "life"); err != nil {
		t.Fatal("start it again:", err)
	}
	again := r.ended("life")
	if again.ExitCode != 7 || !again.StartedAt.After(st.StartedAt) {
		t.Errorf("ended again: %+v", again)
	}
	if err := r.Stop(ctx, "life", time.Second); err != nil {
		t.Error("stop what has ended:", err)
	}
	if err := r.Remove(ctx, "life", true); err != nil {
		t.Fatal(err)
	}
	if got := r.log("life", container.LogOptions{Tail: -1}); strings.Count(got, "hello") != 2 {
		t.Errorf("the kept log: %q", got)
	}
	for range 2 {
		if err := r.Remove(ctx, "life", false); err != nil {
			t.Fatal("remove it again:", err)
		}
	}
	if err := r.Logs(ctx, "life", container.LogOptions{}, nil); !errdefs.IsNotFound(err) {
		t.Errorf("log of a removed container: %v", err)
	}
	for name, err := range map[string]error{"start": r.Start(ctx, "life"), "stop": r.Stop(ctx, "life", 0)} {
		if !errdefs.IsNotFound(err) {
			t.Errorf("%s a removed container: %v", name, err)
		}
	}
	r.nothingLeft(ctx)
}

func TestStop(t *testing.T) {
	r := start(t)
	ctx := t.Context()
	r.run(r.sh("polite", "trap 'echo asked; exit 3' TERM; echo ready; while :; do sleep 0.1; done"))
	r.run(r.sh("deaf", "trap 'echo asked' TERM; echo ready; while :; do sleep 0.1; done"))
	for _, id := range []string{"polite", "deaf"} {
		r.says(id, "ready")
	}
	if err := r.Stop(ctx, "polite", time.Hour); err != nil {
		t.Fatal(err)
	}
	if s := r.ended("polite"); s.ExitCode != 3 {
		t.Errorf("polite: %+v", s)
	}
	if err := r.Stop(ctx, "deaf", 500*time.Millisecond); err != nil {
		t.Fatal(err)
	}
	if s := r.ended("deaf"); s.ExitCode != 137 || s.OOMKilled {
		t.Errorf("deaf: %+v", s)
	}
	if got := r.log("deaf", container.LogOptions{Tail: -1}); got != "ready\nasked\n" {
		t.Errorf("deaf says %q", got)
	}
	// A removal does not wait for the grace of a stop.
	r.run(r.sh("slow", "trap 'echo asked' TERM; echo ready; while :; do sleep 0.1; done"))
	r.says("slow", "ready")
	stopped := make(chan error, 1)
	go func() { stopped <- r.Stop(ctx, "slow", time.Hour) }()
	r.says("slow", "asked")
	if err := r.Remove(ctx, "slow", false); err != nil {
		t.Fatal(err)
	}
	if err := <-stopped; err != nil {
		t.Error("the stop of what was removed:", err)
	}
}

func TestExec(t *testing.T) {
	r := start(t)
	ctx := t.Context()
	s := r.sh("main", "sleep 1000")
	s.Env, s.WorkDir = []vm.EnvVar{{Name: "A", Value: "1"}}, "/tmp"
	r.run(s)
	if out, errs, code := r.exec("main", script("pwd; echo $A; echo err >&2; exit 5"), nil); out != "/tmp\n1\n" || errs != "err\n" || code != 5 {
		t.Errorf("got %q, %q, %d", out, errs, code)
	}
	input := strings.Repeat("0123456789abcde\n", 100_000)
	if out, _, code := r.exec("main", container.Exec{Command: []string{"cat"}}, strings.NewReader(input)); out != input || code != 0 {
		t.Errorf("cat: %d bytes of %d, code %d", len(out), len(input), code)
	}
	if out, _, _ := r.exec("main", container.Exec{Command: []string{"id", "-u"}, User: "www-data"}, nil); out != "33\n" {
		t.Errorf("uid of www-data: %q", out)
	}
	// What a command leaves running does not hold up its end.
	if out, _, code := r.exec("main", script("sleep 1000 & echo left"), nil); out != "left\n" || code != 0 {
		t.Errorf("got %q, %d", out, code)
	}
	for name, e := range map[string]container.Exec{"no such program": {Command: []string{"/nonsense"}}, "no such user": {Command: []string{"id"}, User: "nonsense"}} {
		if _, err := r.Exec(ctx, "main", e, container.Streams{}); !errdefs.IsFailedPrecondition(err) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if _, err := r.Exec(ctx, "main", container.Exec{}, container.Streams{}); !errdefs.IsInvalid(err) {
		t.Error("no command:", err)
	}
	if _, err := r.Exec(ctx, "nobody", script(":"), container.Streams{}); !errdefs.IsNotFound(err) {
		t.Error("no container:", err)
	}
	// The end of the context kills the command.
	cut, cancel := context.WithCancel(ctx)
	out, in := io.Pipe()
	done := make(chan error, 1)
	go func() {
		_, err := r.Exec(cut, "main", script("echo begun; exec sleep 77"), container.Streams{Stdout: in})
		done <- err
	}()
	if _, err := io.ReadFull(out, make([]byte, 6)); err != nil {
		t.Fatal(err)
	}
	cancel()
	if err := <-done; errdefs.ClassOf(err) != errdefs.Canceled {
		t.Error("a command whose caller is gone:", err)
	}
	if out, _, _ := r.exec("main", script("ps | grep '[s]leep 77'"), nil); out != "" {
		t.Errorf("commands are left: %s", out)
	}
	eventually(t, "no streams are left", func() bool { return len(glob(filepath.Join(r.streams(), "*"))) == 0 })
	// Two at a time; and the end of the container ends both.
	var both sync.WaitGroup
	codes := make([]int, 2)
	ready, tell := io.Pipe()
	for i := range codes {
		both.Go(func() {
			code, err := r.Exec(ctx, "main", script("echo r; sleep 1000"), container.Streams{Stdout: tell})
			if err != nil {
				t.Errorf("exec %d: %v", i, err)
			}
			codes[i] = code
		})
	}
	if _, err := io.ReadFull(ready, make([]byte, 4)); err != nil {
		t.Fatal(err)
	}
	if err := r.Stop(ctx, "main", 0); err != nil {
		t.Fatal(err)
	}
	both.Wait()
	if codes[0] != 137 || codes[1] != 137 {
		t.Errorf("exit codes of killed commands: %v", codes)
	}
	if _, err := r.Exec(ctx, "main", script(":"), container.Streams{}); !errdefs.IsFailedPrecondition(err) {
		t.Error("exec in a stopped container:", err)
	}
}

func TestTerminal(t *testing.T) {
	r := start(t)
	r.run(r.sh("main", "sleep 1000"))
	in, typed := io.Pipe()
	shown, out := io.Pipe()
	resize, signals := make(chan container.WinSize), make(chan int)
	done := make(chan error, 1)
	var code int
	go func() {
		var err error
		code, err = r.Exec(t.Context(), "main", container.Exec{
			Command: []string{"sh", "-c", "trap 'stty size; exit 4' USR1; stty size; read line; echo got $line; while :; do sleep 0.1; done"},
			TTY:     true, Rows: 30, Cols: 100,
		}, container.Streams{Stdin: in, Stdout: out, Resize: resize, Signals: signals})
		done <- err
	}()
	var seen bytes.Buffer
	until := func(text string) {
		t.Helper()
		buf := make([]byte, 1<<10)
		for !strings.Contains(seen.String(), text) {
			n, err := shown.Read(buf)
			if err != nil {
				t.Fatal(err)
			}
			seen.Write(buf[:n])
		}
	}
	until("30 100")
	if _, err := io.WriteString(typed, "words\n"); err != nil {
		t.Fatal(err)
	}
	until("got words")
	resize <- container.WinSize{Rows: 40, Cols: 120}
	signals <- 10
	until("40 120")
	if err := <-done; err != nil || code != 4 {
		t.Errorf("code %d, %v", code, err)
	}
	typed.Close()
}

func TestMountsAndFiles(t *testing.T) {
	r := start(t)
	dir := r.d.Dir("data")
	for name, text := range map[string]string{"one": "1\n", "two": "2\n"} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	s := r.sh("mounts", `cat /rw/one /ro/two /etc/hosts /etc/resolv.conf; hostname; touch /rw/new; touch /ro/new || echo refused; mkdir -p /deep/down; ls /deep/down`)
	s.Hostname = "box"
	s.Files = container.Files{Hosts: "127.0.0.1 localhost\n", ResolvConf: "nameserver 192.0.2.1\n"}
	s.Mounts = []container.Mount{{Source: dir, Path: "/rw"}, {Source: dir, Path: "/ro", ReadOnly: true}, {Source: filepath.Join(dir, "one"), Path: "/deep/down/file"}}
	r.run(s)
	if st := r.ended("mounts"); st.ExitCode != 0 {
		t.Errorf("%+v", st)
	}
	got := r.log("mounts", container.LogOptions{Tail: -1})
	for _, want := range []string{"1\n2\n127.0.0.1 localhost\nnameserver 192.0.2.1\nbox\n", "refused\n", "file\n"} {
		if !strings.Contains(got, want) {
			t.Errorf("%q lacks %q", got, want)
		}
	}
	if _, err := os.Stat(filepath.Join(dir, "new")); err != nil {
		t.Error(err)
	}
	s.ID, s.Mounts = "missing", []container.Mount{{Source: filepath.Join(dir, "nonsense"), Path: "/x"}}
	if err := r.Create(t.Context(), s); err != nil {
		t.Fatal(err)
	}
	if err := r.Start(t.Context(), "missing"); !errdefs.IsFailedPrecondition(err) {
		t.Error("start without its source:", err)
	}
	if c, err := r.Inspect(t.Context(), "missing"); err != nil || c.State.Phase != container.Created || !c.State.StartedAt.IsZero() {
		t.Errorf("it is %+v, %v", c.State, err)
	}
}

// TestHostileImage mounts at a path that the image leads out of the container.
func TestHostileImage(t *testing.T) {
	r := start(t)
	dir := r.d.Dir("data")
	outside := r.d.Dir("outside")
	image := r.with("hostile",
		ociimage.Symlink("out", outside), ociimage.Symlink("up", "../../../../../../../.."+outside), ociimage.Symlink("etc/hosts", filepath.Join(outside, "hosts")))
	if _, err := r.EnsureImage(t.Context(), container.Pull{Ref: image}); err != nil {
		t.Fatal(err)
	}
	s := r.sh("hostile", "ls -d /out/a /up/b; cat /etc/hosts")
	s.Image, s.Files.Hosts = image, "192.0.2.1 here\n"
	s.Mounts = []container.Mount{{Source: dir, Path: "/out/a"}, {Source: dir, Path: "/up/b"}}
	if err := r.Create(t.Context(), s); err != nil {
		t.Fatal(err)
	}
	if err := r.Start(t.Context(), "hostile"); err != nil && !errdefs.IsFailedPrecondition(err) {
		t.Fatal(err)
	} else if err == nil {
		r.ended("hostile")
		t.Logf("it says %q", r.log("hostile", container.LogOptions{Tail: -1}))
	}
	if made, err := os.ReadDir(outside); err != nil || len(made) > 0 {
		t.Errorf("outside of the container are now %v, %v", made, err)
	}
}

func TestSafety(t *testing.T) {
	r := start(t)
	look := "grep -E 'NoNewPrivs|Seccomp:|CapEff|CapBnd' /proc/self/status; wc -l </proc/keys; echo x >/proc/sys/kernel/domainname || echo refused; mount -t tmpfs t /tmp || echo refused; ls /dev | wc -l; ls /sys/class/net; ulimit -n; ulimit -Hn; cat /proc/self/cgroup; ls /sys/fs/cgroup; id"
	r.run(r.sh("safe", look))
	r.ended("safe")
	got := r.log("safe", container.LogOptions{Tail: -1})
	t.Log(got)
	for _, want := range []string{"NoNewPrivs:\t1", "Seccomp:\t2", "CapEff:\t00000000a80425fb", "refused\nmount:", "1024\n", "lo\n"} {
		if !strings.Contains(got, want) {
			t.Errorf("a container lacks %q", want)
		}
	}
	if strings.Contains(got, "eth") {
		t.Error("it sees links of the node")
	}
	s := r.sh("mighty", "grep -E 'NoNewPrivs|Seccomp:|CapEff' /proc/self/status; mount -t tmpfs t /tmp && echo mounted; mkdir -p /shared/below && mount -t tmpfs t /shared/below && echo below; ls /proc | grep -c '^[0-9]'; readlink /proc/self/ns/ipc; readlink /proc/self/ns/net; ls /dev | wc -l; sleep 1000")
	shared := r.d.Dir("shared")
	s.Command[2] = strings.ReplaceAll(s.Command[2], "/shared", shared)
	s.Network.Host = true
	s.Host = container.Host{Privileged: true, PID: true, IPC: true, Mount: true, BindPaths: []string{shared}}
	r.run(s)
	r.says("mighty", "net:")
	got = r.log("mighty", container.LogOptions{Tail: -1})
	t.Log(got)
	net, _ := os.Readlink("/proc/self/ns/net")
	ipc, _ := os.Readlink("/proc/self/ns/ipc")
	for _, want := range []string{"NoNewPrivs:\t0", "Seccomp:\t0", net, ipc, "mounted\n", "below\n"} {
		if !strings.Contains(got, want) {
			t.Errorf("a privileged container lacks %q", want)
		}
	}
	if err := r.Stop(t.Context(), "mighty", 0); err != nil {
		t.Fatal(err)
	}
}

func TestOOM(t *testing.T) {
	r := start(t)
	s := r.sh("greedy", "tail /dev/zero")
	s.Command, s.Limits = []string{"tail", "/dev/zero"}, container.Limits{Memory: 24 << 20, CPU: 500, PIDs: 20}
	r.run(s)
	if st := r.ended("greedy"); st.ExitCode != 137 || !st.OOMKilled || st.Reason == "" {
		t.Errorf("%+v", st)
	}
	s = r.sh("busy", "i=0; while [ $i -lt 60 ]; do sleep 1000 & i=$((i+1)); done; echo done; wait")
	s.Limits = container.Limits{PIDs: 20, Memory: 64 << 20}
	r.run(s)
	r.says("busy", "can't fork")
	st, err := r.Stats(t.Context(), "busy")
	if err != nil {
		// its shell may have ended
		if !errdefs.IsFailedPrecondition(err) {
			t.Fatal(err)
		}
	}
	t.Logf("%+v", st)
	s = r.sh("idle", "echo ready; sleep 1000")
	r.run(s)
	r.says("idle", "ready")
	st, err = r.Stats(t.Context(), "idle")
	if err != nil || st.CPU <= 0 || st.Memory <= 0 || st.PIDs < 1 {
		t.Errorf("stats: %+v, %v", st, err)
	}
}

func TestNetworkNamespace(t *testing.T) {
	r := start(t)
	s := r.sh("net", "ls /sys/class/net; cat /proc/sys/net/ipv4/ip_unprivileged_port_start; readlink /proc/self/ns/net")
	s.Network.NetNS = filepath.Join(r.d.State, "netns")
	if err := r.Create(t.Context(), s); err != nil {
		t.Fatal(err)
	}
	if err := r.Start(t.Context(), "net"); !errdefs.IsFailedPrecondition(err) {
		t.Error("start without its namespace:", err)
	}
	ns := netns.New(t)
	if err := os.Symlink(ns, s.Network.NetNS); err != nil {
		t.Fatal(err)
	}
	var st unix.Stat_t
	if err := unix.Stat(ns, &st); err != nil {
		t.Fatal(err)
	}
	if err := r.Start(t.Context(), "net"); err != nil {
		t.Fatal(err)
	}
	r.ended("net")
	if got, want := r.log("net", container.LogOptions{Tail: -1}), fmt.Sprintf("lo\n0\nnet:[%d]\n", st.Ino); got != want {
		t.Errorf("got %q, want %q", got, want)
	}
}

func TestImages(t *testing.T) {
	r := start(t)
	ctx := t.Context()
	f, err := os.Open(need.Built(t, "bin/demo.tar", "make demo-image"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	got, err := r.ImportImage(ctx, f, "")
	if err != nil || len(got) != 1 || got[0].Ref != "docker.io/cocoon/demo:latest" || got[0].Size == 0 {
		t.Fatalf("import: %+v, %v", got, err)
	}
	if _, err := r.EnsureImage(ctx, container.Pull{Ref: "cocoon/demo"}); err != nil {
		t.Error("an imported image is not found by its short name:", err)
	}
	r.run(container.Spec{ID: "demo", Image: "cocoon/demo", Args: nil})
	if out, _, _ := r.exec("demo", script("echo works"), nil); out != "works\n" {
		t.Errorf("exec in demo: %q", out)
	}
	if err := r.RemoveImage(ctx, "cocoon/demo"); !errdefs.IsFailedPrecondition(err) {
		t.Error("remove an image in use:", err)
	}
	var last container.Progress
	other := r.with("other", ociimage.File("big", strings.Repeat("0123456789", 1<<20)))
	if _, err := r.EnsureImage(ctx, container.Pull{Ref: other, Progress: func(p container.Progress) { last = p }}); err != nil {
		t.Fatal(err)
	}
	if last.Total == 0 || last.Done != last.Total {
		t.Errorf("progress ended with %+v", last)
	}
	all, err := r.ListImages(ctx)
	if err != nil || len(all) != 3 {
		t.Errorf("images: %+v, %v", all, err)
	}
	for _, i := range all {
		if want := i.Ref == "docker.io/cocoon/demo:latest"; i.Used != want {
			t.Errorf("%s: used is %v", i.Ref, i.Used)
		}
	}
	gone, err := r.PruneImages(ctx, func(i container.Image) bool { return i.Ref == r.image })
	if err != nil || len(gone) != 1 || gone[0].Ref != other {
		t.Errorf("pruned: %+v, %v", gone, err)
	}
	registry := strings.TrimPrefix(r.d.Registry.URL, "http://")
	for ref, want := range map[string]errdefs.Class{
		"UPPER":                                      errdefs.InvalidArgument,
		registry + "/nobody/nothing:v1":              errdefs.NotFound,
		"127.0.0.1:1/nobody/nothing:v1":              errdefs.Unavailable,
		other + "@sha256:" + strings.Repeat("0", 64): errdefs.NotFound,
	} {
		if _, err := r.EnsureImage(ctx, container.Pull{Ref: ref}); errdefs.ClassOf(err) != want {
			t.Errorf("%s: %v, want %v", ref, err, want)
		}
	}
	for name, text := range map[string]string{"empty": "", "text": "this is no archive", "empty archive": string(ociimage.Tar())} {
		if _, err := r.ImportImage(ctx, strings.NewReader(text), ""); !errdefs.IsInvalid(err) {
			t.Errorf("import of %s: %v", name, err)
		}
	}
	if err := r.Create(ctx, container.Spec{ID: "x", Image: other}); !errdefs.IsNotFound(err) {
		t.Error("a container of a removed image:", err)
	}
}
