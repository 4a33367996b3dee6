#!/bin/bash
# hack/machine/build.sh lvm|kvm OUTDIR: a small machine in which tests run that need another kernel than the host's. Leaves
# OUTDIR/{vmlinux,initramfs}; internal/testkit/machine boots it.
#
#   lvm   device-mapper with thin pools, loop devices, lvm2
#   kvm   vhost and taps, the file system by which a guest sees its host's files, and ext4, which can map users
#
# Both have busybox and the KVM of the CPUs that QEMU emulates. Their /init loads the modules and runs /start, which the test puts into
# another part of the initramfs, and switches the machine off.
#
# Packages come from where the machine's own apt gets them. Needs root or sudo (for chroot), mmdebstrap and go. The result is cached by
# this script and the versions of its packages below ${XDG_CACHE_HOME:-~/.cache}/cocoon; OUTDIR gets links to it.
set -euo pipefail
export LC_ALL=C

usage() { echo "usage: $0 lvm|kvm OUTDIR" >&2; exit 2; }
[ $# = 2 ] || usage
kind=$1
say() { echo "$kind: $*"; }
die() { echo "$kind: $*" >&2; exit 1; }
# shellcheck source=hack/packages.sh
. "$(dirname "$0")/../packages.sh"
repo=$(cd "$(dirname "$0")/../.." && pwd)

packages=(busybox-static kmod)
modules=(virtio_pci virtio_blk virtio_rng kvm-amd)
programs=(/bin/kmod)
case $kind in
    lvm)
        packages+=("$(kernel_package guest)" lvm2 thin-provisioning-tools)
        modules+=(dm-thin-pool dm-snapshot loop)
        programs+=(/sbin/lvm /sbin/dmsetup /usr/sbin/pdata_tools)
        ;;
    kvm)
        packages+=("$(kernel_package host)") # kernels for guests lack 9p
        modules+=(virtio_console 9pnet_virtio 9p overlay vhost_net vhost_vsock tun bridge veth loop ext4)
        modules+=(nf_tables nft_ct nft_masq nft_nat nft_chain_nat nft_fib_inet nft_limit nft_reject_inet nf_conntrack_bridge nft_reject_bridge nft_meta_bridge) # rules of networks
        modules+=(sch_ingress cls_u32 act_mirred)
        ;;
    *) usage ;;
esac
cached "$kind" "$2" vmlinux initramfs
unpack

mkdir "$work/kernel"
cat "$root"/boot/vmlinuz-* >"$work/vmlinuz"
(cd "$repo" && CGO_ENABLED=0 GOWORK=off go run -trimpath ./guest/pack kernel "$work/vmlinuz" "$root" "$work/kernel")
mv "$work/kernel/vmlinux" "$work/out/"

cat >"$work/collect" <<'SCRIPT'
#!/bin/sh
# Makes /tree of what the machine needs. It runs in the folder with the unpacked packages.
# Its arguments are busybox's path, the modules and the programs.
set -e
export PATH=/sbin:/usr/sbin:/bin:/usr/bin
busybox=$1 modules=$2 programs=$3
mkdir -p /tree/bin /tree/dev /tree/etc/lvm /tree/lib64 /tree/modules /tree/proc /tree/run /tree/sbin /tree/sys /tree/tmp /tree/usr/sbin
"$busybox" cp "$busybox" /tree/bin/busybox
ln -s busybox /tree/bin/sh
kernel=$("$busybox" ls /lib/modules)
/sbin/depmod "$kernel" # by its path: busybox has a lesser one
for module in $modules; do
    /sbin/modprobe -S "$kernel" --show-depends "$module" >>/insmods # it fails if there is no such module
done
n=10
"$busybox" awk '$1 == "insmod" && !had[$2]++ {print $2}' /insmods | while read -r file; do
    "$busybox" cp "$file" "/tree/modules/$n-${file##*/}"
    n=$((n + 1))
done
loader=$("$busybox" ls /lib64/ld-linux-*.so.* | "$busybox" head -n1)
for program in $programs; do
    "$busybox" cp "$program" "/tree$program"
    "$loader" --list "$program" | "$busybox" awk '$3 ~ /^\// {print $3} $1 ~ /^\// {print $1}'
done | "$busybox" sort -u | while read -r library; do
    mkdir -p "/tree${library%/*}"
    "$busybox" cp -L "$library" "/tree$library"
done
[ ! -e /tree/usr/sbin/pdata_tools ] || ln -s pdata_tools /tree/usr/sbin/thin_check
ln -s ../bin/kmod /tree/sbin/insmod
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
as_root chroot "$root" "/$busybox" sh /collect "/$busybox" "${modules[*]}" "${programs[*]}" || die "the machine cannot be put together"
cat "$root/initramfs" >"$work/out/initramfs"
publish
