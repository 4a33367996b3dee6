package nodeapi_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"time"

	"cocoonstack.io/cocoon/internal/catalog"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/guest"
	"cocoonstack.io/cocoon/internal/image"
	"cocoonstack.io/cocoon/internal/network"
	"cocoonstack.io/cocoon/internal/nodeapi"
	"cocoonstack.io/cocoon/internal/nodeclient"
	"cocoonstack.io/cocoon/internal/nodewire"
	"cocoonstack.io/cocoon/internal/testkit/diff"
	"cocoonstack.io/cocoon/internal/vm"
)

// scripted is an engine, store and host whose answers a test writes; other calls panic, as nil functions do.
type scripted struct {
	nodeapi.Engine // panics for what is not scripted
	stop           func(ref string, grace time.Duration) (vm.Record, error)
	inspect        func(ref string) (vm.Record, error)
	remove         func(ref string) error
	list           func() ([]vm.Record, error)
	watch          func(ctx context.Context, after int64, fn func(vm.Event) error) error
	exec           func(ctx context.Context, ref string, e guest.Exec, s guest.Streams) (int, error)
	attach         func(ctx context.Context, ref string, a guest.Attach, s guest.Streams) error
	forward        func(ctx context.Context, ref string, port int, s guest.Streams) error
	console        func(ctx context.Context, ref string) (io.ReadWriteCloser, error)
	display        func(ref string, keep bool) (io.ReadWriteCloser, error)
	screenshot     func(ref string, wake bool) ([]byte, error)
	logs           func(ctx context.Context, o guest.LogOptions, fn func(guest.LogEntry) error) error
	imports        func(ctx context.Context, name string, r io.Reader, progress func(int64)) (image.Image, error)
	snapshots      *catalog.Snapshots
	pusher         image.Pusher
	cloned         vm.CloneSpec
}

func (s *scripted) Stop(_ context.Context, ref string, g time.Duration) (vm.Record, error) {
	return s.stop(ref, g)
}

func (s *scripted) Inspect(_ context.Context, ref string) (vm.Record, error) { return s.inspect(ref) }
func (s *scripted) List(context.Context) ([]vm.Record, error)                { return s.list() }
func (s *scripted) Remove(_ context.Context, ref string, _ bool) error       { return s.remove(ref) }

func (s *scripted) Watch(ctx context.Context, after int64, fn func(vm.Event) error) error {
	return s.watch(ctx, after, fn)
}

func (s *scripted) Exec(ctx context.Context, ref string, e guest.Exec, st guest.Streams) (int, error) {
	return s.exec(ctx, ref, e, st)
}

func (s *scripted) Attach(ctx context.Context, ref string, a guest.Attach, st guest.Streams) error {
	return s.attach(ctx, ref, a, st)
}

func (s *scripted) Forward(ctx context.Context, ref string, port int, st guest.Streams) error {
	return s.forward(ctx, ref, port, st)
}

func (s *scripted) Console(ctx context.Context, ref string) (io.ReadWriteCloser, error) {
	return s.console(ctx, ref)
}

func (s *scripted) Display(_ context.Context, ref string, keep bool) (io.ReadWriteCloser, error) {
	return s.display(ref, keep)
}

func (s *scripted) Screenshot(_ context.Context, ref string, wake bool) ([]byte, error) {
	return s.screenshot(ref, wake)
}

func (s *scripted) Logs(ctx context.Context, _ string, o guest.LogOptions, fn func(guest.LogEntry) error) error {
	return s.logs(ctx, o, fn)
}

type store struct {
	image.Store // panics for what is not written here
	*scripted
}

func (s store) Import(ctx context.Context, name string, r io.Reader, p func(int64)) (image.Image, error) {
	return s.imports(ctx, name, r, p)
}

func (store) Get(_ context.Context, ref string) (image.Image, error) {
	return image.Image{Name: ref}, nil
}

func (store) List(context.Context) ([]image.Image, error) {
	return []image.Image{{Name: "a:latest"}}, nil
}

func (store) Export(context.Context, string, io.Writer) error { return nil }

