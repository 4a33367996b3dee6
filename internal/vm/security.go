package vm

import (
	"errors"
	"path"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"cocoonstack.io/cocoon/internal/errdefs"
)

// Security limits what a process of an OCI guest may do in its guest. The boundary to everything else is the VM itself.
type Security struct {
	// Capabilities are the most that the process, its children and commands beside it can have: names of Linux without CAP_.
	Capabilities    []string     `json:"capabilities,omitempty"`
	NoNewPrivileges bool         `json:"no_new_privileges,omitempty"` // programs with setuid, setgid or capabilities of their own give none
	NonRoot         bool         `json:"non_root,omitempty"`          // it is refused if its user is, or may be, user 0
	Groups          []int64      `json:"groups,omitempty"`            // additional groups
	StrictGroups    bool         `json:"strict_groups,omitempty"`     // it has only Groups, and none that the image lists for its user
	Filtered        bool         `json:"filtered,omitempty"`          // system calls that change the kernel fail unless a capability allows them (seccomp)
	SystemCalls     *SystemCalls `json:"system_calls,omitempty"`      // instead of Filtered: a filter of system calls

	// Masked are paths at which the container sees an empty file or folder, and ReadOnly paths that it sees and cannot change. What does not
	// exist is left out. A process whose root is the VM's own sees all of it: it is alone with its guest.
	Masked   []string `json:"masked,omitempty"`
	ReadOnly []string `json:"read_only,omitempty"`
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

// defaultCapabilities are the capabilities of a container that asks for none. Other container runtimes have the same.
var defaultCapabilities = []string{
	"CHOWN", "DAC_OVERRIDE", "FSETID", "FOWNER", "MKNOD", "NET_RAW", "SETGID", "SETUID", "SETFCAP", "SETPCAP", "NET_BIND_SERVICE",
	"SYS_CHROOT", "KILL", "AUDIT_WRITE",
}

// DefaultCapabilities returns the capabilities of a container that asks for none.
func DefaultCapabilities() []string { return slices.Clone(defaultCapabilities) }

// everyCapability is the name that stands for all capabilities.
const everyCapability = "ALL"

// bareCapability returns a name without the prefix that some manifests have.
func bareCapability(name string) string { return strings.TrimPrefix(strings.ToUpper(name), "CAP_") }

// KnowsCapability reports whether name is that of a capability of Linux, with or without CAP_, or ALL.
func KnowsCapability(name string) bool {
	name = bareCapability(name)
	return name == everyCapability || slices.Contains(capabilities, name)
}

// GrantCapabilities returns the default capabilities with the added and without the dropped ones. ALL is applied before single names. A
// capability that is both added and dropped is dropped.
func GrantCapabilities(add, drop []string) []string {
	bare := func(names []string) (out []string) {
		for _, name := range names {
			out = append(out, bareCapability(name))
		}
		return out
	}
	add, drop = bare(add), bare(drop)
	out := DefaultCapabilities()
	if slices.Contains(add, everyCapability) {
		out = AllCapabilities()
	}
	if slices.Contains(drop, everyCapability) {
		out = nil
	}
	for _, name := range add {
		if name != everyCapability && !slices.Contains(out, name) {
			out = append(out, name)
		}
	}
	return slices.DeleteFunc(out, func(name string) bool { return slices.Contains(drop, name) })
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
	if s.Filtered && s.SystemCalls != nil {
		return errdefs.Invalidf("system calls are filtered either by default or by a profile")
	}
	return errors.Join(s.SystemCalls.validate(), validateCovered("masked", s.Masked), validateCovered("read-only", s.ReadOnly))
}

// maxCovered limits the paths that a container does not see, and those that it cannot change.
const maxCovered = 256

func validateCovered(kind string, paths []string) error {
	if len(paths) > maxCovered {
		return errdefs.Invalidf("too many %s paths: %d; at most %d are possible", kind, len(paths), maxCovered)
	}
	for _, p := range paths {
		if !path.IsAbs(p) || path.Clean(p) != p || p == "/" || len(p) > maxPath || strings.ContainsRune(p, 0) {
			return errdefs.Invalidf("invalid %s path %q; it must be absolute, without . and .., and not the root", kind, p)
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
	c.Masked, c.ReadOnly = cloneSlice(s.Masked), cloneSlice(s.ReadOnly)
	c.SystemCalls = s.SystemCalls.Clone()
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
