#!/usr/bin/env bash
# Generates the code under api/ (protobuf, deep copies), the CRDs below deploy and docs/api.md. With --check: fails if what is
# committed differs. Needs protoc.
set -euo pipefail
cd "$(dirname "$0")/.."
export GOWORK=off
command -v protoc >/dev/null || { echo "protoc is missing: apt-get install protobuf-compiler" >&2; exit 1; }

out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT
GOBIN="$out/bin" go install -modfile=tools/go.mod \
  google.golang.org/protobuf/cmd/protoc-gen-go google.golang.org/grpc/cmd/protoc-gen-go-grpc sigs.k8s.io/controller-tools/cmd/controller-gen \
  github.com/elastic/crd-ref-docs
mapfile -t protos < <(cd api && find . -name '*.proto' -printf '%P\n' | sort)
PATH="$out/bin:$PATH" protoc -I api --go_out="$out" --go-grpc_out="$out" \
  --go_opt=module=cocoonstack.io/cocoon --go-grpc_opt=module=cocoonstack.io/cocoon "${protos[@]}"
mkdir -p "$out/api/cocoonset/v1" "$out/deploy/crds"
"$out/bin/controller-gen" object paths=./api/cocoonset/v1 output:object:dir="$out/api/cocoonset/v1"
"$out/bin/controller-gen" crd paths=./api/cocoonset/v1 output:crd:dir="$out/deploy/crds"
# The API of volume snapshots belongs to the cluster's storage group; its types are in a module of theirs. Their texts stay there.
snapshots=$out/deploy/snapshots/crds
mkdir -p "$snapshots"
"$out/bin/controller-gen" crd:maxDescLen=0 paths=github.com/kubernetes-csi/external-snapshotter/client/v8/apis/volumesnapshot/v1 output:crd:dir="$snapshots"
for crd in "$snapshots"/*.yaml; do
  awk '/^    - description: /{drop=1; next}
    drop && /^      [a-zA-Z]+: /{sub(/^      /, "    - "); drop=0}
    drop{next}
    {print}
    /^  annotations:$/{print "    api-approved.kubernetes.io: https://github.com/kubernetes-csi/external-snapshotter/pull/955"}' "$crd" >"$crd.new"
  mv "$crd.new" "$crd"
done
# KubeVirt's types do not say how kubectl shows their kinds, nor what its webhooks check.
mkdir -p "$out/kubevirt" "$out/deploy/kubevirt/crds"
"$out/bin/controller-gen" crd:maxDescLen=0,allowDangerousTypes=true paths='kubevirt.io/api/core/v1;kubevirt.io/api/instancetype/v1beta1;kubevirt.io/api/snapshot/v1beta1;kubevirt.io/api/clone/v1beta1;kubevirt.io/api/pool/v1beta1;kubevirt.io/api/migrations/v1alpha1;kubevirt.io/api/export/v1' output:crd:dir="$out/kubevirt"
"$out/bin/controller-gen" crd:maxDescLen=0,allowDangerousTypes=true paths=kubevirt.io/containerized-data-importer-api/pkg/apis/core/v1beta1 output:crd:dir="$out/kubevirt"
go run -trimpath ./hack/kubevirtcrds "$out/kubevirt" "$out/deploy/kubevirt/crds"
mkdir -p "$out/docs"
"$out/bin/crd-ref-docs" --log-level=ERROR --source-path=api/cocoonset/v1 --config=hack/crd-docs.yaml --renderer=markdown --output-path="$out/docs/api.md"

status=0
while IFS= read -r f; do
  if [ "${1-}" = --check ]; then
    # The plugin writes protoc's version into a comment; only the code matters.
    diff -q -I '^// .*protoc ' "$f" "$out/$f" >/dev/null || { echo "$f is stale: make generate" >&2; status=1; }
  else
    cp "$out/$f" "$f"
  fi
done < <(cd "$out" && find api deploy docs -type f)
exit "$status"
