#!/usr/bin/env bash
# hack/hypervisors.sh OUTDIR: Firecracker, its jailer and Cloud Hypervisor, for the tests of their drivers. Leaves
# OUTDIR/{firecracker,jailer,cloud-hypervisor}, static programs, built from their sources at the versions below.
#
# It needs git, a C compiler for musl, libclang, libseccomp, and cargo with rustup, and it fetches crates as cargo does. COCOON_SOURCES names a
# folder of git repositories that stand for those at https://github.com, such as COCOON_SOURCES/firecracker-microvm/firecracker, for a
# machine without the network. The programs are cached below ${XDG_CACHE_HOME:-~/.cache}/cocoon by this script and the compiler; OUTDIR gets links.
#
# They are built without optimisation across crates, which takes most of the time of a build and matters to no test.
set -euo pipefail
export LC_ALL=C

[ $# = 1 ] || { echo "usage: $0 OUTDIR" >&2; exit 2; }
say() { echo "hypervisors: $*" >&2; }
die() { echo "hypervisors: $*" >&2; exit 1; }

# PROGRAM[,PROGRAM...] REPOSITORY TAG COMMIT: a tag may move, a commit does not
sources=(
    "firecracker,jailer firecracker-microvm/firecracker v1.16.1 2038188f145fb81b8d098147a10e9d9f392fd22f"
    "cloud-hypervisor cloud-hypervisor/cloud-hypervisor v53.0 9ed824d6d08df3e96f7d5f50795d9449ac99f431"
)
left_out="/src/vmm/src/test_utils/mock_resources/*.bin" # programs of Firecracker's own tests

command -v cargo >/dev/null || die "cargo is missing: install Rust with rustup, see https://rustup.rs"
target=$(uname -m)-unknown-linux-musl # Firecracker has system call filters for this target only
self=$(realpath "$0")
mkdir -p "$1"
out=$(cd "$1" && pwd)
cache=${XDG_CACHE_HOME:-$HOME/.cache}/cocoon
mkdir -p "$cache"
programs=$cache/hypervisors-$({ rustc --version; echo "$target"; cat "$self"; } | sha256sum | cut -c1-16)

link() {
    touch "$programs" # in use
    for program in "$programs"/*; do ln -sfn "$program" "$out/${program##*/}"; done
    find "$cache" -maxdepth 1 -name 'hypervisors-????????????????' -type d -mtime +30 -exec rm -rf {} +
    exit
}
[ ! -d "$programs" ] || link
for program in git musl-gcc pkg-config; do command -v $program >/dev/null || die "$program is missing; run: hack/setup.sh hypervisors"; done
exec 9>"$cache/.hypervisors.lock"
flock 9 # of several builders one builds, the others take what it made
[ ! -d "$programs" ] || link
work=$(mktemp -d "$cache/.hypervisors-XXXXXX")
trap 'rm -rf "$work"' EXIT

# cargo asks git too, which takes the sources from where this says.
export CARGO_NET_GIT_FETCH_WITH_CLI=true GIT_TERMINAL_PROMPT=0
if [ -n "${COCOON_SOURCES-}" ]; then
    export GIT_CONFIG_COUNT=1 GIT_CONFIG_KEY_0=url.file://$COCOON_SOURCES/.insteadOf GIT_CONFIG_VALUE_0=https://github.com/
fi
export CARGO_PROFILE_RELEASE_LTO=off CARGO_PROFILE_RELEASE_CODEGEN_UNITS=16 CARGO_PROFILE_RELEASE_STRIP=symbols
# The kernel's headers are those of the system; musl has none.
headers="-idirafter /usr/include -idirafter /usr/include/$(uname -m)-linux-gnu"
export "CFLAGS_${target//-/_}=$headers" BINDGEN_EXTRA_CLANG_ARGS="$headers"

# checkout REPOSITORY TAG COMMIT FOLDER
checkout() {
    git init -q "$4"
    git -C "$4" remote add origin "https://github.com/$1"
    git -C "$4" fetch -q --depth 1 --filter=blob:none origin "refs/tags/$2" ||
        die "the sources of $1 cannot be fetched: let this machine reach https://github.com, or name a folder with its git repository by COCOON_SOURCES"
    [ "$(git -C "$4" rev-parse 'FETCH_HEAD^{commit}')" = "$3" ] || die "$2 of $1 is not the commit $3"
    git -C "$4" sparse-checkout set --no-cone '/*' "!$left_out"
    git -C "$4" -c advice.detachedHead=false checkout -q "$3"
}

mkdir "$work/programs"
for source in "${sources[@]}"; do
    read -r names repository tag commit <<<"$source"
    say "building $repository $tag; this takes five to ten minutes on 2 cores, later it is cached"
    checkout "$repository" "$tag" "$commit" "$work/source"
    IFS=, read -ra names <<<"$names"
    cd "$work/source" # its toolchain file counts
    [ -d "$(rustc --print target-libdir --target "$target")" ] || rustup target add "$target" ||
        die "Rust's standard library for $target is missing; run: rustup target add $target"
    CARGO_TARGET_DIR=$work/target cargo build --locked --release --target "$target" "${names[@]/#/--package=}" "${names[@]/#/--bin=}" ||
        die "$repository $tag cannot be built"
    cd "$work"
    for name in "${names[@]}"; do
        "$work/target/$target/release/$name" --version | sed -n 1p >&2
        mv "$work/target/$target/release/$name" "$work/programs/"
    done
    rm -rf "$work/source" "$work/target"
done
chmod 555 "$work"/programs/*
mv -T "$work/programs" "$programs"
link
