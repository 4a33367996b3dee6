package local_test

import (
	"archive/tar"
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/qcow2"
	"cocoonstack.io/cocoon/internal/snapshot"
	"cocoonstack.io/cocoon/internal/snapshot/artifact"
	"cocoonstack.io/cocoon/internal/snapshot/bundle"
	"cocoonstack.io/cocoon/internal/sparse"
	"cocoonstack.io/cocoon/internal/vm"
)

// sent is a snapshot as an untrusted sender may send it.
type sent struct {
	snap   snapshot.Snapshot
	config artifact.TarConfig
	record []byte // nil: that of snap
	files  []file
}

type file struct {
	bundle.File
	data []byte
}

func whole(name string, data []byte) file {
	return file{bundle.File{Name: name, Size: int64(len(data))}, data}
}

func newSent(t testing.TB) *sent {
	t.Helper()
	path := filepath.Join(t.TempDir(), "o")
	if err := (qcow2.Overlay{VirtualSize: 1 << 20, Backing: "/etc/shadow", BackingFormat: vm.DiskRaw}).Create(path); err != nil {
		t.Fatal(err)
	}
	overlay, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return &sent{
		snap: snapshot.Snapshot{
			ID: string(vm.NewID()), Name: "theirs", Hypervisor: "qemu", CPU: 1, Memory: 1 << 20, Storage: 1 << 20, Live: true,
			Disks: []snapshot.Disk{{Serial: "cow", Role: vm.RoleCOW, Size: 1 << 20, Layers: []snapshot.Layer{
				{File: "disk-0.0.raw", Format: vm.DiskRaw}, {File: "disk-0.1.qcow2", Format: vm.DiskQCOW2},
			}}},
		},
		config: artifact.TarConfig{Hypervisor: "qemu", CPU: 1, Memory: 1 << 20, Storage: 1 << 20},
		files: []file{
			whole(snapshot.FileState, []byte("devices")),
			{bundle.File{Name: snapshot.FileMemory, Size: 1 << 20, Extents: []sparse.Extent{{Offset: 4096, Length: 4}}}, []byte("page")},
			{bundle.File{Name: "disk-0.0.raw", Size: 1 << 20, Extents: []sparse.Extent{}}, nil},
			whole("disk-0.1.qcow2", overlay),
		},
	}
}

func (s *sent) stream(t testing.TB) []byte {
	t.Helper()
	var buf bytes.Buffer
	w := bundle.NewWriter(&buf, true)
	record := s.record
	if record == nil {
		var err error
		if record, err = json.Marshal(s.snap); err != nil {
			t.Fatal(err)
		}
	}
	s.config.ID = cmp.Or(s.config.ID, s.snap.ID)
	err := w.Header(artifact.TarHeader{Config: s.config, Snapshot: record})
	for _, f := range s.files {
		err = errors.Join(err, w.File(f.File, bytes.NewReader(f.data)))
	}
	if err := errors.Join(err, w.Close()); err != nil {
		t.Fatal(err)
	}
	return buf.Bytes()
}

