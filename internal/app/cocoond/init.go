package cocoond

import (
	"fmt"
	"io"
	"os"
	"path/filepath"
	"time"

	"cocoonstack.io/cocoon/internal/appliance/pid1"
	"cocoonstack.io/cocoon/internal/version"
)

// isInit reports whether this program was started as the machine's process 1, /sbin/init. A container's process 1 has its own name.
func isInit(argv0 string, args []string) bool {
	return filepath.Base(argv0) == "init" && os.Getpid() == 1 || len(args) == 1 && args[0] == "init"
}

// runInit is process 1 of Cocoon OS, which runs containerd and the daemon. It returns only if this is no process 1.
func runInit(stderr io.Writer) int {
	err := pid1.Run(pid1.Config{
		Version: version.Version,
		Port:    50000,
		Children: []pid1.Child{
			{Name: "containerd", Path: "/usr/bin/containerd", Args: []string{"--config", "/etc/containerd/config.toml"}},
			{Name: "cocoond", Path: "/proc/self/exe", Args: []string{"--config", "/etc/cocoon/cocoond.yaml"}, Watched: true},
		},
		Installer:     []pid1.Child{{Name: "installer", Path: "/proc/self/exe", Args: []string{installerCommand}}},
		TrialDeadline: 15 * time.Minute,
	})
	fmt.Fprintf(stderr, "Error: %v\n", err)
	return 1
}
