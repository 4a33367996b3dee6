package cli_test

import (
	"compress/gzip"
	"context"
	"encoding/json"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/image"
	"cocoonstack.io/cocoon/internal/nodeapi"
	"cocoonstack.io/cocoon/internal/snapshot"
	"cocoonstack.io/cocoon/internal/testkit/diff"
	"cocoonstack.io/cocoon/internal/vm"
)

// warm is the only snapshot of the tests' node.
var warm = snapshot.Snapshot{
	ID: "zyxwvutsrqponmlkjihgfedcba", Name: "warm", Description: "d", Image: "demo:latest", ImageDigest: "sha256:1", ImageType: vm.ImageOCI, ImageBlobIDs: []string{"sha256:2"},
	Hypervisor: "qemu", Machine: vm.Machine{Driver: "qemu", Version: "7.2", Type: "pc-q35-7.2", Arch: "amd64", Accel: vm.AccelTCG, CPU: "max"},
	CPU: 2, Memory: 1 << 30, Storage: 10 << 30, NICs: 2, Network: "default", Source: snapshot.Source{VMID: "abcdefghijklmnop", VMName: "web"},
	Live: true, Size: 96 << 20, Pause: 12345678, Method: "precopy", CreatedAt: time.Date(2026, 11, 21, 10, 0, 0, 0, time.UTC),
}

// catalog imports and exports warm from and to anywhere.
type catalog struct {
	nodeapi.Snapshots // panics for what is not written here

	imported []byte
	ref, dir string
	auth     snapshot.Auth
	image    image.PushRequest
	withAuth []image.RegistryAuth
	node     *node

	published []string
	behalf    vm.Owner
}

func (s *catalog) GetSnapshot(_ context.Context, ref string) (snapshot.Snapshot, error) {
	if ref != warm.Name && ref != warm.ID {
		return snapshot.Snapshot{}, vm.Snapshots.Missing(vm.Owner{}, ref)
	}
	return warm, nil
}

func (s *catalog) ListSnapshots(context.Context) ([]snapshot.Snapshot, error) {
	return []snapshot.Snapshot{warm}, nil
}

func (s *catalog) PublishSnapshot(ctx context.Context, _ string, namespaces []string) (snapshot.Snapshot, error) {
	s.published, s.behalf = namespaces, vm.Behalf(ctx)
	x := warm
	x.Published = namespaces
	return x, nil
}

func (s *catalog) ExportSnapshot(_ context.Context, _ string, w io.Writer) error {
	_, err := io.WriteString(w, "all of it")
	return err
}

func (s *catalog) ExportSnapshotDir(_ context.Context, _, dir string) error {
	s.dir = dir
	return nil
}

func (s *catalog) ImportSnapshot(_ context.Context, name, description string, r io.Reader, progress func(int64)) (snap snapshot.Snapshot, err error) {
	s.imported, err = io.ReadAll(r)
	progress(int64(len(s.imported)))
	return snapshot.Snapshot{ID: "new", Name: name, Description: description}, err
}

func (s *catalog) ImportSnapshotDir(_ context.Context, name, _, dir string) (snapshot.Snapshot, error) {
	s.dir = dir
	return snapshot.Snapshot{ID: "new", Name: name}, nil
}

func (s *catalog) PushSnapshot(_ context.Context, _, to string, auth snapshot.Auth, progress func(snapshot.Progress)) (snapshot.Snapshot, error) {
	s.ref, s.auth = to, auth
	progress(snapshot.Progress{Phase: "sending", Done: 1, Total: 2})
	pushed := warm
	pushed.Digest = "sha256:m"
	return pushed, nil
}

func (s *catalog) PullSnapshot(_ context.Context, from, name string, auth snapshot.Auth, _ func(snapshot.Progress)) (snapshot.Snapshot, error) {
	s.ref, s.auth = from, auth
	return snapshot.Snapshot{ID: "new", Name: name, Digest: "sha256:m"}, nil
}

func (s *catalog) CloneWithImage(ctx context.Context, spec vm.CloneSpec, auth []image.RegistryAuth) (vm.Record, error) {
	s.withAuth = auth
	return s.node.Clone(ctx, spec)
}

