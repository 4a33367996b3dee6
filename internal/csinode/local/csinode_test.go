package local_test

import (
	"bytes"
	"context"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"cocoonstack.io/cocoon/internal/csinode"
	"cocoonstack.io/cocoon/internal/csinode/csitest"
	"cocoonstack.io/cocoon/internal/csinode/local"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/testkit/diff"
	"cocoonstack.io/cocoon/internal/vm"
)

var staging = []csi.NodeServiceCapability_RPC_Type{csi.NodeServiceCapability_RPC_STAGE_UNSTAGE_VOLUME}

// buffer is a log.
type buffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (b *buffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.Write(p)
}

func (b *buffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.String()
}

// world is a node with its folders.
type world struct {
	*local.Node
	t            *testing.T
	plugins, dir string
	log          *buffer
	stop         func()
}

// folders makes the folders of a node.
func folders(t *testing.T) *world {
	t.Helper()
	dir, err := os.MkdirTemp("", "csinode") // t.TempDir may be too long for a socket
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := os.RemoveAll(dir); err != nil { // fails if something is mounted
			t.Error(err)
		}
	})
	if err := os.Mkdir(dir+"/p", 0o700); err != nil {
		t.Fatal(err)
	}
	return &world{t: t, plugins: dir + "/p", dir: dir + "/d", log: &buffer{}, stop: func() {}}
}

// open starts a node. It ends with the test, if stop does not end it before.
func (w *world) open() {
	w.t.Helper()
	n, err := local.New(w.t.Context(), local.Config{Plugins: w.plugins, Dir: w.dir, Log: slog.New(slog.NewTextHandler(w.log, nil))})
	if err != nil {
		w.t.Fatal(err)
	}
	n.Hurry()
	ctx, cancel := context.WithCancel(w.t.Context())
	done := make(chan error)
	go func() { done <- n.Run(ctx) }()
	w.Node = n
	w.stop = sync.OnceFunc(func() {
		cancel()
		if err := <-done; err != nil {
			w.t.Error(err)
		}
		if err := n.Close(); err != nil {
			w.t.Error(err)
		}
	})
	w.t.Cleanup(w.stop)
}

func (w *world) reopen() {
	w.t.Helper()
	w.stop()
	w.open()
}

// drivers waits until exactly these are registered.
func (w *world) drivers(names ...string) {
	w.t.Helper()
	ctx, cancel := context.WithTimeout(w.t.Context(), 20*time.Second)
	defer cancel()
	for {
		changed := w.Changed()
		var got []string
		for _, d := range w.Drivers() {
			got = append(got, d.Name)
		}
		if slices.Equal(got, names) {
			return
		}
		select {
		case <-changed:
		case <-ctx.Done():
			w.t.Fatalf("drivers %v are registered, want %v; log:\n%s", got, names, w.log)
		}
	}
}

// start starts a node and a driver that is registered.
func start(t *testing.T, o csitest.Options) (*world, *csitest.Driver) {
	t.Helper()
	w := folders(t)
	d := csitest.Start(t, o)
	d.Register(w.plugins)
	w.open()
	w.drivers("csi.test")
	return w, d
}

func request(holder, volume string) csinode.Request {
	return csinode.Request{
		Key: csinode.Key{Owner: vm.Owner{Namespace: "blue"}, Holder: holder, Name: "data"}, Driver: "csi.test", Handle: volume,
		Access: csinode.AsFolder, Mode: "SINGLE_NODE_MULTI_WRITER",
	}
}

func (w *world) publish(r csinode.Request) csinode.Published {
	w.t.Helper()
	p, err := w.Publish(w.t.Context(), r)
	if err != nil {
		w.t.Fatal(err)
	}
	if !p.Ready {
		w.t.Fatalf("%+v is not ready", p)
	}
	return p
}

func (w *world) unpublish(k csinode.Key) {
	w.t.Helper()
	if err := w.Unpublish(w.t.Context(), k); err != nil {
		w.t.Fatal(err)
	}
}

// clean fails the test if the folders or the driver have anything of a volume.
func (w *world) clean(d *csitest.Driver) {
	w.t.Helper()
	if left := d.Left(); left != nil {
		w.t.Errorf("the driver has %v", left)
	}
	var left []string
	if err := filepath.WalkDir(w.dir, func(path string, _ fs.DirEntry, err error) error {
		left = append(left, strings.TrimPrefix(path, w.dir))
		return err
	}); err != nil {
		w.t.Error(err)
	}
	if diff := diff.Of([]string{"", "/lock", "/published", "/records", "/staged"}, left); diff != "" {
		w.t.Errorf("left in the folder (-want +got):\n%s", diff)
	}
}

