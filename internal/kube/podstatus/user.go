package podstatus

import (
	"slices"
	"strconv"
	"strings"

	corev1 "k8s.io/api/core/v1"

	"cocoonstack.io/cocoon/internal/vm"
)

// userOf returns the user and the groups of a container's first process. It returns nil where the image has a say in them: only the
// guest reads the image's /etc/passwd and /etc/group.
func userOf(p vm.Process) *corev1.ContainerUser {
	if p.Security == nil || !p.Security.StrictGroups {
		return nil
	}
	name, group, _ := strings.Cut(p.User, ":")
	uid, err := strconv.ParseInt(name, 10, 64)
	if err != nil {
		return nil
	}
	gid, err := strconv.ParseInt(group, 10, 64)
	if err != nil {
		return nil
	}
	groups := []int64{gid}
	for _, g := range p.Security.Groups {
		if !slices.Contains(groups, g) {
			groups = append(groups, g)
		}
	}
	return &corev1.ContainerUser{Linux: &corev1.LinuxContainerUser{UID: uid, GID: gid, SupplementalGroups: groups}}
}
