#!/usr/bin/env bash
# Runs a command as an ordinary user who may use sudo without a password: hack/user.sh HOME COMMAND... Needs root and sudo.
# The user exists only for the command, in a mount namespace of its own, and owns the folder HOME with all that is in it. Go's caches
# are there what they are here, but what the user builds is gone afterwards.
set -euo pipefail
home=$(cd "$1" && pwd)
shift
if [ -z "${COCOON_USER_FILES-}" ]; then
  files=$(mktemp -d /var/tmp/cocoon-user.XXXXXX)
  trap 'rm -rf "$files"' EXIT
  COCOON_USER_FILES=$files unshare --mount "$0" "$home" "$@"
  exit
fi

files=$COCOON_USER_FILES
name=cocoon-test id=64999
! getent passwd "$id" >/dev/null || { echo "hack/user.sh: this machine has a user $id" >&2; exit 1; }
mount -t tmpfs none "$files"
cp /etc/passwd /etc/group "$files/"
echo "$name:*:$id:$id::$home:/bin/bash" >>"$files/passwd" # without an x, which refers to /etc/shadow
echo "$name:*:$id:" >>"$files/group"
install -m 0440 /dev/stdin "$files/sudoers" <<SUDOERS
Defaults env_reset, secure_path="/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
$name ALL=(ALL:ALL) NOPASSWD: ALL
SUDOERS
chmod 0644 "$files/passwd" "$files/group"
for file in passwd group sudoers; do mount --bind "$files/$file" "/etc/$file"; done

cache=$(go env GOCACHE) modules=$(go env GOMODCACHE)
mkdir -p "$home/.cache/go-build" "$home/go/pkg/mod" "$files/upper" "$files/work"
chown -R "$id:$id" "$home" # before the mounts
mount -t overlay -o "lowerdir=$cache,upperdir=$files/upper,workdir=$files/work" none "$home/.cache/go-build"
find "$home/.cache/go-build" -maxdepth 1 -exec chown "$id:$id" {} +
mount --bind "$modules" "$home/go/pkg/mod"
exec setpriv --reuid="$id" --regid="$id" --init-groups env -i \
  HOME="$home" USER="$name" PATH="$PATH" LANG="${LANG-}" TMPDIR="${TMPDIR:-/tmp}" GOPROXY="$(go env GOPROXY)" GOFLAGS="${GOFLAGS-}" "$@"
