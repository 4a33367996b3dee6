#!/usr/bin/env bash
# Runs the tests that need root and real guests: hack/test.sh vm|e2e|kubevirt|bench|soak|upgrade|host|conformance|cri|kvm [go test flags]
# They run in their own network namespace, so that the machine's network is never touched. The run fails if anything is left
# behind (process, tap, bridge, namespace, mount, table, cgroup, file).
set -euo pipefail
cd "$(dirname "$0")/.."
export GOWORK=off CGO_ENABLED=0
mode=$1
shift
umask 022 # as in cocoond
TMPDIR=$(hack/tmpdir.sh)
export TMPDIR
[ "$(id -u)" = 0 ] || command -v sudo >/dev/null || { echo "make test-$mode needs root or sudo: it makes taps, bridges and namespaces" >&2; exit 1; }

export COCOON_TEST_KERNEL=$PWD/bin/guest/vmlinux COCOON_TEST_INITRD=$PWD/bin/guest/initramfs COCOON_TEST_IMAGE=$PWD/bin/demo.tar
case $mode in
  vm | e2e | kubevirt)
    tags=$mode
    [ "$mode" != kubevirt ] || tags='e2e && kubevirt'
    mode=${tags// && /,}
    mapfile -t files < <(grep -rlE "^//go:build $tags( |\$)" --include='*_test.go' internal deploy test)
    # The slowest package starts first.
    mapfile -t packages < <(dirname "${files[@]}" | sort -u | sed 's|^|./|' | awk '/test\/e2e$/ {print; next} {rest = rest $0 "\n"} END {printf "%s", rest}')
    # The other tests of these packages are unit tests, which have already run.
    set -- -run "^($(grep -hoP '^func \KTest\w+(?=\(t )' "${files[@]}" | paste -sd '|'))\$" "$@"
    ;;
  bench) packages=(./test/bench); set -- -v -run '^TestBench$' "$@" ;; # without -v the table is hidden
  soak) packages=(./test/bench); mode=bench; set -- -v -run '^TestSoak$' "$@" ;;
  upgrade) packages=(./test/e2e); mode=e2e,upgrade; set -- -v -run '^TestUpgrade$' "$@" ;;
  # An emulated machine is slow: each power cut takes two minutes, or more on a busy machine.
  host) packages=(./test/host); set -- -v -timeout $((60 + ${HOST_CRASHES:-3} * 5))m "$@" ;;
  conformance) packages=(./test/conformance); set -- -v -timeout 0 -run '^TestConformance$' "$@" ;; # it stops the cluster when it is interrupted
  cri) packages=(./internal/testkit/containerdtest ./internal/container/containerd ./internal/app/cocoond ./test/cri); set -- -v -p 1 "$@" ;; # without -v the scores are hidden; critest uses fixed ports
  # Nothing can be left behind on the machine of make kvm-guest, which goes with the tests. One at a time: each takes 3 GiB.
  kvm) exec go test -trimpath -vet=off -ldflags "-s -w" -tags vm,kvm,e2e -count=1 -p 1 -v -timeout 60m -exec "$PWD/hack/in-kvm.sh" "$@" ;;
  *) echo "usage: hack/test.sh vm|e2e|kubevirt|bench|soak|upgrade|host|conformance|cri|kvm" >&2; exit 2 ;;
esac

before=$(mktemp -u)
trap 'rm -f "$before" || sudo rm -f "$before"' EXIT
asroot=() # who is not root compiles as themselves; only the tests run as root
[ "$(id -u)" = 0 ] || asroot=(-exec "sudo -E PATH=$PATH")
leak() { COCOON_LEAK_BEFORE=$before go test -trimpath -count=1 "${asroot[@]}" ./test/leak; }
leak >/dev/null
status=0
# Each package runs in its own namespace, which has no network, so it is compiled outside. Clusters and guests wait a lot, so
# two packages run at once.
go test -trimpath -vet=off -ldflags "-s -w" -tags "$mode" -count=1 -p 2 -exec "$PWD/hack/alone.sh" -timeout 50m "$@" "${packages[@]}" || status=$?
leak || status=1
exit "$status"
