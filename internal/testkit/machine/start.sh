#!/bin/sh
# Runs /program on the machine with KVM. The host's files are seen through 9p; what is written is in memory.
port() { # port NAME: the device of the virtio port with this name
	for one in /sys/class/virtio-ports/*; do
		if read -r name <"$one/name" && [ "$name" = "$1" ]; then echo "/dev/${one##*/}"; fi
	done
}
fail() {
	echo "the machine: $*" >/dev/console
	poweroff -f
}
mkdir -p /host /new /whole
mount -t 9p -o trans=virtio,version=9p2000.L,ro,cache=loose,msize=512000 host /host || fail "the host's files cannot be mounted"
mount -t tmpfs -o mode=755,size=90% tmpfs /new
mkdir /new/upper /new/work
mount -t overlay -o lowerdir=/host,upperdir=/new/upper,workdir=/new/work overlay /whole || fail "there is no place for new files"
mount -t proc proc /whole/proc
mount -t sysfs sys /whole/sys
mount -t devtmpfs dev /whole/dev
mkdir -p /whole/dev/shm /whole/dev/pts
mount -t tmpfs tmpfs /whole/dev/shm
mount -t devpts -o ptmxmode=666 devpts /whole/dev/pts
mount -t tmpfs -o mode=755,size=90% tmpfs /whole/run
mkdir -m 1777 /whole/run/tmp
truncate -s 8G /whole/run/ext4 # of which only what is written takes memory
chroot /whole /sbin/mkfs.ext4 -q -E nodiscard,lazy_itable_init=1,lazy_journal_init=1 -O ^has_journal -m 0 /run/ext4 || fail "no file system can be made"
mount -o loop /whole/run/ext4 /whole/run/tmp || fail "there is no place for temporary files"
chmod 1777 /whole/run/tmp
mount -t cgroup2 none /whole/sys/fs/cgroup
ip link set lo up
chmod 666 /dev/kvm /dev/vhost-vsock /dev/vhost-net /dev/net/tun || fail "the kernel has no KVM, vhost or taps"
cp /program /whole/run/program
# Not in a chroot: whoever is in one cannot make user namespaces.
cd /whole || fail "there is no root"
mount --move /whole / || fail "the root cannot be moved"
{
	chroot . /bin/sh /run/program </dev/null 2>&1
	echo $? >"$(port status)"
} | cat >"$(port output)"
sync
