package convert

import (
	"cmp"
	"fmt"
	"slices"
	"strconv"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/vm"
)

// capabilities are the default capabilities of a container, the same as in other container runtimes.
var capabilities = []string{
	"CHOWN", "DAC_OVERRIDE", "FSETID", "FOWNER", "MKNOD", "NET_RAW", "SETGID", "SETUID", "SETFCAP", "SETPCAP", "NET_BIND_SERVICE",
	"SYS_CHROOT", "KILL", "AUDIT_WRITE",
}

// security returns the privileges of a container's processes. They have no effect in a disk guest.
func security(pod *corev1.Pod, c *corev1.Container) *vm.Security {
	out := &vm.Security{Capabilities: slices.Clone(capabilities), NonRoot: nonRoot(pod, c)}
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

// allCapabilities is the name that stands for all capabilities.
const allCapabilities = "ALL"

// capability returns the name of c without the prefix that some manifests have.
func capability(c corev1.Capability) string {
	return strings.TrimPrefix(strings.ToUpper(string(c)), "CAP_")
}

// granted returns the capabilities of a container: the defaults with the added and without the dropped ones. ALL is applied
// before single names. A capability that is both added and dropped is dropped.
func granted(asked *corev1.Capabilities) []string {
	var add, drop []string
	for _, c := range asked.Add {
		add = append(add, capability(c))
	}
	for _, c := range asked.Drop {
		drop = append(drop, capability(c))
	}
	out := slices.Clone(capabilities)
	if slices.Contains(add, allCapabilities) {
		out = vm.AllCapabilities()
	}
	if slices.Contains(drop, allCapabilities) {
		out = nil
	}
	for _, name := range add {
		if name != allCapabilities && !slices.Contains(out, name) {
			out = append(out, name)
		}
	}
	return slices.DeleteFunc(out, func(name string) bool { return slices.Contains(drop, name) })
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
				_, known := vm.CapabilityNumber(capability(added))
				no(!known && capability(added) != allCapabilities, path.Child("capabilities", "add").Index(i), "Linux has no capability "+strconv.Quote(string(added)))
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
