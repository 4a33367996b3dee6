#!/usr/bin/env bash
# hack/hypervisors.sh OUTDIR: Firecracker, its jailer, Cloud Hypervisor and its firmware, for the tests of their drivers. Leaves
# OUTDIR/{firecracker,jailer,cloud-hypervisor}, static programs, and OUTDIR/hypervisor-fw, built from their sources at the versions below.
#
# It needs git, a C compiler for musl, libclang, libseccomp, and cargo with rustup, and it fetches crates as cargo does; for the firmware also
# the toolchain that its sources name, by rustup. COCOON_SOURCES names a folder of git repositories that stand for those at https://github.com,
# such as COCOON_SOURCES/firecracker-microvm/firecracker, for a machine without the network. What each source gives is cached below
# ${XDG_CACHE_HOME:-~/.cache}/cocoon by its line below, the functions that build it and the compiler; OUTDIR gets links.
#
# The programs are built without optimisation across crates, which takes most of the time of a build and matters to no test.
set -euo pipefail
export LC_ALL=C

[ $# = 1 ] || { echo "usage: $0 OUTDIR" >&2; exit 2; }
say() { echo "hypervisors: $*" >&2; }
die() { echo "hypervisors: $*" >&2; exit 1; }

# RECIPE PROGRAM[,PROGRAM...] REPOSITORY TAG COMMIT: a tag may move, a commit does not
sources=(
    "programs firecracker,jailer firecracker-microvm/firecracker v1.16.1 2038188f145fb81b8d098147a10e9d9f392fd22f"
    "programs cloud-hypervisor cloud-hypervisor/cloud-hypervisor v53.0 9ed824d6d08df3e96f7d5f50795d9449ac99f431"
    "firmware hypervisor-fw cloud-hypervisor/rust-hypervisor-firmware 0.5.0 723dfbbb8c9b74796394f190288ff8b4f4b95b15"
)

command -v cargo >/dev/null || die "cargo is missing: install Rust with rustup, see https://rustup.rs"
target=$(uname -m)-unknown-linux-musl # Firecracker has system call filters for this target only
mkdir -p "$1"
out=$(cd "$1" && pwd)
cache=${XDG_CACHE_HOME:-$HOME/.cache}/cocoon
mkdir -p "$cache"

# cargo asks git too, which takes the sources from where this says.
export CARGO_NET_GIT_FETCH_WITH_CLI=true GIT_TERMINAL_PROMPT=0
if [ -n "${COCOON_SOURCES-}" ]; then
    export GIT_CONFIG_COUNT=1 GIT_CONFIG_KEY_0=url.file://$COCOON_SOURCES/.insteadOf GIT_CONFIG_VALUE_0=https://github.com/
fi

# checkout REPOSITORY TAG COMMIT FOLDER, without what only the tests of the repository need
checkout() {
    git init -q "$4"
    git -C "$4" remote add origin "https://github.com/$1"
    git -C "$4" fetch -q --depth 1 --filter=blob:none origin "refs/tags/$2" ||
        die "the sources of $1 cannot be fetched: let this machine reach https://github.com, or name a folder with its git repository by COCOON_SOURCES"
    [ "$(git -C "$4" rev-parse 'FETCH_HEAD^{commit}')" = "$3" ] || die "$2 of $1 is not the commit $3"
    git -C "$4" sparse-checkout set --no-cone '/*' '!/src/vmm/src/test_utils/mock_resources/*.bin'
    git -C "$4" -c advice.detachedHead=false checkout -q "$3"
}

# programs NAME...: builds them in the current folder, whose toolchain file counts, into $work/out
programs() {
    # The kernel's headers are those of the system; musl has none.
    local headers="-idirafter /usr/include -idirafter /usr/include/${target%%-*}-linux-gnu" name
    export CARGO_PROFILE_RELEASE_LTO=off CARGO_PROFILE_RELEASE_CODEGEN_UNITS=16 CARGO_PROFILE_RELEASE_STRIP=symbols
    export "CFLAGS_${target//-/_}=$headers" BINDGEN_EXTRA_CLANG_ARGS="$headers"
    [ -d "$(rustc --print target-libdir --target "$target")" ] || rustup target add "$target" ||
        die "Rust's standard library for $target is missing; run: rustup target add $target"
    cargo build --locked --release --target "$target" "${@/#/--package=}" "${@/#/--bin=}" || return
    for name; do
        "$CARGO_TARGET_DIR/$target/release/$name" --version | sed -n 1p >&2 || return
        mv "$CARGO_TARGET_DIR/$target/release/$name" "$work/out/" || return
    done
}

# firmware NAME: the same for a program without an operating system, whose Rust has no standard library. It needs the very compiler that it names.
firmware() {
    RUSTUP_TOOLCHAIN=$(sed -n 's/^channel = "\(.*\)"$/\1/p' rust-toolchain.toml)
    export RUSTUP_TOOLCHAIN
    rustup component add rust-src >/dev/null 2>&1 || rustup toolchain install "$RUSTUP_TOOLCHAIN" --profile minimal --component rust-src --no-self-update ||
        die "Rust's toolchain $RUSTUP_TOOLCHAIN is missing; run: rustup toolchain install $RUSTUP_TOOLCHAIN --profile minimal --component rust-src"
    cargo build --locked --release --target "${target%%-*}-unknown-none.json" -Zbuild-std=core -Zbuild-std-features=compiler-builtins-mem || return
    mv "$CARGO_TARGET_DIR/${target%%-*}-unknown-none/release/$1" "$work/out/"
}

# build RECIPE NAMES REPOSITORY TAG COMMIT: what it makes is in the folder $made
build() {
    local names
    made=$cache/hypervisors-$({ rustc --version; echo "$target $*"; declare -f checkout "$1"; } | sha256sum | cut -c1-16)
    [ ! -d "$made" ] || return 0
    for program in git musl-gcc pkg-config; do command -v $program >/dev/null || die "$program is missing; run: hack/setup.sh hypervisors"; done
    exec 9>"$cache/.hypervisors.lock"
    flock 9 # of several builders one builds, the others take what it made
    [ ! -d "$made" ] || return 0
    say "building $3 $4; the two hypervisors take five to ten minutes on 2 cores, later they are cached"
    work=$(mktemp -d "$cache/.hypervisors-XXXXXX")
    mkdir "$work/out"
    checkout "$3" "$4" "$5" "$work/source"
    IFS=, read -ra names <<<"$2"
    (cd "$work/source" && CARGO_TARGET_DIR=$work/target && export CARGO_TARGET_DIR && "$1" "${names[@]}") || die "$3 $4 cannot be built"
    chmod 555 "$work"/out/*
    mv -T "$work/out" "$made"
    rm -rf "$work"
}
work=
trap '[ -z "$work" ] || rm -rf "$work"' EXIT

for source in "${sources[@]}"; do
    read -ra words <<<"$source"
    build "${words[@]}"
    touch "$made" # in use
    for program in "$made"/*; do ln -sfn "$program" "$out/${program##*/}"; done
done
find "$cache" -maxdepth 1 -name 'hypervisors-????????????????' -type d -mtime +30 -exec rm -rf {} +
