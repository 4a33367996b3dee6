package cli_test

import (
	"bytes"
	"context"
	"encoding/json"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/image"
	"cocoonstack.io/cocoon/internal/nodejson"
	"cocoonstack.io/cocoon/internal/testkit/diff"
	"cocoonstack.io/cocoon/internal/vm"
	"cocoonstack.io/cocoon/internal/volume"
	"cocoonstack.io/cocoon/internal/volume/file"
)

// withVolumes returns the tests' node with a store of volumes.
func withVolumes(t *testing.T) (n *node, s *file.Store) {
	t.Helper()
	s, err := file.New(t.Context(), file.Config{Dir: filepath.Join(t.TempDir(), "volumes")})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = s.Close() })
	return &node{volumes: grower{s}}, s
}

// grower is a store whose volumes VM web has, and it only reads them.
type grower struct{ *file.Store }

func (g grower) Grow(ctx context.Context, ref string, size int64) (volume.Resized, error) {
	v, err := g.Resize(ctx, ref, size)
	return volume.Resized{Volume: v, Waiting: []volume.Waiting{{VM: "web", Reason: "it only reads the volume"}}}, err
}

// A VM gets a volume and gives it back.
func TestAttachVolumeVerbs(t *testing.T) {
	n := &node{record: vm.Record{ID: "abcdefghijklmnop", Spec: vm.Spec{Name: "web"}}}
	run := serve(t, n)
	for _, tt := range []struct {
		args []string
		code int
		want string
	}{
		{[]string{"attach-volume", "web", "data:/data"}, 0, "web gets {data false false  false} at /data"},
		{[]string{"attach-volume", "web", "data:/data:ro"}, 0, "web gets {data true false  false} at /data"},
		{[]string{"attach-volume", "web", "prod/data:ro"}, 0, "web gets {prod/data true false  false} at "},
		{[]string{"attach-volume", "web", "data:shared"}, 0, "web gets {data false true  false} at "},
		{[]string{"attach-volume", "web", "data:ro:shared"}, 0, "web gets {data true true  false} at "},
		{[]string{"detach-volume", "web", "data"}, 0, "web loses data"},
		{[]string{"attach-volume", "web", "data:data"}, 2, ""},
		{[]string{"attach-volume", "web"}, 2, ""},
		{[]string{"detach-volume", "web", "used"}, 5, "web loses used"},
	} {
		n.killed = nil
		code, out, errs := run("", append([]string{"vm"}, tt.args...)...)
		if code != tt.code || strings.Join(n.killed, "") != tt.want || code == 0 && !strings.Contains(out, "web") {
			t.Errorf("%v: %d %q %q, %v", tt.args, code, out, errs, n.killed)
		}
	}
}

// disks has every image, with a disk of 1 MiB.
type disks struct {
	*file.Store
	asked []string
}

func (d *disks) FromImage(ctx context.Context, s volume.Spec, from image.PullRequest, progress func(image.Progress)) (volume.Volume, error) {
	d.asked = append(d.asked, string(from.Policy)+" "+from.Name)
	if strings.Contains(from.Name, "missing") {
		return volume.Volume{}, errdefs.NotFoundf("%s is not there", from.Name)
	}
	progress(image.Progress{Phase: image.PhaseFill, Total: 1 << 20})
	s.Size = max(s.Size, 1<<20)
	return d.Create(ctx, s)
}

func TestVolumeFromImage(t *testing.T) {
	n, store := withVolumes(t)
	run := serve(t, n)
	if code, _, errs := run("", "volume", "create", "system", "--image", "demo"); code == 0 || !strings.Contains(errs, "makes no volumes from images") {
		t.Errorf("%d %q", code, errs)
	}
	d := &disks{Store: store}
	n.filler = d
	run = serve(t, n)
	for _, tt := range []struct {
		args string
		want string // size, or an error
	}{
		{"system --image demo", "1M"},
		{"large --image demo --size 2M --kind file", "2M"},
		{"none --image missing", "missing is not there"},
		{"nothing", "a volume needs a size"},
	} {
		code, out, errs := run("", append([]string{"volume", "create"}, strings.Fields(tt.args)...)...)
		if text := out + errs; !strings.Contains(text, tt.want) || (code != 0) != (out == "") {
			t.Errorf("%s: %d %q %q", tt.args, code, out, errs)
		}
	}
	if diff := diff.Of([]string{"IfNotPresent demo", "IfNotPresent demo", "IfNotPresent missing"}, d.asked); diff != "" {
		t.Error(diff)
	}
}

