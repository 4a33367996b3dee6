//go:build vm

package local_test

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"cocoonstack.io/cocoon/internal/image"
	"cocoonstack.io/cocoon/internal/testkit/need"
	"cocoonstack.io/cocoon/internal/testkit/ociimage"
	"cocoonstack.io/cocoon/internal/testkit/testguest"
	"cocoonstack.io/cocoon/internal/vm"
)

// script is the init of the test guest: it mounts the two disks as our real init does, and prints what it sees.
const script = `#!/bin/busybox sh
b=/bin/busybox
$b mount -t devtmpfs dev /dev; $b mount -t proc proc /proc; $b mount -t sysfs sys /sys
for m in virtio_ring virtio virtio_pci_modern_dev virtio_pci_legacy_dev virtio_pci virtio_blk overlay; do $b insmod /modules/$m.ko; done
for d in /sys/block/vd*; do
  s=$($b cat $d/serial)
  case $s in
    cocoon-l*) $b mkdir -p /l/$s; $b mount -t ext4 -o ro /dev/${d##*/} /l/$s || echo MOUNT-FAILED;;
    cocoon-cow) cow=/dev/${d##*/};;
  esac
done
for l in /l/*; do lower=$l${lower:+:$lower}; done
{
$b mount -t ext4 $cow /mnt/upper && $b mkdir -p /mnt/upper/u /mnt/upper/w &&
$b mount -t overlay -o lowerdir=$lower,upperdir=/mnt/upper/u,workdir=/mnt/upper/w none /mnt/root || echo MOUNT-FAILED
cd /mnt/root
echo "SU $($b stat -c '%a %u %g' su)"
echo "LINKS $($b stat -c %h a) $($b cat b)"
echo "DIR $($b ls d)"
echo "SYM $($b readlink s)"
echo "BIG $($b md5sum big)"
echo "BOOTS $($b cat boots 2>/dev/null)"
echo -n x >> boots
echo changed > d/kept
echo "RO $($b touch /l/cocoon-l000/x 2>&1)"
echo "TREE $($b find . -path ./lost+found -prune -o -print | $b sort | $b tr '\n' ' ')"
echo "ERRORS $($b ls -lR . 2>&1 >/dev/null)"
echo "PARENT $($b stat -c '%a %u %g' p/q) $($b cat real/through)"
echo "OPAQUE $($b ls o)"
$b df -k /mnt/upper | $b tail -1 | { read dev size rest; echo "SIZE $size"; }
} > /dev/ttyS0 2>&1
cd /
$b umount /mnt/root; $b umount /mnt/upper
$b dmesg | $b grep -i 'ext4.*error' > /dev/ttyS0
$b sync; $b poweroff -f
`

// cpio writes an archive that the kernel unpacks over the initramfs before it.
func cpio(files map[string]string) []byte {
	var b bytes.Buffer
	entry := func(name, data string, mode int) {
		fmt.Fprintf(&b, "070701%08x%08x%08x%08x%08x%08x%08x%08x%08x%08x%08x%08x%08x%s\x00", 0, mode, 0, 0, 1, 0, len(data), 0, 0, 0, 0, len(name)+1, 0, name)
		b.Write(make([]byte, (4-b.Len()%4)%4))
		b.WriteString(data)
		b.Write(make([]byte, (4-b.Len()%4)%4))
	}
	entry("bin", "", 0o40755)
	for name, data := range files {
		entry(name, data, 0o100755)
	}
	entry("TRAILER!!!", "", 0)
	return b.Bytes()
}

func boot(t *testing.T, disks []vm.Disk) string {
	t.Helper()
	qemu := need.QEMU(t)
	kernel, modules := need.GuestKernel(t)
	busybox, err := os.ReadFile(need.Built(t, "bin/guest/busybox", "make guest"))
	if err != nil {
		t.Fatal(err)
	}
	initrd, err := os.ReadFile(modules)
	if err != nil {
		t.Fatal(err)
	}
	initrd = append(initrd, make([]byte, (4-len(initrd)%4)%4)...)
	path := filepath.Join(t.TempDir(), "initrd")
	if err := os.WriteFile(path, append(initrd, cpio(map[string]string{"init": script, "bin/busybox": string(busybox)})...), 0o600); err != nil {
		t.Fatal(err)
	}
	args := []string{
		"-M", "q35", "-m", "192", "-accel", "tcg,tb-size=64", "-nographic", "-no-reboot", "-nodefaults", "-serial", "stdio",
		"-kernel", kernel, "-initrd", path,
		"-append", "console=ttyS0 quiet panic=-1" + testguest.ClockArgs() + " no_timer_check noreplace-smp cryptomgr.notests rdinit=/init",
	}
	for i, d := range disks {
		ro := "off"
		if d.ReadOnly {
			ro = "on"
		}
		args = append(args, "-drive", fmt.Sprintf("if=none,id=d%d,format=%s,readonly=%s,file=%s", i, d.Format, ro, d.Path),
			"-device", fmt.Sprintf("virtio-blk-pci,drive=d%d,serial=%s", i, d.Serial))
	}
	ctx, cancel := context.WithTimeout(t.Context(), 4*time.Minute)
	defer cancel()
	out, err := exec.CommandContext(ctx, qemu, args...).CombinedOutput()
	if err != nil {
		t.Fatalf("qemu: %v\n%s", err, out)
	}
	return strings.ReplaceAll(string(out), "\r", "")
}

