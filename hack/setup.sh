#!/usr/bin/env bash
# hack/setup.sh demo|test|hypervisors: installs the Debian packages that `make` with this word needs, if any are missing. It says so before.
# SETUP=no forbids it: then it prints the command and fails. On other systems it names the programs that are missing.
set -euo pipefail

# package, or PACKAGE|PACKAGE where releases name it differently, and for systems without apt a program of it
demo=(
  qemu-system-x86:qemu-system-x86_64 qemu-utils:qemu-img seabios: # guests
  e2fsprogs:mkfs.ext4 nftables:nft iproute2:ip procps:ps curl:curl # host tools of engine and demo
)
test=(
  "${demo[@]}" ovmf: swtpm:swtpm jq:jq iputils-ping:ping
  mmdebstrap:mmdebstrap grub-pc-bin: grub-efi-amd64-bin: grub-common:grub-mkimage mtools:mcopy dosfstools:mkfs.vfat fdisk:sfdisk squashfs-tools:mksquashfs # the cloud image of the tests, and Cocoon OS
  xfsprogs:mkfs.xfs # a file system that shares what files have in common
  qemu-guest-agent: openssh-client:ssh # what the tests talk to, and with
  isc-dhcp-client:dhclient "dhcpcd-base|dhcpcd5:dhcpcd" busybox:busybox systemd: # DHCP clients of the tests
  containernetworking-plugins: iptables:iptables dnsmasq-base:dnsmasq # the network's neighbours: CNI, and a server to compare with
  protobuf-compiler:protoc shellcheck:shellcheck git:git make:make gcc:gcc libc6-dev: # building and checking
  libseccomp-dev: "pkgconf|pkg-config:pkg-config" # building runc
  sudo:sudo # some tests are run by an ordinary user
)
# Rust itself comes from rustup: Debian's is too old.
hypervisors=(git:git musl-tools:musl-gcc libclang-dev: libseccomp-dev: "pkgconf|pkg-config:pkg-config")
case ${1-} in
  demo) wanted=("${demo[@]}") ;;
  test) wanted=("${test[@]}") ;;
  hypervisors) wanted=("${hypervisors[@]}") ;;
  *) echo "usage: $0 demo|test|hypervisors" >&2; exit 2 ;;
esac
die() { echo "setup: $*" >&2; exit 1; }

if ! command -v apt-get >/dev/null || ! command -v dpkg-query >/dev/null; then
  missing=()
  for one in "${wanted[@]}"; do
    program=${one#*:}
    [ -z "$program" ] || PATH=$PATH:/usr/sbin:/sbin command -v "$program" >/dev/null || missing+=("$program")
  done
  [ ${#missing[@]} = 0 ] || die "these programs are missing: ${missing[*]}; install them with this system's package manager"
  exit 0
fi

installed=$(dpkg-query -W -f '${Status} ${Package}\n' | awk '/^install ok installed/ {print $4}')
missing=()
for one in "${wanted[@]}"; do
  grep -qxE "${one%%:*}" <<<"$installed" || missing+=("${one%%:*}")
done
[ ${#missing[@]} != 0 ] || exit 0

sudo=
if [ "$(id -u)" != 0 ]; then sudo=sudo; fi
commands="${sudo:+sudo }apt-get update && ${sudo:+sudo }apt-get install -y --no-install-recommends ${missing[*]%%|*}"
[ "${SETUP-}" != no ] || die "missing: ${missing[*]}; run: $commands"
[ -z "$sudo" ] || command -v sudo >/dev/null || die "missing: ${missing[*]}; run as root: ${commands//sudo /}"
echo "setup: fetching ${missing[*]} (SETUP=no forbids it)"
$sudo apt-get update -q
packages=()
for one in "${missing[@]}"; do
  mapfile -t known < <(IFS='|'; read -ra names <<<"$one"; apt-cache policy "${names[@]}" | awk '/^[^ ]/ {p = $1} /Candidate:/ && $2 != "(none)" {sub(":", "", p); print p}')
  if [ ${#known[@]} != 0 ]; then packages+=("${known[0]}"); else echo "setup: apt has no package $one here: what needs it is skipped"; fi
done
[ ${#packages[@]} = 0 ] || $sudo env DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends "${packages[@]}"
