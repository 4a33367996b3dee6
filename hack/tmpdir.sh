#!/usr/bin/env bash
# Prints the folder for temporary files of builds and tests: TMPDIR if it is set, else /tmp, or /var/tmp if /tmp is small or does not
# allow programs. Builds and tests run programs there and need some GiB. Names of sockets are short, so it is no folder of ours.
set -euo pipefail
enough=$((6 << 20)) # KiB
if [ -n "${TMPDIR-}" ]; then
  echo "$TMPDIR"
elif [ "$(df --output=avail -k /tmp | tail -n 1)" -lt "$enough" ] || findmnt -no OPTIONS -T /tmp | grep -qE '(^|,)noexec(,|$)'; then
  echo /var/tmp
else
  echo /tmp
fi
