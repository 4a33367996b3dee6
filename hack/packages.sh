# shellcheck shell=bash
# packages.sh: which packages of the distribution the builders of guests and images take, and from where. Sourced, with the arguments
# of the script, by scripts with the functions say and die.
#
# apt's lists may be missing or older than what the mirror has. Then the script runs again with lists of its own, which are below
# ${XDG_CACHE_HOME:-~/.cache}/cocoon and need no root.

packages_again=("$PWD" "$(cd "$(dirname "$0")" && pwd)/$(basename "$0")" "$@")
lists=() # options with which apt uses these lists
if [ -n "${COCOON_APT_LISTS-}" ]; then
    lists=(-o "Dir::State::lists=$COCOON_APT_LISTS" -o Dir::Cache::pkgcache= -o Dir::Cache::srcpkgcache=)
fi

# own_lists WHY: fetches lists and runs the script again with them. If that was already done, WHY is the error. Exit traps do not run.
own_lists() {
    [ -z "${COCOON_APT_LISTS-}" ] || die "$*"
    export COCOON_APT_LISTS=${XDG_CACHE_HOME:-$HOME/.cache}/cocoon/apt-lists
    say "fetching apt's lists into $COCOON_APT_LISTS, because $*"
    mkdir -p "$COCOON_APT_LISTS/partial"
    apt-get -q -o "Dir::State::lists=$COCOON_APT_LISTS" -o Dir::Cache::pkgcache= -o Dir::Cache::srcpkgcache= -o APT::Sandbox::User=root \
        update >/dev/null || say "not all of apt's lists can be fetched"
    cd "${packages_again[0]}" && exec "${packages_again[@]:1}"
}

# distribution prints Debian or Ubuntu, as their archives call themselves: what this system is, or what it is made from.
distribution() {
    local word
    for word in $(os_release ID) $(os_release ID_LIKE); do
        case $word in
            debian) echo Debian && return ;;
            ubuntu) echo Ubuntu && return ;;
        esac
    done
    echo Debian
}

# codename prints the name of the distribution's release.
codename() {
    local name=
    if [ "$(distribution)" = Ubuntu ]; then name=$(os_release UBUNTU_CODENAME); else name=$(os_release DEBIAN_CODENAME); fi
    echo "${name:-$(os_release VERSION_CODENAME)}"
}

os_release() { # os_release KEY
    # shellcheck disable=SC1090 # it is the system's
    (. "${COCOON_OS_RELEASE:-/etc/os-release}" && echo "${!1-}")
}

# kernel_package guest|host prints the package that stands for the newest kernel: for machines that are guests, or any machine.
kernel_package() {
    case $(distribution)-$1 in
        Debian-guest) echo linux-image-cloud-amd64 ;;
        Debian-host) echo linux-image-amd64 ;;
        Ubuntu-guest) echo linux-image-virtual ;;
        Ubuntu-host) echo linux-image-generic ;;
    esac
}

# kernel_parts PACKAGE prints the packages of the kernel that PACKAGE stands for. Ubuntu has its modules in a package of their own.
kernel_parts() {
    local image
    image=$(apt-cache "${lists[@]}" depends "$1" 2>/dev/null | awk '/Depends: linux-image-[0-9]/ {print $2; exit}')
    [ -n "$image" ] || return 0
    echo "$image"
    apt-cache "${lists[@]}" depends "$image" | awk '/Depends: linux-modules-[0-9]/ {print $2; exit}'
}

# versions PACKAGE... prints a line with the name and the version of each. It fails if apt does not know all of them.
versions() {
    apt-cache "${lists[@]}" policy "$@" 2>/dev/null |
        awk -v want=$# '/^[^ ]/ {p = $1} /Candidate:/ && $2 != "(none)" {print p, $2; n++} END {exit n != want}'
}

# sources prints the machine's own lines for apt, of the distribution alone.
sources() {
    apt-get "${lists[@]}" indextargets --format "\$(ORIGIN)|\$(REPO_URI)|\$(RELEASE)|\$(COMPONENT)|\$(SIGNED_BY)" 'Created-By: Packages' |
        awk -F'|' -v origin="$(distribution)" '$1 == origin {o = $5 ~ /^\// ? " [signed-by=" $5 "]" : ""; print "deb" o " " $2 " " $3 " " $4}' | sort -u
}

