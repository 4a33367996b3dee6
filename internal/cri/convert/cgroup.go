package convert

import (
	"path"
	"slices"
	"strings"

	"cocoonstack.io/cocoon/internal/errdefs"
)

// cgroup returns the cgroup of a pod as a path below the root, "" if the pod has none. The kubelet names a folder, or, with the driver of
// systemd, a slice: a unit whose folder is below those of the slices that its name begins with.
func cgroup(parent string) (string, error) {
	name := path.Base(parent)
	base, slice := strings.CutSuffix(name, ".slice")
	if !slice {
		if slices.Contains(strings.Split(parent, "/"), "..") {
			return "", errdefs.Invalidf("invalid cgroup %.80q: a part of its path is '..'", parent)
		}
		return strings.TrimSuffix(path.Clean("/"+parent), "/"), nil
	}
	if base == "-" { // the slice of all others
		return "", nil
	}
	out, prefix := "", ""
	for part := range strings.SplitSeq(base, "-") {
		if part == "" {
			return "", errdefs.Invalidf("invalid slice %.80q: two dashes follow each other, or one is at an end", name)
		}
		prefix += part
		out += "/" + prefix + ".slice"
		prefix += "-"
	}
	return out, nil
}
