package signature_test

import (
	"testing"
	"time"

	"cocoonstack.io/cocoon/internal/ext4"
	"cocoonstack.io/cocoon/internal/filesystem/signature"
)

func with(size, at int, text string) []byte {
	b := make([]byte, size)
	copy(b[at:], text)
	return b
}

// disk is a disk in memory.
type disk struct {
	b []byte
	n int // writes that are left
}

func (d *disk) WriteAt(p []byte, off int64) (int, error) {
	if d.n--; d.n >= 0 {
		copy(d.b[off:], p)
	}
	return len(p), nil
}

func (*disk) Sync() error { return nil }

func formatted(t *testing.T, writes int) []byte {
	t.Helper()
	d := &disk{b: make([]byte, ext4.MinFormat), n: writes}
	if err := ext4.Format(d, ext4.Empty{Size: ext4.MinFormat, Now: time.Unix(1, 0)}); err != nil {
		t.Fatal(err)
	}
	return d.b
}

func TestIdentify(t *testing.T) {
	const size = signature.Window
	zeros := make([]byte, size)
	for _, c := range []struct {
		name       string
		head, tail []byte
		want       signature.Kind
	}{
		{"nothing", zeros, zeros, signature.Blank},
		{"no bytes", nil, nil, signature.Blank},
		{"small and odd", make([]byte, 13), make([]byte, 13), signature.Blank},
		{"last byte of the head", with(size, size-1, "x"), zeros, signature.Unknown},
		{"last byte of the tail", zeros, with(size, size-1, "x"), signature.Unknown},
		{"first byte of the tail", zeros, with(size, 0, "x"), signature.Unknown},
		{"text", with(size, 0, "hello"), zeros, signature.Unknown},
		{"ext4", with(size, 1080, "\x53\xef"), zeros, signature.Ext4},
		{"our ext4", formatted(t, 1000)[:size], zeros, signature.Ext4},
		{"our ext4, interrupted at once", formatted(t, 1)[:size], zeros, signature.Unfinished},
		{"our ext4, interrupted before the mark is removed", formatted(t, 8)[:size], zeros, signature.Unfinished},
		{"xfs", with(size, 0, "XFSB"), zeros, signature.XFS},
		{"erofs", with(size, 1024, "\xe2\xe1\xf5\xe0"), nil, signature.EROFS},
		{"squashfs", with(size, 0, "hsqs"), zeros, signature.SquashFS},
		{"LUKS", with(size, 0, "LUKS\xba\xbe\x00\x02"), zeros, "LUKS encryption"},
		{"LUKS with a lost first header", with(size, 0x4000, "SKUL\xba\xbe"), zeros, "LUKS encryption"},
		{"LVM", with(size, 512, "LABELONE"), zeros, "an LVM volume"},
		{"swap", with(size, 4086, "SWAPSPACE2"), zeros, "swap space"},
		{"swap of large pages", with(size, 65526, "SWAPSPACE2"), zeros, "swap space"},
		{"btrfs", with(size, 0x10040, "_BHRfS_M"), zeros, "btrfs"},
		{"MBR", with(size, 510, "\x55\xaa"), zeros, "an MBR partition table or a boot sector"},
		{"GPT", append(with(512, 510, "\x55\xaa"), with(size-512, 0, "EFI PART")...), zeros, "a GPT partition table"},
		{"GPT of large sectors", with(size, 4096, "EFI PART"), zeros, "a GPT partition table"},
		{"GPT at the end only", zeros, with(size, size-512, "EFI PART"), "a GPT partition table"},
		{"FAT", append(with(510, 82, "FAT32   "), with(size-510, 0, "\x55\xaa")...), zeros, "FAT"},
		{"RAID", with(size, 4096, "\xfc\x4e\x2b\xa9"), zeros, "a part of a RAID"},
		{"RAID at the end", zeros, with(size, size-8192, "\xfc\x4e\x2b\xa9"), "a part of a RAID"},
		{"ISO 9660", with(size, 0x8001, "CD001"), zeros, "an ISO 9660 file system"},
		{"qcow2", with(size, 0, "QFI\xfb"), zeros, "a qcow2 image"},
	} {
		if got := signature.Identify(c.head, c.tail); got != c.want {
			t.Errorf("%s: %s, want %s", c.name, got, c.want)
		}
	}
}

func FuzzIdentify(f *testing.F) {
	f.Add(with(2048, 1080, "\x53\xef"), []byte{})
	f.Add(with(2048, 1024, "\xe2\xe1\xf5\xe0"), []byte{})
	f.Add([]byte("hsqs"), []byte("EFI PART"))
	f.Add([]byte("cocoon makes an ext4"), []byte{})
	f.Add(make([]byte, 100), make([]byte, 9000))
	f.Fuzz(func(t *testing.T, head, tail []byte) {
		kind := signature.Identify(head, tail)
		if kind == "" {
			t.Error("no kind")
		}
		for _, b := range [][]byte{head, tail} {
			for _, c := range b {
				if c != 0 && kind == signature.Blank {
					t.Fatal("a disk with data is blank")
				}
			}
		}
	})
}