// A resize says who does not use the new size yet.
func TestVolumeResizeTellsWhoWaits(t *testing.T) {
	n, _ := withVolumes(t)
	run := serve(t, n)
	run("", "volume", "create", "data", "--size", "1M")
	code, out, errs := run("", "volume", "resize", "data", "2M")
	if code != 0 || !strings.Contains(out, "2M") || !strings.Contains(errs, "Warning: VM web does not use the new size of volume data yet: it only reads the volume") {
		t.Errorf("%d %q %q", code, out, errs)
	}
	_, out, _ = run("", "volume", "resize", "data", "2M", "-o", "json")
	var v nodejson.ResizedVolume
	if err := json.Unmarshal([]byte(out), &v); err != nil || v.Size != 2<<20 || len(v.Waiting) != 1 || v.Waiting[0].VM != "web" {
		t.Errorf("%q, %v", out, err)
	}
}

func TestVolumeVerbs(t *testing.T) {
	n, store := withVolumes(t)
	run := serve(t, n)
	ok := func(args ...string) string {
		t.Helper()
		code, out, errs := run("", append([]string{"volume"}, args...)...)
		if code != 0 {
			t.Fatalf("%v: %d %s", args, code, errs)
		}
		return out
	}
	fails := func(want int, text string, args ...string) {
		t.Helper()
		if code, _, errs := run("", append([]string{"volume"}, args...)...); code != want || !strings.Contains(errs, text) {
			t.Errorf("%v: %d %s", args, code, errs)
		}
	}
	inspect := func(name string) (v nodejson.Volume) {
		t.Helper()
		if err := json.Unmarshal([]byte(ok("inspect", name)), &v); err != nil {
			t.Fatal(err)
		}
		return v
	}
	if out := ok("list", "-o", "json"); out != "[]\n" {
		t.Errorf("no volumes: %q", out)
	}
	ok("create", "data", "--size", "1M", "--label", "a=b")
	v := inspect("data")
	if v.Size != 1<<20 || v.Labels["a"] != "b" || !strings.HasPrefix(v.Serial, "vol-") || v.Attachments == nil || v.Kind != "file" {
		t.Errorf("created %+v", v)
	}
	fails(2, "needs a size", "create", "other")
	fails(2, "invalid volume size", "create", "other", "--size", "1")
	ok("resize", "data", "2M")
	fails(2, "smaller", "resize", "data", "1M")

	from := filepath.Join(t.TempDir(), "raw")
	if err := os.WriteFile(from, bytes.Repeat([]byte("x"), 1<<20), 0o600); err != nil {
		t.Fatal(err)
	}
	ok("import", "raw", from)
	ok("snapshot", "create", "raw", "--name", "before")
	ok("clone", "raw", "raw-2")
	ok("clone", "--snapshot", "before", "raw-3", "--size", "2M")
	ok("restore", "raw", "before")
	ok("export", "raw-3", "-o", from+".out")
	if got, err := os.ReadFile(from + ".out"); err != nil || len(got) != 2<<20 || !bytes.Equal(got[:1<<20], bytes.Repeat([]byte("x"), 1<<20)) {
		t.Errorf("exported %d bytes, %v", len(got), err)
	}
	if out := ok("snapshot", "list", "-q"); out != "before\n" {
		t.Errorf("snapshots: %q", out)
	}
	if out := ok("list", "-q"); out != "data\nraw\nraw-2\nraw-3\n" {
		t.Errorf("volumes: %q", out)
	}
	if _, _, err := store.Attach(context.Background(), "data", vm.NewID(), volume.Mode{}); err != nil {
		t.Fatal(err)
	}
	fails(5, "attached", "rm", "data")
	if out := ok("list"); !strings.Contains(out, inspectedVM(inspect("data"))) {
		t.Errorf("the list does not name the VM: %s", out)
	}
	ok("rm", "raw", "raw-2", "raw-3")
	ok("snapshot", "rm", "before")
	if out := ok("snapshot", "list", "-o", "json"); out != "[]\n" {
		t.Errorf("no snapshots: %q", out)
	}
}

