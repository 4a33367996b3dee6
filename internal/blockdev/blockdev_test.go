package blockdev

import (
	"os"
	"path/filepath"
	"testing"

	"cocoonstack.io/cocoon/internal/errdefs"
)

func TestRead(t *testing.T) {
	for name, c := range map[string]struct {
		dir   string // below the folder with the files
		files map[string]string
		want  Identity
	}{
		"virtio":      {"vda", map[string]string{"vda/serial": "one\n"}, Identity{Serial: "one"}},
		"SCSI":        {"sda", map[string]string{"sda/device/vpd_pg80": "\x00\x80\x00\x05 two \x00", "sda/device/wwid": "naa.5000\n"}, Identity{Serial: "two", WWID: "naa.5000"}},
		"NVMe":        {"nvme0n1", map[string]string{"nvme0n1/wwid": "eui.1\n", "nvme0n1/device/serial": "S3  \n"}, Identity{Serial: "S3", WWID: "eui.1"}},
		"mapper":      {"dm-0", map[string]string{"dm-0/dm/uuid": "LVM-x\n"}, Identity{Virtual: "LVM-x"}},
		"RAID":        {"md0", map[string]string{"md0/md/uuid": "u\n"}, Identity{Virtual: "u"}},
		"loop":        {"loop0", map[string]string{"loop0/loop/backing_file": "/disk\n"}, Identity{Virtual: "/disk"}},
		"partition":   {"sda/sda2", map[string]string{"sda/serial": "one\n", "sda/sda2/partition": "2\n", "sda/sda2/start": "2048\n"}, Identity{Serial: "one", Partition: "2 at 2048"}},
		"bytes":       {"sda", map[string]string{"sda/serial": "\xff\x00x"}, Identity{Serial: "?\x00x"}},
		"short page":  {"sda", map[string]string{"sda/device/vpd_pg80": "\x00\x80"}, Identity{}},
		"unknown":     {"sda", nil, Identity{}},
		"blank texts": {"sda", map[string]string{"sda/serial": "   \n", "sda/device/vpd_pg80": "\x01\x80\x00\x01x"}, Identity{Serial: "x"}},
	} {
		root := t.TempDir()
		for file, text := range c.files {
			if err := os.MkdirAll(filepath.Dir(filepath.Join(root, file)), 0o700); err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(filepath.Join(root, file), []byte(text), 0o600); err != nil {
				t.Fatal(err)
			}
		}
		if got := read(filepath.Join(root, c.dir)); got != c.want {
			t.Errorf("%s: %+v, want %+v", name, got, c.want)
		}
	}
}

func TestSame(t *testing.T) {
	one := Identity{Size: 1, Serial: "a", WWID: "b", Virtual: "c", Partition: "d"}
	if two := (Identity{Size: 2, Serial: "a", WWID: "b", Virtual: "c", Partition: "d"}); !one.Same(two) {
		t.Error("one that has grown")
	}
	for _, two := range []Identity{
		{Serial: "x", WWID: "b", Virtual: "c", Partition: "d"},
		{Serial: "a", Virtual: "c", Partition: "d"},
		{Serial: "a", WWID: "b", Virtual: "x", Partition: "d"},
		{Serial: "a", WWID: "b", Virtual: "c"},
	} {
		if one.Same(two) {
			t.Errorf("%s is %s", one, two)
		}
	}
}

func TestIdentifyFile(t *testing.T) {
	f, err := os.Create(filepath.Join(t.TempDir(), "file"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if _, err := Identify(f); !errdefs.IsInvalid(err) {
		t.Error(err)
	}
}