func (s *catalog) Push(_ context.Context, r image.PushRequest, _ func(image.Progress)) (image.Image, error) {
	s.image = r
	return image.Image{Digest: "sha256:m"}, nil
}

func (n *node) SaveSnapshot(_ context.Context, ref string, s vm.SaveSpec) (snapshot.Snapshot, error) {
	if ref != n.record.Spec.Name {
		return snapshot.Snapshot{}, vm.VMs.Missing(vm.Owner{}, ref)
	}
	saved := warm
	saved.Name, saved.Description, saved.Quiesced, saved.Labels = s.Name, s.Description, s.Quiesce, s.Labels
	return saved, nil
}

func (n *node) RemoveSnapshot(_ context.Context, ref string) error {
	if ref == "kept" {
		return errdefs.Preconditionf("the hibernated VM web is in snapshot kept; wake or remove it first")
	}
	return nil
}

func (n *node) Clone(_ context.Context, s vm.CloneSpec) (vm.Record, error) {
	if s.Snapshot != "warm" && s.FromDir == "" {
		return vm.Record{}, vm.Snapshots.Missing(vm.Owner{}, s.Snapshot)
	}
	n.cloned = s
	r := n.record
	if s.Cold {
		r.Spec.CPUs, r.Spec.Memory = s.CPUs, s.Memory
	}
	return r, nil
}

func (n *node) Restore(context.Context, string, string) (vm.Record, error) { return n.record, nil }

func (n *node) Hibernate(_ context.Context, ref, name string) (vm.Record, error) {
	return vm.Record{ID: "abcdefghijklmnop", Spec: vm.Spec{Name: ref}, State: vm.StateHibernated, Snapshot: name}, nil
}

func (n *node) Wake(context.Context, string) (vm.Record, error) { return n.record, nil }

func TestPublishSaysToWhom(t *testing.T) {
	for _, tt := range []struct {
		args []string
		want []string
		code int
	}{
		{args: []string{"--to", "prod,dev"}, want: []string{"prod", "dev"}},
		{args: []string{"--all"}, want: []string{"*"}},
		{args: []string{"--none"}},
		{args: nil, code: 2},
		{args: []string{"--all", "--none"}, code: 2},
	} {
		n := &node{}
		code, out, errOut := serve(t, n)("", append([]string{"snapshot", "publish", "warm"}, tt.args...)...)
		if code != tt.code || !slices.Equal(n.catalog.published, tt.want) || code == 0 && !strings.Contains(out, "PUBLISHED") {
			t.Errorf("%q: %d %q %q, published to %q", tt.args, code, out, errOut, n.catalog.published)
		}
	}
}

// A person acts for a namespace by a flag, a program by its environment.
func TestNamespaceActsOnItsBehalf(t *testing.T) {
	n := &node{env: map[string]string{"COCOON_ON_BEHALF": `{"namespace":"dev","pod_uid":"p"}`}}
	cocoon := serve(t, n)
	if code, _, errOut := cocoon("", "snapshot", "publish", "warm", "--none"); code != 0 || n.catalog.behalf != (vm.Owner{Namespace: "dev", PodUID: "p"}) {
		t.Errorf("%d %q: on behalf of %s", code, errOut, diff.Of(vm.Owner{Namespace: "dev", PodUID: "p"}, n.catalog.behalf))
	}
	if code, _, errOut := cocoon("", "--namespace", "prod", "snapshot", "publish", "warm", "--none"); code != 0 || n.catalog.behalf != (vm.Owner{Namespace: "prod"}) {
		t.Errorf("%d %q: on behalf of %s", code, errOut, diff.Of(vm.Owner{Namespace: "prod"}, n.catalog.behalf))
	}
	n.env["COCOON_ON_BEHALF"] = "{"
	if code, _, errOut := cocoon("", "snapshot", "publish", "warm", "--none"); code != 2 || !strings.Contains(errOut, "COCOON_ON_BEHALF") {
		t.Errorf("%d %q", code, errOut)
	}
}