// TestVMGuestMountsItsDisks boots a guest twice with the disks of Prepare: the image is complete and read-only, the
// writable layer has its size and keeps its content, and both are clean afterwards.
func TestVMGuestMountsItsDisks(t *testing.T) {
	big := strings.Repeat("0123456789abcdef", 1<<19)
	img := ociimage.Image{Layers: []ociimage.Layer{
		ociimage.Of(ociimage.Entry{Name: "su", Body: "x", Mode: 0o4755, UID: 7, GID: 9}, ociimage.File("a", "linked"), ociimage.HardLink("b", "a"),
			ociimage.Dir("d"), ociimage.File("d/gone", "x"), ociimage.File("d/kept", "x"), ociimage.Symlink("s", "../x"), ociimage.File("big", big),
			ociimage.Entry{Name: "p/q/", Type: '5', Mode: 0o1770, UID: 3, GID: 4}, ociimage.Dir("o"), ociimage.File("o/old", "x"), ociimage.Dir("real"), ociimage.Symlink("to", "real"),
			ociimage.Dir("folder"), ociimage.File("folder/x", "y")),
		ociimage.Of(ociimage.Whiteout("d", "gone"), ociimage.Whiteout("none", "gone"), ociimage.File("p/q/r", "x"), ociimage.Opaque("o"), ociimage.File("o/new", "x"),
			ociimage.File("to/through", "followed"), ociimage.HardLink("a3", "a"), ociimage.Device("devices/null")),
		ociimage.Of(ociimage.File("folder", "now a file"), ociimage.Whiteout(".", "su2")),
	}}
	s := open(t, t.TempDir())
	stored, err := s.Import(t.Context(), "app", bytes.NewReader(img.OCI()), nil)
	if err != nil {
		t.Fatal(err)
	}
	const storage = 10 << 30
	root, err := s.Prepare(t.Context(), stored, image.Layout{Dir: t.TempDir(), Storage: storage})
	if err != nil {
		t.Fatal(err)
	}
	for boots := range 2 {
		out := boot(t, root.Disks)
		for _, want := range []string{
			"SU 4755 7 9\n", "LINKS 2 linked\n", "DIR kept\n", "ERRORS \n", "PARENT 1770 3 4 followed\n", "OPAQUE new\n",
			"TREE . ./a ./a3 ./b ./big ./boots ./d ./d/kept ./folder ./o ./o/new ./p ./p/q ./p/q/r ./real ./real/through ./s ./su ./to \n",
			"SYM ../x\n", "BIG ce06e59c3306aa4fb71f6af4b70f73d7", "BOOTS " + strings.Repeat("x", boots) + "\n", "Read-only file system",
		} {
			if !strings.Contains(out, want) {
				t.Fatalf("boot %d lacks %q:\n%s", boots, want, out)
			}
		}
		var size int64
		if _, err := fmt.Sscanf(out[strings.Index(out, "SIZE ")+5:], "%d", &size); err != nil || size < 9<<20 {
			t.Errorf("the guest sees %d KiB of storage, %v", size, err)
		}
	}
	layers, cow := root.Disks[:len(root.Disks)-1], root.Disks[len(root.Disks)-1].Path
	if len(layers) != 3 {
		t.Errorf("%d layers", len(layers))
	}
	if out, err := exec.Command("qemu-img", "check", cow).CombinedOutput(); err != nil {
		t.Errorf("qemu-img check: %v %s", err, out)
	}
	raw := filepath.Join(t.TempDir(), "raw")
	if out, err := exec.Command("qemu-img", "convert", "-O", "raw", cow, raw).CombinedOutput(); err != nil {
		t.Fatalf("qemu-img convert: %v %s", err, out)
	}
	for _, fs := range []string{layers[0].Path, layers[1].Path, layers[2].Path, raw} {
		if out, err := exec.Command("/usr/sbin/e2fsck", "-fn", fs).CombinedOutput(); err != nil {
			t.Errorf("e2fsck: %v %s", err, out)
		}
	}
	if info, err := os.Stat(cow); err != nil || info.Size() > 32<<20 {
		t.Errorf("two boots made the overlay %d bytes large, %v", info.Size(), err)
	} else {
		t.Logf("overlay after two boots: %d KiB", info.Size()>>10)
	}
}
