#!/bin/bash
# hack/lvm/build.sh OUTDIR: the machine on which the volume store of LVM is tested: a kernel with device-mapper's thin pools, and an
# initramfs with lvm2, busybox, the KVM of the CPUs that QEMU emulates, and nothing else. Leaves OUTDIR/{vmlinux,initramfs}. The test brings its program and a disk.
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
mkdir -p "$1"
out=$(cd "$1" && pwd)
self=$(cd "$(dirname "$0")" && pwd)/$(basename "$0")
repo=$(cd "$(dirname "$0")/../.." && pwd)
cache=${XDG_CACHE_HOME:-$HOME/.cache}/cocoon
mkdir -p "$cache"

packages=("$(kernel_package guest)" lvm2 thin-provisioning-tools busybox-static kmod)

# The versions decide about the bytes. Where apt's lists cannot be had, the newest machine there is serves.
if versions=$(versions "${packages[@]}"); then
    machine=$cache/lvm-$({ cat "$self"; echo "$versions"; } | sha256sum | cut -c1-16)
else
    [ -n "${COCOON_APT_LISTS-}" ] || own_lists "apt does not know all of: ${packages[*]}"
    machine=$(find "$cache" -maxdepth 1 -name 'lvm-*' -type d -printf '%T@ %p\n' | sort -n | tail -n1 | cut -d' ' -f2-)
    [ -n "$machine" ] || die "apt does not know all of: ${packages[*]}"
    say "apt does not know all packages, using the newest machine there is"
fi

link() {
    touch "$machine" # in use
    for f in vmlinux initramfs; do ln -sfn "$machine/$f" "$out/$f"; done
    find "$cache" -maxdepth 1 -name 'lvm-*' -type d -mtime +30 -exec rm -rf {} +
    say "$1 is $(basename "$machine"), $(du -sm "$machine" | cut -f1) MiB"
}

[ ! -d "$machine" ] || { link "$1"; exit; }
command -v mmdebstrap >/dev/null || die "mmdebstrap is missing; run: make setup"
exec 9>"$cache/.lvm.lock"
flock 9 # of several builders one builds, the others take what it made
[ ! -d "$machine" ] || { link "$1"; exit; }
sweep "$cache" '.lvm-*'

work=$(mktemp -d "$cache/.lvm-XXXXXX")
root=$work/root
trap '[ ! -e "$root" ] || as_root rm -rf "$root"; rm -rf "$work"' EXIT
chmod 755 "$work" # apt's user passes through
sources >"$work/sources.list"
[ -s "$work/sources.list" ] || die "apt has no source of $(distribution)'s packages"

say "fetching ${packages[*]} and what they need (half a minute)"
# Nothing is installed: the packages are only unpacked, so no script of theirs runs.
if ! as_root mmdebstrap --mode=root --variant=extract --include="$(IFS=,; echo "${packages[*]}")" \
    --aptopt='APT::Install-Recommends "false"' --aptopt='Acquire::Languages "none"' \
    "$(codename)" "$root" - <"$work/sources.list" >"$work/log" 2>&1; then
    tail -n 40 "$work/log" >&2
    die "mmdebstrap failed"
fi

mkdir -p "$work/out" "$work/kernel"
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
for module in virtio_pci virtio_blk virtio_rng dm-thin-pool dm-snapshot kvm-amd; do
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
sync "$work"/out/*
mv -T "$work/out" "$machine"
link "$1"
