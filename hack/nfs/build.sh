#!/bin/bash
# hack/nfs/build.sh OUTDIR: the NFS server of the tests, nfs-ganesha, with all libraries that it needs: a machine needs no other package,
# and no NFS in its kernel. Leaves OUTDIR/root; internal/testkit/nfsserver starts it.
#
# Packages come from where the machine's own apt gets them. Needs root or sudo and mmdebstrap. The result is cached by this script and
# the versions of its packages below ${XDG_CACHE_HOME:-~/.cache}/cocoon; OUTDIR gets a link to it.
set -euo pipefail
export LC_ALL=C

[ $# = 1 ] || { echo "usage: $0 OUTDIR" >&2; exit 2; }
say() { echo "nfs: $*"; }
die() { echo "nfs: $*" >&2; exit 1; }
# shellcheck source=hack/packages.sh
. "$(dirname "$0")/../packages.sh"
mkdir -p "$1"
out=$(cd "$1" && pwd)
self=$(cd "$(dirname "$0")" && pwd)/$(basename "$0")
cache=${XDG_CACHE_HOME:-$HOME/.cache}/cocoon
mkdir -p "$cache"

packages=(nfs-ganesha nfs-ganesha-vfs)

# The versions decide about the bytes. Where apt's lists cannot be had, the newest server there is serves.
if versions=$(versions "${packages[@]}"); then
    server=$cache/nfs-$({ cat "$self"; echo "$versions"; } | sha256sum | cut -c1-16)
else
    [ -n "${COCOON_APT_LISTS-}" ] || own_lists "apt does not know all of: ${packages[*]}"
    server=$(find "$cache" -maxdepth 1 -name 'nfs-*' -type d -printf '%T@ %p\n' | sort -n | tail -n1 | cut -d' ' -f2-)
    [ -n "$server" ] || die "apt does not know all of: ${packages[*]}"
    say "apt does not know all packages, using the newest server there is"
fi

link() {
    touch "$server" # in use
    ln -sfn "$server/root" "$out/root"
    find "$cache" -maxdepth 1 -name 'nfs-*' -type d -mtime +30 -exec rm -rf {} +
    say "$1 is $(basename "$server"), $(du -sm "$server" | cut -f1) MiB"
}

[ ! -d "$server" ] || { link "$1"; exit; }
command -v mmdebstrap >/dev/null || die "mmdebstrap is missing; run: make setup"
exec 9>"$cache/.nfs.lock"
flock 9 # of several builders one builds, the others take what it made
[ ! -d "$server" ] || { link "$1"; exit; }
sweep "$cache" '.nfs-*'

work=$(mktemp -d "$cache/.nfs-XXXXXX")
root=$work/root
trap '[ ! -e "$root" ] || as_root rm -rf "$root"; rm -rf "$work"' EXIT
chmod 755 "$work" # apt's user passes through
sources >"$work/sources.list"
[ -s "$work/sources.list" ] || die "apt has no source of $(distribution)'s packages"

say "fetching ${packages[*]} and what they need"
# Nothing is installed: the packages are only unpacked, so no script of theirs runs, and no service starts.
if ! as_root mmdebstrap --mode=root --variant=extract --include="$(IFS=,; echo "${packages[*]}")" \
    --aptopt='APT::Install-Recommends "false"' --aptopt='Acquire::Languages "none"' \
    "$(codename)" "$root" - <"$work/sources.list" >"$work/log" 2>&1; then
    tail -n 40 "$work/log" >&2
    die "mmdebstrap failed"
fi

# Only the server and its libraries stay: names in $tree are without folders, and links are followed.
tree=$work/out/root
mkdir -p "$tree/lib" "$tree/fsal"
cp "$root/usr/bin/ganesha.nfsd" "$tree/"
cp "$root"/usr/lib/*/ganesha/libfsalvfs.so "$tree/fsal/"
loader=$(find "$root" -name 'ld-linux-*.so.*' -type f -print -quit)
[ -n "$loader" ] || die "the packages have no loader of libraries"
cp "$loader" "$tree/ld.so"
chmod 755 "$tree/ld.so"
paths=$(find "$root" -name '*.so*' -printf '%h\n' | sort -u | paste -sd:)
for program in "$tree/ganesha.nfsd" "$tree/fsal/libfsalvfs.so"; do
    "$tree/ld.so" --library-path "$paths" --list "$program" | awk '/not found/ {print "nfs: missing " $1 >"/dev/stderr"; exit 1} $3 ~ /^\// {print $3}'
done | sort -u | while read -r library; do
    cp -L "$library" "$tree/lib/"
done
"$tree/ld.so" --library-path "$tree/lib" "$tree/ganesha.nfsd" -v | head -n1
sync -f "$tree"
mv -T "$work/out" "$server"
link "$1"
