package jail

import (
	"os"
	"slices"
	"strings"
)

// HostFlags returns the features of the host's CPUs, sorted. nil if the host does not tell them.
func HostFlags() []string {
	info, err := os.ReadFile("/proc/cpuinfo")
	if err != nil {
		return nil
	}
	return CPUFlags(string(info))
}

// CPUFlags returns the features in the text of /proc/cpuinfo, sorted.
func CPUFlags(cpuinfo string) []string {
	for line := range strings.Lines(cpuinfo) {
		if key, value, ok := strings.Cut(line, ":"); ok && strings.TrimSpace(key) == "flags" {
			flags := strings.Fields(value)
			slices.Sort(flags)
			return slices.Compact(flags)
		}
	}
	return nil
}
