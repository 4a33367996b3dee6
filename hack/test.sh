#!/usr/bin/env bash
# Runs the tests that need root and real guests: hack/test.sh vm|e2e|bench|soak [go test flags]
# They get a network namespace of their own, so that the machine's network is never touched, and what they leave behind
# (process, tap, bridge, namespace, mount, table, cgroup, file) fails the run.
set -euo pipefail
cd "$(dirname "$0")/.."
export GOWORK=off
mode=$1
shift
[ "$(id -u)" = 0 ] || { echo "make test-$mode needs root: it makes taps, bridges and namespaces" >&2; exit 1; }

export COCOON_TEST_KERNEL=$PWD/bin/guest/vmlinux COCOON_TEST_INITRD=$PWD/bin/guest/initramfs COCOON_TEST_IMAGE=$PWD/bin/demo.tar
case $mode in
  vm | e2e) mapfile -t packages < <(grep -rlE "^//go:build $mode" --include='*_test.go' internal deploy test | xargs -n1 dirname | sort -u | sed 's|^|./|') ;;
  bench) packages=(./test/bench); set -- -v -run '^TestBench$' "$@" ;; # without -v the table is hidden
  soak) packages=(./test/bench); mode=bench; set -- -v -run '^TestSoak$' "$@" ;;
  *) echo "usage: hack/test.sh vm|e2e|bench|soak" >&2; exit 2 ;;
esac

# Compiled first: inside the namespace there is no network to fetch modules from.
go vet -tags "$mode" "${packages[@]}" ./test/leak >/dev/null

before=$(mktemp -u)
trap 'rm -f "$before"' EXIT
leak() { COCOON_LEAK_BEFORE=$before go test -count=1 ./test/leak; }
leak >/dev/null
status=0
# Each package has a namespace of its own. Clusters mostly wait, and run two at once; guests want the whole machine.
at_once=1
[ "$mode" != e2e ] || at_once=2
go test -trimpath -tags "$mode" -count=1 -p "$at_once" -exec "$PWD/hack/alone.sh" -timeout 30m "$@" "${packages[@]}" || status=$?
leak || status=1
exit "$status"
