#!/bin/bash
# hack/host/build.sh OUTDIR: the machine of `make test-host`, a Debian or Ubuntu host on which Cocoon is installed and which may be
# broken. Leaves OUTDIR/{disk.img,vmlinuz,initrd.img}. Nothing of Cocoon is in it: the test brings the package.
#
# The kernel is the distribution's generic one, since Debian's for guests has no KVM. It has systemd, cgroup v2, device-mapper, vhost and
# sshd, which takes the key on the disk labelled "payload"; there is no password. The machine boots by -kernel: no
# bootloader, no partitions, no loop device.
#
# Packages come from where the machine's own apt gets them. Needs root or sudo (for chroot), mmdebstrap and e2fsprogs. The
# result is cached by this script and the versions of its packages below ${XDG_CACHE_HOME:-~/.cache}/cocoon; OUTDIR gets
# links to it.
set -euo pipefail
export LC_ALL=C

[ $# = 1 ] || { echo "usage: $0 OUTDIR" >&2; exit 2; }
say() { echo "host: $*"; }
die() { echo "host: $*" >&2; exit 1; }
# shellcheck source=hack/packages.sh
. "$(dirname "$0")/../packages.sh"
umask 022 # files of the machine

packages=(
    "$(kernel_package host)" initramfs-tools systemd-sysv udev kmod openssh-server # the machine
    qemu-system-x86 qemu-utils seabios e2fsprogs                             # what the package depends on
    iproute2 iputils-ping nftables lvm2 thin-provisioning-tools util-linux   # what tests use on it
    procps curl jq ca-certificates
)

cached host "$1" disk.img vmlinuz initrd.img
PATH=$PATH:/usr/sbin:/sbin
command -v mke2fs >/dev/null || die "mke2fs is missing; run: make setup"
suite=$(codename)

mkdir -p "$work/files"
(
    cd "$work/files"
    mkdir -p etc/initramfs-tools/conf.d etc/systemd/system etc/systemd/journald.conf.d etc/ssh/sshd_config.d payload
    # What boots quickly on an emulated CPU: only the modules a root disk needs, and a compression that unpacks fast.
    echo 'COMPRESS=lz4' >etc/initramfs-tools/conf.d/compress
    echo 'MODULES=list' >etc/initramfs-tools/conf.d/modules
    printf '%s\n' virtio_pci virtio_blk ext4 >etc/initramfs-tools/modules
    echo host >etc/hostname
    echo '127.0.0.1 localhost host' >etc/hosts
    printf '%s\n' '/dev/vda / ext4 defaults,noatime 0 1' 'LABEL=payload /payload ext4 ro 0 0' >etc/fstab
    # QEMU's user network, said instead of asked for.
    cat >etc/systemd/system/eth0.service <<'UNIT'
[Unit]
Description=QEMU's user network
After=systemd-udev-trigger.service
Before=network.target
[Service]
Type=oneshot
RemainAfterExit=yes
ExecStart=sh -c 'until ip link set eth0 up 2>/dev/null; do sleep 0.2; done'
ExecStart=ip address add 10.0.2.15/24 dev eth0
ExecStart=ip route add default via 10.0.2.2
[Install]
WantedBy=multi-user.target
UNIT
    printf '%s\n' '[Journal]' 'Storage=volatile' 'RateLimitIntervalSec=0' >etc/systemd/journald.conf.d/host.conf
    printf '%s\n' 'PermitRootLogin prohibit-password' 'AuthorizedKeysFile /payload/authorized_keys' 'UseDNS no' 'UsePAM no' >etc/ssh/sshd_config.d/host.conf
)
say "installing ${#packages[@]} packages of $suite and what they need (a minute or two)"
# shellcheck disable=SC2016 # the hooks' $1 is mmdebstrap's
bootstrap "$suite" --variant=minbase --include="$(IFS=,; echo "${packages[*]}"),lz4" \
    --dpkgopt='path-exclude=/usr/share/doc/*' --dpkgopt='path-exclude=/usr/share/man/*' \
    --dpkgopt='path-exclude=/usr/share/info/*' --dpkgopt='path-exclude=/usr/share/locale/*' \
    --dpkgopt=force-unsafe-io \
    --extract-hook="cp -r '$work/files/etc/initramfs-tools' \"\$1/etc/\"" \
    --customize-hook="cp -r '$work/files/.' \"\$1/\"" \
    --customize-hook='chroot "$1" systemctl -q enable eth0 ssh' \
    --customize-hook='chroot "$1" systemctl -q mask apt-daily.timer apt-daily-upgrade.timer dpkg-db-backup.timer e2scrub_all.timer e2scrub_reap.service fstrim.timer systemd-pstore.service systemd-timesyncd.service serial-getty@ttyS0.service getty@tty1.service lvm2-monitor.service dev-hugepages.mount dev-mqueue.mount sys-kernel-debug.mount sys-kernel-tracing.mount' \
    --customize-hook='chroot "$1" systemctl -q set-default multi-user.target && chroot "$1" usermod -p "*" root' \
    --customize-hook='rm -rf "$1"/var/lib/apt/lists/* "$1"/var/cache/apt/* "$1"/etc/initramfs-tools/initramfs.conf.dpkg-*' \
    --customize-hook='mkdir -p "$1/var/cache/apt/archives/partial"; : >"$1/etc/apt/sources.list"; echo uninitialized >"$1/etc/machine-id"'

for f in vmlinuz initrd.img; do
    as_root cat "$root/boot/$f"-* >"$work/out/$f"
    as_root rm "$root/boot/$f"-*
done
systemd_id=$(sha256sum <<<"$made" | cut -c1-32) # of its own, and the same at each boot: no first boot
echo "$systemd_id" | as_root tee "$root/etc/machine-id" >/dev/null
truncate -s 8G "$work/out/disk.img"
as_root mke2fs -q -t ext4 -L host-root -m 0 -O ^metadata_csum_seed,^orphan_file -E lazy_itable_init=1 -d "$root" "$work/out/disk.img"
publish