func wantClass(t *testing.T, err error, class errdefs.Class, words ...string) {
	t.Helper()
	if err == nil || errdefs.ClassOf(err) != class {
		t.Errorf("error %v of class %v, want %v", err, errdefs.ClassOf(err), class)
		return
	}
	for _, word := range words {
		if !strings.Contains(err.Error(), word) {
			t.Errorf("error %q does not say %q", err, word)
		}
	}
}

func TestOrderOfCalls(t *testing.T) {
	for _, c := range []struct {
		name              string
		able              []csi.NodeServiceCapability_RPC_Type
		change            func(*csinode.Request)
		publish, withdraw []string
	}{
		{
			"staged", staging, func(*csinode.Request) {},
			[]string{"NodeStageVolume v", "NodePublishVolume v"},
			[]string{"NodeUnpublishVolume v", "NodeUnstageVolume v"},
		},
		{"not staged", nil, func(*csinode.Request) {}, []string{"NodePublishVolume v"}, []string{"NodeUnpublishVolume v"}},
		{"ephemeral", staging, func(r *csinode.Request) {
			r.Ephemeral, r.Attributes = true, map[string]string{"csi.storage.k8s.io/ephemeral": "true"}
		}, []string{"NodePublishVolume v"}, []string{"NodeUnpublishVolume v"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			w, d := start(t, csitest.Options{Able: c.able})
			r := request("pod", "v")
			c.change(&r)
			p := w.publish(r)
			if want := w.dir + "/published/blue/pod/data/mount"; p.Path != want || !strings.HasPrefix(p.Path, w.Root()+"/") {
				t.Errorf("published at %s below %s, want %s", p.Path, w.Root(), want)
			}
			calls := d.Calls()
			if diff := diff.Of(c.publish, calls); diff != "" {
				t.Errorf("calls of publishing (-want +got):\n%s", diff)
			}
			if diff := diff.Of(p, w.publish(r)); diff != "" || len(d.Calls()) != len(calls) {
				t.Errorf("published again with the calls %v:\n%s", d.Calls()[len(calls):], diff)
			}
			w.reopen()
			w.drivers("csi.test")
			if diff := diff.Of([]csinode.Published{p}, w.List()); diff != "" {
				t.Errorf("after a restart (-want +got):\n%s", diff)
			}
			if w.publish(r); len(d.Calls()) != len(calls) {
				t.Errorf("a restart in the same boot made the calls %v", d.Calls()[len(calls):])
			}
			w.unpublish(r.Key)
			if diff := diff.Of(c.withdraw, d.Calls()[len(calls):]); diff != "" {
				t.Errorf("calls of unpublishing (-want +got):\n%s", diff)
			}
			w.unpublish(r.Key)
			if got := len(d.Calls()); got != len(calls)+len(c.withdraw) {
				t.Errorf("unpublishing nothing made the calls %v", d.Calls()[len(calls)+len(c.withdraw):])
			}
			w.clean(d)
		})
	}
}

func TestTwoHoldersShareOneStaging(t *testing.T) {
	w, d := start(t, csitest.Options{Able: staging})
	a, b := request("a", "v"), request("b", "v")
	w.publish(a)
	w.publish(b)
	if diff := diff.Of([]string{"NodeStageVolume v", "NodePublishVolume v", "NodePublishVolume v"}, d.Calls()); diff != "" {
		t.Errorf("calls (-want +got):\n%s", diff)
	}
	w.unpublish(a.Key)
	if left := d.Left(); len(left) != 2 {
		t.Errorf("left for the second holder: %v", left)
	}
	w.unpublish(b.Key)
	w.clean(d)
}

