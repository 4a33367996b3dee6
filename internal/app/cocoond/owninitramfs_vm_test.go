//go:build vm

package cocoond_test

import (
	"archive/tar"
	"bytes"
	"errors"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/cavaliergopher/cpio"

	capsulev1 "cocoonstack.io/cocoon/api/capsule/v1"
	"cocoonstack.io/cocoon/internal/testkit/need"
)

// distribution returns the files of the demo disk: a kernel as Debian ships it, whose drivers of disks and networks are modules, and those
// modules with the order in which they load, by their path in an initramfs.
func distribution(t *testing.T) (kernel []byte, modules map[string][]byte) {
	t.Helper()
	disk, err := os.Open(need.Built(t, "bin/guest/disk.img", "make guest"))
	if err != nil {
		t.Fatal(err)
	}
	defer disk.Close()
	modules = map[string][]byte{}
	const partition, size = 1 << 20, 1 << 30
	for r := tar.NewReader(io.NewSectionReader(disk, partition, size)); ; {
		h, err := r.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		switch h.Name {
		case "vmlinuz":
			if kernel, err = io.ReadAll(r); err != nil {
				t.Fatal(err)
			}
		case "initrd":
			for in := cpio.NewReader(r); ; {
				h, err := in.Next()
				if errors.Is(err, io.EOF) {
					break
				}
				if err != nil {
					t.Fatal(err)
				}
				if strings.HasPrefix(h.Name, "modules/") {
					if modules[h.Name], err = io.ReadAll(in); err != nil {
						t.Fatal(err)
					}
				}
			}
		}
	}
	if kernel == nil || modules["modules/order"] == nil {
		t.Fatalf("the demo disk has a kernel of %d bytes and %d modules", len(kernel), len(modules))
	}
	return kernel, modules
}

// What the guest does: its initramfs loads the drivers, and starts the first program of the root that the command line names. That program
// counts its runs on the volume and on its root, serves both numbers, and obeys the power button.
const (
	ownInitramfs = `#!/bin/busybox sh
/bin/busybox --install -s /bin
export PATH=/bin
mount -t proc proc /proc
mount -t devtmpfs dev /dev
while read -r module; do insmod "/modules/$module.ko"; done </modules/order
root=$(sed 's/.*root=\([^ ]*\).*/\1/' /proc/cmdline)
until [ -b "$root" ]; do sleep 0.1; done
mount -t ext4 -o ro "$root" /mnt
echo "the initramfs has mounted $root"
mount --move /dev /mnt/dev
umount /proc
exec switch_root /mnt /sbin/init
`
	ownInit = `#!/bin/busybox sh
export PATH=/bin
mount -t proc proc /proc
mount -t sysfs sys /sys
mount -o remount,rw /
(while :; do acpid -f -l /dev/null; sleep 1; done) &
ip link set eth0 up
udhcpc -i eth0 -q -n -t 20 -T 1 -s /etc/udhcpc
volume=$(($(head -c 8 /dev/vdb | tr -dc 0-9) + 1))
printf %-8s "$volume" | dd of=/dev/vdb bs=8 count=1 conv=notrunc,fsync
root=$(($(cat /runs 2>/dev/null) + 1))
echo "$root" >/runs
echo "a program of the root: run $volume of the volume, $root of the root" | tee /www/index.html
httpd -p 8080 -h /www
while :; do sleep 3600; done
`
	ownLease = `#!/bin/busybox sh
[ "$1" = bound ] || exit 0
ip addr add "$ip/${mask:-24}" dev "$interface"
`
	ownButton = `#!/bin/busybox sh
echo "switched off by its button" >/dev/console
sync
poweroff -f
`
)

