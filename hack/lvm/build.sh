#!/bin/bash
# hack/lvm/build.sh OUTDIR: the machine on which the volume store of LVM is tested: a kernel with device-mapper's thin pools, and an
# initramfs with lvm2, busybox, loop devices, the KVM of the CPUs that QEMU emulates, and nothing else. Leaves OUTDIR/{vmlinux,initramfs}. The test brings its program and a disk.
#
# Its /init loads the modules and runs /start, which the test puts into another part of the initramfs, and switches the machine off.
#
# Packages come from where the machine's own apt gets them. Needs root or sudo (for chroot), mmdebstrap and go. The result is cached by
# this script and the versions of its packages below ${XDG_CACHE_HOME:-~/.cache}/cocoon; OUTDIR gets links to it.
set -euo pipefail
export LC_ALL=C

[ $# = 1 ] || { echo "usage: $0 OUTDIR" >&2; exit 2; }
say() { echo "lvm: $*"; }
die() { echo "lvm: $*" >&2; exit 1; }
# shellcheck source=hack/packages.sh
. "$(dirname "$0")/../packages.sh"
repo=$(cd "$(dirname "$0")/../.." && pwd)

packages=("$(kernel_package guest)" lvm2 thin-provisioning-tools busybox-static kmod)
cached lvm "$1" vmlinux initramfs
unpack

mkdir "$work/kernel"
cat "$root"/boot/vmlinuz-* >"$work/vmlinuz"
(cd "$repo" && CGO_ENABLED=0 GOWORK=off go run -trimpath ./guest/pack kernel "$work/vmlinuz" "$root" "$work/kernel")
mv "$work/kernel/vmlinux" "$work/out/"

cat >"$work/collect" <<'SCRIPT'
#!/bin/sh
# Makes /tree of what the machine needs. It runs in the folder with the unpacked packages.
set -e
export PATH=/sbin:/usr/sbin:/bin:/usr/bin
busybox=$1
mkdir -p /tree/bin /tree/dev /tree/etc/lvm /tree/lib64 /tree/modules /tree/proc /tree/run /tree/sbin /tree/sys /tree/tmp /tree/usr/sbin
"$busybox" cp "$busybox" /tree/bin/busybox
ln -s busybox /tree/bin/sh
kernel=$("$busybox" ls /lib/modules)
/sbin/depmod "$kernel" # by its path: busybox has a lesser one
n=10
for module in virtio_pci virtio_blk virtio_rng dm-thin-pool dm-snapshot kvm-amd loop; do
    /sbin/modprobe -S "$kernel" --show-depends "$module"
done | "$busybox" awk '$1 == "insmod" && !had[$2]++ {print $2}' | while read -r file; do
    "$busybox" cp "$file" "/tree/modules/$n-${file##*/}"
    n=$((n + 1))
done
loader=$("$busybox" ls /lib64/ld-linux-*.so.* | "$busybox" head -n1)
for program in /bin/kmod /sbin/lvm /sbin/dmsetup /usr/sbin/pdata_tools; do
    "$busybox" cp "$program" "/tree$program"
    "$loader" --list "$program" | "$busybox" awk '$3 ~ /^\// {print $3} $1 ~ /^\// {print $1}'
done | "$busybox" sort -u | while read -r library; do
    mkdir -p "/tree${library%/*}"
    "$busybox" cp -L "$library" "/tree$library"
done
ln -s pdata_tools /tree/usr/sbin/thin_check
ln -s ../bin/kmod /tree/sbin/insmod
[ -e /tree/modules/*-dm-snapshot.ko* ]
[ -e /tree/modules/*-kvm-amd.ko* ]
"$busybox" cat >/tree/etc/lvm/lvm.conf <<'CONF'
# There is no udev here, and nothing outlives the machine.
activation { udev_sync=0 udev_rules=0 monitoring=0 }
devices { obtain_device_list_from_udev=0 external_device_info_source="none" }
backup { backup=0 archive=0 }
CONF
"$busybox" cat >/tree/init <<'INIT'
#!/bin/sh
export PATH=/sbin:/usr/sbin:/bin
/bin/busybox --install -s /bin
mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t devtmpfs dev /dev
for module in /modules/*; do /sbin/insmod "$module"; done
/start
poweroff -f
INIT
"$busybox" chmod 755 /tree/init
cd /tree
"$busybox" find . | "$busybox" sort | "$busybox" cpio --quiet -o -H newc -R 0:0 >/initramfs
SCRIPT
as_root install -m 755 "$work/collect" "$root/collect"
busybox=$(cd "$root" && find bin usr/bin -name busybox -type f | head -n1)
as_root chroot "$root" "/$busybox" sh /collect "/$busybox" || die "the machine cannot be put together"
cat "$root/initramfs" >"$work/out/initramfs"
publish
