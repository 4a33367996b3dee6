#!/usr/bin/env bash
# Builds a Debian package of the binaries in $BIN (bin): hack/deb.sh VERSION OUTPUT.deb [kube-proxy]
# kube-proxy is a package of its own: it would make the other one half as large again (42 beside 75 MB), and most machines have no
# use for it.
# dpkg-deb is on every Debian machine; the packages need nothing that a packaging tool would add.
set -euo pipefail
cd "$(dirname "$0")/.."
bin=${BIN:-bin}
version=$1
out=$2
package=${3:-cocoon}
version=${version#v}
[[ $version =~ ^[0-9] ]] || version=0~$version # Debian wants a digit first
version=${version//[^A-Za-z0-9.+~]/.}

root=$(mktemp -d)
trap 'rm -rf "$root"' EXIT
chmod 0755 "$root"
install -d "$root"/{DEBIAN,etc/cocoon,usr/lib/{systemd/system,sysusers.d},usr/local/lib/cocoon}

cocoon() {
  control=deploy/deb
  install -d "$root"/{usr/local/bin,usr/lib/tmpfiles.d,usr/local/lib/cocoon/guest}
  install -d -m 0750 "$root"/etc/cocoon/{images.d,vk,vk/tls}
  install -m 0755 "$bin"/{cocoon,cocoond,capsulectl,vk-cocoon,epoch} "$root"/usr/local/bin/
  install -D -m 0755 "$bin"/cocoon-container-log "$root"/usr/local/lib/cocoon/cocoon-container-log
  install -m 0644 "$bin"/guest/{vmlinux,initramfs} "$root"/usr/local/lib/cocoon/guest/
  install -m 0644 deploy/systemd/{cocoond,vk-cocoon,epoch}.service "$root"/usr/lib/systemd/system/
  install -m 0644 deploy/systemd/cocoon.sysusers "$root"/usr/lib/sysusers.d/cocoon.conf
  install -m 0644 deploy/systemd/cocoon.tmpfiles "$root"/usr/lib/tmpfiles.d/cocoon.conf
  # Its number is right for lvm2 of Debian and Ubuntu: see the file.
  install -D -m 0644 deploy/systemd/cocoon-volumes.rules "$root"/usr/lib/udev/rules.d/57-cocoon-volumes.rules
  install -m 0640 deploy/systemd/cocoond.env.example "$root"/etc/cocoon/cocoond.env
  install -m 0640 deploy/systemd/epoch.env.example "$root"/etc/cocoon/epoch.env
  install -m 0640 deploy/vk-cocoon/vk-cocoon.env.example "$root"/etc/cocoon/vk-cocoon.env
  install -D -m 0644 -t "$root"/usr/share/cocoon/examples/vk-cocoon deploy/vk-cocoon/*.yaml
  for part in approve policies volumes wide; do
    install -D -m 0644 -t "$root"/usr/share/cocoon/examples/vk-cocoon/$part deploy/vk-cocoon/$part/*.yaml
  done
  install -D -m 0644 -t "$root"/usr/share/cocoon/examples/crds deploy/crds/*.yaml
  install -D -m 0644 -t "$root"/usr/share/cocoon/examples/runtimeclass deploy/runtimeclass/*.yaml
  install -D -m 0644 deploy/systemd/kubelet-cocoon.conf "$root"/usr/share/cocoon/examples/kubelet/20-cocoon.conf
}

kube_proxy() {
  control=deploy/deb/kube-proxy
  install -m 0755 "$bin"/cocoon-up deploy/systemd/kube-proxy-claim "$root"/usr/local/lib/cocoon/
  install -m 0644 deploy/systemd/cocoon-kube-proxy.service "$root"/usr/lib/systemd/system/
  install -m 0644 deploy/systemd/cocoon-kube-proxy.sysusers "$root"/usr/lib/sysusers.d/cocoon-kube-proxy.conf
  install -m 0644 deploy/systemd/kube-proxy.yaml.example "$root"/etc/cocoon/kube-proxy.yaml
  install -D -m 0644 -t "$root"/usr/share/cocoon/examples/kube-proxy deploy/kube-proxy/*.yaml
}

case $package in
  cocoon) cocoon ;;
  kube-proxy) kube_proxy ;;
  *) echo "usage: $0 VERSION OUTPUT.deb [kube-proxy]" >&2; exit 2 ;;
esac
install -D -m 0644 LICENSE "$root/usr/share/doc/$(awk '$1 == "Package:" {print $2}' "$control/control")/copyright"
install -m 0755 "$control"/{postinst,prerm,postrm} "$root"/DEBIAN/
(cd "$root" && find etc -type f | sort | sed 's|^|/|') >"$root"/DEBIAN/conffiles
sed -e "s/@VERSION@/$version/" -e "s/@ARCH@/$(dpkg --print-architecture)/" \
  -e "s/@SIZE@/$(du -sk --exclude=DEBIAN "$root" | cut -f1)/" "$control/control" >"$root"/DEBIAN/control
mkdir -p "$(dirname "$out")"
dpkg-deb --root-owner-group -Zzstd -z3 --build "$root" "$out" >/dev/null
