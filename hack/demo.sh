#!/usr/bin/env bash
# Shows the main job: a control plane starts, a Pod becomes a VM, is used like a pod, and is removed; a set of VMs forks,
# hibernates and wakes; then images from other places: from a registry, and a cloud image by an alias.
# Not interactive; prints each step with its time; leaves no process and no file behind.
set -euo pipefail
cd "$(dirname "$0")/.."
PATH=$PWD/bin:$PATH

# The cloud image is built once, from the distribution's packages, if the tools for that are installed. Whoever runs this owns it.
if [ -z "${DEMO_CLOUD+set}" ]; then
  DEMO_CLOUD=bin/cloudimg.qcow2
  for program in mmdebstrap mcopy grub-mkimage mkfs.vfat sfdisk ssh; do
    PATH=$PATH:/usr/sbin command -v "$program" >/dev/null || DEMO_CLOUD=
  done
  if [ -n "$DEMO_CLOUD" ]; then guest/cloudimg/build.sh "$DEMO_CLOUD" || DEMO_CLOUD=; fi
  export DEMO_CLOUD
fi
if [ "$(id -u)" != 0 ]; then exec sudo --preserve-env=PATH,VK_NODE_NAME,DEMO_CLOUD "$0" "$@"; fi
cloud=$DEMO_CLOUD

dir=$(mktemp -d "${TMPDIR:-/tmp}/cocoon-demo.XXXXXX")
export COCOON_DIR=$dir KUBECONFIG=$dir/kubeconfig
origin=''
finish() {
  local status=$?
  trap - EXIT INT TERM
  if [ -n "$origin" ]; then kill "$origin" 2>/dev/null || true; fi
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

cocoon up --detach --with manager,epoch | sed '/^$/,$d'
step "kubectl get nodes" kubectl get nodes -o wide --no-headers

# What a user would have elsewhere: a registry and a web server, here on loopback.
mkdir "$dir/files"
if [ -n "$cloud" ]; then ln -s "$(readlink -f "$cloud")" "$dir/files/cloudimg.qcow2"; fi
origin -addr-file "$dir/origin" -dir "$dir/files" -image team/hello:1.0=bin/demo.tar &
origin=$!
until [ -s "$dir/origin" ]; do sleep 0.05; done
registry=$(cat "$dir/origin")

# An emulated cloud image boots slowly, so it boots while the other steps run.
if [ -n "$cloud" ]; then
  printf 'translations:\n- {name: debian, url: "http://%s/files/cloudimg.qcow2"}\n' "$registry" >"$dir/etc/images.d/demo.yaml"
  step "an alias, explained" cocoon image explain virtlet.cloud/debian
  ssh-keygen -q -t ed25519 -N '' -f "$dir/key"
  sed "s|ssh-ed25519 AAAA.*|$(cat "$dir/key.pub")|" examples/cloud/pod.yaml >"$dir/cloud.yaml"
  cloud_began=$(now)
  step "apply a pod of a cloud image, by its alias" kubectl apply -f "$dir/cloud.yaml"
fi

step "apply a pod" kubectl apply -f examples/pod.yaml
step "the pod is Ready" kubectl wait pod/hello --for=condition=Ready --timeout=120s
step "it runs on the virtual node" kubectl get pod hello -o wide --no-headers
step "it is a QEMU guest" cocoon vm list
step "exec: its own kernel" kubectl exec hello -- uname -sr
ip=$(kubectl get pod hello -o 'jsonpath={.status.podIP}')
step "HTTP GET http://$ip:8080/" curl -sS --fail --max-time 10 --retry 10 --retry-delay 1 --retry-connrefused "http://$ip:8080/"
step "its log" kubectl logs hello --tail=2
step "delete it" kubectl delete pod hello --timeout=60s

kubectl apply -f - >/dev/null <<'EOT'
apiVersion: cocoonset.cocoonstack.io/v1
kind: CocoonSet
metadata: {name: team}
spec: {agent: {mode: run, image: "cocoon/demo:latest", replicas: 2}, snapshotPolicy: never}
EOT
each() { for n in 0 1 2; do kubectl exec "team-$n" -- sh -c "$1" | paste -sd' '; done; }
phase() { kubectl wait cocoonset/team --for="jsonpath={.status.phase}=$1" --timeout=120s; }
step "a set: a VM and two forks of it" phase Running
step "its pods" kubectl get pods -l cocoonset.cocoonstack.io/name=team -o wide --no-headers
step "each is itself, and as old as the first (seconds)" each 'hostname; cut -d. -f1 /proc/uptime'
kubectl patch cocoonset team --type merge -p '{"spec":{"suspend":true}}' >/dev/null
step "suspended: each VM is in the registry" phase Suspended
step "no process is left of them" cocoon vm list
kubectl patch cocoonset team --type merge -p '{"spec":{"suspend":false}}' >/dev/null
step "woken" phase Running
step "they went on" each 'hostname; uptime'
step "delete it" kubectl delete cocoonset team --timeout=60s

step "pull an image of a registry" cocoon image pull "$registry/team/hello:1.0"
step "run it" cocoon vm run --name pulled --memory 256M --cpu 1 "$registry/team/hello:1.0"
step "exec" cocoon vm exec pulled -- hostname
step "images" cocoon image list

step "save it while it runs" cocoon snapshot save --name golden pulled
step "a clone goes on from there" cocoon vm clone --name twin golden
step "as somebody else" cocoon vm exec twin -- sh -c 'hostname; cat /sys/class/net/eth0/address; uptime'
step "hibernate it" cocoon vm hibernate twin
step "wake it" cocoon vm wake twin
step "it went on" cocoon vm exec twin -- sh -c 'hostname; uptime'
golden=http://127.0.0.1:$(sed -n 's/.*"epochPort": *\([0-9]*\).*/\1/p' "$dir/up.json")/demo/golden:1
EPOCH_TOKEN=$(cat "$dir/etc/epoch-tokens")
export EPOCH_TOKEN
step "push it to a registry of ours" cocoon snapshot push golden "$golden"
step "pull it" cocoon snapshot pull --name copy "$golden"
step "remove it all" sh -c 'cocoon vm rm --force twin pulled && cocoon snapshot rm copy && cocoon snapshot rm golden'

if [ -n "$cloud" ]; then
  kubectl wait pod/debian --for=condition=Ready --timeout=400s >/dev/null
  ip=$(kubectl get pod debian -o 'jsonpath={.status.podIP}')
  login() {
    for _ in $(seq 100); do
      ssh -i "$dir/key" -o BatchMode=yes -o ConnectTimeout=5 -o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null \
        -o LogLevel=ERROR "debian@$ip" 'hostname; uname -r; cat /etc/motd' 2>/dev/null && return
      sleep 2
    done
    return 1
  }
  printf '%8.2fs  %s\n' "$(bc_ms $(($(now) - cloud_began)))" "since it was applied, the cloud image is Ready"
  step "log in with the key of its annotation" login
  step "delete it" kubectl delete pod debian --timeout=120s
else
  echo "          (no cloud image here: \`make cloudimg\` says what it needs to build one)"
fi
step "no VM is left" test "$(cocoon vm list -o json)" = "[]"
step "cocoon down" cocoon down
printf '%8.2fs  in all\n' "$(bc_ms $(($(now) - total)))"
