#!/usr/bin/env bash
# Runs a command in its own network and mount namespaces.
set -euo pipefail
exec unshare --net --mount -- sh -c 'ip link set lo up && exec "$@"' sh "$@"
