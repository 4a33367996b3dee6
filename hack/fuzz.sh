#!/usr/bin/env bash
# Runs every fuzz target of the main module for FUZZTIME each.
set -euo pipefail
cd "$(dirname "$0")/.."
export GOWORK=off
grep -rlE '^func Fuzz' --include='*_test.go' internal api guest | xargs -rn1 dirname | sort -u | while read -r dir; do
  grep -hoE '^func Fuzz[A-Za-z0-9_]+' "$dir"/*_test.go | awk '{print $2}' | while read -r target; do
    echo "== $dir $target"
    go test -run '^$' -fuzz "^$target\$" -fuzztime "${FUZZTIME:-2m}" -fuzzminimizetime 1s "./$dir"
  done
done
