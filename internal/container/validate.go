package container

import (
	"fmt"
	"path"
	"regexp"
	"strings"

	"cocoonstack.io/cocoon/internal/errdefs"
)

// Bounds of a Spec.
const (
	maxID        = 76 // as containerd has it
	maxHostname  = 64 // as the kernel has it
	maxMounts    = 128
	maxFile      = 64 << 10  // bytes of a file of Files
	maxWords     = 128 << 10 // bytes of one argument or variable, as the kernel has it
	leastCPU     = 10        // thousandths: the kernel's shortest quota
	maxCPU       = 1 << 20
	leastMemory  = 6 << 20 // bytes: with less, runc cannot start anything
	maxPIDs      = 1 << 22 // as the kernel has it
	maxLabelText = 256 << 10
)

var id = regexp.MustCompile(`^[A-Za-z0-9]+([._-][A-Za-z0-9]+)*$`)

// reserved are paths of a container that are the kernel's.
var reserved = []string{"/proc", "/sys", "/dev"}

// CheckID says whether a container can have the id.
// Errors: InvalidArgument.
func CheckID(s string) error {
	if len(s) > maxID || !id.MatchString(s) {
		return errdefs.Invalidf("container ID %q: use at most %d letters and digits, with single '.', '_' or '-' between them", s, maxID)
	}
	return nil
}

// Validate says what is wrong with a Spec, before anything is done.
// Errors: InvalidArgument.
func (s Spec) Validate() error {
	if err := CheckID(s.ID); err != nil {
		return err
	}
	for _, check := range []func() error{s.checkProcess, s.checkNetwork, s.checkMounts, s.checkLimits, s.checkLabels} {
		if err := check(); err != nil {
			return errdefs.As(errdefs.InvalidArgument, fmt.Errorf("container %s: %w", s.ID, err))
		}
	}
	return nil
}

func (s Spec) checkProcess() error {
	if s.Image == "" {
		return fmt.Errorf("an image is needed")
	}
	for _, word := range append(append([]string{s.Image, s.User, s.WorkDir}, s.Command...), s.Args...) {
		if strings.Contains(word, "\x00") || len(word) > maxWords {
			return fmt.Errorf("an argument, user, folder or image has a null byte, or more than %d bytes", maxWords)
		}
	}
	for _, e := range s.Env {
		if e.Name == "" || strings.ContainsAny(e.Name, "=\x00") || strings.Contains(e.Value, "\x00") || len(e.Name)+len(e.Value) > maxWords {
			return fmt.Errorf("environment variable %.64q: its name needs a character and has no '=', neither has a null byte, and both have at most %d bytes", e.Name, maxWords)
		}
	}
	if s.WorkDir != "" && !path.IsAbs(s.WorkDir) {
		return fmt.Errorf("working folder %q: an absolute path is needed", s.WorkDir)
	}
	if len(s.Hostname) > maxHostname || strings.ContainsAny(s.Hostname, "\x00\n /") {
		return fmt.Errorf("hostname %.80q: use at most %d characters without spaces and slashes", s.Hostname, maxHostname)
	}
	return nil
}

func (s Spec) checkNetwork() error {
	switch {
	case s.Network.Host && s.Network.NetNS != "":
		return fmt.Errorf("it cannot have both the network of the node and a network namespace")
	case s.Network.NetNS != "" && !clean(s.Network.NetNS):
		return fmt.Errorf("network namespace %q: an absolute path without . and .. is needed", s.Network.NetNS)
	case len(s.Files.Hosts) > maxFile || len(s.Files.ResolvConf) > maxFile:
		return fmt.Errorf("hosts and resolv.conf have at most %d bytes", maxFile)
	}
	return nil
}

func (s Spec) checkMounts() error {
	if len(s.Mounts)+len(s.Host.BindPaths) > maxMounts {
		return fmt.Errorf("it has more than %d mounts", maxMounts)
	}
	seen := map[string]bool{}
	for _, m := range s.Mounts {
		switch {
		case !clean(m.Source):
			return fmt.Errorf("mount of %q: an absolute path of the node without . and .. is needed", m.Source)
		case !clean(m.Path) || m.Path == "/":
			return fmt.Errorf("mount at %q: an absolute path below / without . and .. is needed", m.Path)
		case kernels(m.Path):
			return fmt.Errorf("mount at %q: the folders /proc, /sys and /dev are the kernel's", m.Path)
		case seen[m.Path]:
			return fmt.Errorf("two mounts at %q", m.Path)
		}
		seen[m.Path] = true
	}
	for _, p := range s.Host.BindPaths {
		if !clean(p) || p == "/" || p == "/proc" {
			return fmt.Errorf("path of the node %q: an absolute path without . and .. is needed, other than / and /proc", p)
		}
		if seen[p] {
			return fmt.Errorf("two mounts at %q", p)
		}
		seen[p] = true
	}
	return nil
}

func (s Spec) checkLimits() error {
	l := s.Limits
	switch {
	case l.CPU != 0 && (l.CPU < leastCPU || l.CPU > maxCPU):
		return fmt.Errorf("limit of %d thousandths of a CPU: use %d to %d, or 0 for none", l.CPU, leastCPU, maxCPU)
	case l.Memory != 0 && l.Memory < leastMemory:
		return fmt.Errorf("limit of %d bytes of memory: use at least %d, or 0 for none", l.Memory, leastMemory)
	case l.PIDs < 0 || l.PIDs > maxPIDs:
		return fmt.Errorf("limit of %d processes: use 1 to %d, or 0 for none", l.PIDs, maxPIDs)
	}
	return nil
}

func (s Spec) checkLabels() error {
	n := 0
	for k, v := range s.Labels {
		n += len(k) + len(v)
	}
	if n > maxLabelText {
		return fmt.Errorf("its labels have more than %d bytes", maxLabelText)
	}
	return nil
}

// clean reports whether p is an absolute path that names one place only.
func clean(p string) bool { return path.IsAbs(p) && path.Clean(p) == p && !strings.Contains(p, "\x00") }

// kernels reports whether p is one of the folders that the kernel fills, or below one.
func kernels(p string) bool {
	for _, r := range reserved {
		if p == r || strings.HasPrefix(p, r+"/") {
			return true
		}
	}
	return false
}
