#!/bin/bash
# os/installer.sh [--check] OUTDIR: the installer of Cocoon OS, OUTDIR/installer.raw, of what os/build.sh left in OUTDIR. It is for a stick: a boot partition
# and the same root as of installed machines, with the manifest that signs both. Its disk has a signature of its own, b005ab1e, so that no kernel takes it
# for an installed one.
#
# The same inputs give the same bytes; --check builds twice and compares. VERSION and OS_SIGNING_KEY are those of the build. Needs mtools, dosfstools, fdisk.
set -euo pipefail
export LC_ALL=C TZ=UTC

say() { echo "os: $*"; }
die() { echo "os: $*" >&2; exit 1; }
check=
[ "${1-}" != --check ] || { check=yes; shift; }
[ $# = 1 ] || { echo "usage: $0 [--check] OUTDIR" >&2; exit 2; }
out=$(cd "$1" && pwd)
cd "$(dirname "$0")/.."
umask 022
PATH=$PATH:/usr/sbin:/sbin
for tool in mkfs.vfat mcopy sfdisk; do
    command -v "$tool" >/dev/null || die "$tool is missing; run: make setup"
done
for file in disk.raw rootfs.sqsh vmlinuz initramfs cache/pack; do
    [ -s "$out/$file" ] || die "$out/$file is missing; run: make os-image"
done
version=${VERSION:-$(git describe --tags --always --dirty 2>/dev/null || echo unknown)}
export SOURCE_DATE_EPOCH=${SOURCE_DATE_EPOCH:-$(git log -1 --format=%ct 2>/dev/null || echo 0)}
esp_mib=64 mib=2048

work=$(mktemp -d "$out/.installer-XXXXXX")
trap 'rm -rf "$work"' EXIT

# build OUT: all of it. Sectors of 512 bytes.
build() {
    local disk=$1 root_mib
    rm -rf "$work/parts"
    mkdir -p "$work/parts/install"
    "$out/cache/pack" bundle "${OS_SIGNING_KEY:-$out/signing-key.pem}" "$version" '' "$out" "$work/bundle.tar"
    tar -C "$work/parts/install" --no-same-owner -xf "$work/bundle.tar" MANIFEST.json MANIFEST.sig
    rm "$work/bundle.tar"
    mcopy -n -i "$out/disk.raw@@1M" ::/EFI/BOOT/BOOTX64.EFI "$work/parts/BOOTX64.EFI"
    cp os/installer.cfg "$work/parts/grub.cfg"
    cp "$out"/{vmlinuz,initramfs} "$work/parts/"
    find "$work/parts" -exec touch -d "@$SOURCE_DATE_EPOCH" {} +

    rm -f "$work/esp"
    truncate -s "${esp_mib}M" "$work/esp"
    mkfs.vfat -F 32 -n CAPSULEINST -i b005ab1e --invariant "$work/esp" >/dev/null
    mmd -i "$work/esp" ::/EFI ::/EFI/BOOT ::/install
    mcopy -m -i "$work/esp" "$work/parts/BOOTX64.EFI" "$work/parts/grub.cfg" ::/EFI/BOOT/
    mcopy -m -i "$work/esp" "$work/parts/vmlinuz" "$work/parts/initramfs" ::/
    mcopy -m -i "$work/esp" "$work/parts/install/MANIFEST.json" "$work/parts/install/MANIFEST.sig" ::/install/

    root_mib=$((($(stat -c %s "$out/rootfs.sqsh") + (1 << 20) - 1) >> 20))
    rm -f "$disk"
    truncate -s "$((1 + esp_mib + root_mib + 1))M" "$disk"
    sfdisk -q --no-tell-kernel "$disk" <<TABLE
label: dos
label-id: 0xb005ab1e
start=2048, size=$((esp_mib * mib)), type=ef, bootable
start=$((2048 + esp_mib * mib)), size=$((root_mib * mib)), type=83
TABLE
    dd if="$work/esp" of="$disk" bs=1M seek=1 conv=notrunc,sparse status=none
    dd if="$out/rootfs.sqsh" of="$disk" bs=1M seek="$((1 + esp_mib))" conv=notrunc,sparse status=none
}

build "$work/installer.raw"
if [ -n "$check" ]; then
    build "$work/second.raw"
    cmp "$work/installer.raw" "$work/second.raw" || die "a second build gave another installer"
    say "a second build gave the same installer: $(sha256sum <"$work/installer.raw" | cut -c1-16)"
fi
mv -f "$work/installer.raw" "$out/installer.raw"
say "installer of version $version: $(du -m --apparent-size "$out/installer.raw" | cut -f1) MiB"
