#!/usr/bin/env bash
# Upgrades from an older build: hack/upgrade.sh [REV] [go test flags]
# Builds REV in a separate folder, by default the last tag, or without a tag the hundredth commit before this one, and runs
# test/e2e/upgrade: the older build starts guests, this one takes them over. The builds are kept below bin/old.
set -euo pipefail
cd "$(dirname "$0")/.."
[ "$(id -u)" = 0 ] || { echo "make test-upgrade needs root: it makes taps, bridges and namespaces" >&2; exit 1; }

case ${1:-} in '' | -*) rev=$(git describe --tags --abbrev=0 HEAD^ 2>/dev/null || echo HEAD~100) ;; *) rev=$1; shift ;; esac
commit=$(git rev-parse --verify --quiet "$rev^{commit}") || { echo "hack/upgrade.sh: $rev is no commit of this repository" >&2; exit 1; }
old=$PWD/bin/old/$commit
if [ ! -d "$old" ]; then
  echo "building $rev ($commit)" >&2
  source=$(mktemp -d)
  trap 'rm -rf "$source"' EXIT
  git archive "$commit" | tar -x -C "$source"
  make -C "$source" build VERSION="old-${commit:0:12}" >&2
  mkdir -p bin/old
  rm -rf "$old.new" # of one that was cut off
  mv "$source/bin" "$old.new"
  mv "$old.new" "$old"
  rm -rf "$source"
  trap - EXIT
fi
# Builds before vk--NAMESPACE.POD gave pods of two namespaces the same VM name.
git grep -q 'vk--' "$commit" -- api/contract || export COCOON_TEST_OLD_AMBIGUOUS=1
COCOON_TEST_OLD=$old exec hack/test.sh upgrade "$@"