func (store) Collect(context.Context, image.GCLimits, func(string) bool) (image.Collected, error) {
	return image.Collected{}, nil
}

func (store) Remove(_ context.Context, ref string, inUse func(string) bool) error {
	if inUse(ref) {
		return errdefs.Preconditionf("image %s is in use", ref)
	}
	return nil
}

type host struct{}

func (host) Info(context.Context) (nodewire.NodeInfo, error) {
	return nodewire.NodeInfo{Hostname: "n"}, nil
}

func (host) TeardownNetworks(context.Context) error { return errdefs.Preconditionf("VM web runs") }
func (host) Strays(context.Context) ([]vm.Stray, error) {
	return []vm.Stray{{ID: "lost", Name: "db", State: vm.StateRunning, Dirs: []string{"/d"}, Taps: []string{"tap1"}, PIDs: []int{7}, Reason: "why"}}, nil
}

func (host) AdoptStray(_ context.Context, ref, name string) (vm.Record, error) {
	return vm.Record{ID: vm.ID(ref), Spec: vm.Spec{Name: name}}, nil
}

func (host) KeptFirmware(ctx context.Context) ([]vm.KeptFirmware, error) {
	return []vm.KeptFirmware{{Owner: vm.Owner{Namespace: "prod"}, VM: "db", Key: "uid", Since: time.Unix(7, 0).UTC()}, {Owner: vm.Behalf(ctx), VM: "asked"}}, nil
}

func (host) DropFirmware(_ context.Context, k vm.KeptFirmware) error {
	if k.VM != "db" || k.Key != "uid" || k.Owner.Namespace != "prod" {
		return errdefs.NotFoundf("nothing is kept for %v", k)
	}
	return nil
}

func (host) RemoveStray(_ context.Context, ref string) error {
	return errdefs.NotFoundf("no unknown VM is kept aside as %q", ref)
}

func (host) Police(_ context.Context, p network.Policies) error {
	if len(p.Guests) != 1 || p.Guests[0].ID != "vm" {
		return errdefs.Invalidf("policies %+v", p)
	}
	return nil
}

func (host) Doctor(context.Context) ([]nodewire.Check, error) {
	return []nodewire.Check{{Name: "root"}}, nil
}

// A front end may use the engine or the client: their methods are the same.
var _ interface {
	Create(ctx context.Context, s vm.Spec) (vm.Record, error)
	Launch(ctx context.Context, s vm.Spec) (vm.Record, error)
	Start(ctx context.Context, ref string) (vm.Record, error)
	Stop(ctx context.Context, ref string, grace time.Duration) (vm.Record, error)
	Restart(ctx context.Context, ref string, grace time.Duration) (vm.Record, error)
	Reboot(ctx context.Context, ref string, hard bool) (vm.Record, error)
	Pause(ctx context.Context, ref string) (vm.Record, error)
	Unpause(ctx context.Context, ref string) (vm.Record, error)
	Remove(ctx context.Context, ref string, force bool) error
	Inspect(ctx context.Context, ref string) (vm.Record, error)
	List(ctx context.Context) ([]vm.Record, error)
	Watch(ctx context.Context, after int64, fn func(vm.Event) error) error
	Exec(ctx context.Context, ref string, e guest.Exec, s guest.Streams) (int, error)
	Logs(ctx context.Context, ref string, o guest.LogOptions, fn func(guest.LogEntry) error) error
	Console(ctx context.Context, ref string) (io.ReadWriteCloser, error)
	guest.Displays
	Stats(ctx context.Context, ref string) (guest.Stats, error)
	Reset(ctx context.Context) error
} = (*nodeclient.Client)(nil)

var discard = slog.New(slog.DiscardHandler)

