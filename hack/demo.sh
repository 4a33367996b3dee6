#!/usr/bin/env bash
# The main job before your eyes: a control plane comes up, a Pod becomes a VM, is used like a pod, and is gone again.
# Not interactive; prints each step with its time; leaves nothing running and nothing on disk.
set -euo pipefail
cd "$(dirname "$0")/.."
PATH=$PWD/bin:$PATH
if [ "$(id -u)" != 0 ]; then exec sudo --preserve-env=PATH,VK_NODE_NAME "$0" "$@"; fi

while read -r program package; do
  command -v "$program" >/dev/null || { echo "$program is missing: apt-get install $package" >&2; exit 1; }
done <<'EOT'
qemu-system-x86_64 qemu-system-x86
mkfs.ext4 e2fsprogs
curl curl
EOT

dir=$(mktemp -d "${TMPDIR:-/tmp}/cocoon-demo.XXXXXX")
export COCOON_DIR=$dir KUBECONFIG=$dir/kubeconfig
finish() {
  local status=$?
  trap - EXIT INT TERM
  if [ -e "$dir/up.json" ]; then cocoon down >/dev/null 2>&1 || status=1; fi
  if [ "$status" != 0 ]; then
    printf '\nThe demo failed; logs:\n'
    tail -n 15 "$dir"/log/*.log 2>/dev/null || true
  fi
  rm -rf "$dir"
  exit "$status"
}
trap finish EXIT INT TERM

now() { date +%s%N; }
step() { # step "what" command...: runs it, prints how long it took, then what it printed
  local what=$1 began out status=0
  shift
  began=$(now)
  out=$("$@" 2>&1) || status=$?
  printf '%8.2fs  %s\n' "$(bc_ms $(($(now) - began)))" "$what"
  if [ -n "$out" ]; then printf '           | %s\n' "${out//$'\n'/$'\n'           | }"; fi
  return "$status"
}
bc_ms() { printf '%d.%02d' $(($1 / 1000000000)) $(($1 / 10000000 % 100)); }
total=$(now)

cocoon up --detach | sed '/^$/,$d'
step "kubectl get nodes" kubectl get nodes -o wide --no-headers
step "apply a pod" kubectl apply -f examples/pod.yaml
step "the pod is Ready" kubectl wait pod/hello --for=condition=Ready --timeout=120s
step "it runs on the virtual node" kubectl get pod hello -o wide --no-headers
step "it is a QEMU guest" cocoon vm list
step "exec: its own kernel" kubectl exec hello -- uname -sr
ip=$(kubectl get pod hello -o 'jsonpath={.status.podIP}')
step "HTTP GET http://$ip:8080/" curl -sS --fail --max-time 10 "http://$ip:8080/"
step "its log" kubectl logs hello --tail=2
step "delete it" kubectl delete pod hello --timeout=60s
step "no VM is left" test "$(cocoon vm list -o json)" = "[]"
step "cocoon down" cocoon down
printf '%8.2fs  in all\n' "$(bc_ms $(($(now) - total)))"
