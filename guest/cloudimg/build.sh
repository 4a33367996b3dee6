#!/bin/bash
# guest/cloudimg/build.sh OUT.qcow2: a small cloud image for the tests, made of the distribution's packages: GRUB for BIOS and UEFI,
# its kernel for virtual machines, systemd, cloud-init, sshd and qemu-guest-agent. It has no password and no key: who gets in is
# said by the cloud-init seed.
#
# Packages come from where the machine's own apt gets them. No partition of the image is ever mounted, and no
# bootloader installer is run: neither needs the host to know GPT or FAT. Needs root or sudo (for chroot), mmdebstrap, grub,
# mtools, dosfstools, fdisk and qemu-utils. The image is cached by this script and the versions of its packages below
# ${XDG_CACHE_HOME:-~/.cache}/cocoon; OUT.qcow2 becomes a link to it.
set -euo pipefail
export LC_ALL=C

[ $# = 1 ] || { echo "usage: $0 OUT.qcow2" >&2; exit 2; }
say() { echo "cloudimg: $*"; }
die() { echo "cloudimg: $*" >&2; exit 1; }
# shellcheck source=hack/packages.sh
. "$(dirname "$0")/../../hack/packages.sh"
umask 022 # files of the image
mkdir -p "$(dirname "$1")"
out=$(cd "$(dirname "$1")" && pwd)/$(basename "$1")
self=$(cd "$(dirname "$0")" && pwd)/$(basename "$0")
cache=${XDG_CACHE_HOME:-$HOME/.cache}/cocoon
mkdir -p "$cache"

packages=(
    "$(kernel_package guest)" initramfs-tools zstd systemd-sysv udev dbus libpam-systemd iproute2
    cloud-init cloud-guest-utils fdisk e2fsprogs openssh-server qemu-guest-agent sudo
)

# The versions decide about the bytes. Where apt's lists cannot be had, the newest image there is serves.
if versions=$(versions "${packages[@]}"); then
    image=$cache/cloudimg-$({ cat "$self"; echo "$versions"; } | sha256sum | cut -c1-16).qcow2
else
    [ -n "${COCOON_APT_LISTS-}" ] || own_lists "apt does not know all of: ${packages[*]}"
    image=$(find "$cache" -maxdepth 1 -name 'cloudimg-*.qcow2' -printf '%T@ %p\n' | sort -n | tail -n1 | cut -d' ' -f2-)
    [ -n "$image" ] || die "apt does not know all of: ${packages[*]}"
    say "apt does not know all packages, using the newest image there is"
fi

link() {
    touch "$image" # in use
    ln -sfn "$image" "$out"
    find "$cache" -maxdepth 1 -name 'cloudimg-*.qcow2' -mtime +30 -delete
    say "$1 is $(basename "$image"), $(($(stat -c %s "$image") >> 20)) MiB"
}

[ ! -s "$image" ] || { link "$1"; exit; }
for tool in mmdebstrap grub-mkimage mkfs.vfat mcopy sfdisk mke2fs qemu-img; do
    command -v "$tool" >/dev/null || PATH=$PATH:/usr/sbin:/sbin command -v "$tool" >/dev/null || die "$tool is missing; run: make setup"
done
PATH=$PATH:/usr/sbin:/sbin
exec 9>"$cache/.cloudimg.lock"
flock 9 # of several builders one builds, the others take what it made
[ ! -s "$image" ] || { link "$1"; exit; }
sweep "$cache" '.cloudimg-*'

work=$(mktemp -d "$cache/.cloudimg-XXXXXX")
root=$work/root
trap '[ ! -e "$root" ] || as_root rm -rf "$root"; rm -rf "$work"' EXIT
chmod 755 "$work" # apt's user passes through

# --- the file system ---------------------------------------------------------------------------------------------------

suite=$(codename)
sources >"$work/sources.list"
[ -s "$work/sources.list" ] || die "apt has no source of $(distribution)'s packages"

mkdir -p "$work/files"
(
    cd "$work/files"
    mkdir -p etc/cloud/cloud.cfg.d etc/initramfs-tools/conf.d etc/initramfs-tools/modules.d etc/apt/apt.conf.d \
        etc/systemd/system/qemu-guest-agent.service.d boot/grub
    # What boots quickly on an emulated CPU: only the modules a root disk needs, and a compression that unpacks fast.
    echo 'COMPRESS=lz4' >etc/initramfs-tools/conf.d/compress
    echo 'MODULES=list' >etc/initramfs-tools/conf.d/modules
    printf '%s\n' virtio_pci virtio_blk ext4 >etc/initramfs-tools/modules
    cat >etc/cloud/cloud.cfg.d/90_cocoon.cfg <<'CFG'
datasource_list: [NoCloud, ConfigDrive, None]
ssh_genkeytypes: [ed25519]
system_info:
  network:
    renderers: [networkd]
  default_user:
    name: debian
    lock_passwd: true
    gecos: Debian
    groups: [sudo]
    sudo: ["ALL=(ALL) NOPASSWD:ALL"]
    shell: /bin/bash
cloud_init_modules: [seed_random, bootcmd, write_files, growpart, resizefs, mounts, set_hostname, update_hostname, update_etc_hosts, users-groups, ssh]
cloud_config_modules: [runcmd]
cloud_final_modules: [scripts-user, final-message]
CFG
    # A node's own modprobe of vfat and the like is not needed: the ESP is read by the firmware alone.
    echo 'LABEL=cocoon-root / ext4 defaults,noatime 0 1' >etc/fstab
    cat >boot/grub/grub.cfg <<'CFG'
set timeout=0
linux /vmlinuz root=LABEL=cocoon-root ro console=ttyS0 quiet net.ifnames=0 panic=30 tsc=reliable no_timer_check cryptomgr.notests
initrd /initrd.img
boot
CFG
)
say "installing ${#packages[@]} packages of $suite and what they need (a minute or two)"
# shellcheck disable=SC2016 # the hooks' $1 is mmdebstrap's
if ! as_root mmdebstrap --mode=root --variant=minbase --include="$(IFS=,; echo "${packages[*]}")" \
    --aptopt='APT::Install-Recommends "false"' --aptopt='Acquire::Languages "none"' \
    --dpkgopt='path-exclude=/usr/share/doc/*' --dpkgopt='path-exclude=/usr/share/man/*' \
    --dpkgopt='path-exclude=/usr/share/info/*' --dpkgopt='path-exclude=/usr/share/locale/*' \
    --dpkgopt='path-exclude=/usr/share/i18n/*' --dpkgopt='path-exclude=/usr/share/bug/*' \
    --dpkgopt=force-unsafe-io \
    --extract-hook="cp -r '$work/files/etc/initramfs-tools' \"\$1/etc/\"" \
    --customize-hook="cp -r '$work/files/.' \"\$1/\"" \
    --customize-hook='chroot "$1" systemctl -q enable systemd-networkd ssh qemu-guest-agent' \
    --customize-hook='chroot "$1" systemctl -q mask apt-daily.timer apt-daily-upgrade.timer dpkg-db-backup.timer e2scrub_all.timer e2scrub_reap.service fstrim.timer man-db.timer systemd-pstore.service systemd-timesyncd.service' \
    --customize-hook='chroot "$1" systemctl -q set-default multi-user.target && chroot "$1" passwd -q -l root' \
    --customize-hook='rm -f "$1"/etc/ssh/ssh_host_* "$1"/var/lib/dbus/machine-id "$1"/etc/hostname "$1"/etc/initramfs-tools/initramfs.conf.dpkg-*' \
    --customize-hook=': >"$1/etc/machine-id"; : >"$1/etc/apt/sources.list"' \
    --customize-hook='rm -rf "$1"/var/lib/apt/lists/* "$1"/var/cache/* "$1"/var/log/* "$1"/usr/share/doc "$1"/usr/share/man "$1"/usr/share/locale "$1"/usr/share/i18n' \
    --customize-hook='mkdir -p "$1/var/cache/apt/archives/partial" "$1/var/log/journal"; rmdir "$1/var/log/journal"' \
    "$suite" "$root" - <"$work/sources.list" >"$work/log" 2>&1; then
    tail -n 40 "$work/log" >&2
    die "mmdebstrap failed"
fi
for f in vmlinuz initrd.img; do
    [ -e "$root/$f" ] || as_root cp -l "$root/boot/$f"-* "$root/$f" || die "the image has no /$f" # Ubuntu makes its links in /boot
done

# --- the disk ----------------------------------------------------------------------------------------------------------

# Sectors of 512 bytes: 2048 GRUB's core image, 4096 ESP of 8 MiB, 20480 root to the end.
disk=$work/disk.raw
truncate -s 2G "$disk"
sfdisk -q "$disk" <<'TABLE'
label: gpt
start=2048, size=2048, type=21686148-6449-6E6F-744E-656564454649, name=bios
start=4096, size=16384, type=uefi, name=esp
start=20480, type=linux, name=root
TABLE
root_sectors=$(sfdisk -l -o Sectors "$disk" | tail -n1 | tr -d ' ')
as_root mke2fs -q -t ext4 -L cocoon-root -m 1 -O ^metadata_csum_seed,^orphan_file -E "offset=$((20480 * 512)),lazy_itable_init=1" \
    -d "$root" "$disk" $((root_sectors / 2))k

# GRUB finds the root by its label, whatever the firmware calls the disk.
echo 'search --no-floppy --set=root --label cocoon-root
configfile /boot/grub/grub.cfg' >"$work/early.cfg"
modules=(part_gpt ext2 search search_label normal configfile linux)
grub-mkimage -O x86_64-efi -p /boot/grub -c "$work/early.cfg" -o "$work/bootx64.efi" "${modules[@]}"
truncate -s 8M "$work/esp"
mkfs.vfat -n ESP "$work/esp" >/dev/null
mmd -i "$work/esp" ::/EFI ::/EFI/BOOT
mcopy -i "$work/esp" "$work/bootx64.efi" ::/EFI/BOOT/BOOTX64.EFI
place() { dd if="$1" of="$disk" bs=512 seek="$2" conv=notrunc,sparse status=none; }
place "$work/esp" 4096

# What grub-bios-setup does, which wants a device whose partitions the kernel knows: boot.img goes to the first sector,
# but for its partition table, and learns where core.img is; the first sector of core.img learns where the rest of it is.
grub-mkimage -O i386-pc -p /boot/grub -c "$work/early.cfg" -o "$work/core.img" biosdisk "${modules[@]}"
[ "$(stat -c %s "$work/core.img")" -le $((2048 * 512)) ] || die "GRUB's core image does not fit into its partition"
cp /usr/lib/grub/i386-pc/boot.img "$work/boot.img"
patch() { printf '%b' "$3" | dd of="$1" bs=1 seek=$(($2)) conv=notrunc status=none; } # patch FILE OFFSET BYTES
patch "$work/boot.img" 0x5c '\x00\x08\x00\x00\x00\x00\x00\x00' # sector 2048, little endian
patch "$work/boot.img" 0x66 '\x90\x90'                         # believe the BIOS which disk it was
patch "$work/core.img" 0x1f4 '\x01\x08\x00\x00\x00\x00\x00\x00' # sector 2049; its length is there already
dd if="$work/boot.img" of="$disk" bs=1 count=440 conv=notrunc status=none
place "$work/core.img" 2048

qemu-img convert -q -O qcow2 -c -m 2 -W "$disk" "$work/image.qcow2"
sync "$work/image.qcow2"
mv "$work/image.qcow2" "$image"
link "$1"