func TestSaveSaysHowLongTheGuestStoodStill(t *testing.T) {
	cocoon := serve(t, &node{record: vm.Record{ID: "abcdefghijklmnop", Spec: vm.Spec{Name: "web"}}})
	code, out, errOut := cocoon("", "snapshot", "save", "--name", "now", "web")
	if code != 0 || !strings.HasPrefix(out, "NAME ") || !strings.Contains(out, "\nnow ") || !strings.Contains(out, "12.3 ms") {
		t.Errorf("%d %q %q", code, out, errOut)
	}
	var got struct {
		PauseMS  float64 `json:"pause_ms"`
		Quiesced bool
		Labels   map[string]string
	}
	code, out, errOut = cocoon("", "snapshot", "save", "--name", "now", "--quiesce", "--label", "a=b", "--output", "json", "web")
	if err := json.Unmarshal([]byte(out), &got); code != 0 || err != nil || got.PauseMS != 12.345 || !got.Quiesced || got.Labels["a"] != "b" {
		t.Errorf("%d %q %q: %+v, %v", code, out, errOut, got, err)
	}
}

// The documented keys of the reference, and our own.
func TestSnapshotJSONKeys(t *testing.T) {
	code, out, errOut := serve(t, &node{})("", "snapshot", "inspect", "warm")
	want := `{
  "id": "zyxwvutsrqponmlkjihgfedcba",
  "name": "warm",
  "description": "d",
  "cpu": 2,
  "memory": 1073741824,
  "storage": 10737418240,
  "image": "demo:latest",
  "image_digest": "sha256:1",
  "image_type": "oci",
  "image_blob_ids": {
    "sha256:2": {}
  },
  "network": "default",
  "windows": false,
  "hypervisor": "cloud-hypervisor",
  "nics": 2,
  "created_at": "2026-11-21T10:00:00Z",
  "driver": "qemu",
  "live": true,
  "size": 100663296,
  "source": {
    "vm_id": "abcdefghijklmnop",
    "vm_name": "web"
  },
  "machine": {
    "driver": "qemu",
    "version": "7.2",
    "type": "pc-q35-7.2",
    "arch": "amd64",
    "accel": "tcg",
    "cpu": "max"
  },
  "pause_ms": 12.345,
  "method": "precopy",
  "quiesced": false,
  "used_at": null
}
`
	if code != 0 || out != want {
		t.Errorf("%d %q\n%s\nwant\n%s", code, errOut, out, want)
	}
}

func TestSnapshotList(t *testing.T) {
	cocoon := serve(t, &node{})
	if code, out, _ := cocoon("", "snapshot", "ls", "-q"); code != 0 || out != "warm\n" {
		t.Errorf("%d %q", code, out)
	}
	if code, out, _ := cocoon("", "snapshot", "list"); code != 0 || !strings.Contains(out, "warm ") || !strings.Contains(out, " live ") || !strings.Contains(out, " demo:latest ") {
		t.Errorf("%d %q", code, out)
	}
	var all []map[string]any
	if code, out, _ := cocoon("", "snapshot", "list", "-o", "json"); code != 0 || json.Unmarshal([]byte(out), &all) != nil || len(all) != 1 {
		t.Errorf("%d %q", code, out)
	}
	if code, out, errOut := cocoon("", "snapshot", "rm", "a", "kept", "b"); code != 5 || out != "a\nb\n" || strings.Count(errOut, "\n") != 1 {
		t.Errorf("rm: %d %q %q", code, out, errOut)
	}
	if code, out, _ := cocoon("", "__complete", "vm", "clone", ""); code != 0 || !strings.HasPrefix(out, "warm\n") {
		t.Errorf("completion: %d %q", code, out)
	}
}