func TestAnotherBootPublishesAgain(t *testing.T) {
	w, d := start(t, csitest.Options{Able: staging})
	r := request("pod", "v")
	p := w.publish(r)
	before := len(d.Calls())
	d.Reboot()
	w.SetBoot("another")
	if list := w.List(); len(list) != 1 || list[0].Ready {
		t.Errorf("after a boot: %+v", list)
	}
	wantClass(t, w.Find(r.Owner, p.Path, false), errdefs.FailedPrecondition, "publish it again")
	if _, err := w.Usage(t.Context(), r.Key); !errdefs.IsFailedPrecondition(err) {
		t.Errorf("usage: %v", err)
	}
	w.publish(r)
	calls := d.Calls()[before:]
	d.Reboot()
	w.SetBoot("a third")
	w.unpublish(r.Key) // the volume is not mounted, and its folders are there
	w.clean(d)
	w.publish(r)
	if diff := diff.Of([]string{"NodeStageVolume v", "NodePublishVolume v"}, calls); diff != "" {
		t.Errorf("calls (-want +got):\n%s", diff)
	}
	w.unpublish(r.Key)
	w.clean(d)
}

func TestFindIsExact(t *testing.T) {
	w, _ := start(t, csitest.Options{})
	r := request("pod", "v")
	r.ReadOnly = true
	p := w.publish(r)
	for _, c := range []struct {
		owner vm.Owner
		path  string
		write bool
		ok    bool
	}{
		{vm.Owner{Namespace: "blue"}, p.Path, false, true},
		{vm.Owner{Namespace: "blue", PodUID: "another"}, p.Path, false, true},
		{vm.Owner{}, p.Path, false, true},
		{vm.Owner{Namespace: "blue"}, p.Path, true, false},
		{vm.Owner{Namespace: "red"}, p.Path, false, false},
		{vm.Owner{Namespace: "blue"}, p.Path + "/etc", false, false},
		{vm.Owner{Namespace: "blue"}, p.Path + "/", false, false},
		{vm.Owner{Namespace: "blue"}, filepath.Dir(p.Path), false, false},
		{vm.Owner{Namespace: "blue"}, w.Root(), false, false},
		{vm.Owner{Namespace: "blue"}, "", false, false},
	} {
		if err := w.Find(c.owner, c.path, c.write); c.ok != (err == nil) || err != nil && !errdefs.IsFailedPrecondition(err) {
			t.Errorf("find %q for %+v, write %t: %v", c.path, c.owner, c.write, err)
		}
	}
}

func TestRefusals(t *testing.T) {
	w, d := start(t, csitest.Options{Able: staging})
	base := request("pod", "v")
	w.publish(base)
	calls := len(d.Calls())
	for name, c := range map[string]struct {
		change func(*csinode.Request)
		class  errdefs.Class
	}{
		"no holder":            {func(r *csinode.Request) { r.Holder = "" }, errdefs.InvalidArgument},
		"no name":              {func(r *csinode.Request) { r.Name = "" }, errdefs.InvalidArgument},
		"no handle":            {func(r *csinode.Request) { r.Handle = "" }, errdefs.InvalidArgument},
		"handle is not text":   {func(r *csinode.Request) { r.Handle = "\xff" }, errdefs.InvalidArgument},
		"driver with a path":   {func(r *csinode.Request) { r.Driver = "../x" }, errdefs.InvalidArgument},
		"driver of dots":       {func(r *csinode.Request) { r.Driver = "a..b" }, errdefs.InvalidArgument},
		"unknown mode":         {func(r *csinode.Request) { r.Mode = "UNKNOWN" }, errdefs.InvalidArgument},
		"mode of Kubernetes":   {func(r *csinode.Request) { r.Mode = "ReadWriteOnce" }, errdefs.InvalidArgument},
		"unknown access":       {func(r *csinode.Request) { r.Access = "pipe" }, errdefs.InvalidArgument},
		"device with a type":   {func(r *csinode.Request) { r.Access, r.FSType = csinode.AsDevice, "ext4" }, errdefs.InvalidArgument},
		"too many flags":       {func(r *csinode.Request) { r.MountFlags = []string{strings.Repeat("x", 4097)} }, errdefs.InvalidArgument},
		"another handle":       {func(r *csinode.Request) { r.Handle = "v2" }, errdefs.FailedPrecondition},
		"another driver":       {func(r *csinode.Request) { r.Driver = "csi.other" }, errdefs.FailedPrecondition},
		"another mode":         {func(r *csinode.Request) { r.Mode = "MULTI_NODE_MULTI_WRITER" }, errdefs.FailedPrecondition},
		"read-only":            {func(r *csinode.Request) { r.ReadOnly = true }, errdefs.FailedPrecondition},
		"as a device":          {func(r *csinode.Request) { r.Access = csinode.AsDevice }, errdefs.FailedPrecondition},
		"device for another":   {func(r *csinode.Request) { r.Holder, r.Access = "pod2", csinode.AsDevice }, errdefs.FailedPrecondition},
		"single writer":        {func(r *csinode.Request) { r.Holder, r.Mode = "pod2", "SINGLE_NODE_SINGLE_WRITER" }, errdefs.FailedPrecondition},
		"ephemeral of another": {func(r *csinode.Request) { r.Holder, r.Ephemeral = "pod2", true }, errdefs.FailedPrecondition},
		"no such driver": {func(r *csinode.Request) {
			r.Holder, r.Driver = "pod2", "csi.other"
		}, errdefs.Unavailable},
	} {
		t.Run(name, func(t *testing.T) {
			r := base
			c.change(&r)
			_, err := w.Publish(t.Context(), r)
			wantClass(t, err, c.class)
		})
	}
	if got := d.Calls(); len(got) != calls {
		t.Errorf("refused requests made the calls %v", got[calls:])
	}
	if list := w.List(); len(list) != 1 {
		t.Errorf("refused requests left %+v", list)
	}
}

