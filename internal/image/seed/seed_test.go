package seed

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"io"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"unicode/utf16"

	"github.com/kdomanski/iso9660"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/testkit/diff"
	"cocoonstack.io/cocoon/internal/vm"
)

const id vm.ID = "abcdefghijklmnopqrstuvwxyz"

// read returns what another implementation reads from the image: files by path, and the label.
func read(t *testing.T, img []byte) (map[string]string, string) {
	t.Helper()
	i, err := iso9660.OpenImage(bytes.NewReader(img))
	if err != nil {
		t.Fatal(err)
	}
	root, err := i.RootDir()
	if err != nil {
		t.Fatal(err)
	}
	label, err := i.Label()
	if err != nil {
		t.Fatal(err)
	}
	got := map[string]string{}
	var walk func(dir string, f *iso9660.File)
	walk = func(dir string, f *iso9660.File) {
		children, err := f.GetChildren()
		if err != nil {
			t.Fatal(err)
		}
		for _, c := range children {
			name := path.Join(dir, c.Name())
			if c.IsDir() {
				walk(name, c)
				continue
			}
			if c.Mode().Perm() != 0o400 {
				t.Errorf("%s has mode %o", name, c.Mode())
			}
			b, err := io.ReadAll(c.Reader())
			if err != nil {
				t.Fatal(err)
			}
			got[name] = string(b)
		}
	}
	walk("", root)
	return got, label
}

func TestAnotherReaderSeesTheSame(t *testing.T) {
	for label, files := range map[string]map[string][]byte{
		"cidata": {
			"meta-data": []byte("a"), "user-data": bytes.Repeat([]byte("x"), 3*sector), "vendor-data": nil,
			"network-config": bytes.Repeat([]byte("y"), sector+1),
		},
		"config-2": {
			"openstack/latest/meta_data.json": []byte("{}"), "openstack/latest/user_data": []byte("#!/bin/sh\n"),
			"openstack/latest/network_data.json": []byte("{}"), "openstack/latest/vendor_data.json": []byte("\"\""),
		},
	} {
		img, err := encode(label, files)
		if err != nil {
			t.Fatal(err)
		}
		got, gotLabel := read(t, img)
		want := map[string]string{}
		for name, data := range files {
			want[name] = string(data)
			if joliet := ucs2(path.Base(name) + ";1"); !bytes.Contains(img, joliet) {
				t.Errorf("%s is not in the Joliet tree", name)
			}
		}
		if d := diff.Of(want, got); d != "" {
			t.Errorf("%s: %s", label, d)
		}
		if strings.TrimRight(gotLabel, " ") != label {
			t.Errorf("label %q, want %q", gotLabel, label)
		}
		if svd := img[sectorJoliet*sector:]; !bytes.HasPrefix(svd[40:], ucs2(label+" ")) || string(svd[88:91]) != "%/E" {
			t.Errorf("%s: the Joliet descriptor is %q", label, svd[:96])
		}
		again, err := encode(label, files)
		if err != nil || !bytes.Equal(again, img) {
			t.Errorf("%s: equal input gave other bytes", label)
		}
	}
}

func TestNamesThatDoNotFit(t *testing.T) {
	for _, name := range []string{"", "/a", "a//b", "a b", "\x00", strings.Repeat("n", 61), "é"} {
		if _, err := encode("cidata", map[string][]byte{name: nil}); !errdefs.IsInvalid(err) {
			t.Errorf("%q: %v", name, err)
		}
	}
	many := map[string][]byte{}
	for i := range 200 {
		many[fmt.Sprintf("folder-%d/file", i)] = nil
	}
	if _, err := encode("cidata", many); !errdefs.IsInvalid(err) {
		t.Errorf("folders whose table has two sectors: %v", err)
	}
}

