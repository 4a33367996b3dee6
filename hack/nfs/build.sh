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

packages=(nfs-ganesha nfs-ganesha-vfs)
cached nfs "$1" root
unpack

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
publish
