package podstatus

import (
	"slices"
	"strconv"
	"strings"

	corev1 "k8s.io/api/core/v1"

	"cocoonstack.io/cocoon/internal/vm"
)

// userOf returns the user and the groups of a container's first process. The guest reports them, because it reads the image's /etc/passwd
// and /etc/group. Agents of earlier releases report nothing. Then userOf returns what the pod sets, and nil if the image decides.
func userOf(c vm.ContainerRecord) *corev1.ContainerUser {
	if u := c.Status.User; u != nil {
		return &corev1.ContainerUser{Linux: &corev1.LinuxContainerUser{UID: u.UID, GID: u.GID, SupplementalGroups: slices.Clone(u.Groups)}}
	}
	p := c.Process
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