func TestExportToFileAndBack(t *testing.T) {
	n := &node{}
	cocoon, dir := serve(t, n), t.TempDir()
	if code, out, errOut := cocoon("", "snapshot", "export", "warm", "-o", "-"); code != 0 || out != "all of it" {
		t.Errorf("to stdout: %d %q %q", code, out, errOut)
	}
	path := filepath.Join(dir, "warm.tar.gz")
	if code, out, errOut := cocoon("", "snapshot", "export", "warm", "--gzip", "-o", path); code != 0 || out != "" {
		t.Fatalf("to a file: %d %q %q", code, out, errOut)
	}
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	z, err := gzip.NewReader(f)
	if err != nil {
		t.Fatal(err)
	}
	if b, err := io.ReadAll(z); err != nil || string(b) != "all of it" {
		t.Errorf("the file holds %q, %v", b, err)
	}
	if fi, err := f.Stat(); err != nil || fi.Mode().Perm() != 0o600 {
		t.Errorf("memory of a guest for others to read: %v %v", fi.Mode(), err)
	}
	if left, err := filepath.Glob(filepath.Join(dir, ".*")); err != nil || len(left) > 0 {
		t.Errorf("left behind: %v %v", left, err)
	}
	replaced := filepath.Join(dir, "link")
	if err := os.Symlink(path, replaced); err != nil {
		t.Fatal(err)
	}
	if code, out, errOut := cocoon("", "snapshot", "export", "warm", "-o", replaced); code != 0 || out != "" {
		t.Fatalf("through a link: %d %q %q", code, out, errOut)
	}
	if fi, err := os.Lstat(replaced); err != nil || fi.Mode().Type() != os.ModeSymlink {
		t.Errorf("the link is a file now: %v %v", fi, err)
	}
	if b, err := os.ReadFile(path); err != nil || string(b) != "all of it" {
		t.Errorf("what it leads to holds %q, %v", b, err)
	}
	if code, out, errOut := cocoon("", "snapshot", "import", "--name", "copy", path); code != 0 || !strings.Contains(out, "copy ") || len(n.catalog.imported) == 0 {
		t.Errorf("from a file: %d %q %q", code, out, errOut)
	}
	if code, _, errOut := cocoon("from a pipe", "snapshot", "import", "--name", "copy", "--description", "d", "-o", "json"); code != 0 || string(n.catalog.imported) != "from a pipe" {
		t.Errorf("from stdin: %d %q, got %q", code, errOut, n.catalog.imported)
	}
	t.Chdir(dir)
	if code, _, errOut := cocoon("", "snapshot", "export", "warm", "--to-dir", "out"); code != 0 || n.catalog.dir != filepath.Join(dir, "out") {
		t.Errorf("to a folder: %d %q, went to %q", code, errOut, n.catalog.dir)
	}
	if code, _, errOut := cocoon("", "snapshot", "import", "--name", "x", "--from-dir", "in"); code != 0 || n.catalog.dir != filepath.Join(dir, "in") {
		t.Errorf("from a folder: %d %q, came from %q", code, errOut, n.catalog.dir)
	}
}

// A device or a pipe is written to, not replaced by a file of its name.
func TestExportToWhatIsNoFile(t *testing.T) {
	cocoon, pipe := serve(t, &node{}), filepath.Join(t.TempDir(), "pipe")
	if err := unix.Mkfifo(pipe, 0o600); err != nil {
		t.Fatal(err)
	}
	f, err := os.OpenFile(pipe, os.O_RDWR, 0) // so that neither side waits for the other
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	for _, args := range [][]string{{"snapshot", "export", "warm", "-o", pipe}, {"image", "export", "web", pipe}} {
		if code, _, errOut := cocoon("", args...); code != 0 {
			t.Fatalf("%s: %d %q", args, code, errOut)
		}
		if fi, err := os.Lstat(pipe); err != nil || fi.Mode().Type() != os.ModeNamedPipe {
			t.Fatalf("%s: the pipe is %v now, %v", args, fi.Mode(), err)
		}
		b := make([]byte, 100)
		if n, err := f.Read(b); err != nil || n == 0 {
			t.Errorf("%s: nothing came: %v", args, err)
		}
	}
}

