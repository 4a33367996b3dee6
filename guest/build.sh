#!/bin/bash
# guest/build.sh OUTDIR: the kernel and initramfs of OCI guests, a static busybox for the demo image, and the disk of a small system that
# starts by itself, with the kernel for virtual machines (disk.img) and with that for any machine (pc.img), which starts slower and drives all
# devices that a VM may have. Leaves OUTDIR/{vmlinux,initramfs,busybox,disk.img,pc.img}. Needs apt-get, dpkg-deb, gzip and go. Everything is cached by content below
# ${XDG_CACHE_HOME:-~/.cache}/cocoon/guest: the kernel by its package version, the initramfs by the agent's sources.
set -euo pipefail

[ $# = 1 ] || { echo "usage: $0 OUTDIR" >&2; exit 2; }
say() { echo "guest: $*"; }
die() { echo "guest: $*" >&2; exit 1; }
# shellcheck source=hack/packages.sh
. "$(dirname "$0")/../hack/packages.sh"
mkdir -p "$1"
out=$(cd "$1" && pwd)
repo=$(cd "$(dirname "$0")/.." && pwd)
cache=${XDG_CACHE_HOME:-$HOME/.cache}/cocoon/guest
mkdir -p "$cache"
cd "$repo"
export CGO_ENABLED=0 GOOS=linux GOARCH=amd64 GOWORK=off

work=
cleanup() { [ -z "$work" ] || rm -rf "$work"; }
trap cleanup EXIT

# the sources of the tool and the agent, which determine the built bytes
pack_key=$(find guest internal/image/compress -name '*.go' ! -name '*_test.go' -o -path guest/build.sh -o -path 'guest/pack/rootfs/*' -type f | LC_ALL=C sort | xargs cat | sha256sum | cut -c1-16)
agent_key=$({
    echo "$pack_key"
    go version
    cat go.mod
    find api/guest internal/guest internal/guestagent internal/grpcerr internal/errdefs internal/blockdev internal/proc internal/vm \
        internal/ext4 internal/app/cocoonguest cmd/cocoon-guest -name '*.go' ! -name '*_test.go' | LC_ALL=C sort | xargs cat
} | sha256sum | cut -c1-16)

# Settings for Go's runtime in the agent. No preemption signals: no goroutine computes for long, and signals are slow on an
# emulated CPU and when code is cold after a resume. No check for other CPUs each second.
agent_runtime=asyncpreemptoff=1,updatemaxprocs=0

# apt's lists name the current package; without them the newest cached kernel is used.
package=$(kernel_package guest)
fresh() {
    cleanup
    own_lists "$*"
}
stamp=${COCOON_APT_LISTS-}$(stat -c %Y /var/lib/apt/lists 2>/dev/null || echo 0)
if [ "$(cat "$cache/apt-stamp" 2>/dev/null)" = "$stamp" ] && [ -s "$cache/apt-kernel" ]; then
    kernel_version=$(cat "$cache/apt-kernel")
else
    if kernel_version=$(versions "$package"); then
        kernel_version=${kernel_version#* }
        echo "$kernel_version" >"$cache/apt-kernel"
        echo "$stamp" >"$cache/apt-stamp"
    else
        kernel_version=$(cat "$cache/apt-kernel" 2>/dev/null || true)
        [ -n "$kernel_version" ] || fresh "apt knows no $package"
        say "apt knows no $package, trying the cached $kernel_version"
    fi
fi

kernel=$cache/kernel-${kernel_version//[^A-Za-z0-9.-]/_}-$pack_key
initramfs=$cache/initramfs-$(basename "$kernel" | sha256sum | cut -c1-8)-$agent_key

# publish SRC DST: a folder appears complete or not at all; if two builders run at once, the first one wins
publish() { mv -T "$1" "$2" 2>/dev/null || [ -d "$2" ]; }

fetch() { # fetch PACKAGE...: into the current folder
    apt-get -q "${lists[@]}" -o APT::Sandbox::User=root -o Dpkg::Use-Pty=0 download "$@" >/dev/null
}

if [ ! -d "$kernel" ]; then
    work=$(mktemp -d "$cache/.kernel-XXXXXX")
    mapfile -t parts < <(kernel_parts "$package")
    [ ${#parts[@]} != 0 ] || fresh "apt does not know the current kernel"
    mapfile -t whole < <(kernel_parts "$(kernel_package host)")
    [ ${#whole[@]} != 0 ] || fresh "apt does not know the current kernel of hosts"
    say "downloading ${parts[*]}, ${whole[*]}, busybox-static, e2fsck-static and GRUB"
    mkdir "$work/deb" "$work/whole" "$work/out"
    (cd "$work/deb" && fetch "${parts[@]}" busybox-static e2fsck-static grub-pc-bin grub-efi-amd64-bin grub-common) || fresh "the mirror lacks the packages of the older lists"
    (cd "$work/whole" && fetch "${whole[@]}") || fresh "the mirror lacks the packages of the older lists"
    for deb in "$work"/deb/linux-*.deb; do dpkg-deb -x "$deb" "$work/kernel"; done
    for deb in "$work"/whole/linux-*.deb; do dpkg-deb -x "$deb" "$work/pc"; done
    dpkg-deb -x "$work"/deb/busybox-static_*.deb "$work/busybox"
    dpkg-deb -x "$work"/deb/e2fsck-static_*.deb "$work/e2fsck"
    say "unpacking the kernel and choosing modules"
    go run -trimpath ./guest/pack kernel "$work"/kernel/boot/vmlinuz-* "$work/kernel" "$work/out"
    busybox=$(find "$work/busybox" -name busybox -type f -perm -u+x | head -n1)
    install -m 0755 "$busybox" "$work/out/busybox"
    gzip -9n <"$(find "$work/e2fsck" -name e2fsck.static -type f -perm -u+x | head -n1)" >"$work/out/e2fsck.gz"
    say "packing the demo disks"
    for deb in "$work"/deb/grub-*.deb; do dpkg-deb -x "$deb" "$work/grub"; done
    echo 'set root=(hd0,gpt2)
configfile /grub.cfg' >"$work/early.cfg"
    cp "$work/grub/usr/lib/grub/i386-pc/boot.img" "$work/"
    "$work/grub/usr/bin/grub-mkimage" -d "$work/grub/usr/lib/grub/i386-pc" -O i386-pc -p / -c "$work/early.cfg" -o "$work/core.img" \
        biosdisk part_gpt tar normal configfile linux
    echo 'search --no-floppy --file --set=root /grub.cfg
configfile /grub.cfg' >"$work/early.cfg"
    "$work/grub/usr/bin/grub-mkimage" -d "$work/grub/usr/lib/grub/x86_64-efi" -O x86_64-efi -p / -c "$work/early.cfg" -o "$work/bootx64.efi" \
        part_gpt tar search search_fs_file normal configfile linux
    for pair in kernel:disk pc:pc; do
        go run -trimpath ./guest/pack modules "$work/${pair%:*}" "$work/modules-${pair%:*}"
        go run -trimpath ./guest/pack disk "$work/${pair%:*}"/boot/vmlinuz-* "$work/modules-${pair%:*}" "$work/out/busybox" "$work" "$work/out/${pair#*:}.img"
    done
    publish "$work/out" "$kernel"
    rm -rf "$work"
    work=
fi

if [ ! -d "$initramfs" ]; then
    work=$(mktemp -d "$cache/.initramfs-XXXXXX")
    mkdir "$work/out"
    say "building the guest agent"
    go build -trimpath -tags grpcnotrace \
        -ldflags "-s -w -X cocoonstack.io/cocoon/internal/app/cocoonguest.version=$agent_key -X runtime.godebugDefault=$agent_runtime" \
        -o "$work/agent" ./cmd/cocoon-guest
    say "packing the initramfs"
    go run -trimpath ./guest/pack initramfs "$work/agent" "$kernel/modules" "$kernel/e2fsck.gz" "$work/out/initramfs"
    publish "$work/out" "$initramfs"
    rm -rf "$work"
    work=
fi

# remove what killed builders left, and what nobody has used for a month
touch "$kernel" "$initramfs"
find "$cache" -mindepth 1 -maxdepth 1 -type d \( -name '.*' -mmin +60 -o -mtime +30 \) -exec rm -rf {} +

# place SRC DST: atomically replaces DST with a copy (a reflink if the file system supports it), unless DST is already the same
place() {
    [ -f "$2" ] && [ "$2" -nt "$1" ] && cmp -s "$1" "$2" && return
    cp --reflink=auto "$1" "$2.new.$$"
    mv "$2.new.$$" "$2"
}
place "$kernel/vmlinux" "$out/vmlinux"
place "$kernel/busybox" "$out/busybox"
place "$kernel/disk.img" "$out/disk.img"
place "$kernel/pc.img" "$out/pc.img"
place "$initramfs/initramfs" "$out/initramfs"
say "kernel $kernel_version and agent $agent_key are in $1"
