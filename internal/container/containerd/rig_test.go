//go:build cri

package containerd

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/containerd/containerd/v2/core/snapshots"

	"cocoonstack.io/cocoon/internal/container"
	"cocoonstack.io/cocoon/internal/container/containerd/shimlog"
	"cocoonstack.io/cocoon/internal/proc"
	"cocoonstack.io/cocoon/internal/testkit/containerdtest"
	"cocoonstack.io/cocoon/internal/testkit/netns"
	"cocoonstack.io/cocoon/internal/testkit/ociimage"
)

// TestMain lets the test binary be the program that writes a log, as cocoond's would be.
func TestMain(m *testing.M) {
	if len(os.Args) == 3 && os.Args[1] == shimlog.Command {
		if err := shimlog.Serve(os.Args[2]); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		return
	}
	if os.Getenv(clientEnv) != "" {
		os.Exit(asClient())
	}
	os.Exit(netns.Main(m))
}

// patience limits how long a test waits for anything.
const patience = time.Minute

// rig is a runtime at a containerd of its own.
type rig struct {
	*Runtime
	t     testing.TB
	d     *containerdtest.Daemon
	image string // has busybox
}

func start(t testing.TB) *rig {
	t.Helper()
	d := containerdtest.Start(t)
	r := &rig{t: t, d: d, image: strings.TrimPrefix(d.Registry.URL, "http://") + "/e2e-test-images/busybox:1.29-2"}
	r.open()
	t.Cleanup(r.clean)
	if _, err := r.EnsureImage(t.Context(), container.Pull{Ref: r.image}); err != nil {
		t.Fatal(err)
	}
	return r
}

func config4(t testing.TB, d *containerdtest.Daemon) Config {
	t.Helper()
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	return Config{
		Socket: d.Socket(), Root: filepath.Join(d.State, "containers"), State: filepath.Join(d.State, "run"), Logger: exe,
		Runc: d.Program("runc"), RuncRoot: filepath.Join(d.State, "runc-capsule"), Log: slog.New(slog.NewTextHandler(t.Output(), nil)),
	}
}

// open connects as a process does that has just started.
func (r *rig) open() {
	r.t.Helper()
	if r.Runtime != nil {
		_ = r.Close()
	}
	rt, err := Open(config4(r.t, r.d))
	if err != nil {
		r.t.Fatal(err)
	}
	r.Runtime = rt
}

// clean removes the containers, and says what is left of them.
func (r *rig) clean() {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	all, err := r.List(ctx)
	if err != nil {
		r.t.Error(err)
	}
	for _, c := range all {
		if err := r.Remove(ctx, c.Spec.ID, false); err != nil {
			r.t.Error(err)
		}
	}
	r.nothingLeft(ctx)
	for _, dir := range glob("/sys/fs/cgroup/*/capsule") {
		if err := os.Remove(dir); err != nil {
			r.t.Error(err)
		}
	}
	if r.t.Failed() {
		r.t.Log("containerd's log:\n" + r.d.Log())
	}
	_ = r.Close()
}

// nothingLeft fails the test if anything of a removed container stays there. A shim ends a moment after its task is removed.
func (r *rig) nothingLeft(ctx context.Context) {
	r.t.Helper()
	limit := time.NewTimer(patience / 4)
	defer limit.Stop()
	tick := time.NewTicker(50 * time.Millisecond)
	defer tick.Stop()
	for left := r.left(ctx); len(left) > 0; left = r.left(ctx) {
		select {
		case <-tick.C:
		case <-limit.C:
			r.t.Errorf("of removed containers are left: %s", strings.Join(left, "\n"))
			return
		}
	}
}