// serve runs a server of s and returns a client; stop ends the server and waits until it has ended.
func serve(t *testing.T, s *scripted, cfg nodeapi.Config) (c *nodeclient.Client, stop func()) {
	t.Helper()
	if cfg.Socket == "" {
		cfg.Socket = filepath.Join(t.TempDir(), "cocoond.sock")
	}
	images := catalog.Images{Store: store{scripted: s}, Pusher: s.pusher, InUse: func(digest string) bool { return digest == "used" }}
	deps := nodeapi.Deps{Engine: s, Images: images, Host: host{}, Log: discard}
	if s.snapshots != nil {
		deps.Snapshots = s.snapshots
	}
	srv, err := nodeapi.New(cfg, deps)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- srv.Run(ctx) }()
	select {
	case <-srv.Ready():
	case err := <-done:
		t.Fatalf("server ended: %v", err)
	}
	c, err = nodeclient.Dial(cfg.Socket)
	if err != nil {
		t.Fatal(err)
	}
	var stopped bool
	stop = func() {
		if stopped {
			return
		}
		stopped = true
		cancel()
		if err := <-done; err != nil {
			t.Errorf("server: %v", err)
		}
	}
	t.Cleanup(func() { stop(); c.Close() })
	return c, stop
}

func TestErrorsKeepClassAndText(t *testing.T) {
	s := &scripted{}
	c, _ := serve(t, s, nodeapi.Config{})
	for class := errdefs.Internal; class <= errdefs.DeadlineExceeded; class++ {
		text := "it is " + class.String()
		s.inspect = func(string) (vm.Record, error) { return vm.Record{}, errdefs.New(class, "%s", text) }
		_, err := c.Inspect(t.Context(), "x")
		if errdefs.ClassOf(err) != class || err.Error() != text {
			t.Errorf("%v came as %v: %v", class, errdefs.ClassOf(err), err)
		}
		s.watch = func(context.Context, int64, func(vm.Event) error) error { return errdefs.New(class, "%s", text) }
		if err := c.Watch(t.Context(), 0, nil); errdefs.ClassOf(err) != class || err.Error() != text {
			t.Errorf("stream: %v came as %v: %v", class, errdefs.ClassOf(err), err)
		}
	}
}

func TestGrace(t *testing.T) {
	var got time.Duration
	s := &scripted{stop: func(_ string, g time.Duration) (vm.Record, error) { got = g; return vm.Record{ID: "i"}, nil }}
	c, _ := serve(t, s, nodeapi.Config{})
	for _, g := range []time.Duration{-1, 0, time.Minute} {
		if _, err := c.Stop(t.Context(), "x", g); err != nil || got != g {
			t.Errorf("grace %v came as %v (%v)", g, got, err)
		}
	}
}

func TestListOfAnySize(t *testing.T) {
	want := make([]vm.Record, 3000)
	for i := range want {
		want[i] = vm.Record{ID: vm.NewID(), Message: strings.Repeat("x", 4000)} // 12 MB in all
	}
	c, _ := serve(t, &scripted{list: func() ([]vm.Record, error) { return want, nil }}, nodeapi.Config{})
	got, err := c.List(t.Context())
	if err != nil || !reflect.DeepEqual(got, want) {
		t.Fatalf("%d records, %v", len(got), err)
	}
}

func TestWatchEndsWithTheServer(t *testing.T) {
	s := &scripted{watch: func(ctx context.Context, after int64, fn func(vm.Event) error) error {
		if err := fn(vm.Event{Type: vm.EventAdded, Revision: after + 1}); err != nil {
			return err
		}
		<-ctx.Done()
		return ctx.Err()
	}}
	c, stop := serve(t, s, nodeapi.Config{})
	seen := make(chan int64, 1)
	ended := make(chan error, 1)
	go func() {
		ended <- c.Watch(t.Context(), 7, func(e vm.Event) error { seen <- e.Revision; return nil })
	}()
	if r := <-seen; r != 8 {
		t.Errorf("revision %d", r)
	}
	stop()
	if err := <-ended; !errdefs.IsUnavailable(err) || !strings.Contains(err.Error(), "stopping") {
		t.Errorf("the watch ended with %v", err)
	}
	if _, err := c.List(t.Context()); !errdefs.IsUnavailable(err) || !strings.Contains(err.Error(), "is it running?") {
		t.Errorf("after the stop: %v", err)
	}
}