# as_root COMMAND... runs it as root, with sudo if this is somebody else. Files that remain are made by the script, so that they
# belong to who runs it.
as_root() {
    if [ "$(id -u)" = 0 ]; then
        "$@"
    else
        command -v sudo >/dev/null || die "the files of packages belong to root: run this as root, or install sudo"
        sudo --preserve-env=LC_ALL,TMPDIR,http_proxy,https_proxy,no_proxy "$@"
    fi
}

# sweep DIR PATTERN removes folders of builders that were killed; those may hold root's files. Preconditions: their lock is held.
sweep() {
    local left
    mapfile -d '' -t left < <(find "$1" -maxdepth 1 -name "$2" -type d -print0)
    [ ${#left[@]} = 0 ] || rm -rf "${left[@]}" 2>/dev/null || as_root rm -rf "${left[@]}"
}

# cached NAME OUTDIR FILE...: what the script makes of the packages in the array packages is kept in a folder of the cache, by their versions
# and the text of the script and of this file. Where apt's lists cannot be had, the newest such folder serves. If there is one, OUTDIR gets links to the FILEs in
# it, and the script ends. Otherwise cached returns with the lock of NAME: the script fills $work/out and calls publish. $root is the place
# for unpacked packages, and $work/sources.list says where they come from. $work goes when the script ends.
# shellcheck disable=SC2154 # packages is the script's
cached() {
    local versions
    cached_name=$1 cached_dir=$2 cached_files=("${@:3}") cache=${XDG_CACHE_HOME:-$HOME/.cache}/cocoon
    mkdir -p "$cached_dir" "$cache"
    if versions=$(versions "${packages[@]}"); then
        made=$cache/$cached_name-$({ cat "${packages_again[1]}" "${BASH_SOURCE[0]}"; echo "$versions"; } | sha256sum | cut -c1-16)
    else
        [ -n "${COCOON_APT_LISTS-}" ] || own_lists "apt does not know all of: ${packages[*]}"
        made=$(find "$cache" -maxdepth 1 -name "$cached_name-*" -type d -printf '%T@ %p\n' | sort -n | tail -n1 | cut -d' ' -f2-)
        [ -n "$made" ] || die "apt does not know all of: ${packages[*]}"
        say "apt does not know all packages, using the newest that was made of them"
    fi
    [ ! -d "$made" ] || { link_cached; exit; }
    command -v mmdebstrap >/dev/null || die "mmdebstrap is missing; run: make setup"
    exec 9>"$cache/.$cached_name.lock"
    flock 9 # of several builders one builds, the others take what it made
    [ ! -d "$made" ] || { link_cached; exit; }
    sweep "$cache" ".$cached_name-*"
    work=$(mktemp -d "$cache/.$cached_name-XXXXXX")
    root=$work/root
    trap '[ ! -e "$root" ] || as_root rm -rf "$root"; rm -rf "$work"' EXIT
    chmod 755 "$work" # apt's user passes through
    mkdir "$work/out"
    sources >"$work/sources.list"
    [ -s "$work/sources.list" ] || die "apt has no source of $(distribution)'s packages"
}

# publish puts $work/out into the cache.
publish() {
    sync -f "$work/out"
    mv -T "$work/out" "$made"
    link_cached
}

link_cached() {
    touch "$made" # in use
    local file
    for file in "${cached_files[@]}"; do ln -sfn "$made/$file" "$cached_dir/$file"; done
    find "$cache" -maxdepth 1 -name "$cached_name-*" -type d -mtime +30 -exec rm -rf {} +
    say "$cached_dir is $(basename "$made"), $(du -sm "$made" | cut -f1) MiB"
}

# bootstrap SUITE ARGUMENT... puts packages into $root, by mmdebstrap with these arguments.
bootstrap() {
    if ! as_root mmdebstrap --mode=root --aptopt='APT::Install-Recommends "false"' --aptopt='Acquire::Languages "none"' "${@:2}" \
        "$1" "$root" - <"$work/sources.list" >"$work/log" 2>&1; then
        tail -n 40 "$work/log" >&2
        die "mmdebstrap failed"
    fi
}

# unpack puts the packages and what they need into $root. It only unpacks them: no script of theirs runs, and no service starts.
unpack() {
    say "fetching ${packages[*]} and what they need"
    bootstrap "$(codename)" --variant=extract --include="$(IFS=,; echo "${packages[*]}")"
}
