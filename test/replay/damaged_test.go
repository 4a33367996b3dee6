//go:build replay

package replay

import (
	"fmt"
	"os"
	"strings"
	"testing"

	"cocoonstack.io/cocoon/internal/appliance/bootctl"
)

// Whatever is damaged on the boot partition, a slot starts if there is one whose boot files are there.
func TestDamaged(t *testing.T) {
	b := newBench(t)
	const block = bootctl.Size
	text := func(lines string) []byte {
		return []byte("# GRUB Environment Block\n" + lines + strings.Repeat("#", block-25-len(lines)))
	}
	onA := booted{"v1", "v1", bootctl.Boot{Slot: bootctl.A, Files: "v1"}}
	onB := booted{"v1", "v1", bootctl.Boot{Slot: bootctl.B, Files: "v1"}}
	const both = "files_a=v1\nfiles_b=v1\n"
	for i, tt := range []struct {
		name string
		env  []byte // nil: the file is missing
		less string // files of which slots are missing
		want booted
	}{
		{"zeroed", make([]byte, block), "", onA},
		{"zeroed, and slot a has no kernel", make([]byte, block), "a", onB},
		{"garbage", []byte(strings.Repeat("\xa5\n", block/2)), "", onA},
		{"missing", nil, "", onA},
		{"empty", []byte{}, "", onA},
		{"no good slot", text(both), "", onA},
		{"a good slot that is none", text("good=x\ntry=b\ntries=2\n" + both + "uid=v1\n"), "", onA},
		{"the good slot has no kernel", text("good=b\ntry=-\ntries=0\n" + both), "b", onA},
		{"the trial has no kernel", text("good=a\ntry=b\ntries=2\nfiles_a=v1\nfiles_b=v2\nuid=v2\n"), "", onA},
		{"tries that are none", text("good=a\ntry=b\ntries=x\n" + both + "uid=v1\n"), "", onA},
		{"a trial of the good slot", text("good=b\ntry=b\ntries=2\n" + both + "uid=v1\n"), "", onB},
		{"an id that is of no file", text("good=b\ntry=-\ntries=0\nfiles_a=v9\nfiles_b=v9\n"), "", onA},
	} {
		t.Run(tt.name, func(t *testing.T) {
			disk := b.path(fmt.Sprintf("damaged%d.raw", i))
			b.do("cp", "--sparse=always", b.path("disk.raw"), disk)
			defer os.Remove(disk)
			esp := disk + "@@1M"
			b.do("mdel", "-i", esp, "::/EFI/BOOT/grubenv")
			if tt.env != nil {
				b.write("damaged.env", tt.env)
				b.do("mcopy", "-i", esp, b.path("damaged.env"), "::/EFI/BOOT/grubenv")
			}
			for _, slot := range strings.Split(tt.less, "") {
				b.do("mdel", "-i", esp, "::/vmlinuz_"+slot+"-v1")
			}
			if got := b.start(disk, ""); got != tt.want {
				t.Errorf("started %+v, want %+v", got, tt.want)
			}
		})
	}
}