// A secret comes from a file or the environment, and appears nowhere.
func TestPushAndPullProveWhoTheyAre(t *testing.T) {
	dir := t.TempDir()
	write := func(name, content string) string {
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
		return path
	}
	token, ca := write("token", " s3cret\n"), write("ca", "PEM")
	docker := write("config.json", `{"auths":{"https://reg.example:5000/v2/":{"auth":"bWU6cHc="}}}`)
	for name, c := range map[string]struct {
		args []string
		env  map[string]string
		want snapshot.Auth
	}{
		"nobody":      {nil, nil, snapshot.Auth{}},
		"environment": {nil, map[string]string{"EPOCH_TOKEN": "env", "EPOCH_CA_CERT": ca}, snapshot.Auth{Token: "env", CA: []byte("PEM")}},
		"file":        {[]string{"--token-file", token, "--ca-cert", ca}, map[string]string{"EPOCH_TOKEN": "env"}, snapshot.Auth{Token: "s3cret", CA: []byte("PEM")}},
		"docker":      {[]string{"--auth-file", docker}, map[string]string{"EPOCH_TOKEN": "env"}, snapshot.Auth{Username: "me", Password: "pw"}},
	} {
		n := &node{env: c.env}
		cocoon := serve(t, n)
		if code, out, errOut := cocoon("", append([]string{"snapshot", "push", "warm", "https://Reg.example:5000/team/warm:v1"}, c.args...)...); code != 0 || out != "sha256:m\n" || errOut != "" || diff.Of(c.want, n.catalog.auth) != "" {
			t.Errorf("%s: push: %d %q %q, credentials %s", name, code, out, errOut, diff.Of(c.want, n.catalog.auth))
		}
		n.catalog.auth = snapshot.Auth{}
		if code, _, errOut := cocoon("", append([]string{"snapshot", "pull", "--name", "x", "reg.example:5000/team/warm:v1"}, c.args...)...); code != 0 || diff.Of(c.want, n.catalog.auth) != "" || n.catalog.ref != "reg.example:5000/team/warm:v1" {
			t.Errorf("%s: pull of %s: %d %q, credentials %s", name, n.catalog.ref, code, errOut, diff.Of(c.want, n.catalog.auth))
		}
		code, out, errOut := cocoon("", append([]string{"image", "push", "demo", "reg.example:5000/demo"}, c.args...)...)
		want := image.PushRequest{Ref: "demo", To: "reg.example:5000/demo", Token: c.want.Token, Username: c.want.Username, Password: c.want.Password, CA: c.want.CA}
		if d := diff.Of(want, n.catalog.image); code != 0 || out != "sha256:m\n" || d != "" {
			t.Errorf("%s: image push: %d %q %q, asked for %s", name, code, out, errOut, d)
		}
	}
	n := &node{env: map[string]string{"EPOCH_TOKEN": "not for everybody"}}
	cocoon := serve(t, n)
	if code, _, errOut := cocoon("", "image", "pull", "--token-file", token, "oci://reg.example:5000/demo:1"); code != 0 || len(n.pulls.asked) != 1 {
		t.Errorf("image pull: %d %q, asked %+v", code, errOut, n.pulls.asked)
	} else if d := diff.Of([]image.RegistryAuth{{Registry: "reg.example:5000", Token: "s3cret"}}, n.pulls.asked[0].Auth); d != "" {
		t.Errorf("image pull: credentials %s", d)
	}
	if code, _, errOut := cocoon("", "image", "pull", "demo:1", "--token-file", token); code != 2 || !strings.Contains(errOut, "HOST/REPOSITORY") {
		t.Errorf("image pull without a registry: %d %q", code, errOut)
	}
	if code, _, errOut := cocoon("", "image", "pull", "r/demo"); code != 0 || n.pulls.asked[1].Auth != nil {
		t.Errorf("image pull: %d %q, asked %+v", code, errOut, n.pulls.asked[1])
	}
	for _, args := range [][]string{{"--token-file", write("empty", "\n")}, {"--token-file", write("two", "s3cret words")}, {"--auth-file", docker}} {
		code, _, errOut := serve(t, &node{})("", append([]string{"snapshot", "push", "warm", "other/x"}, args...)...)
		if code != 2 || strings.Contains(errOut, "s3cret") || strings.Contains(errOut, "pw") {
			t.Errorf("%v: %d %q", args, code, errOut)
		}
	}
}