func TestWatchersOwnErrorComesBack(t *testing.T) {
	s := &scripted{watch: func(ctx context.Context, _ int64, fn func(vm.Event) error) error {
		for {
			if err := fn(vm.Event{}); err != nil {
				return err
			}
		}
	}}
	c, _ := serve(t, s, nodeapi.Config{})
	mine := errors.New("enough")
	if err := c.Watch(t.Context(), -1, func(vm.Event) error { return mine }); !errors.Is(err, mine) {
		t.Errorf("got %v", err)
	}
}

func TestLogs(t *testing.T) {
	want := guest.LogEntry{Seq: 3, Time: time.Unix(5, 6).UTC(), Stream: "stderr", Data: []byte{0xff, '\n'}}
	s := &scripted{logs: func(_ context.Context, o guest.LogOptions, fn func(guest.LogEntry) error) error {
		if o.Tail != -1 || !o.Previous {
			return errdefs.Invalidf("options came as %+v", o)
		}
		return fn(want)
	}}
	c, _ := serve(t, s, nodeapi.Config{})
	var got guest.LogEntry
	err := c.Logs(t.Context(), "x", guest.LogOptions{Tail: -1, Previous: true}, func(e guest.LogEntry) error { got = e; return nil })
	if d := diff.Of(want, got); err != nil || d != "" {
		t.Fatalf("%v, %s", err, d)
	}
}

func TestImport(t *testing.T) {
	var stored []byte
	seen, began := make(chan error, 1), make(chan struct{}, 2)
	s := &scripted{imports: func(_ context.Context, name string, r io.Reader, progress func(int64)) (image.Image, error) {
		began <- struct{}{}
		b, err := io.ReadAll(r)
		seen <- err
		if err != nil {
			return image.Image{}, err
		}
		stored = b
		progress(int64(len(b)))
		return image.Image{Name: name, Size: int64(len(b))}, nil
	}}
	c, _ := serve(t, s, nodeapi.Config{})
	in := bytes.Repeat([]byte("image"), 1<<20+3)
	var reported int64
	img, err := c.ImportImage(t.Context(), "demo", bytes.NewReader(in), func(n int64) { reported = n })
	if err != nil || img.Name != "demo" || !bytes.Equal(stored, in) || reported != int64(len(in)) {
		t.Fatalf("%+v, %v, %d bytes, reported %d", img, err, len(stored), reported)
	}
	if err := <-seen; err != nil {
		t.Errorf("the store read: %v", err)
	}

	<-began
	broken := errdefs.New(errdefs.DataLoss, "disk on fire")
	_, err = c.ImportImage(t.Context(), "demo", io.MultiReader(strings.NewReader("half"), reader(func([]byte) (int, error) {
		<-began // earlier, the store would never learn of the error
		return 0, broken
	})), nil)
	if !errors.Is(err, broken) {
		t.Errorf("the caller got %v", err)
	}
	if err := <-seen; err == nil {
		t.Error("the store took half an image for a whole one")
	}
}

