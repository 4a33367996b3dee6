#!/bin/sh
# A VM with a volume on a thin pool, by the CLI. It runs as root in the machine of TestVMOnThinPool, which has everything in /opt.
export PATH=/usr/sbin:/usr/bin:/sbin:/bin:/opt
say() { read -r up _ </proc/uptime; echo "[$up] $*"; }
die() {
	say "FAILED: $*"
	cocoon vm inspect db
	tail -n 40 /tmp/log
	exit 1
}
run() { say "$*"; "$@" || die "$*"; }
inside() { cocoon vm exec db -- sh -c "$1"; }
expect() { # expect WANT SCRIPT: what the script prints in the guest
	got=$(inside "$2") || die "$2"
	[ "$got" = "$1" ] || die "$2: it prints $got, want $1"
}
until_true() { # until_true WHAT COMMAND...
	what=$1
	shift
	n=0
	until "$@"; do
		n=$((n + 1))
		[ $n -lt 300 ] || die "waited in vain until $what"
		sleep 1
	done
	say "$what"
}
there() { inside true 2>/dev/null; }
reason() { [ "$(cocoon vm inspect db | sed -n 's/^ *"reason": "\(.*\)",*$/\1/p')" = "$1" ]; }
md5() { echo 'echo 3 >/proc/sys/vm/drop_caches; md5sum </'"$1"' | cut -d" " -f1'; }

mount -t tmpfs -o size=400m,mode=755 tmpfs /tmp
mount -t tmpfs -o mode=755 tmpfs /run
mkdir -p /dev/shm /sys/fs/cgroup
mount -t tmpfs tmpfs /dev/shm
mount -t cgroup2 none /sys/fs/cgroup
ip link set lo up
chmod 666 /dev/kvm || die "no KVM"
run lvm pvcreate -q /dev/vda
run lvm vgcreate -q vg /dev/vda
run lvm lvcreate -q -y -L 48m -T --errorwhenfull y vg/pool
printf 'network: {enabled: false}\nvolumePool: vg/pool\n' >/tmp/cocoond.yaml
cocoond --config /tmp/cocoond.yaml --state-dir /tmp/state --run-dir /tmp/run --kernel /opt/vmlinux --initramfs /opt/initramfs >/tmp/log 2>&1 &
export COCOON_SOCKET=/tmp/run/cocoond.sock
until_true "cocoond answers" cocoon vm list
run cocoon image import demo:latest /opt/demo.tar
run cocoon volume create data --size 128M --kind lvm
run cocoon vm run --no-wait --name db --nics 0 --cpu 1 --memory 192M --storage 64M --volume data:/data demo:latest sleep 100000
until_true "the guest is there" there
boot=$(inside 'cat /proc/sys/kernel/random/boot_id') || die "boot id"

# A snapshot while the guest runs, and a copy of it, which the same guest gets beside its source.
first=$(inside "yes first | head -c 8388608 >/data/a; sync; $(md5 data/a)") || die "write"
run cocoon volume snapshot create data --name before
inside 'echo second >/data/a; sync' || die "write again"
run cocoon volume clone --snapshot before copy
run cocoon vm attach-volume db copy:/copy
expect "$first" "$(md5 copy/a)"
expect second 'cat /data/a'
run cocoon vm detach-volume db copy

# The pool becomes full while the guest writes. It waits, and goes on when the pool has grown.
want=$(yes full | head -c 50331648 | md5sum | cut -d' ' -f1)
inside '(yes full | head -c 50331648 >/data/b; sync; echo all >/done) >/dev/null 2>&1 </dev/null &' || die "fill"
until_true "the guest waits" reason DiskFull
cocoon vm inspect db | grep '"message"' | grep 'the thin pool of one of its volumes is full' || die "no message about the pool"
run lvm lvextend -q -L +96m vg/pool
until_true "the guest goes on" reason ""
until_true "all is written" inside 'test -e /done'
expect "$want" "$(md5 data/b)"
expect second 'cat /data/a'
expect "$boot" 'cat /proc/sys/kernel/random/boot_id'
expect 0 'dmesg | grep -c "EXT4-fs error\|I/O error" || true'

# The next start checks the file system and finds all of it.
run cocoon vm restart db
until_true "the guest is there again" there
expect "$want" "$(md5 data/b)"
run cocoon vm rm --force db
run cocoon volume rm copy
run cocoon volume snapshot rm before
run cocoon volume rm data
[ "$(lvm lvs --noheadings -o lv_name vg | xargs)" = pool ] || die "left: $(lvm lvs vg)"
say "the VM passed"
