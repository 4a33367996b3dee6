// Package hack_test tests how the builders choose the distribution's packages, with the os-release and the apt of other systems.
package hack_test

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// script runs a script that sources packages.sh, on a system with that os-release and these programs.
func script(t *testing.T, osRelease string, programs map[string]string, text string) string {
	t.Helper()
	dir := t.TempDir()
	here, err := filepath.Abs("packages.sh")
	if err != nil {
		t.Fatal(err)
	}
	file := func(name, text string) {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	file("os-release", osRelease)
	for name, text := range programs {
		file(name, "#!/bin/sh\n"+text)
	}
	file("builder", "set -euo pipefail\nsay() { echo \"say: $*\"; }\ndie() { echo \"die: $*\"; exit 1; }\n. "+here+"\n"+text)
	cmd := exec.Command("bash", "builder", "an argument")
	cmd.Dir = dir
	cmd.Env = []string{"PATH=" + dir + ":" + os.Getenv("PATH"), "COCOON_OS_RELEASE=" + filepath.Join(dir, "os-release"), "HOME=" + dir, "LC_ALL=C"}
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	return strings.ReplaceAll(strings.TrimSpace(string(out)), dir, "DIR")
}

func TestDistribution(t *testing.T) {
	for name, c := range map[string]struct{ osRelease, want string }{
		"Debian":     {"ID=debian\nVERSION_CODENAME=bookworm\n", "Debian bookworm linux-image-cloud-amd64 linux-image-amd64"},
		"Ubuntu":     {"ID=ubuntu\nID_LIKE=debian\nVERSION_CODENAME=noble\nUBUNTU_CODENAME=noble\n", "Ubuntu noble linux-image-virtual linux-image-generic"},
		"Mint":       {"ID=linuxmint\nID_LIKE=\"ubuntu debian\"\nVERSION_CODENAME=virginia\nUBUNTU_CODENAME=jammy\n", "Ubuntu jammy linux-image-virtual linux-image-generic"},
		"Mint, LMDE": {"ID=linuxmint\nID_LIKE=debian\nVERSION_CODENAME=faye\nDEBIAN_CODENAME=bookworm\n", "Debian bookworm linux-image-cloud-amd64 linux-image-amd64"},
	} {
		got := script(t, c.osRelease, nil, `echo "$(distribution) $(codename) $(kernel_package guest) $(kernel_package host)"`)
		if got != c.want {
			t.Errorf("%s: %s", name, got)
		}
	}
}

const ubuntu = "ID=ubuntu\nID_LIKE=debian\nVERSION_CODENAME=noble\n"

// Ubuntu keeps a kernel's modules in another package than its image.
func TestKernelParts(t *testing.T) {
	depends := `case $2 in
linux-image-virtual) printf 'linux-image-virtual\n  Depends: linux-image-6.8.0-50-generic\n' ;;
linux-image-6.8.0-50-generic) printf '%s\n  Depends: kmod\n  Depends: linux-base\n  Depends: linux-modules-6.8.0-50-generic\n |Recommends: grub-pc\n' "$2" ;;
esac`
	got := script(t, ubuntu, map[string]string{"apt-cache": depends}, `kernel_parts "$(kernel_package guest)"`)
	if got != "linux-image-6.8.0-50-generic\nlinux-modules-6.8.0-50-generic" {
		t.Errorf("Ubuntu: %s", got)
	}
	depends = `case $2 in
linux-image-cloud-amd64) printf 'linux-image-cloud-amd64\n  Depends: linux-image-6.1.0-1-cloud-amd64\n' ;;
*) printf '%s\n  Depends: kmod\n  Depends: linux-base\n  Depends: <initramfs-tools>\n' "$2" ;;
esac`
	got = script(t, "ID=debian\n", map[string]string{"apt-cache": depends}, `kernel_parts "$(kernel_package guest)"`)
	if got != "linux-image-6.1.0-1-cloud-amd64" {
		t.Errorf("Debian: %s", got)
	}
}

// Builders take packages from the distribution's own archive, not from those of others that a machine may also use.
func TestSources(t *testing.T) {
	targets := `printf '%s\n' 'Ubuntu|http://a/ubuntu/|noble|main|' 'Ubuntu|http://a/ubuntu/|noble|main|' 'Ubuntu|http://a/ubuntu/|noble|universe|/usr/share/keyrings/u.gpg' \
  'Debian|http://d/debian/|bookworm|main|' 'Docker|http://c/|noble|stable|'`
	got := script(t, ubuntu, map[string]string{"apt-get": targets}, "sources")
	if want := "deb [signed-by=/usr/share/keyrings/u.gpg] http://a/ubuntu/ noble universe\ndeb http://a/ubuntu/ noble main"; got != want {
		t.Errorf("sources:\n%s", got)
	}
}

// A builder whose lists lack a package runs once more, with lists of its own. If those lack it too, the builder decides.
func TestOwnLists(t *testing.T) {
	const builder = `
if got=$(versions one two); then echo "$1: $got"; exit; fi
[ -n "${COCOON_APT_LISTS-}" ] || own_lists "two is not known"
echo still not known`
	const policy = `[ "$1" != -o ] || shift 6
printf '%s:\n  Installed: (none)\n  Candidate: 1.0\n' "$2"
[ ! -e "$HOME/.cache/cocoon/apt-lists/list" ] || printf '%s:\n  Candidate: 2.0\n' "$3"`
	for name, c := range map[string]struct{ update, want string }{
		"online":  {`touch "${3#Dir::State::lists=}/list"`, "an argument: one: 1.0\ntwo: 2.0"},
		"offline": {"exit 100", "say: not all of apt's lists can be fetched\nstill not known"},
	} {
		got := script(t, ubuntu, map[string]string{"apt-cache": policy, "apt-get": c.update}, builder)
		if want := "say: fetching apt's lists into DIR/.cache/cocoon/apt-lists, because two is not known\n" + c.want; got != want {
			t.Errorf("%s:\n%s", name, got)
		}
	}
}

// A builder makes its files once for each version of its packages. Where apt does not know the packages, it takes the newest files.
func TestCached(t *testing.T) {
	const builder = `
packages=(one two)
build() { (cached thing "$1" file; unpack; echo "$2" >"$work/out/file"; publish) | sed 's/-[0-9a-f]*, .*//'; echo "has $(cat "$1/file")"; }
mkdir -p "$HOME/.cache/cocoon/.thing-left"
build a first; build a second
touch "$HOME/newer"; build a third; build b fourth
touch "$HOME/none"; export COCOON_APT_LISTS=$HOME; build b fifth
rm "$HOME/none" "$HOME/newer"; build b sixth
touch "$HOME/broken"; touch "$HOME/newest"; (cached thing b file; unpack)
ls -A "$HOME/.cache/cocoon" | sed 's/-.*//' | sort | uniq -c | tr -s ' '`
	programs := map[string]string{
		"apt-cache": `while [ "$1" = -o ]; do shift 2; done; [ ! -e "$HOME/none" ] || exit 0
v=1; [ ! -e "$HOME/newer" ] || v=2; [ ! -e "$HOME/newest" ] || v=3
printf 'one:\n  Candidate: %s\ntwo:\n  Candidate: %s\n' $v $v`,
		"apt-get":    `echo 'Ubuntu|http://a/ubuntu/|noble|main|'`,
		"mmdebstrap": `[ ! -e "$HOME/broken" ] || { echo no space; exit 1; }`,
		"sudo":       `shift; exec "$@"`,
	}
	want := `say: fetching one two and what they need
say: a is thing
has first
say: a is thing
has first
say: fetching one two and what they need
say: a is thing
has third
say: b is thing
has third
say: apt does not know all packages, using the newest that was made of them
say: b is thing
has third
say: b is thing
has first
say: fetching one two and what they need
die: mmdebstrap failed`
	programs["tail"] = `[ "$1" != -n ] || exit 0; exec /usr/bin/tail "$@"` // leaves out the log
	got := script(t, ubuntu, programs, strings.Replace(builder, "(cached thing b file; unpack)", "(cached thing b file; unpack) || true", 1))
	if got != want+"\n 1 .thing.lock\n 2 thing" {
		t.Errorf("got:\n%s", got)
	}
}
