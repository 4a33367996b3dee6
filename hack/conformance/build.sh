#!/usr/bin/env bash
# hack/conformance/build.sh OUTDIR: what the conformance run needs beside Cocoon. Leaves in OUTDIR
#   e2e.test, ginkgo, agnhost, nnp   Kubernetes' end-to-end tests, their runner and two of their images' programs (from go.mod)
#   standin                          the programs of ours in stand-in images
#   userland.tar                     the distribution's tools that the tests call in their pods
#   nautilus, kitten, porter         folders with files of their images
# All is cached below ${XDG_CACHE_HOME:-~/.cache}/cocoon: the programs by go.mod and build settings, the tools by package versions.
set -euo pipefail
export LC_ALL=C

[ $# = 1 ] || { echo "usage: $0 OUTDIR" >&2; exit 2; }
say() { echo "conformance: $*"; }
die() { echo "conformance: $*" >&2; exit 1; }
# shellcheck source=hack/packages.sh
. "$(dirname "$0")/../packages.sh"
umask 022 # files of images
mkdir -p "$1"
out=$(cd "$1" && pwd)
here=$(cd "$(dirname "$0")" && pwd)
repo=$(cd "$here/../.." && pwd)
cache=${XDG_CACHE_HOME:-$HOME/.cache}/cocoon
mkdir -p "$cache"

packages=(
    base-files bash bash-static coreutils findutils grep gawk sed procps util-linux hostname libc-bin
    bind9-dnsutils bind9-host curl iperf iproute2 iputils-ping netcat-openbsd socat
)
# The versions decide about the bytes. Where apt's lists cannot be had, the newest userland there is serves.
if versions=$(versions "${packages[@]}"); then
    userland=$cache/userland-$({ cat "$here/build.sh"; echo "$versions"; } | sha256sum | cut -c1-16).tar
else
    [ -n "${COCOON_APT_LISTS-}" ] || own_lists "apt does not know all of: ${packages[*]}"
    userland=$(find "$cache" -maxdepth 1 -name 'userland-*.tar' -printf '%T@ %p\n' | sort -n | tail -n1 | cut -d' ' -f2-)
    [ -n "$userland" ] || die "apt does not know all of: ${packages[*]}"
    say "apt does not know all packages, using the newest userland there is"
fi

exec 9>"$cache/.conformance.lock"
flock 9 # of several builders one builds, the others take what it made
sweep "$cache" '.conformance-*'
work=$(mktemp -d "$cache/.conformance-XXXXXX")
trap 'rm -rf "$work"' EXIT

if [ ! -s "$userland" ]; then
    command -v mmdebstrap >/dev/null || die "mmdebstrap is missing; run: make setup"
    say "unpacking ${#packages[@]} of $(distribution)'s packages and what they need (a minute or two)"
    sources >"$work/sources.list"
    [ -s "$work/sources.list" ] || die "apt has no source of $(distribution)'s packages"
    # Nothing of the packages runs. Root unpacks them, and this script writes the archive.
    # shellcheck disable=SC2016 # the hook's $1 is mmdebstrap's
    if ! as_root mmdebstrap --mode=root --variant=extract --include="$(IFS=,; echo "${packages[*]}")" \
        --aptopt='APT::Install-Recommends "false"' --aptopt='Acquire::Languages "none"' \
        --extract-hook='rm -rf "$1"/usr/share/* "$1"/usr/lib/x86_64-linux-gnu/perl* "$1"/usr/lib/x86_64-linux-gnu/gconv "$1"/etc/hostname' \
        "$(codename)" - - <"$work/sources.list" >"$work/userland.tar" 2>"$work/log"; then
        tail -n 40 "$work/log" >&2
        die "mmdebstrap failed"
    fi
    mv "$work/userland.tar" "$userland"
    find "$cache" -maxdepth 1 -name 'userland-*.tar' ! -path "$userland" -mtime +30 -delete
fi
touch "$userland"

# The control plane's settings of the compiler: with others, Kubernetes would be compiled twice.
control_plane=$repo/cmd/cocoon-up/build.sh
in_module() { "$control_plane" -- go -C "$here" "$@"; }

kubernetes=$(awk '$1 == "require" && $2 == "k8s.io/kubernetes" {print $3}' "$here/go.mod")
[ -n "$kubernetes" ] || die "go.mod names no version of k8s.io/kubernetes"
programs=$cache/conformance-$({ go version; cat "$here/go.mod" "$here/build.sh" "$control_plane"; } | sha256sum | cut -c1-16)
if [ ! -d "$programs" ]; then
    say "compiling the tests of Kubernetes $kubernetes (after the control plane some minutes, then it is cached)"
    version=k8s.io/component-base/version
    ldflags="-s -w -X $version.gitVersion=$kubernetes -X $version.gitMajor=1 -X $version.gitMinor=$(cut -d. -f2 <<<"$kubernetes") -X $version.gitCommit="
    in_module test -c -vet=off -ldflags "$ldflags" -o "$work/programs/e2e.test" k8s.io/kubernetes/test/e2e
    in_module build -ldflags "$ldflags" -o "$work/programs/agnhost" k8s.io/kubernetes/test/images/agnhost
    in_module build -ldflags '-s -w' -o "$work/programs/nnp" k8s.io/kubernetes/test/images/nonewprivs
    in_module build -ldflags '-s -w' -o "$work/programs/ginkgo" github.com/onsi/ginkgo/v2/ginkgo
    images=$(in_module list -m -f '{{.Dir}}' k8s.io/kubernetes)/test/images
    for name in nautilus kitten; do cp -r "$images/$name/html" "$work/programs/$name"; done
    mkdir "$work/programs/porter"
    cp "$images"/agnhost/porter/localhost.* "$work/programs/porter/"
    chmod -R u+w "$work/programs"
    mv "$work/programs" "$programs"
    find "$cache" -maxdepth 1 -name 'conformance-????????????????' -type d ! -path "$programs" -mtime +30 -exec rm -rf {} +
fi
touch "$programs"

GOWORK=off CGO_ENABLED=0 go -C "$repo" build -trimpath -ldflags '-s -w' -o "$out/standin" ./test/conformance/standin
for name in e2e.test ginkgo agnhost nnp nautilus kitten porter; do ln -sfn "$programs/$name" "$out/$name"; done
ln -sfn "$userland" "$out/userland.tar"