func TestImagesAndNode(t *testing.T) {
	c, _ := serve(t, &scripted{}, nodeapi.Config{})
	ctx := t.Context()
	if err := c.RemoveImage(ctx, "used"); !errdefs.IsFailedPrecondition(err) {
		t.Errorf("remove: %v", err)
	}
	if i, err := c.GetImage(ctx, "a"); err != nil || i.Name != "a" {
		t.Error(i, err)
	}
	if l, err := c.ListImages(ctx); err != nil || len(l) != 1 {
		t.Error(l, err)
	}
	if i, err := c.Info(ctx); err != nil || i.Hostname != "n" {
		t.Error(i, err)
	}
	if err := c.TeardownNetworks(ctx); !errdefs.IsFailedPrecondition(err) {
		t.Error(err)
	}
	want, _ := host{}.Strays(ctx)
	got, err := c.Strays(ctx)
	if d := diff.Of(want, got); err != nil || d != "" {
		t.Errorf("strays: %v, %s", err, d)
	}
	if r, err := c.AdoptStray(ctx, "lost", "db2"); err != nil || r.ID != "lost" || r.Spec.Name != "db2" {
		t.Errorf("adopted %+v, %v", r, err)
	}
	if err := c.RemoveStray(ctx, "other"); !errdefs.IsNotFound(err) {
		t.Error(err)
	}
	kept, err := c.KeptFirmware(ctx)
	all, _ := host{}.KeptFirmware(ctx)
	if d := diff.Of(all, kept); err != nil || d != "" {
		t.Errorf("kept: %v, %s", err, d)
	}
	if err := c.DropFirmware(ctx, kept[0]); err != nil {
		t.Error(err)
	}
	if err := c.DropFirmware(ctx, kept[1]); !errdefs.IsNotFound(err) {
		t.Error(err)
	}
	if err := c.Police(ctx, network.Policies{Node: "n", Guests: []network.Guest{{ID: "vm"}}}); err != nil {
		t.Error(err)
	}
	if d, err := c.Doctor(ctx); err != nil || len(d) != 1 {
		t.Error(d, err)
	}
}

func TestNoDaemonIsOneSentence(t *testing.T) {
	path := filepath.Join(t.TempDir(), "cocoond.sock")
	c, err := nodeclient.Dial(path)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	want := fmt.Sprintf("cannot reach cocoond at %s: is it running? start it with `cocoond` or `cocoon up`", path)
	if _, err := c.Inspect(t.Context(), "x"); !errdefs.IsUnavailable(err) || err.Error() != want {
		t.Errorf("unary: %v", err)
	}
	if _, err := c.List(t.Context()); !errdefs.IsUnavailable(err) || err.Error() != want {
		t.Errorf("stream: %v", err)
	}
}

func TestClientFindsTheDaemonAgain(t *testing.T) {
	s := &scripted{inspect: func(string) (vm.Record, error) { return vm.Record{ID: "i"}, nil }}
	path := filepath.Join(t.TempDir(), "cocoond.sock")
	c, stop := serve(t, s, nodeapi.Config{Socket: path})
	if _, err := c.Inspect(t.Context(), "x"); err != nil {
		t.Fatal(err)
	}
	stop()
	if _, err := os.Stat(path); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the socket is still there: %v", err)
	}
	serve(t, s, nodeapi.Config{Socket: path})
	for {
		_, err := c.Inspect(t.Context(), "x")
		if err == nil {
			return
		}
		if !errdefs.IsUnavailable(err) {
			t.Fatal(err)
		}
	}
}

type reader func([]byte) (int, error)

func (r reader) Read(p []byte) (int, error) { return r(p) }

type writer func([]byte) (int, error)

func (w writer) Write(p []byte) (int, error) { return w(p) }

// TestTrustedIsRefused: only the kubelet of the node can have what the operator's list does not have, and it does not come this way.
func TestTrustedIsRefused(t *testing.T) {
	c, stop := serve(t, &scripted{}, nodeapi.Config{})
	defer stop()
	for what, v := range map[string]vm.Volume{
		"a folder": {Name: "v", Kind: vm.VolumeDir, Dir: &vm.HostDir{Path: "/etc", Trusted: true}},
		"a device": {Name: "v", Kind: vm.VolumeHostDisk, HostDisk: &vm.HostDisk{Path: "/dev/sda", Trusted: true}},
	} {
		_, err := c.AddContainer(t.Context(), "web", vm.Container{Name: "c", Image: "demo", Kind: vm.ContainerEphemeral, Volumes: []vm.Volume{v}})
		if !errdefs.IsInvalid(err) {
			t.Errorf("%s: %v", what, err)
		}
	}
	s := vm.Spec{Name: "pod", Sandbox: true, CgroupParent: "/kubepods/pod1"}
	if _, err := c.Create(t.Context(), s); !errdefs.IsInvalid(err) {
		t.Errorf("a cgroup: %v", err)
	}
	if _, err := c.Launch(t.Context(), s); !errdefs.IsInvalid(err) {
		t.Errorf("a cgroup: %v", err)
	}
}
