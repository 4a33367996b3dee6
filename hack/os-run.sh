#!/usr/bin/env bash
# Starts a disk of Cocoon OS in QEMU: hack/os-run.sh [DISK [QEMU OPTION...]]
# The machine has UEFI firmware, the disk on virtio, a network card behind QEMU's user network, and its serial console here; Ctrl-A X ends it.
# A local port, which is printed, is forwarded to the API of the appliance. What the machine writes stays in DISK, and what its
# firmware writes in DISK.vars. OS_PORT, OS_MEMORY (MiB) and OS_CPUS change the obvious; OS_ACCEL is kvm or tcg.
set -euo pipefail
cd "$(dirname "$0")/.."
disk=${1:-bin/os/disk.raw}
shift || true
[ -s "$disk" ] || { echo "$disk is missing; run: make os-image" >&2; exit 1; }
code=''
vars=''
for dir in /usr/share/OVMF /usr/share/edk2/ovmf /usr/share/edk2/x64; do
  for size in _4M .4m ''; do
    if [ -z "$code" ] && [ -e "$dir/OVMF_CODE$size.fd" ]; then code=$dir/OVMF_CODE$size.fd; vars=$dir/OVMF_VARS$size.fd; fi
  done
done
[ -n "$code" ] || { echo "UEFI firmware is missing: install ovmf" >&2; exit 1; }
[ -e "$disk.vars" ] || cp "$vars" "$disk.vars"

# A CPU that shows neither feature has no KVM that starts firmware, whatever /dev/kvm is.
accel=${OS_ACCEL-}
if [ -z "$accel" ]; then
  accel=tcg
  if [ -w /dev/kvm ] && grep -qwE 'vmx|svm' /proc/cpuinfo; then accel=kvm; fi
fi
case $accel in
  kvm) machine=(-accel kvm -cpu host) ;;
  *) machine=(-accel "tcg,thread=multi,tb-size=256" -cpu max) ;;
esac

# free prints a port that nothing listens on.
free() {
  local port
  for port in $(shuf -i 50000-59999 -n 50); do
    (exec 3<>"/dev/tcp/127.0.0.1/$port") 2>/dev/null || { echo "$port"; return; }
  done
}
port=${OS_PORT:-$(free)}
echo "os-run: $accel, 127.0.0.1:$port is port 50000 of the appliance" >&2
exec qemu-system-x86_64 -M q35 "${machine[@]}" -smp "${OS_CPUS:-2}" -m "${OS_MEMORY:-2048}" -nodefaults -no-user-config -display none \
  -drive "if=pflash,format=raw,unit=0,readonly=on,file=$code" -drive "if=pflash,format=raw,unit=1,file=$disk.vars" \
  -drive "if=none,id=disk,format=raw,file=$disk,discard=unmap" -device virtio-blk-pci,drive=disk,bootindex=0 \
  -netdev "user,id=net,hostfwd=tcp:127.0.0.1:$port-:50000" -device virtio-net-pci,netdev=net,romfile= \
  -device virtio-rng-pci -device i6300esb -watchdog-action reset \
  -chardev stdio,id=serial,mux=on,signal=off -serial chardev:serial -mon chardev=serial "$@"
