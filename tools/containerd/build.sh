#!/usr/bin/env bash
# tools/containerd/build.sh OUTDIR: the container runtime of a node and its conformance tests. Leaves in OUTDIR
#   containerd, containerd-shim-runc-v2, ctr, runc   the runtime
#   crictl, critest, ginkgo                          its client, its tests and their runner
#   standin                                          the programs of ours in the images of these tests
# All others come unmodified from the modules of go.mod and are cached by it below ${XDG_CACHE_HOME:-~/.cache}/cocoon; OUTDIR gets links.
#
# runc enters namespaces in C, so it needs gcc and the headers of libseccomp; the program itself is static.
set -euo pipefail
export LC_ALL=C

[ $# = 1 ] || { echo "usage: $0 OUTDIR" >&2; exit 2; }
say() { echo "containerd: $*" >&2; }
die() { echo "containerd: $*" >&2; exit 1; }
mkdir -p "$1"
out=$(cd "$1" && pwd)
cd "$(dirname "$0")"
cache=${XDG_CACHE_HOME:-$HOME/.cache}/cocoon
mkdir -p "$cache"

seccomp=$(pkg-config --modversion libseccomp) || die "pkg-config or the headers of libseccomp are missing; run: make setup"
programs=$cache/containerd-$({ go version; go env GOARCH GOAMD64; echo "$seccomp"; cat go.mod go.sum build.sh; } | sha256sum | cut -c1-16)

exec 9>"$cache/.containerd.lock"
flock 9 # of several builders one builds, the others take what it made
if [ ! -d "$programs" ]; then
    say "compiling; the first time takes about five to eight minutes on 2 cores, later it is cached"
    work=$(mktemp -d "$cache/.containerd-XXXXXX")
    trap 'rm -rf "$work"' EXIT
    export GOWORK=off CGO_ENABLED=0 GOFLAGS="-buildvcs=false -trimpath -gcflags=all=-dwarf=false"
    version() { go list -m -f '{{.Version}}' "$1" | sed s/^v//; }
    mkdir "$work/programs"

    # Snapshotters whose tools or modules of the kernel a machine of ours lacks are left out, and traces.
    containerd=github.com/containerd/containerd/v2
    tags=urfave_cli_no_docs,no_btrfs,no_devmapper,no_zfs,no_tracing
    flags="-s -w -X $containerd/version.Version=v$(version $containerd)"
    go build -tags "$tags" -ldflags "$flags" -o "$work/programs/" $containerd/cmd/containerd $containerd/cmd/ctr
    go build -tags "$tags,no_grpc" -ldflags "$flags" -o "$work/programs/" $containerd/cmd/containerd-shim-runc-v2

    runc=github.com/opencontainers/runc
    CGO_ENABLED=1 go build -tags urfave_cli_no_docs,seccomp,netgo,osusergo -o "$work/programs/" \
        -ldflags "-s -w -linkmode external -extldflags -static -X main.version=$(version $runc)" $runc

    tools=sigs.k8s.io/cri-tools
    flags="-s -w -X $tools/pkg/version.Version=$(version $tools)"
    go build -ldflags "$flags" -o "$work/programs/" $tools/cmd/crictl
    go test -c -vet=off -ldflags "$flags" -o "$work/programs/critest" $tools/cmd/critest
    go build -ldflags '-s -w' -o "$work/programs/" github.com/onsi/ginkgo/v2/ginkgo
    mv "$work/programs" "$programs"
    find "$cache" -maxdepth 1 -name 'containerd-????????????????' -type d ! -path "$programs" -mtime +30 -exec rm -rf {} +
fi
touch "$programs"
GOWORK=off CGO_ENABLED=0 go -C ../.. build -trimpath -ldflags '-s -w' -o "$out/standin" ./internal/testkit/containerdtest/standin
for program in "$programs"/*; do ln -sfn "$program" "$out/$(basename "$program")"; done
