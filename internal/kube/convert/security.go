package convert

import (
	"cmp"
	"fmt"
	"slices"
	"strconv"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/vm"
)

// security returns the privileges of a container's processes. They have no effect in a disk guest.
func security(pod *corev1.Pod, c *corev1.Container) *vm.Security {
	out := &vm.Security{Capabilities: vm.DefaultCapabilities(), NonRoot: nonRoot(pod, c)}
	if p := seccomp(pod, c); p != nil {
		out.Filtered = p.Type == corev1.SeccompProfileTypeRuntimeDefault
	}
	if sc := c.SecurityContext; sc != nil {
		out.NoNewPrivileges = sc.AllowPrivilegeEscalation != nil && !*sc.AllowPrivilegeEscalation
		if yes(sc.Privileged) {
			out.Capabilities, out.Filtered = vm.AllCapabilities(), false
		} else if sc.Capabilities != nil {
			out.Capabilities = granted(sc.Capabilities)
		}
	}
	if sc := pod.Spec.SecurityContext; sc != nil {
		out.Groups = slices.Clone(sc.SupplementalGroups)
		if sc.FSGroup != nil {
			out.Groups = append(out.Groups, *sc.FSGroup)
		}
		out.StrictGroups = sc.SupplementalGroupsPolicy != nil && *sc.SupplementalGroupsPolicy == corev1.SupplementalGroupsPolicyStrict
	}
	return out
}

// granted returns the capabilities of a container.
func granted(asked *corev1.Capabilities) []string {
	var add, drop []string
	for _, c := range asked.Add {
		add = append(add, string(c))
	}
	for _, c := range asked.Drop {
		drop = append(drop, string(c))
	}
	return vm.GrantCapabilities(add, drop)
}

// seccomp returns the seccomp profile of a container: its own, else the pod's, else nil.
func seccomp(pod *corev1.Pod, c *corev1.Container) *corev1.SeccompProfile {
	if sc := c.SecurityContext; sc != nil && sc.SeccompProfile != nil {
		return sc.SeccompProfile
	}
	if sc := pod.Spec.SecurityContext; sc != nil {
		return sc.SeccompProfile
	}
	return nil
}

// appArmor returns the AppArmor profile of a container: its own, else the pod's, else nil.
func appArmor(pod *corev1.Pod, c *corev1.Container) *corev1.AppArmorProfile {
	if sc := c.SecurityContext; sc != nil && sc.AppArmorProfile != nil {
		return sc.AppArmorProfile
	}
	if sc := pod.Spec.SecurityContext; sc != nil {
		return sc.AppArmorProfile
	}
	return nil
}

// nonRoot reports whether a container must not run as user 0.
func nonRoot(pod *corev1.Pod, c *corev1.Container) bool {
	if sc := c.SecurityContext; sc != nil && sc.RunAsNonRoot != nil {
		return *sc.RunAsNonRoot
	}
	return pod.Spec.SecurityContext != nil && yes(pod.Spec.SecurityContext.RunAsNonRoot)
}

// user returns uid, uid:gid or :gid, or "" for the image's own user.
func user(pod *corev1.Pod, c *corev1.Container) string {
	uid, gid := runAs(pod, c)
	s := ""
	if uid != nil {
		s = strconv.FormatInt(*uid, 10)
	}
	if gid != nil {
		s += ":" + strconv.FormatInt(*gid, 10)
	}
	return s
}

// runAs merges the security contexts of pod and container. The container's takes precedence.
func runAs(pod *corev1.Pod, c *corev1.Container) (uid, gid *int64) {
	if sc := pod.Spec.SecurityContext; sc != nil {
		uid, gid = sc.RunAsUser, sc.RunAsGroup
	}
	if c.SecurityContext != nil {
		if c.SecurityContext.RunAsUser != nil {
			uid = c.SecurityContext.RunAsUser
		}
		if c.SecurityContext.RunAsGroup != nil {
			gid = c.SecurityContext.RunAsGroup
		}
	}
	return uid, gid
}

func sysctls(pod *corev1.Pod) (out []vm.Sysctl) {
	if sc := pod.Spec.SecurityContext; sc != nil {
		for _, s := range sc.Sysctls {
			out = append(out, vm.Sysctl{Name: s.Name, Value: s.Value})
		}
	}
	return out
}

// checkSecurity checks the security context of the container at that path.
func checkSecurity(c *corev1.Container, at *field.Path) field.ErrorList {
	var errs field.ErrorList
	no := forbid(&errs)
	path := at.Child("securityContext")
	if sc := c.SecurityContext; sc != nil {
		no(sc.WindowsOptions != nil, path.Child("windowsOptions"), "this node runs only Linux guests")
		if sc.Capabilities != nil {
			for i, added := range sc.Capabilities.Add {
				no(!vm.KnowsCapability(string(added)), path.Child("capabilities", "add").Index(i), "Linux has no capability "+strconv.Quote(string(added)))
			}
		}
	}
	return errs
}

// CheckProfiles returns an error if a container needs a security profile of the node, which has none, or AppArmor, which the
// guest's kernel lacks. Errors: FailedPrecondition.
func CheckProfiles(pod *corev1.Pod) error {
	for _, c := range containers(pod) {
		if p := seccomp(pod, c); p != nil && p.Type == corev1.SeccompProfileTypeLocalhost {
			return errdefs.Preconditionf("container %s: cannot load seccomp profile %q: this node has no profiles; use RuntimeDefault", c.Name, text(p.LocalhostProfile))
		}
		if p := appArmor(pod, c); p != nil && p.Type != corev1.AppArmorProfileTypeUnconfined {
			return errdefs.Preconditionf("container %s: cannot enforce AppArmor profile %s: AppArmor is not enabled in the guest; use Unconfined", c.Name, cmp.Or(text(p.LocalhostProfile), string(p.Type)))
		}
	}
	return nil
}

func text(s *string) string {
	if s == nil {
		return ""
	}
	return *s
}

// CheckUsers returns an error if a container must not run as user 0 but may do so. users has the user of each OCI image. Disk
// images are not in users and are not checked, because they boot their own system.
// Errors: FailedPrecondition.
func CheckUsers(pod *corev1.Pod, users map[string]string) error {
	for _, c := range containers(pod) {
		of, ok := users[ImageOf(pod, c)]
		if !ok || !nonRoot(pod, c) {
			continue
		}
		where := fmt.Sprintf("(pod: %q, container: %s)", pod.Name+"_"+pod.Namespace+"("+string(pod.UID)+")", c.Name)
		if uid, _ := runAs(pod, c); uid != nil && *uid == 0 {
			return errdefs.Preconditionf("container's runAsUser breaks non-root policy %s", where)
		}
		p := vm.Process{User: user(pod, c), Security: &vm.Security{NonRoot: true}}
		if err := p.Over(vm.Process{User: of}).Allowed(); err != nil {
			return fmt.Errorf("%w %s", err, where)
		}
	}
	return nil
}
