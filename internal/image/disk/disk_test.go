package disk_test

import (
	"encoding/binary"
	"testing"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/image/disk"
	"cocoonstack.io/cocoon/internal/vm"
)

func TestRecognise(t *testing.T) {
	put := func(off int, s string) []byte {
		b := make([]byte, disk.HeadSize)
		copy(b[off:], s)
		return b
	}
	for name, c := range map[string]struct {
		head   []byte
		format vm.DiskFormat
	}{
		"qcow2": {put(0, "QFI\xfb"), vm.DiskQCOW2}, "mbr": {put(510, "\x55\xaa"), vm.DiskRaw}, "gpt": {put(512, "EFI PART"), vm.DiskRaw},
		"ext4": {put(1080, "\x53\xef"), vm.DiskRaw}, "squashfs": {put(0, "hsqs"), vm.DiskRaw}, "erofs": {put(1024, "\xe2\xe1\xf5\xe0"), vm.DiskRaw},
		"iso": {put(0x8001, "CD001"), vm.DiskRaw}, "btrfs": {put(0x10040, "_BHRfS_M"), vm.DiskRaw}, "xfs": {put(0, "XFSB"), vm.DiskRaw},
		"zeros": {put(0, ""), ""}, "vmdk": {put(0, "KDMV"), disk.FormatVMDK},
		"vhdx": {put(0, "vhdxfile"), disk.FormatVHDX}, "vhd": {put(0, "conectix"), disk.FormatVHD}, "vmdk text": {put(0, "# Disk DescriptorFile"), ""}, "elf": {put(0, "\x7fELF"), ""}, "short": {[]byte("QF"), ""}, "empty": {nil, ""},
	} {
		got, err := disk.Recognise(c.head)
		if got != c.format || (err == nil) != (c.format != "") || err != nil && !errdefs.IsInvalid(err) {
			t.Errorf("%s: got %q, %v", name, got, err)
		}
	}
}

func TestRawDisksThatWereCut(t *testing.T) {
	le := binary.LittleEndian
	disks := map[string]func(b []byte){
		"gpt": func(b []byte) { copy(b[512:], "EFI PART"); le.PutUint64(b[512+32:], 1<<20/512-1) },
		"mbr": func(b []byte) { b[510], b[511], b[450] = 0x55, 0xaa, 0x83; le.PutUint32(b[454:], 1<<19/512) },
		"ext4": func(b []byte) {
			le.PutUint16(b[1080:], 0xef53)
			le.PutUint32(b[1028:], 1024)
			le.PutUint32(b[1048:], 0)
		},
	}
	for name, fill := range disks {
		head := make([]byte, disk.HeadSize)
		fill(head)
		if err := disk.CheckRaw(head, 1<<20); err != nil {
			t.Errorf("%s whole: %v", name, err)
		}
		if err := disk.CheckRaw(head, 1<<18); !errdefs.Is(err, errdefs.DataLoss) {
			t.Errorf("%s cut: %v", name, err)
		}
	}
}

// FuzzRecognise passes any bytes to Recognise and to the checks of raw disks.
func FuzzRecognise(f *testing.F) {
	f.Add([]byte("QFI\xfb"), int64(4))
	f.Add(make([]byte, 2048), int64(1<<20))
	f.Fuzz(func(t *testing.T, b []byte, size int64) {
		if format, err := disk.Recognise(b); err == nil && format == vm.DiskRaw {
			if err := disk.CheckRaw(b, size); err != nil && !errdefs.Is(err, errdefs.DataLoss) {
				t.Errorf("unclassified: %v", err)
			}
		}
	})
}
