#!/usr/bin/env bash
# Runs tests as they run on other people's machines: in a new clone, by make, with a restrictive umask, a foreign locale and time
# zone, one CPU, and a small /tmp without programs. hack/variants.sh [PACKAGE...]: by default a few that touch files, processes and
# networks.
set -euo pipefail
cd "$(dirname "$0")/.."
packages=("$@")
if [ $# = 0 ]; then
  packages=(. ./internal/app/epoch ./internal/doctor ./internal/image/disk ./internal/network/host ./internal/network/dhcp ./internal/reach ./internal/testkit/netns ./internal/proc ./internal/snapshot/local)
fi
[ "$(id -u)" = 0 ] || { echo "the variants need root: one of them mounts a folder over /tmp" >&2; exit 1; }
clone=$(mktemp -d /var/tmp/cocoon-variants.XXXXXX)
trap 'rm -rf "$clone"' EXIT
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
variant "/tmp of 64 MiB without programs" unshare --mount -- env -u TMPDIR sh -c 'mount -t tmpfs -o size=64m,noexec none /tmp && exec "$@"' sh