func inspectedVM(v nodejson.Volume) string { return string(v.Attachments[0].VM[:12]) }

func TestRunWithVolumes(t *testing.T) {
	n, _ := withVolumes(t)
	run := serve(t, n)
	if code, _, errs := run("", "vm", "create", "--volume", "data:/var/lib/db", "-v", "prod/more:/more:ro", "-v", "raw:ro", "demo"); code != 0 {
		t.Fatal(errs)
	}
	want := []vm.Volume{
		{Name: "data", Kind: vm.VolumeDisk, Disk: &vm.VolumeUse{Ref: "data"}},
		{Name: "prod-more", Kind: vm.VolumeDisk, Disk: &vm.VolumeUse{Ref: "prod/more", ReadOnly: true}},
		{Name: "raw", Kind: vm.VolumeDisk, Disk: &vm.VolumeUse{Ref: "raw", ReadOnly: true}},
	}
	if got := n.launched.Volumes; !slices.EqualFunc(got, want, func(a, b vm.Volume) bool { return a.Name == b.Name && a.Kind == b.Kind && *a.Disk == *b.Disk }) {
		t.Errorf("volumes %+v", got)
	}
	if got := n.launched.Mounts; !slices.Equal(got, []vm.Mount{{Volume: "data", Path: "/var/lib/db"}, {Volume: "prod-more", Path: "/more", ReadOnly: true}}) {
		t.Errorf("mounts %+v", got)
	}
	if code, _, errs := run("", "vm", "create", "-v", "/srv/data/:/data", "-v", "/srv/fixed:/fixed:ro", "demo"); code != 0 {
		t.Fatal(errs)
	}
	if got := n.launched.Volumes; len(got) != 2 || *got[0].Dir != (vm.HostDir{Path: "/srv/data"}) || *got[1].Dir != (vm.HostDir{Path: "/srv/fixed", ReadOnly: true}) || got[0].Name == got[1].Name {
		t.Errorf("folders %+v", got)
	}
	if code, _, errs := run("", "vm", "create", "-v", "/srv/data", "demo"); code != 2 || !strings.Contains(errs, "/FOLDER:/PATH") {
		t.Errorf("a folder without a path: %d %s", code, errs)
	}
	if code, _, errs := run("", "vm", "create", "-v", "nfs://files.example/data/a:/data", "-v", "nfs://[fd00::1]:20049/:/all:ro", "demo"); code != 0 {
		t.Fatal(errs)
	}
	exports := []vm.NFS{{Server: "files.example", Path: "/data/a"}, {Server: "fd00::1", Path: "/", ReadOnly: true, Options: []string{"port=20049"}}}
	if got := n.launched.Volumes; len(got) != 2 || diff.Of(exports, []vm.NFS{*got[0].NFS, *got[1].NFS}) != "" || got[0].Name == got[1].Name {
		t.Errorf("folders of servers %+v", got)
	}
	if got := n.launched.Mounts; len(got) != 2 || got[0].Path != "/data" || got[1].Path != "/all" || !got[1].ReadOnly {
		t.Errorf("mounts of folders of servers %+v", got)
	}
	for _, bad := range []string{"nfs://files", "nfs://files/data", "nfs:///data:/data", "nfs://files,ro/data:/data", "nfs://files:x/data:/data"} {
		if code, _, errs := run("", "vm", "create", "-v", bad, "demo"); code != 2 {
			t.Errorf("%q: %d %s", bad, code, errs)
		}
	}
	for _, bad := range []string{"", ":/x", "data:x", ":shared", "data:shared:ro"} {
		if code, _, errs := run("", "vm", "create", "--volume", bad, "demo"); code != 2 || !strings.Contains(errs, "VOLUME:/PATH") {
			t.Errorf("%q: %d %s", bad, code, errs)
		}
	}
}
