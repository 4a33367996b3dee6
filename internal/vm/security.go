package vm

import (
	"regexp"
	"slices"
	"strconv"
	"strings"

	"cocoonstack.io/cocoon/internal/errdefs"
)

// Security limits what a process of an OCI guest may do in its guest. The boundary to everything else is the VM itself.
type Security struct {
	// Capabilities are the most that the process, its children and commands beside it can have: names of Linux without CAP_.
	Capabilities    []string `json:"capabilities,omitempty"`
	NoNewPrivileges bool     `json:"no_new_privileges,omitempty"` // programs with setuid, setgid or capabilities of their own give none
	NonRoot         bool     `json:"non_root,omitempty"`          // it is refused if its user is, or may be, user 0
	Groups          []int64  `json:"groups,omitempty"`            // additional groups
	StrictGroups    bool     `json:"strict_groups,omitempty"`     // it has only Groups, and none that the image lists for its user
	Filtered        bool     `json:"filtered,omitempty"`          // system calls that change the kernel fail unless a capability allows them (seccomp)
}

// capabilities are the names of Linux's capabilities, in the order of their numbers.
var capabilities = []string{
	"CHOWN", "DAC_OVERRIDE", "DAC_READ_SEARCH", "FOWNER", "FSETID", "KILL", "SETGID", "SETUID", "SETPCAP", "LINUX_IMMUTABLE",
	"NET_BIND_SERVICE", "NET_BROADCAST", "NET_ADMIN", "NET_RAW", "IPC_LOCK", "IPC_OWNER", "SYS_MODULE", "SYS_RAWIO", "SYS_CHROOT",
	"SYS_PTRACE", "SYS_PACCT", "SYS_ADMIN", "SYS_BOOT", "SYS_NICE", "SYS_RESOURCE", "SYS_TIME", "SYS_TTY_CONFIG", "MKNOD", "LEASE",
	"AUDIT_WRITE", "AUDIT_CONTROL", "SETFCAP", "MAC_OVERRIDE", "MAC_ADMIN", "SYSLOG", "WAKE_ALARM", "BLOCK_SUSPEND", "AUDIT_READ",
	"PERFMON", "BPF", "CHECKPOINT_RESTORE",
}

// AllCapabilities returns the names of all capabilities, in the order of their numbers.
func AllCapabilities() []string { return slices.Clone(capabilities) }

// CapabilityNumber returns the kernel's number of the capability called name; false if there is none.
func CapabilityNumber(name string) (int, bool) {
	n := slices.Index(capabilities, name)
	return n, n >= 0
}

// maxGroups limits the additional groups of a process. The kernel accepts 65,536, together with those of the image.
const maxGroups = 1024

// Validate returns the first thing that makes s impossible, as an InvalidArgument error.
func (s *Security) Validate() error {
	if s == nil {
		return nil
	}
	for _, name := range s.Capabilities {
		if _, ok := CapabilityNumber(name); !ok {
			return errdefs.Invalidf("unknown capability %q; use a name of Linux without CAP_, for example NET_ADMIN", name)
		}
	}
	if len(s.Groups) > maxGroups {
		return errdefs.Invalidf("too many additional groups: %d; at most %d are possible", len(s.Groups), maxGroups)
	}
	for _, g := range s.Groups {
		if g < 0 || g > maxID {
			return errdefs.Invalidf("%d is not the id of a group", g)
		}
	}
	return nil
}

// Clone returns a copy of s that shares no memory with it.
func (s *Security) Clone() *Security {
	if s == nil {
		return nil
	}
	c := *s
	c.Capabilities, c.Groups = cloneSlice(s.Capabilities), cloneSlice(s.Groups)
	return &c
}

// Allowed returns an error unless p, resolved, may run as its user. Only the number of a user shows that it is not root: a name
// means what the image's files say.
// Errors: FailedPrecondition.
func (p Process) Allowed() error {
	if p.Security == nil || !p.Security.NonRoot {
		return nil
	}
	name, _, _ := strings.Cut(p.User, ":")
	if name == "" {
		return errdefs.Preconditionf("container has runAsNonRoot and image will run as root")
	}
	uid, err := strconv.ParseUint(name, 10, 32)
	switch {
	case err != nil:
		return errdefs.Preconditionf("container has runAsNonRoot and image has non-numeric user (%s), cannot verify user is non-root", name)
	case uid == 0:
		return errdefs.Preconditionf("container has runAsNonRoot and image will run as root")
	}
	return nil
}

// Sysctl is a setting of a guest's kernel.
type Sysctl struct {
	Name  string `json:"name"` // as in sysctl.conf: parts with dots between them, or with slashes
	Value string `json:"value"`
}

// The rule of Kubernetes. Every part begins and ends with a letter or digit, so no name leaves the kernel's folder.
var sysctlRE = regexp.MustCompile(`^[a-z0-9]([a-z0-9_-]*[a-z0-9])?([./][a-z0-9]([a-z0-9_-]*[a-z0-9])?)*$`)

// Path returns the path of the setting below /proc/sys. The first separator of a name is the one between its parts; the other
// one belongs to the name of a part.
func (c Sysctl) Path() string {
	if i := strings.IndexAny(c.Name, "./"); i >= 0 && c.Name[i] == '/' {
		return c.Name
	}
	return strings.NewReplacer(".", "/", "/", ".").Replace(c.Name)
}

// Limits of settings of the kernel; sizes are bytes.
const (
	maxSysctls     = 256
	maxSysctlName  = 253
	maxSysctlValue = 4 << 10
)

// ValidateSysctls is the part of Validate that checks settings of the kernel.
func (s Spec) ValidateSysctls() error {
	if len(s.Sysctls) > maxSysctls {
		return errdefs.Invalidf("too many sysctls: %d; at most %d are possible", len(s.Sysctls), maxSysctls)
	}
	for _, c := range s.Sysctls {
		switch {
		case len(c.Name) > maxSysctlName || !sysctlRE.MatchString(c.Name):
			return errdefs.Invalidf("invalid name of a sysctl %q; use for example net.ipv4.ip_forward", c.Name)
		case len(c.Value) > maxSysctlValue || strings.ContainsAny(c.Value, "\x00\n"):
			return errdefs.Invalidf("sysctl %s: invalid value; it must be one line of at most %d bytes", c.Name, maxSysctlValue)
		}
	}
	return nil
}

// A signal has a name or a number.
var stopSignalRE = regexp.MustCompile(`^([1-9][0-9]?|(SIG)?[A-Z][A-Z0-9]{1,9}([+-][0-9]{1,2})?)$`)

func (p Process) validate() error {
	if p.StopSignal != "" && !stopSignalRE.MatchString(p.StopSignal) {
		return errdefs.Invalidf("invalid stop signal %q; use for example SIGTERM", p.StopSignal)
	}
	return p.Security.Validate()
}
