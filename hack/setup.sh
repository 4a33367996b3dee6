#!/usr/bin/env bash
# hack/setup.sh demo|test: installs the Debian packages that `make demo` or `make test` need, if any are missing. It says so before.
# SETUP=no forbids it: then it prints the command and fails. On other systems it names the programs that are missing.
set -euo pipefail

# package and, for systems without apt, a program of it
demo=(
  qemu-system-x86:qemu-system-x86_64 qemu-utils:qemu-img seabios: # guests
  e2fsprogs:mkfs.ext4 nftables:nft iproute2:ip procps:ps curl:curl # host tools of engine and demo
)
test=(
  "${demo[@]}" ovmf: jq:jq iputils-ping:ping
  mmdebstrap:mmdebstrap grub-pc-bin: grub-efi-amd64-bin: grub-common:grub-mkimage mtools:mcopy dosfstools:mkfs.vfat fdisk:sfdisk # the cloud image of the tests
  qemu-guest-agent: openssh-client:ssh # what the tests talk to, and with
  isc-dhcp-client:dhclient dhcpcd-base:dhcpcd busybox:busybox systemd: # DHCP clients of the tests
  containernetworking-plugins: dnsmasq-base:dnsmasq # the network's neighbours: CNI, and a server to compare with
  protobuf-compiler:protoc shellcheck:shellcheck git:git make:make gcc:gcc libc6-dev: # building and checking
)
case ${1-} in
  demo) wanted=("${demo[@]}") ;;
  test) wanted=("${test[@]}") ;;
  *) echo "usage: $0 demo|test" >&2; exit 2 ;;
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
  grep -qxF "${one%%:*}" <<<"$installed" || missing+=("${one%%:*}")
done
# The guest kernel is a package that guest/build.sh downloads: it needs apt's lists.
if [ ${#missing[@]} = 0 ] && [ -n "$(apt-cache show linux-image-cloud-amd64 2>/dev/null)" ]; then exit 0; fi

sudo=
if [ "$(id -u)" != 0 ]; then sudo=sudo; fi
if [ ${#missing[@]} = 0 ]; then
  what="lists of apt"
  commands="${sudo:+sudo }apt-get update"
else
  what="${missing[*]}"
  commands="${sudo:+sudo }apt-get update && ${sudo:+sudo }apt-get install -y --no-install-recommends ${missing[*]}"
fi
[ "${SETUP-}" != no ] || die "missing: $what; run: $commands"
[ -z "$sudo" ] || command -v sudo >/dev/null || die "missing: $what; run as root: ${commands//sudo /}"
echo "setup: fetching $what (SETUP=no forbids it)"
$sudo apt-get update -q
if [ ${#missing[@]} != 0 ]; then
  $sudo env DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends "${missing[@]}"
fi