func TestClone(t *testing.T) {
	ready := vm.Record{ID: "abcdefghijklmnop", Spec: vm.Spec{Name: "web-2"}, State: vm.StateRunning, ImageType: vm.ImageOCI, AgentReady: true, Cloned: true, Snapshot: "zyx"}
	n := &node{record: ready}
	n.catalog.node = n
	cocoon := serve(t, n)
	code, out, errOut := cocoon("", "vm", "clone", "--name", "web-2", "--storage", "40G", "--hostname", "h", "--ssh-host-keys", "--label", "a=b", "--network", "lan", "--output", "json", "warm")
	want := vm.CloneSpec{
		Snapshot: "warm", Name: "web-2", Storage: 40 << 30, Hostname: "h", SSHHostKeys: true, Labels: map[string]string{"a": "b"},
		NICs: []vm.NICSpec{{Network: "lan"}}, Keep: vm.Keep{NICs: true},
	}
	if d := diff.Of(want, n.cloned); code != 0 || d != "" || !strings.Contains(out, `"cloned": true`) || !strings.Contains(out, `"snapshot": "zyx"`) {
		t.Errorf("%d %q %q, asked for %s", code, out, errOut, d)
	}
	code, _, errOut = cocoon("", "vm", "clone", "--from-dir", "/srv/x", "--nics", "1", "--cold", "--cpu", "4", "--memory", "2G", "--disk-bandwidth", "100M", "--disk-iops", "500", "--stop-grace", "5s", "--on-demand", "--no-direct-io")
	want = vm.CloneSpec{FromDir: "/srv/x", NICs: []vm.NICSpec{{}}, Cold: true, CPUs: 4, Memory: 2 << 30, DiskRate: vm.DiskRate{Bytes: 100 << 20, Ops: 500}, StopGrace: 5 * time.Second, Keep: vm.Keep{Size: true}}
	if d := diff.Of(want, n.cloned); code != 0 || d != "" {
		t.Errorf("%d %q, asked for %s", code, errOut, d)
	}
	docker := filepath.Join(t.TempDir(), "config.json")
	if err := os.WriteFile(docker, []byte(`{"auths":{"r":{"auth":"bWU6cHc="}}}`), 0o600); err != nil {
		t.Fatal(err)
	}
	if code, _, errOut = cocoon("", "vm", "clone", "--pull", "--auth-file", docker, "warm"); code != 0 || len(n.catalog.withAuth) != 1 || n.catalog.withAuth[0].Username != "me" {
		t.Errorf("%d %q, image with %+v", code, errOut, n.catalog.withAuth)
	}
}

// A clone is ready when it has its own identity; if nobody can give it one, the output says what to do.
func TestCloneWaitsUntilItIsItself(t *testing.T) {
	n := &node{record: vm.Record{ID: "abcdefghijklmnop", Spec: vm.Spec{Name: "web-2"}, State: vm.StateRunning, ImageType: vm.ImageOCI, Cloned: true, Resume: &vm.Resume{Clone: true}}}
	n.events = func(_ context.Context, fn func(vm.Event) error) error {
		r := n.record
		r.AgentReady, r.Resume = true, nil
		return fn(vm.Event{Type: vm.EventModified, Record: r})
	}
	cocoon := serve(t, n)
	if code, out, errOut := cocoon("", "vm", "clone", "warm"); code != 0 || !strings.Contains(out, " running ") || errOut != "" {
		t.Errorf("%d %q %q", code, out, errOut)
	}
	if code, out, errOut := cocoon("", "vm", "clone", "--no-wait", "warm"); code != 0 || !strings.Contains(out, " running (resuming) ") || errOut != "" {
		t.Errorf("%d %q %q", code, out, errOut)
	}
	if code, out, errOut := cocoon("", "vm", "wake", "web-2"); code != 0 || out != "web-2\n" {
		t.Errorf("wake: %d %q %q", code, out, errOut)
	}
	if code, out, errOut := cocoon("", "vm", "restore", "web-2", "warm"); code != 0 || !strings.Contains(out, "web-2 ") {
		t.Errorf("restore: %d %q %q", code, out, errOut)
	}
	n.record.ImageType = vm.ImageDisk
	if code, _, errOut := cocoon("", "vm", "clone", "warm"); code != 0 || !strings.HasPrefix(errOut, "Note: web-2 is being told who it is") || !strings.Contains(errOut, "cloud-init clean") {
		t.Errorf("%d %q", code, errOut)
	}
}

func TestHibernate(t *testing.T) {
	cocoon := serve(t, &node{})
	if code, out, errOut := cocoon("", "vm", "hibernate", "a", "b"); code != 0 || out != "a\nb\n" {
		t.Errorf("%d %q %q", code, out, errOut)
	}
	if code, out, errOut := cocoon("", "vm", "hibernate", "--snapshot", "s", "-o", "json", "a"); code != 0 || !strings.Contains(out, `"state": "hibernated"`) || !strings.Contains(out, `"snapshot": "s"`) {
		t.Errorf("%d %q %q", code, out, errOut)
	}
}