// A folder with many files has several sectors of records, and no record crosses from one sector to the next. This test reads the records
// itself: the other reader (v0.4.0) mixes sectors up. In test/e2e, the kernel of a guest reads such a disk.
func TestManyFiles(t *testing.T) {
	files, want := map[string][]byte{}, []string{"", ""} // the folder itself and its parent
	for i := range 1000 {
		name := strings.Repeat("n", i%50+1) + fmt.Sprintf("%04d", i)
		files[name], want = []byte(name), append(want, name)
	}
	img, err := encode("files", files)
	if err != nil {
		t.Fatal(err)
	}
	root := img[sectorPrimary*sector+156:]
	at, size := int(binary.LittleEndian.Uint32(root[2:])), int(binary.LittleEndian.Uint32(root[10:]))
	if size%sector != 0 || size < 20*sector {
		t.Fatalf("the folder has %d bytes", size)
	}
	var got []string
	for from := at * sector; from < at*sector+size; from += sector {
		for rest := img[from : from+sector]; len(rest) > 0 && rest[0] > 0; rest = rest[rest[0]:] {
			record, name := rest[:rest[0]], ""
			if begin := bytes.Index(record, []byte("NM")); begin >= 0 {
				name = string(record[begin+5 : begin+int(record[begin+2])])
				data := int(binary.LittleEndian.Uint32(record[2:])) * sector
				if !bytes.HasPrefix(img[data:], []byte(name)) {
					t.Errorf("%s has other content", name)
				}
			}
			got = append(got, name)
		}
	}
	slices.Sort(got)
	slices.Sort(want)
	if d := diff.Of(want, got); d != "" {
		t.Error(d)
	}
}

// Volumes with a label are disks of their own, and in no document.
func TestFilesOnDisks(t *testing.T) {
	dir := t.TempDir()
	s := spec()
	s.Volumes = append(s.Volumes, vm.Volume{Name: "keys", Kind: vm.VolumeFiles, Label: "KEYS", Files: []vm.VolumeFile{{Path: "a", Data: []byte("secret")}, {Path: "b/c", Data: []byte("2")}}},
		vm.Volume{Name: "none", Kind: vm.VolumeFiles, Label: "none"})
	disks, err := Maker{}.Seed(t.Context(), id, s, nil, dir)
	if err != nil || len(disks) != 3 {
		t.Fatalf("%v, %v", disks, err)
	}
	want := vm.Disk{Path: filepath.Join(dir, "files-2.iso"), Format: vm.DiskRaw, ReadOnly: true, Serial: "cocoon-files-2", Role: vm.RoleCidat}
	if d := diff.Of(want, disks[1]); d != "" {
		t.Error(d)
	}
	for i, want := range map[int]map[string]string{1: {"a": "secret", "b/c": "2"}, 2: {}} {
		img, err := os.ReadFile(disks[i].Path)
		if err != nil {
			t.Fatal(err)
		}
		got, label := read(t, img)
		if d := diff.Of(want, got); d != "" || strings.TrimSpace(label) != s.Volumes[i+1].Label {
			t.Errorf("disk %d is called %q: %s", i, label, d)
		}
		if info, err := os.Stat(disks[i].Path); err != nil || info.Mode() != 0o600 {
			t.Errorf("disk %d: %v, %v", i, info.Mode(), err)
		}
	}
	s.Volumes[2].Files[0].Path = "no name"
	if _, err := (Maker{}).Seed(t.Context(), id, s, nil, dir); !errdefs.IsInvalid(err) || !strings.Contains(err.Error(), "volume keys") || strings.Contains(err.Error(), "secret") {
		t.Errorf("a name that does not fit: %v", err)
	}
}

func spec() vm.Spec {
	return vm.Spec{
		Name: "web", Hostname: "web", Process: vm.Process{Env: []vm.EnvVar{{Name: "A", Value: "secret"}}},
		CloudInit: &vm.CloudInit{UserData: "#!/bin/sh\n"},
		Volumes: []vm.Volume{{Name: "cm", Kind: vm.VolumeFiles, Files: []vm.VolumeFile{
			{Path: "a", Data: []byte("1"), Mode: 0o600}, {Path: "sub/b", Data: []byte("2")}, {Path: "sub2", Data: []byte("3")},
		}}, {Name: "empty", Kind: vm.VolumeEmpty}},
		Mounts: []vm.Mount{
			{Volume: "cm", Path: "/etc/cm"},
			{Volume: "cm", Path: "/etc/one", SubPath: "a"},
			{Volume: "cm", Path: "/srv", SubPath: "sub"},
			{Volume: "empty", Path: "/cache"},
		},
	}
}