// left returns what there is of removed containers.
func (r *rig) left(ctx context.Context) (left []string) {
	r.t.Helper()
	err := r.client.SnapshotService(snapshotter).Walk(ctx, func(_ context.Context, i snapshots.Info) error {
		if i.Kind == snapshots.KindActive {
			left = append(left, "snapshot "+i.Name)
		}
		return nil
	})
	if err != nil {
		r.t.Error(err)
	}
	leases, err := r.client.LeasesService().List(ctx)
	if err != nil {
		r.t.Error(err)
	}
	for _, l := range leases {
		left = append(left, "lease "+l.ID)
	}
	for _, pattern := range []string{
		filepath.Join(r.cfg.Root, "*"), filepath.Join(r.streams(), "*"), filepath.Join(r.mounts(), "*"), filepath.Join(r.cfg.RuncRoot, "*/*"),
		filepath.Join(r.d.State, "state/io.containerd.runtime.v2.task/capsule/*"), "/sys/fs/cgroup/*/capsule/*/cgroup.procs",
	} {
		left = append(left, glob(pattern)...)
	}
	for _, socket := range glob(filepath.Join(r.d.State, "s/*")) { // containerd leaves those of shims that it was killed with
		if conn, err := (&net.Dialer{}).DialContext(ctx, "unix", socket); err == nil {
			conn.Close()
			left = append(left, socket)
		}
	}
	left = append(left, proc.MountsBelow(filepath.Join(r.d.State, "state/io.containerd.runtime.v2.task/capsule"))...)
	left = append(left, proc.MountsBelow(r.mounts())...)
	for _, p := range glob("/proc/[0-9]*/cmdline") {
		b, _ := os.ReadFile(p)
		if bytes.Contains(b, []byte(r.d.State+"/")) && (bytes.Contains(b, []byte("containerd-shim")) || bytes.Contains(b, []byte(shimlog.Command))) {
			left = append(left, "process "+string(bytes.ReplaceAll(b, []byte{0}, []byte(" "))))
		}
	}
	return left
}

func glob(pattern string) []string {
	all, _ := filepath.Glob(pattern)
	return all
}

// sh is a container that runs a script.
func (r *rig) sh(id, script string) container.Spec {
	return container.Spec{ID: id, Image: r.image, Command: []string{"sh", "-c", script}}
}

// run creates a container and starts it.
func (r *rig) run(s container.Spec) {
	r.t.Helper()
	if err := errors.Join(r.Create(r.t.Context(), s), r.Start(r.t.Context(), s.ID)); err != nil {
		r.t.Fatal(err)
	}
}

// ended returns how a container has ended.
func (r *rig) ended(id string) container.State {
	r.t.Helper()
	ctx, cancel := context.WithTimeout(r.t.Context(), patience)
	defer cancel()
	s, err := r.Wait(ctx, id)
	if err != nil {
		r.t.Fatal(err)
	}
	return s
}

// log returns the log of a container.
func (r *rig) log(id string, o container.LogOptions) string {
	r.t.Helper()
	var b strings.Builder
	if err := r.Logs(r.t.Context(), id, o, func(e container.LogEntry) error { b.Write(e.Data); return nil }); err != nil {
		r.t.Fatal(err)
	}
	return b.String()
}

// says waits until a container has written a text, and goes on after it.
func (r *rig) says(id, text string) {
	r.t.Helper()
	ctx, cancel := context.WithTimeout(r.t.Context(), patience)
	defer cancel()
	found := errors.New("found")
	var last string
	err := r.Logs(ctx, id, container.LogOptions{Follow: true, Tail: -1}, func(e container.LogEntry) error {
		last += string(e.Data)
		if strings.Contains(last, text) {
			return found
		}
		last = last[max(0, len(last)-1000):]
		return nil
	})
	if !errors.Is(err, found) {
		r.t.Fatalf("container %s does not say %q, at last %q: %v", id, text, last, err)
	}
}

// exec runs a script in a container, and returns its output and exit code.
func (r *rig) exec(id string, e container.Exec, stdin io.Reader) (out, errs string, code int) {
	r.t.Helper()
	ctx, cancel := context.WithTimeout(r.t.Context(), patience)
	defer cancel()
	var o, w bytes.Buffer
	code, err := r.Exec(ctx, id, e, container.Streams{Stdin: stdin, Stdout: &o, Stderr: &w})
	if err != nil {
		r.t.Fatalf("exec %v: %v (%s %s)", e.Command, err, o.String(), w.String())
	}
	return o.String(), w.String(), code
}

func script(text string) container.Exec {
	return container.Exec{Command: []string{"sh", "-c", text}}
}

// eventually waits until something holds.
func eventually(t testing.TB, what string, holds func() bool) {
	t.Helper()
	limit := time.NewTimer(patience)
	defer limit.Stop()
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for !holds() {
		select {
		case <-tick.C:
		case <-limit.C:
			t.Fatalf("%s: not within %v", what, patience)
		}
	}
}

// with is the image of the registry with more files.
func (r *rig) with(name string, entries ...ociimage.Entry) string {
	r.t.Helper()
	base := containerdtest.Images(r.t)[containerdtest.BusyBox]
	base.Layers = append(base.Layers[:len(base.Layers):len(base.Layers)], ociimage.Of(entries...))
	r.d.Registry.Push("example.org/"+name+":v1", base)
	return strings.TrimPrefix(r.d.Registry.URL, "http://") + "/" + name + ":v1"
}
