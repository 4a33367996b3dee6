#!/bin/bash
# os/build.sh [--check] OUTDIR: the disk of Cocoon OS, an appliance with two slots for its system. Leaves in OUTDIR
#
#   disk.raw         the disk, sparse: a boot partition, two slots with the same system, and the place for data
#   rootfs.sqsh, vmlinuz, initramfs   what is in a slot and its boot files, of which bundles are made
#   sbom.spdx.json   the packages in it, with versions and licences
#   id               of the boot files
#
# The same inputs give the same bytes; --check builds twice and compares. No partition is ever mounted, and no loop device used: the
# table, the boot partition and the slots are written into the file. SLOT_SIZE_MIB (2048) is the size of a slot, which never changes after an
# installation; OS_SIGNING_KEY is the key whose bundles the system will accept, by default one made in OUTDIR for development.
#
# Preconditions: bin/{cocoond,cocoon}, bin/guest and bin/containerd are built. bin/capsulectl is taken if there is one. Needs what
# os/system.sh needs, squashfs-tools, grub, mtools, dosfstools and fdisk.
set -euo pipefail
export LC_ALL=C TZ=UTC

say() { echo "os: $*"; }
die() { echo "os: $*" >&2; exit 1; }
check=
[ "${1-}" != --check ] || { check=yes; shift; }
[ $# = 1 ] || { echo "usage: $0 [--check] OUTDIR" >&2; exit 2; }
mkdir -p "$1"
out=$(cd "$1" && pwd)
cd "$(dirname "$0")/.."
umask 022 # files of the system
PATH=$PATH:/usr/sbin:/sbin
for tool in mksquashfs mkfs.vfat mcopy sfdisk grub-mkimage; do
    command -v "$tool" >/dev/null || die "$tool is missing; run: make setup"
done
export GOWORK=off CGO_ENABLED=0 GOFLAGS=-trimpath

slot_mib=${SLOT_SIZE_MIB:-2048}
if ! [[ $slot_mib =~ ^[0-9]{1,5}$ ]] || [ "$slot_mib" -lt 64 ] || [ "$slot_mib" -gt 65536 ]; then die "SLOT_SIZE_MIB is a number from 64 to 65536"; fi
esp_mib=256 data_mib=2048
version=${VERSION:-$(git describe --tags --always --dirty 2>/dev/null || echo unknown)}
# The time of all files: that of the last change of the sources.
export SOURCE_DATE_EPOCH=${SOURCE_DATE_EPOCH:-$(git log -1 --format=%ct 2>/dev/null || echo 0)}

inputs=(bin/cocoond bin/cocoon bin/cocoon-container-log bin/guest/vmlinux bin/guest/initramfs bin/containerd/{containerd,containerd-shim-runc-v2,runc})
for file in "${inputs[@]}"; do
    [ -s "$file" ] || die "$file is missing; run: make binaries guest containerd"
done
mkdir -p "$out/cache"
os/system.sh "$out/cache"
go build -o "$out/cache/pack" ./os/pack
pack=$out/cache/pack
if [ -z "${OS_SIGNING_KEY-}" ]; then
    OS_SIGNING_KEY=$out/signing-key.pem
    "$pack" key "$OS_SIGNING_KEY"
fi

work=$(mktemp -d "$out/.build-XXXXXX")
trap 'chmod -R u+w "$work" 2>/dev/null; rm -rf "$work"' EXIT

# root DIR: puts the root file system into DIR. Its files need no owner: all are root's in the slot.
root() {
    local dir=$1
    mkdir "$dir"
    tar -C "$dir" --no-same-owner -xf "$out/cache/system.tar"
    install -m 0755 bin/cocoond bin/cocoon bin/cocoon-container-log "$dir/usr/bin/"
    [ ! -x bin/capsulectl ] || install -m 0755 bin/capsulectl "$dir/usr/bin/"
    install -m 0755 bin/containerd/{containerd,containerd-shim-runc-v2,runc} "$dir/usr/bin/"
    install -D -m 0644 -t "$dir/usr/lib/cocoon/guest" bin/guest/vmlinux bin/guest/initramfs
    ln -sfn ../bin/cocoond "$dir/usr/sbin/init"
    cp -r os/rootfs/. "$dir/"
    # What an installation writes besides the system itself.
    install -D -m 0644 -t "$dir/usr/lib/cocoon/boot" os/grub.cfg
    install -m 0644 "$work/bootx64.efi" "$dir/usr/lib/cocoon/boot/BOOTX64.EFI"
    printf '%s\n' "$slot_mib" >"$dir/usr/lib/cocoon/boot/slot-size-mib"
    printf '%s\n' "$version" >"$dir/etc/cocoon/version"
    "$pack" public "$OS_SIGNING_KEY" "$dir/etc/cocoon/os-signing.pub.pem"
    cat >"$dir/usr/lib/os-release" <<RELEASE
NAME="Cocoon OS"
ID=cocoon-os
PRETTY_NAME="Cocoon OS $version"
VERSION_ID="$version"
RELEASE
    ln -sfn ../usr/lib/os-release "$dir/etc/os-release"
}

# initramfs DIR OUT: the small system that finds the root.
initramfs() {
    local dir=$1
    mkdir -p "$dir"/{bin,dev,proc,sys,modules}
    install -m 0755 os/initramfs/init "$dir/init"
    tar -C "$dir/bin" --no-same-owner -xf "$out/cache/system.tar" --strip-components=3 ./usr/bin/busybox
    tar -C "$dir/modules" --no-same-owner -xf "$out/cache/modules.tar"
    ln -s busybox "$dir/bin/sh"
    "$pack" initramfs "$dir" "$2"
}

# loader: GRUB, with all its modules in it.
loader() {
    local modules=(part_msdos fat search normal configfile linux loadenv test echo sleep reboot halt regexp minicmd all_video gfxterm)
    grub-mkimage -O x86_64-efi -p /EFI/BOOT -o "$work/bootx64.efi" "${modules[@]}"
}

# esp OUT ID: the boot partition. Boot files have an id in their name: an update never writes over a file that the boot loader may read.
esp() {
    local esp=$1 id=$2
    "$pack" grubenv "$id" "$work/grubenv"
    cp os/grub.cfg "$work/grub.cfg"
    touch -d "@$SOURCE_DATE_EPOCH" "$work"/{bootx64.efi,grubenv,grub.cfg,vmlinuz,initramfs}
    rm -f "$esp"
    truncate -s "${esp_mib}M" "$esp"
    mkfs.vfat -F 32 -n CAPSULEBOOT -i b1a570ff --invariant "$esp" >/dev/null
    mmd -i "$esp" ::/EFI ::/EFI/BOOT
    # The environment first: its sectors follow each other, and its two are in one cluster.
    mcopy -m -i "$esp" "$work/grubenv" ::/EFI/BOOT/grubenv
    mcopy -m -i "$esp" "$work/bootx64.efi" ::/EFI/BOOT/BOOTX64.EFI
    mcopy -m -i "$esp" "$work/grub.cfg" ::/EFI/BOOT/grub.cfg
    local slot
    for slot in a b; do
        mcopy -m -i "$esp" "$work/vmlinuz" "::/vmlinuz_$slot-$id"
        mcopy -m -i "$esp" "$work/initramfs" "::/initramfs_$slot-$id"
    done
}

# disk OUT: all of it. Sectors of 512 bytes.
disk() {
    local disk=$1 mib=2048 slot data
    slot=$((2048 + esp_mib * mib))
    data=$((slot + 2 * slot_mib * mib))
    rm -f "$disk"
    truncate -s "$(((data / mib + data_mib) * 1024 * 1024))" "$disk"
    sfdisk -q --no-tell-kernel "$disk" <<TABLE
label: dos
label-id: 0xb1a570ff
start=2048, size=$((esp_mib * mib)), type=ef, bootable
start=$slot, size=$((slot_mib * mib)), type=83
start=$((slot + slot_mib * mib)), size=$((slot_mib * mib)), type=83
start=$data, size=$((data_mib * mib)), type=8e
TABLE
    place() { dd if="$1" of="$disk" bs=1M seek="$(($2 / mib))" conv=notrunc,sparse status=none; }
    place "$work/esp" 2048
    place "$work/rootfs.sqsh" "$slot"
    place "$work/rootfs.sqsh" $((slot + slot_mib * mib))
}

# build makes all parts in $work.
build() {
    local start=$SECONDS
    cat "$out/cache/vmlinuz" >"$work/vmlinuz"
    initramfs "$work/small" "$work/initramfs"
    loader
    root "$work/root"
    mksquashfs "$work/root" "$work/rootfs.sqsh" -noappend -all-root -no-xattrs -comp zstd -Xcompression-level "${OS_ZSTD_LEVEL:-15}" -b 256K \
        -reproducible -quiet -no-progress >/dev/null
    rm -rf "$work/root" "$work/small"
    local size
    size=$(stat -c %s "$work/rootfs.sqsh")
    [ "$size" -le $((slot_mib << 20)) ] || die "the root has $((size >> 20)) MiB, and a slot $slot_mib; give SLOT_SIZE_MIB"
    cat "$work"/{vmlinuz,initramfs,rootfs.sqsh} | sha256sum | cut -c1-16 >"$work/id"
    esp "$work/esp" "$(cat "$work/id")"
    disk "$work/disk.raw"
    "$pack" sbom "$version" "$SOURCE_DATE_EPOCH" "$out/cache/packages.tsv" "$work/sbom.spdx.json"
    say "built in $((SECONDS - start)) s"
}

results=(disk.raw rootfs.sqsh vmlinuz initramfs sbom.spdx.json id)

# key names all that goes into the disk.
key() {
    {
        sha256sum <"$pack"
        "$pack" public "$OS_SIGNING_KEY" "$work/public" && cat "$work/public"
        for file in "${inputs[@]}" bin/capsulectl os/build.sh os/grub.cfg os/initramfs/init; do
            [ ! -e "$file" ] || sha256sum <"$file"
        done
        readlink -f "$out"/cache/{system.tar,modules.tar,vmlinuz} # named by their content
        find os/rootfs -type f -print0 | sort -z | xargs -0 sha256sum
        echo "$version $SOURCE_DATE_EPOCH $slot_mib ${OS_ZSTD_LEVEL:-15}"
    } | sha256sum | cut -c1-16
}

# With OS_IMAGE_CACHE the disk is kept by that name below ${XDG_CACHE_HOME:-~/.cache}/cocoon, and the one before is dropped.
images=${XDG_CACHE_HOME:-$HOME/.cache}/cocoon
made=''
if [ -n "${OS_IMAGE_CACHE-}" ] && [ -z "$check" ]; then
    mkdir -p "$images"
    made=$images/os-image-$(key)
    if [ -d "$made" ]; then
        touch "$made"
        for file in "${results[@]}"; do
            cp --sparse=always "$made/$file" "$work/$file"
            mv -f "$work/$file" "$out/$file"
        done
        say "version $version, id $(cat "$out/id"), from $made"
        exit
    fi
fi
build
if [ -n "$check" ]; then
    mkdir "$work/first"
    mv "${results[@]/#/$work/}" "$work/first/"
    build
    for file in "${results[@]}"; do
        cmp "$work/first/$file" "$work/$file" || die "a second build gave another $file"
    done
    say "a second build gave the same bytes: $(sha256sum <"$work/disk.raw" | cut -c1-16)"
fi
if [ -n "$made" ]; then
    find "$images" -maxdepth 1 -name 'os-image-*' -type d -exec rm -rf {} +
    mkdir "$made.$$"
    for file in "${results[@]}"; do cp --sparse=always "$work/$file" "$made.$$/$file"; done
    mv -T "$made.$$" "$made"
fi
for file in "${results[@]}"; do mv -f "$work/$file" "$out/$file"; done
say "version $version, id $(cat "$out/id"): root $(du -m --apparent-size "$out/rootfs.sqsh" | cut -f1) MiB of $slot_mib, kernel $(du -k --apparent-size "$out/vmlinuz" | cut -f1) KiB, initramfs $(du -k --apparent-size "$out/initramfs" | cut -f1) KiB, disk $(du -m --apparent-size "$out/disk.raw" | cut -f1) MiB of which $(du -m "$out/disk.raw" | cut -f1) are used"
