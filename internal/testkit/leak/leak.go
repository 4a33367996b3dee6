// Package leak lists what Cocoon could leave behind on a machine, so that a test can compare the state before and
// after.
//
// It only looks; it removes nothing.
package leak

import (
	"bufio"
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
)

// Names of processes that are ours or that we start.
var names = []string{"cocoon", "cocoond", "cocoon-up", "vk-cocoon", "kubectl"}

// Snapshot lists processes, links, namespaces, mounts, nftables tables, cgroups and files, one line each, sorted.
func Snapshot() []string {
	var all []string
	all = append(all, processes()...)
	all = append(all, links()...)
	all = append(all, mounts()...)
	all = append(all, tables()...)
	all = append(all, cgroups()...)
	for _, pattern := range []string{"/run/cocoon*", "/var/lib/cocoon*", "/run/netns/*", os.TempDir() + "/cocoon-*"} {
		hits, _ := filepath.Glob(pattern)
		for _, h := range hits {
			all = append(all, "file "+h)
		}
	}
	slices.Sort(all)
	return all
}

// New returns the entries of after that are not in before.
func New(before, after []string) []string {
	return slices.DeleteFunc(slices.Clone(after), func(s string) bool { return slices.Contains(before, s) })
}

func processes() []string {
	var out []string
	hits, _ := filepath.Glob("/proc/[0-9]*/cmdline")
	for _, h := range hits {
		data, err := os.ReadFile(h)
		if err != nil || len(data) == 0 {
			continue
		}
		argv := strings.Split(string(bytes.TrimRight(data, "\x00")), "\x00")
		base := filepath.Base(argv[0])
		if slices.Contains(names, base) || strings.HasPrefix(base, "qemu-system-") {
			out = append(out, "process "+filepath.Base(filepath.Dir(h))+" "+strings.Join(argv[:min(4, len(argv))], " "))
		}
	}
	return out
}

func links() []string {
	var out []string
	entries, _ := os.ReadDir("/sys/class/net")
	for _, e := range entries {
		out = append(out, "link "+e.Name())
	}
	return out
}

func mounts() []string {
	var out []string
	f, err := os.Open("/proc/self/mountinfo")
	if err != nil {
		return nil
	}
	defer f.Close()
	for s := bufio.NewScanner(f); s.Scan(); {
		if fields := strings.Fields(s.Text()); len(fields) > 4 && strings.Contains(fields[4], "cocoon") {
			out = append(out, "mount "+fields[4])
		}
	}
	return out
}

func tables() []string {
	var out []string
	list, err := exec.Command("nft", "list", "tables").Output()
	if err != nil {
		return nil
	}
	for line := range strings.Lines(string(list)) {
		out = append(out, "nft "+strings.TrimSpace(line))
	}
	return out
}

func cgroups() []string {
	var out []string
	for _, pattern := range []string{"/sys/fs/cgroup/cocoon*", "/sys/fs/cgroup/*/cocoon*", "/sys/fs/cgroup/*/cocoon*/*"} {
		hits, _ := filepath.Glob(pattern)
		for _, h := range hits {
			if fi, err := os.Stat(h); err == nil && fi.IsDir() {
				out = append(out, "cgroup "+h)
			}
		}
	}
	return out
}
