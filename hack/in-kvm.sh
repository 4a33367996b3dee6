#!/usr/bin/env bash
# hack/in-kvm.sh PROGRAM [ARGUMENT...]: runs a program, such as a binary of tests, as root on the emulated machine of `make kvm-guest`, which
# has KVM, vhost, vsock, taps and cgroup v2. `go test -exec "$PWD/hack/in-kvm.sh"` runs tests there.
#
# The program sees all files of this host and its environment, in the same folder. What it writes is in the machine's memory and goes with
# it. TMPDIR there is /run/tmp. There is no network. COCOON_KVM_MEMORY is the machine's memory in MiB (3072), and COCOON_KVM_CPUS the number
# of its CPUs (1; with more, a guest on the emulated KVM can hang the machine).
set -euo pipefail
[ $# != 0 ] || { echo "usage: $0 PROGRAM [ARGUMENT...]" >&2; exit 2; }
repo=$(cd "$(dirname "$0")/.." && pwd)
[ -x "$repo/bin/kvm/in-kvm" ] || { echo "in-kvm: the machine with KVM is missing; run: make kvm-guest" >&2; exit 1; }
exec "$repo/bin/kvm/in-kvm" "$repo" "$PWD" "$@"