func TestHostileSnapshots(t *testing.T) {
	dir := t.TempDir()
	s := open(t, dir)
	const ok = errdefs.Class(-1)
	disk := func(change func(*snapshot.Disk)) func(*sent) {
		return func(x *sent) { change(&x.snap.Disks[0]) }
	}
	head := func(change func([]byte)) func(*sent) { return func(x *sent) { change(x.files[3].data) } }
	for name, c := range map[string]struct {
		change func(*sent)
		class  errdefs.Class
		says   string
	}{
		"sound":                  {func(*sent) {}, ok, ""},
		"other order":            {func(x *sent) { slices.Reverse(x.files) }, ok, ""},
		"another system":         {func(x *sent) { x.record, x.config.Hypervisor = []byte("null"), "cloud-hypervisor" }, errdefs.InvalidArgument, "cloud-hypervisor"},
		"no record":              {func(x *sent) { x.record = []byte(`"x"`) }, errdefs.InvalidArgument, "another system"},
		"record of another type": {func(x *sent) { x.record = []byte(`{"id":"` + x.snap.ID + `","disks":1}`) }, errdefs.InvalidArgument, "cannot be read"},
		"another's file": {func(x *sent) {
			x.record, x.config.Hypervisor = []byte(`{"cpus":{"boot_vcpus":2},"memory":{"size":1073741824}}`), "cloud-hypervisor"
		}, errdefs.InvalidArgument, "cloud-hypervisor"},
		"bad id":         {func(x *sent) { x.snap.ID = "../x" }, errdefs.InvalidArgument, "id"},
		"bad name":       {func(x *sent) { x.snap.Name = "../x" }, errdefs.InvalidArgument, "name"},
		"contradiction":  {func(x *sent) { x.config.Memory = 2 << 20 }, errdefs.InvalidArgument, "contradict"},
		"no memory":      {func(x *sent) { x.snap.Memory, x.config.Memory = 0, 0 }, errdefs.InvalidArgument, "memory"},
		"less than none": {func(x *sent) { x.snap.Memory, x.config.Memory = -1, -1 }, errdefs.InvalidArgument, "memory"},
		"storage":        {func(x *sent) { x.snap.Storage, x.config.Storage = 1<<60, 1<<60 }, errdefs.InvalidArgument, "storage"},
		"CPUs":           {func(x *sent) { x.snap.CPU, x.config.CPU = 1<<30, 1<<30 }, errdefs.InvalidArgument, "CPUs"},
		"NICs":           {func(x *sent) { x.snap.NICs, x.config.NICs = 1000, 1000 }, errdefs.InvalidArgument, "network"},
		"unknown file":   {func(x *sent) { x.files = append(x.files, whole("evil", nil)) }, errdefs.InvalidArgument, "evil"},
		"missing file":   {func(x *sent) { x.files = x.files[1:] }, errdefs.DataLoss, "vmstate"},
		"much memory":    {func(x *sent) { x.files[1].Size = 1<<20 + 1 }, errdefs.InvalidArgument, "memory-ranges"},
		"much state": {func(x *sent) {
			x.files[0] = file{bundle.File{Name: "vmstate", Size: 5 << 30, Extents: []sparse.Extent{}}, nil}
		}, errdefs.InvalidArgument, "vmstate"},
		"path":            {disk(func(d *snapshot.Disk) { d.Layers[0].File = "../../x" }), errdefs.InvalidArgument, "invalid name"},
		"state as a disk": {disk(func(d *snapshot.Disk) { d.Layers[0].File = "vmstate" }), errdefs.InvalidArgument, "invalid name"},
		"twice":           {disk(func(d *snapshot.Disk) { d.Layers[0] = d.Layers[1] }), errdefs.InvalidArgument, "twice"},
		"wrong format":    {disk(func(d *snapshot.Disk) { d.Layers[1].Format = vm.DiskRaw }), errdefs.InvalidArgument, "format"},
		"unknown format":  {disk(func(d *snapshot.Disk) { d.Layers[1].Format = "vmdk" }), errdefs.InvalidArgument, "format"},
		"raw on an image": {disk(func(d *snapshot.Disk) { d.Image = true }), errdefs.InvalidArgument, "raw"},
		"no layers":       {disk(func(d *snapshot.Disk) { d.Layers = nil }), errdefs.InvalidArgument, "no layers"},
		"role":            {disk(func(d *snapshot.Disk) { d.Role = "evil" }), errdefs.InvalidArgument, "role"},
		"serial":          {disk(func(d *snapshot.Disk) { d.Serial = strings.Repeat("x", 21) }), errdefs.InvalidArgument, "serial"},
		"size":            {disk(func(d *snapshot.Disk) { d.Size = 2 << 20 }), errdefs.InvalidArgument, "1048576"},
		"smaller":         {disk(func(d *snapshot.Disk) { d.Size = 1 << 19 }), errdefs.InvalidArgument, "524288"},
		"many disks":      {func(x *sent) { x.snap.Disks = make([]snapshot.Disk, 300) }, errdefs.InvalidArgument, "disks"},
		"no qcow2":        {head(func(b []byte) { copy(b, "XXXX") }), errdefs.InvalidArgument, "qcow2"},
		"data file":       {head(func(b []byte) { b[79] = 4 }), errdefs.InvalidArgument, "another file"},
		"encrypted":       {head(func(b []byte) { b[35] = 2 }), errdefs.InvalidArgument, "encrypted"},
		"virtual size":    {head(func(b []byte) { b[24] = 0x80 }), errdefs.InvalidArgument, "size"},
		"L2 outside":      {head(func(b []byte) { b[3<<16+2] = 1 }), errdefs.DataLoss, "beyond"},
		"truncated layer": {func(x *sent) { x.files[3] = whole("disk-0.1.qcow2", x.files[3].data[:1000]) }, errdefs.DataLoss, "truncated"},
	} {
		t.Run(name, func(t *testing.T) {
			x := newSent(t)
			c.change(x)
			got, err := s.Import(t.Context(), "", "", bytes.NewReader(x.stream(t)), nil)
			if c.class == ok {
				if err != nil {
					t.Fatal(err)
				}
				if err := s.Remove(t.Context(), got.ID); err != nil {
					t.Error(err)
				}
				return
			}
			if !errdefs.Is(err, c.class) || !strings.Contains(err.Error(), c.says) {
				t.Errorf("got %v (%v), want %v about %q", err, errdefs.ClassOf(err), c.class, c.says)
			}
		})
	}
	if left, err := os.ReadDir(filepath.Join(dir, "tmp")); err != nil || len(left) > 0 {
		t.Errorf("left behind: %v, %v", left, err)
	}
	if all, err := s.List(t.Context()); err != nil || len(all) > 0 {
		t.Errorf("there is %+v, %v", all, err)
	}
}