func TestSeed(t *testing.T) {
	dir := t.TempDir()
	nics := []vm.NIC{{MAC: "52:54:00:00:00:01", DHCP: true}}
	disks, err := Maker{}.Seed(t.Context(), id, spec(), nics, dir)
	if err != nil || len(disks) != 1 {
		t.Fatalf("%v, %v", disks, err)
	}
	disk := disks[0]
	want := vm.Disk{Path: filepath.Join(dir, "cidata.iso"), Format: vm.DiskRaw, ReadOnly: true, Serial: "cocoon-cidata", Role: vm.RoleCidat}
	if d := diff.Of(want, disk); d != "" {
		t.Error(d)
	}
	first, err := os.Stat(disk.Path)
	if err != nil {
		t.Fatal(err)
	}
	if first.Mode() != 0o600 {
		t.Errorf("mode %v", first.Mode())
	}
	img, err := os.ReadFile(disk.Path)
	if err != nil {
		t.Fatal(err)
	}
	files, _ := read(t, img)
	if files["user-data"] != "#!/bin/sh\n" || !strings.Contains(files["meta-data"], string(id)) {
		t.Errorf("files %v", files)
	}
	for _, p := range []string{"/etc/cloud/environment", "/etc/cm/a", "/etc/cm/sub/b", "/etc/cm/sub2", "/etc/one", "/srv/b"} {
		if !strings.Contains(files["vendor-data"], `path: "`+p+`"`) {
			t.Errorf("%s is not written: %s", p, files["vendor-data"])
		}
	}
	if n := strings.Count(files["vendor-data"], "path:"); n != 6 {
		t.Errorf("%d files are written", n)
	}

	if _, err := (Maker{}).Seed(t.Context(), id, spec(), nics, dir); err != nil {
		t.Fatal(err)
	}
	if second, err := os.Stat(disk.Path); err != nil || !os.SameFile(first, second) {
		t.Errorf("equal input wrote the file anew (%v)", err)
	}
	other := spec()
	other.Hostname = "other"
	if _, err := (Maker{}).Seed(t.Context(), id, other, nics, dir); err != nil {
		t.Fatal(err)
	}
	if second, err := os.Stat(disk.Path); err != nil || os.SameFile(first, second) {
		t.Errorf("other input left the old file (%v)", err)
	}
	if left, _ := os.ReadDir(dir); len(left) != 1 {
		t.Errorf("left behind: %v", left)
	}
}

func TestSeedRefusesAndLeavesTheOldOne(t *testing.T) {
	dir := t.TempDir()
	bad := spec()
	bad.CloudInit.MetaData = "- secret"
	_, err := Maker{}.Seed(t.Context(), id, bad, nil, dir)
	if !errdefs.IsInvalid(err) || strings.Contains(err.Error(), "secret") || !strings.Contains(err.Error(), "VM web") {
		t.Errorf("%v", err)
	}
	if left, _ := os.ReadDir(dir); len(left) != 0 {
		t.Errorf("left behind: %v", left)
	}
}

// For any documents, the other reader returns them unchanged.
func FuzzEncode(f *testing.F) {
	f.Add([]byte("#cloud-config\n"), []byte("{}"), "cidata")
	f.Add([]byte{}, bytes.Repeat([]byte{0xff}, sector), "config-2")
	f.Fuzz(func(t *testing.T, user, meta []byte, label string) {
		img, err := encode(label, map[string][]byte{"user-data": user, "openstack/latest/meta_data.json": meta})
		if err != nil {
			t.Fatal(err)
		}
		got, _ := read(t, img)
		if got["user-data"] != string(user) || got["openstack/latest/meta_data.json"] != string(meta) {
			t.Errorf("got %v of %q in %d bytes (label of %d)", got, user, len(img), len(utf16.Encode([]rune(label))))
		}
	})
}
