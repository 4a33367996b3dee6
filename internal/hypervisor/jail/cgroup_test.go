package jail

import (
	"strings"
	"testing"
)

func TestFindCgroup2(t *testing.T) {
	tests := []struct{ name, mountinfo, want string }{
		{"none", "22 27 0:21 / /proc rw,relatime - proc proc rw\n", ""},
		{"unified", "30 23 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw\n", "/sys/fs/cgroup"},
		{"hybrid", "32 31 0:29 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n", "/sys/fs/cgroup/unified"},
		{"read-only", "30 23 0:26 / /sys/fs/cgroup ro,nosuid - cgroup2 cgroup2 rw\n", ""},
		{"escaped", `30 23 0:26 / /my\040cgroup rw - cgroup2 cgroup2 rw`, "/my cgroup"},
		{"torn", "30 23 0:26 / - cgroup2\n", ""},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			if got := findCgroup2(strings.NewReader(tt.mountinfo)); got != tt.want {
				t.Errorf("findCgroup2 = %q, want %q", got, tt.want)
			}
		})
	}
}
