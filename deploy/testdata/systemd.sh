#!/bin/sh
# systemd.sh DIR CGROUP CGROUP2: becomes the systemd of a machine that has this one's files, writes its own to memory and sees no
# other of this one's processes, links, devices and cgroups. It wants namespaces of its own, and folders: DIR to mount at, and
# CGROUP, which becomes its root, in the tree that is mounted at CGROUP2. It has the folder $PROGRAMS, if any, at /mnt.
set -eu
dir=$1 root=$1/root
mount --make-rprivate /
if [ -n "$2" ]; then
  echo 0 >"$2/cgroup.procs"
  exec unshare --cgroup "$0" "$dir" '' "$3"
fi
mount -t tmpfs -o mode=0755 tmpfs "$dir"
mkdir "$dir/upper" "$dir/work" "$root"
mount -t overlay -o "lowerdir=/,upperdir=$dir/upper,workdir=$dir/work" overlay "$root"
mount -t proc proc "$root/proc"
mount -t sysfs sysfs "$root/sys"
mount -t cgroup2 cgroup2 "$root/sys/fs/cgroup"
mount -t tmpfs -o mode=0755 tmpfs "$root/run"
mount -t tmpfs tmpfs "$root/tmp"
[ -z "${PROGRAMS-}" ] || mount --bind "$PROGRAMS" "$root/mnt"
mount -t tmpfs -o mode=0755 tmpfs "$root/dev"
mkdir -p "$root/dev/net" "$root/dev/pts" "$root/dev/shm"
mount -t devpts -o newinstance,ptmxmode=0666 devpts "$root/dev/pts"
ln -s pts/ptmx "$root/dev/ptmx"
ln -s /proc/self/fd "$root/dev/fd"
for node in null zero full random urandom tty net/tun kvm; do
  [ ! -e "/dev/$node" ] || cp -a "/dev/$node" "$root/dev/$node"
done
# Of this machine's services there are none.
rm -rf "$root/etc/systemd/system" "$root/var/lib/cocoon" "$root/etc/cocoon"
mkdir -p "$root/etc/systemd/system"
: >"$root/etc/machine-id"
for unit in systemd-udevd systemd-udev-trigger systemd-sysctl systemd-binfmt systemd-modules-load systemd-journal-flush; do
  ln -s /dev/null "$root/etc/systemd/system/$unit.service"
done
cd "$root"
exec env -i container=test PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \
  chroot . /lib/systemd/systemd --unit=basic.target --log-target=journal
