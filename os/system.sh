#!/bin/bash
# os/system.sh OUTDIR: what Cocoon OS takes from the distribution. Leaves OUTDIR/{system.tar,modules.tar,vmlinuz,packages.tsv}: the tree
# of the root file system without our programs, the modules of the initramfs in the order in which they load, the kernel, and a line
# for each package: name, version, architecture, source, licences.
#
# The packages are unpacked, not installed: no script of theirs runs, so the result depends on their content alone. What an
# appliance has no use for is left out: package managers, documentation, drivers of sound, pictures and wireless links.
#
# Packages come from where the machine's own apt gets them. Needs root or sudo (for chroot), mmdebstrap. The result is cached
# by this script and the versions of its packages below ${XDG_CACHE_HOME:-~/.cache}/cocoon; OUTDIR gets links to it.
set -euo pipefail
export LC_ALL=C
# shellcheck disable=SC2154 # cached sets work and root
:

[ $# = 1 ] || { echo "usage: $0 OUTDIR" >&2; exit 2; }
say() { echo "os: $*"; }
die() { echo "os: $*" >&2; exit 1; }
# shellcheck source=hack/packages.sh
. "$(dirname "$0")/../hack/packages.sh"
umask 022 # files of the system

packages=(
    "$(kernel_package host)" kmod busybox-static                             # the machine; Debian's kernel for guests has no KVM
    qemu-system-x86 qemu-utils seabios                                       # VMs
    e2fsprogs lvm2 thin-provisioning-tools dosfstools                        # disks
    iproute2 nftables iptables                                               # networks
    util-linux ca-certificates netbase tzdata                                # prlimit, and what all programs want
)
cached os "$1" system.tar modules.tar vmlinuz packages.tsv

cat >"$work/list" <<'SCRIPT'
#!/bin/sh
# Writes a line for each package that was unpacked.
set -e
for deb in "$1"/var/cache/apt/archives/*.deb; do
    dpkg-deb -W --showformat='${Package}\t${Version}\t${Architecture}\t${source:Package}\n' "$deb"
done | sort >"$1/packages.tsv"
mkdir "$1/lists"
for deb in "$1"/var/cache/apt/archives/*.deb; do
    dpkg-deb -c "$deb" | awk '{print $6}' >"$1/lists/$(dpkg-deb -f "$deb" Package)"
done
SCRIPT
chmod 755 "$work/list"
say "fetching ${packages[*]} and what they need"
bootstrap "$(codename)" --variant=extract --include="$(IFS=,; echo "${packages[*]}")" --extract-hook="$work/list \"\$1\""

cat >"$work/reduce" <<'SCRIPT'
#!/bin/sh
# Makes the system of the unpacked packages, in the folder with them.
set -e
"$1" mkdir /.tools # the folder that it is in moves
"$1" cp "$1" /.tools/busybox
busybox=/.tools/busybox
export PATH=/usr/sbin:/usr/bin:/sbin:/bin
bb() { "$busybox" "$@"; }

# One tree of programs.
for dir in bin sbin lib lib64; do
    [ ! -L /$dir ] || continue
    bb mkdir -p /usr/$dir
    bb cp -a /$dir/. /usr/$dir/
    bb mv /$dir /.$dir
    bb ln -s usr/$dir /$dir
    bb rm -rf /.$dir
done

# Licences, for the list of packages.
while IFS='	' read -r name version arch source; do
    licences=$(bb sed -n 's/^License: *//p' "/usr/share/doc/$name/copyright" 2>/dev/null | bb sed 's/[ \t]*$//' | bb sort -u | bb tr '\n' ';')
    bb printf '%s\t%s\t%s\t%s\t%s\n' "$name" "$version" "$arch" "$source" "${licences%;}"
done </packages.tsv >/packages.new
bb mv /packages.new /packages.tsv

# Modules: the initramfs has those of disks, in the order in which they load.
kernel=$(bb ls /lib/modules)
base=/lib/modules/$kernel/kernel
cd "$base"
bb rm -rf sound drivers/gpu drivers/media drivers/net/wireless drivers/bluetooth drivers/infiniband drivers/staging drivers/iio drivers/isdn \
    drivers/video drivers/input/joystick drivers/input/touchscreen drivers/input/tablet drivers/leds drivers/power drivers/hwmon drivers/mtd drivers/parport \
    drivers/pcmcia drivers/ssb drivers/bcma drivers/firewire drivers/net/can drivers/net/hamradio drivers/net/ieee802154 drivers/net/wwan drivers/net/arcnet \
    drivers/platform/surface drivers/comedi drivers/auxdisplay drivers/w1 drivers/rtc drivers/gnss drivers/greybus drivers/counter drivers/soundwire drivers/memstick \
    drivers/usb/serial drivers/usb/gadget drivers/usb/misc drivers/usb/atm net/bluetooth net/mac80211 net/wireless net/can net/nfc net/ieee802154 net/6lowpan net/mac802154 \
    net/atm net/appletalk net/ax25 net/netrom net/rose net/x25 net/phonet net/rds net/tipc net/batman-adv net/sctp net/dccp net/lapb net/caif net/sunrpc/xprtrdma \
    fs/ocfs2 fs/gfs2 fs/dlm fs/ceph fs/afs fs/coda fs/jfs fs/reiserfs fs/ufs fs/hfs fs/hfsplus fs/hpfs fs/jffs2 fs/ubifs fs/minix fs/sysv fs/qnx4 fs/qnx6 \
    fs/adfs fs/affs fs/befs fs/bfs fs/efs fs/freevxfs fs/omfs fs/orangefs fs/ecryptfs fs/ksmbd fs/smbfs_common fs/cifs fs/9p fs/nilfs2 fs/udf fs/f2fs
/usr/sbin/depmod "$kernel" # by its path: busybox has a lesser one
bb rm -f "/boot/System.map-$kernel"
bb mkdir -p /boot-modules
n=100
for module in virtio_pci virtio_blk virtio_scsi ahci ata_piix nvme vmd sd_mod vmw_pvscsi megaraid_sas mpt3sas hpsa xhci_pci ehci_pci uas usb_storage \
    sdhci_pci mmc_block virtio_rng squashfs overlay efi-pstore lpc_ich iTCO_wdt wdat_wdt i6300esb softdog; do
    /usr/sbin/modprobe -S "$kernel" --show-depends "$module" || echo "missing $module" >&2
done | bb awk '$1 == "insmod" && !had[$2]++ {print $2}' | while read -r file; do
    bb cp "$file" "/boot-modules/$n-${file##*/}"
    n=$((n + 1))
done
for module in virtio_blk ahci nvme usb-storage squashfs overlay i6300esb softdog; do
    [ -e /boot-modules/*-$module.ko ] || { echo "the kernel has no module $module" >&2; exit 1; }
done

# What only an installation needs, and what is for people or other machines.
bb rm -rf /usr/share/doc /usr/share/man /usr/share/info /usr/share/locale /usr/share/i18n /usr/share/lintian /usr/share/bug /usr/share/bash-completion \
    /usr/share/initramfs-tools /usr/share/iso-codes /usr/share/xml /usr/share/perl5 /usr/share/debconf /usr/share/pam /usr/share/pam-configs \
    /usr/share/alsa /usr/share/sounds /usr/share/applications /usr/share/icons /usr/share/menu /usr/share/gdb /usr/share/doc-base /usr/share/adduser \
    /usr/share/metainfo /usr/share/zsh /usr/share/tcltk /usr/share/polkit-1 /usr/share/keyrings /usr/share/libdrm /usr/share/common-licenses /usr/share/gcc \
    /usr/lib/klibc /usr/lib/initramfs-tools /usr/lib/klibc-* /usr/lib/modprobe.d/*blacklist* /usr/lib/tmpfiles.d /usr/lib/systemd /usr/lib/sysusers.d \
    /usr/lib/x86_64-linux-gnu/gconv /usr/lib/x86_64-linux-gnu/perl* /usr/lib/x86_64-linux-gnu/gstreamer-1.0 /usr/lib/x86_64-linux-gnu/gstreamer1.0 \
    /usr/lib/locale /usr/lib/gcc /usr/include /usr/share/gstreamer-1.0 /usr/share/glib-2.0 /etc/init.d /etc/cron* /etc/default /etc/initramfs-tools /etc/kernel /etc/pam.d \
    /etc/security /etc/dpkg /etc/apt /etc/skel /etc/rc* /etc/logrotate.d /var /boot
bb rm -f /usr/bin/qemu-system-i386 /usr/libexec/qemu-system-i386 /usr/bin/qemu-system-x86_64-microvm /usr/bin/qemu-io /usr/bin/qemu-nbd /usr/bin/qemu-storage-daemon /usr/lib/x86_64-linux-gnu/libklibc* /usr/lib/klibc* /usr/bin/localedef
cd /usr/share/qemu && bb rm -rf openbios* skiboot* slof* u-boot* palcode* hppa* s390* opensbi* QEMU* *.ndrv *.dtb icons trace-events-all petalogix* bamboo* canyonlands* npcm* vof* edk2-*
# Packages that others need for their installation only, and those that busybox replaces.
for package in coreutils debconf adduser passwd cpio initramfs-tools-core linux-base openssl sysvinit-utils logsave udev; do
    [ ! -e "/lists/$package" ] || bb sed 's|^\./||' "/lists/$package" | while read -r file; do
        case $file in */ | '') ;; usr/*) bb rm -f "/$file" ;; *) bb rm -f "/usr/$file" "/$file" ;; esac
    done
done
bb rm -rf /lists

# A name for each tool of busybox that no package has.
for tool in $("$busybox" --list); do
    [ -e "/usr/bin/$tool" ] || [ -e "/usr/sbin/$tool" ] || bb ln -s busybox "/usr/bin/$tool"
done
for cert in $(bb find /usr/share/ca-certificates/mozilla -name '*.crt' | bb sort); do bb cat "$cert"; done >/certs
bb mkdir -p /etc/ssl/certs
bb mv /certs /etc/ssl/certs/ca-certificates.crt
bb rm -rf /usr/share/ca-certificates
bb mkdir -p /dev /proc /sys /run /tmp /var /perm /media /root /home /mnt /opt /srv /boot
bb mkdir -p /var/lib /var/cache /var/log /var/tmp
bb ln -sfn /run /var/run
bb chmod 1777 /tmp /var/tmp
bb chmod 700 /root
/usr/bin/busybox rm -r /.tools
SCRIPT
as_root install -m 755 "$work/reduce" "$root/reduce"
as_root rm -rf "$root"/var/cache "$root"/var/lib/apt
busybox=$(cd "$root" && find bin usr/bin -name busybox -type f | head -n1)
as_root cp "$root/packages.tsv" "$work/out/packages.tsv" 2>/dev/null || die "the packages are not listed"
cat "$root"/boot/vmlinuz-* >"$work/out/vmlinuz"
as_root chroot "$root" "/$busybox" sh /reduce "/$busybox" || die "the system cannot be put together"
cat "$root/packages.tsv" >"$work/out/packages.tsv.new"
mv -f "$work/out/packages.tsv.new" "$work/out/packages.tsv"
as_root rm -f "$root/reduce" "$root/packages.tsv"
pack=(--sort=name --format=gnu --mtime=@0 --owner=0 --group=0 --numeric-owner)
as_root tar -C "$root/boot-modules" "${pack[@]}" -cf - . >"$work/out/modules.tar"
as_root rm -rf "$root/boot-modules"
as_root tar -C "$root" "${pack[@]}" --exclude='./dev/*' -cf - . >"$work/out/system.tar"
publish
