#!/usr/bin/env bash
# Runs a command as root in its own network and mount namespaces. What a namespace inherits from a host that forwards packets or
# has no IPv6, or has a module that filters bridged packets, is set as on any other host.
set -euo pipefail
if [ "$(id -u)" != 0 ]; then exec sudo -E PATH="$PATH" "$0" "$@"; fi
# shellcheck disable=SC2016 # the inner shell expands them
exec unshare --net --mount -- sh -c '
for key in ipv4/ip_forward ipv6/conf/all/disable_ipv6 ipv6/conf/default/disable_ipv6 ipv6/conf/lo/disable_ipv6 \
  bridge/bridge-nf-call-iptables; do
  [ ! -e "/proc/sys/net/$key" ] || echo 0 >"/proc/sys/net/$key"
done
ip link set lo up && exec "$@"' sh "$@"
