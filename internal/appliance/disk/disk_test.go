package disk

import (
	"encoding/binary"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/testkit/need"
)

func TestParseRoot(t *testing.T) {
	for cmdline, want := range map[string]Root{
		"BOOT_IMAGE=/x root=PARTUUID=b1a570ff-02 ro": {Signature, 2},
		"root=PARTUUID=b1a570ff-03\n":                {Signature, 3},
	} {
		if got, err := ParseRoot(cmdline); err != nil || got != want {
			t.Errorf("%q: got %+v, %v", cmdline, got, err)
		}
	}
	for _, cmdline := range []string{"", "root=/dev/vda", "root=PARTUUID=b1a570f-02", "root=PARTUUID=b1a570ff", "root=PARTUUID=12345678-9abc-4def-8123-456789abcdef"} {
		if got, err := ParseRoot(cmdline); err == nil || got != (Root{}) {
			t.Errorf("%q: got %+v, %v", cmdline, got, err)
		}
	}
}

// machineWith makes the folders of a kernel with disks of these signatures. Each has four partitions, the last one of that type.
func machineWith(t *testing.T, disks map[string]uint32, kind byte) (sysBlock, dev string) {
	t.Helper()
	sysBlock, dev = t.TempDir(), t.TempDir()
	for name, sig := range disks {
		b := make([]byte, 4096)
		binary.LittleEndian.PutUint32(b[diskID:], sig)
		b[tables+3*16+4] = kind
		b[510], b[511] = 0x55, 0xaa
		if err := os.WriteFile(filepath.Join(dev, name), b, 0o600); err != nil {
			t.Fatal(err)
		}
		infix := ""
		if strings.HasPrefix(name, "nvme") {
			infix = "p"
		}
		for i, number := range []string{"1", "2", "3", "4"} {
			dir := filepath.Join(sysBlock, name, name+infix+string(rune('1'+i)))
			if err := os.MkdirAll(dir, 0o755); err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(filepath.Join(dir, "partition"), []byte(number+"\n"), 0o600); err != nil {
				t.Fatal(err)
			}
		}
	}
	return sysBlock, dev
}

func TestPartitionOfTheDiskOfTheSystem(t *testing.T) {
	root := Root{Signature, 2}
	for name, tt := range map[string]struct {
		disks  map[string]uint32
		kind   byte
		number int
		want   string
		class  errdefs.Class
	}{
		"a virtual disk":             {map[string]uint32{"vda": Signature}, typeLVM, 4, "vda4", 0},
		"one of several":             {map[string]uint32{"sda": 1, "sdb": Signature}, typeLVM, 4, "sdb4", 0},
		"NVMe":                       {map[string]uint32{"nvme0n1": Signature}, typeLVM, 1, "nvme0n1p1", 0},
		"not a loop device":          {map[string]uint32{"loop0": Signature, "vda": Signature}, typeLVM, 4, "vda4", 0},
		"another type":               {map[string]uint32{"vda": Signature}, 0x83, 4, "", errdefs.FailedPrecondition},
		"another type is no matter":  {map[string]uint32{"vda": Signature}, 0x83, 1, "vda1", 0},
		"a copy of the disk":         {map[string]uint32{"vda": Signature, "vdb": Signature}, typeLVM, 4, "", errdefs.FailedPrecondition},
		"no such disk":               {map[string]uint32{"vda": 1}, typeLVM, 4, "", errdefs.NotFound},
		"a partition that is absent": {map[string]uint32{"vda": Signature}, typeLVM, 5, "", errdefs.NotFound},
	} {
		t.Run(name, func(t *testing.T) {
			sysBlock, dev := machineWith(t, tt.disks, tt.kind)
			got, err := root.Partition(sysBlock, dev, tt.number)
			if tt.want != "" {
				if err != nil || got != filepath.Join(dev, tt.want) {
					t.Errorf("got %s, %v", got, err)
				}
			} else if !errdefs.Is(err, tt.class) {
				t.Errorf("got %s, %v, want a %s error", got, err, tt.class)
			}
		})
	}
	if _, err := (Root{}).Partition(t.TempDir(), t.TempDir(), 1); !errdefs.IsNotFound(err) {
		t.Errorf("without a root: got %v", err)
	}
}

// The table is what sfdisk writes.
func TestTableOfSfdisk(t *testing.T) {
	tool := need.Tool(t, "sfdisk")
	image := filepath.Join(t.TempDir(), "disk")
	if err := os.WriteFile(image, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Truncate(image, 64<<20); err != nil {
		t.Fatal(err)
	}
	cmd := exec.CommandContext(t.Context(), tool, "-q", "--no-tell-kernel", image)
	cmd.Stdin = strings.NewReader("label: dos\nlabel-id: 0xb1a570ff\nstart=2048, size=2048, type=ef\nstart=4096, size=2048, type=83\nstart=6144, size=2048, type=83\nstart=8192, size=4096, type=8e\n")
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	sig, entries, err := tableOf(image)
	if err != nil || sig != Signature {
		t.Fatalf("got %x, %v", sig, err)
	}
	if want := (Entry{typeLVM, 8192, 4096}); entries[3] != want {
		t.Errorf("got %+v", entries[3])
	}
	if err := os.Truncate(image, 0); err != nil {
		t.Fatal(err)
	}
	if _, _, err := tableOf(image); err == nil {
		t.Error("an empty disk has a table")
	}
}

func TestBlank(t *testing.T) {
	path := filepath.Join(t.TempDir(), "partition")
	for name, tt := range map[string]struct {
		at   int
		want bool
	}{"zeros": {-1, true}, "a label at its start": {0, false}, "the last byte that counts": {blankBytes - 1, false}, "data far behind": {blankBytes, true}} {
		b := make([]byte, blankBytes+512)
		if tt.at >= 0 {
			b[tt.at] = 1
		}
		if err := os.WriteFile(path, b, 0o600); err != nil {
			t.Fatal(err)
		}
		if got, err := blank(path); err != nil || got != tt.want {
			t.Errorf("%s: got %t, %v", name, got, err)
		}
	}
}

func TestPermSize(t *testing.T) {
	const extent = 4 * mebibyte
	for _, tt := range []struct{ group, want int64 }{
		{2044 * mebibyte, gibibyte},
		{4 * gibibyte, gibibyte},
		{8 * gibibyte, 2 * gibibyte},
		{128 * gibibyte, 32 * gibibyte},
		{4096 * gibibyte, 32 * gibibyte},
		{4*gibibyte + 4*extent, gibibyte + extent},
		{4*gibibyte + extent, gibibyte + extent},
		{gibibyte, gibibyte},
	} {
		if got, err := PermSize(tt.group, extent); err != nil || got != tt.want {
			t.Errorf("PermSize(%d) = %d, %v, want %d", tt.group, got, err, tt.want)
		}
	}
	if _, err := PermSize(gibibyte-extent, extent); !errdefs.Is(err, errdefs.ResourceExhausted) {
		t.Errorf("a disk that is too small: got %v", err)
	}
}
