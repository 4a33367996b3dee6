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