// TestVMApplianceOwnKernelWithInitramfs: a micro-VM boots the kernel of a distribution with an initramfs that has its drivers, up to a
// program of its own root, which becomes ready, has a volume as its second disk, and obeys the power button.
func TestVMApplianceOwnKernelWithInitramfs(t *testing.T) {
	n, o := newAppliance(t)
	ctx := t.Context()
	dir := filepath.Join(n.dir, "state/files")
	busybox, err := os.ReadFile(need.Built(t, "bin/guest/busybox", "make guest"))
	if err != nil {
		t.Fatal(err)
	}
	write := func(path string, data []byte, mode os.FileMode) {
		t.Helper()
		if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o755), os.WriteFile(path, data, mode)); err != nil {
			t.Fatal(err)
		}
	}
	kernel, files := distribution(t)
	write(filepath.Join(dir, "vmlinuz"), kernel, 0o600)
	files["bin/busybox"], files["init"] = busybox, []byte(ownInitramfs)
	var initramfs bytes.Buffer
	w := cpio.NewWriter(&initramfs)
	for _, name := range []string{"bin", "dev", "mnt", "modules", "proc"} {
		if err := w.WriteHeader(&cpio.Header{Name: name, Mode: cpio.TypeDir | 0o755}); err != nil {
			t.Fatal(err)
		}
	}
	for name, data := range files {
		err := w.WriteHeader(&cpio.Header{Name: name, Mode: cpio.TypeReg | 0o755, Size: int64(len(data))})
		if err := errors.Join(err, second(w.Write(data))); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	write(filepath.Join(dir, "initrd.img"), initramfs.Bytes(), 0o600)
	tree := t.TempDir()
	for _, name := range []string{"dev", "proc", "sys", "www"} {
		if err := os.Mkdir(filepath.Join(tree, name), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	for name, data := range map[string]string{"bin/busybox": string(busybox), "sbin/init": ownInit, "etc/udhcpc": ownLease, "etc/acpi/PWRF/00000080": ownButton} {
		write(filepath.Join(tree, name), []byte(data), 0o755)
	}
	for _, name := range []string{"acpid", "cat", "dd", "head", "httpd", "ip", "mount", "poweroff", "printf", "sh", "sleep", "sync", "tee", "tr", "udhcpc"} {
		if err := os.Symlink("busybox", filepath.Join(tree, "bin", name)); err != nil {
			t.Fatal(err)
		}
	}
	if out, err := exec.Command(need.Tool(t, "mkfs.ext4"), "-q", "-d", tree, filepath.Join(dir, "root.ext4"), "32M").CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}

	if _, err := o.volumes.Create(ctx, &capsulev1.VolumeCreateRequest{Name: "data", SizeMib: 32}); err != nil {
		t.Fatal(err)
	}
	own := microVM("own", &capsulev1.MicroVMSpec{
		KernelPath: filepath.Join(dir, "vmlinuz"), InitramfsPath: filepath.Join(dir, "initrd.img"), RootfsPath: filepath.Join(dir, "root.ext4"),
		KernelCmdlineExtra: "net.ifnames=0", Mounts: []*capsulev1.VolumeMount{{VolumeName: "data", MountPath: "/data"}},
	})
	own.MicroVm.Image = ""
	own.StopGraceSeconds = 240 // as long as the test waits for anything: the button ends it
	own.ReadinessProbe = &capsulev1.Probe{Action: &capsulev1.Probe_Http{Http: &capsulev1.ProbeHTTP{Port: 8080}}, PeriodSeconds: 1}
	o.apply(own)
	// Its writes to the volume stay, and those to its root do not.
	for _, words := range []string{"a program of the root: run 1 of the volume, 1 of the root", "a program of the root: run 2 of the volume, 1 of the root"} {
		if _, err := o.workloads.Start(ctx, &capsulev1.WorkloadStartRequest{Name: "own"}); err != nil {
			t.Fatal(err)
		}
		st := o.ready("own")
		resp, err := http.Get("http://" + st.GetAddress() + ":8080/")
		if err != nil {
			t.Fatal(err)
		}
		page, err := io.ReadAll(resp.Body)
		resp.Body.Close()
		if err != nil || string(page) != words+"\n" {
			t.Errorf("it serves %q, %v; want %q", page, err, words)
		}
		log := o.logs(&capsulev1.WorkloadLogsRequest{Name: "own"})
		if !strings.Contains(log, "the initramfs has mounted /dev/vda") || !strings.Contains(log, words) {
			t.Errorf("its log has no %q:\n%s", words, log)
		}
		if _, err := o.workloads.Stop(ctx, &capsulev1.WorkloadStopRequest{Name: "own"}); err != nil {
			t.Fatal(err)
		}
		o.until("own", "is stopped", func(s *capsulev1.WorkloadStatus) bool {
			return s.GetPhase() == capsulev1.WorkloadPhase_WORKLOAD_PHASE_STOPPED
		})
		if log := o.logs(&capsulev1.WorkloadLogsRequest{Name: "own"}); !strings.Contains(log, words) || !strings.Contains(log, "switched off by its button") {
			t.Errorf("after its end its log is:\n%s", log)
		}
	}
}
