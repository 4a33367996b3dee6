#!/usr/bin/env bash
# Runs tests as they run on other people's machines: in a new clone, by make, with a restrictive umask, a foreign locale and time
# zone, one CPU, a small /tmp without programs, and by an ordinary user with sudo. hack/variants.sh [PACKAGE...]: by default a few that
# touch files, processes and networks.
set -euo pipefail
cd "$(dirname "$0")/.."
packages=("$@")
if [ $# = 0 ]; then
  packages=(./internal/app/epoch ./internal/doctor ./internal/image/disk ./internal/network/host ./internal/network/dhcp ./internal/reach ./internal/testkit/netns ./internal/proc ./internal/snapshot/local)
fi
as_root=() as_user=() # only a mount needs root
if [ "$(id -u)" != 0 ]; then
  command -v sudo >/dev/null || { echo "the variants need root or sudo: one of them mounts a folder over /tmp" >&2; exit 1; }
  as_root=(sudo -E "PATH=$PATH" "HOME=$HOME")
  as_user=(setpriv "--reuid=$(id -u)" "--regid=$(id -g)" --init-groups)
fi
clone=$(mktemp -d /var/tmp/cocoon-variants.XXXXXX)
trap 'rm -rf "$clone"' EXIT
repo=$PWD
umask 077
export GOFLAGS=-count=1 # results of another environment are no proof
git clone -q . "$clone/cocoon"
cd "$clone/cocoon"

# variant NAME COMMAND...: runs the unit tests of the packages in another environment.
variant() {
  echo "variant: $1"
  shift
  "$@" make -s test-unit PACKAGES="${packages[*]}"
}
one=$(taskset -pc $$ | sed 's/.*: //; s/[^0-9].*//')
variant "umask 077, one CPU, Turkish, Kathmandu" taskset -c "$one" env LANG=tr_TR.UTF-8 TZ=Asia/Kathmandu
# shellcheck disable=SC2016 # the inner shell expands them
variant "/tmp of 64 MiB without programs" "${as_root[@]}" unshare --mount -- env -u TMPDIR sh -c 'mount -t tmpfs -o size=64m,noexec none /tmp && exec "$@"' sh "${as_user[@]}"

[ "$(id -u)" = 0 ] || exit 0 # all of this was run by an ordinary user
command -v sudo >/dev/null || { echo "skipped: the variant of an ordinary user, because sudo is not installed"; exit 0; }
echo "variant: an ordinary user with sudo"
home=$clone/home
mkdir "$home"
chmod 711 "$clone"
git clone -q "$repo" "$home/cocoon"
cd "$home/cocoon"
# shellcheck disable=SC2016 # the inner shell expands them
"$repo/hack/user.sh" "$home" sh -ec '
  hack/variants.sh ./internal/proc ./internal/network/host
  CGO_ENABLED=0 go test -trimpath -vet=off -exec "$PWD/hack/alone.sh" ./internal/network/host # as hack/test.sh runs the others
'
left=$(find "$home" -user root)
[ -z "$left" ] || { echo "files of root are left in the home of the user: $left" >&2; exit 1; }