func TestNamesOfFoldersAreSafeAndDiffer(t *testing.T) {
	w, d := start(t, csitest.Options{})
	seen := map[string]bool{}
	var keys []csinode.Key
	for _, namespace := range []string{"", "_", "..", "blue"} {
		for _, holder := range []string{".", "..", "a/b", "../../x", "A", "a", "_", strings.Repeat("h", 253)} {
			r := request(holder, "v-"+namespace+"-"+holder)
			r.Owner.Namespace = namespace
			p := w.publish(r)
			if rel, ok := strings.CutPrefix(p.Path, w.Root()+"/"); !ok || filepath.Clean(p.Path) != p.Path || strings.Count(rel, "/") != 3 || seen[p.Path] {
				t.Errorf("holder %q of %q is at %s", holder, namespace, p.Path)
			}
			seen[p.Path] = true
			keys = append(keys, r.Key)
		}
	}
	for _, k := range keys {
		w.unpublish(k)
	}
	w.clean(d)
}

func TestModesOfOneNodeAreMapped(t *testing.T) {
	for _, able := range [][]csi.NodeServiceCapability_RPC_Type{nil, {csi.NodeServiceCapability_RPC_SINGLE_NODE_MULTI_WRITER}} {
		w, d := start(t, csitest.Options{Able: able}) // which refuses a mode that it does not have
		for _, mode := range []string{"SINGLE_NODE_SINGLE_WRITER", "SINGLE_NODE_MULTI_WRITER"} {
			r := request("pod", mode)
			r.Mode = mode
			w.publish(r)
			other := r
			other.Holder = "pod2"
			_, err := w.Publish(t.Context(), other)
			if single := mode == "SINGLE_NODE_SINGLE_WRITER"; single != errdefs.IsFailedPrecondition(err) || !single && err != nil {
				t.Errorf("second holder in the mode %s: %v", mode, err)
			}
			w.unpublish(r.Key)
			w.unpublish(other.Key)
		}
		w.clean(d)
	}
}

func TestErrorsOfADriver(t *testing.T) {
	for code, class := range map[codes.Code]errdefs.Class{
		codes.InvalidArgument: errdefs.InvalidArgument, codes.NotFound: errdefs.NotFound, codes.FailedPrecondition: errdefs.FailedPrecondition,
		codes.Unimplemented: errdefs.Unsupported, codes.Unavailable: errdefs.Unavailable, codes.DeadlineExceeded: errdefs.Unavailable,
		codes.Aborted: errdefs.Unavailable, codes.Canceled: errdefs.Unavailable, codes.Internal: errdefs.Internal,
		codes.ResourceExhausted: errdefs.ResourceExhausted,
	} {
		for _, method := range []string{"NodeStageVolume", "NodePublishVolume"} {
			for _, late := range []bool{false, true} {
				w, d := start(t, csitest.Options{Able: staging})
				d.On(method, &csitest.Fault{Err: status.Error(code, "the cause"), Late: late})
				r := request("pod", "v")
				_, err := w.Publish(t.Context(), r)
				wantClass(t, err, class, "the cause", method, "csi.test", `"data"`)
				if list := w.List(); len(list) != 1 || list[0].Ready {
					t.Errorf("after a failed call: %+v", list)
				}
				d.On(method, nil)
				if late {
					w.publish(r)
				}
				w.unpublish(r.Key)
				w.clean(d)
			}
		}
	}
}