// TestClaimsOfOthers: a snapshot without files of its own comes with nothing that only this node can say, from a stream and from a folder.
func TestClaimsOfOthers(t *testing.T) {
	s := open(t, t.TempDir())
	x := newSent(t)
	x.snap.Live, x.snap.Disks, x.files = false, nil, nil
	x.snap.Published, x.snap.Kept, x.snap.Volumes = []string{"*"}, true, []snapshot.Volume{{}}
	x.snap.Record.PID, x.snap.Record.Handle = 1, []byte(`{}`)
	dir := filepath.Join(t.TempDir(), "x")
	record, err := json.Marshal(x.snap)
	if err := errors.Join(err, os.Mkdir(dir, 0o700), os.WriteFile(filepath.Join(dir, snapshot.FileMeta), record, 0o600)); err != nil {
		t.Fatal(err)
	}
	for from, arrive := range map[string]func() (snapshot.Snapshot, error){
		"stream": func() (snapshot.Snapshot, error) {
			return s.Import(t.Context(), "stream", "", bytes.NewReader(x.stream(t)), nil)
		},
		"folder": func() (snapshot.Snapshot, error) { return s.ImportDir(t.Context(), "folder", "", dir) },
	} {
		got, err := arrive()
		if err != nil {
			t.Fatal(err)
		}
		if len(got.Published) > 0 || got.Kept || len(got.Volumes) > 0 || got.Record.PID != 0 || got.Record.Handle != nil {
			t.Errorf("from a %s comes %+v", from, got)
		}
		other := vm.OnBehalf(t.Context(), vm.Owner{Namespace: "other"})
		if _, err := s.Get(other, got.ID); !errdefs.IsNotFound(err) {
			t.Errorf("another namespace finds what comes from a %s: %v", from, err)
		}
	}
}

// TestMoreThanTheDiskHolds: such an entry is refused by the size in its header, before its data arrives.
func TestMoreThanTheDiskHolds(t *testing.T) {
	x := newSent(t)
	x.config.ID = x.snap.ID
	record, err1 := json.Marshal(x.snap)
	header, err2 := json.Marshal(artifact.TarHeader{Version: bundle.Version, Config: x.config, Snapshot: record})
	if err := errors.Join(err1, err2); err != nil {
		t.Fatal(err)
	}
	var buf bytes.Buffer
	w := tar.NewWriter(&buf)
	err1 = w.WriteHeader(&tar.Header{Name: bundle.FileHeader, Size: int64(len(header))})
	_, err2 = w.Write(header)
	if err := errors.Join(err1, err2, w.WriteHeader(&tar.Header{Name: "disk-0.1.qcow2", Size: 1 << 45})); err != nil {
		t.Fatal(err)
	}
	if _, err := open(t, t.TempDir()).Import(t.Context(), "", "", &buf, nil); !errdefs.Is(err, errdefs.ResourceExhausted) {
		t.Error(err)
	}
}
