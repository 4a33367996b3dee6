package cocoond

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"

	"github.com/spf13/cobra"

	"cocoonstack.io/cocoon/internal/appliance"
	"cocoonstack.io/cocoon/internal/appliance/disk"
	"cocoonstack.io/cocoon/internal/appliance/identity"
	"cocoonstack.io/cocoon/internal/appliance/install"
	"cocoonstack.io/cocoon/internal/appliance/pid1"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/logging"
)

// installerCommand is what process 1 runs on a machine that was started from the installer.
const installerCommand = "installer"

// Files of the installer, and the words of the kernel's command line for it.
const (
	loaderDir     = "/usr/lib/cocoon/boot"
	slotSize      = loaderDir + "/slot-size-mib"
	openInstaller = "capsule.install=open"
)

func installCommand(stderr io.Writer) *cobra.Command {
	return &cobra.Command{
		Use: installerCommand, Short: "Install Cocoon OS on a disk of this machine, as an operator asks for over the network", Hidden: true, Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return runInstaller(cmd.Context(), stderr) },
	}
}

// runInstaller serves the installation of this machine. It refuses on one that was not started from the installer.
func runInstaller(ctx context.Context, stderr io.Writer) error {
	cmdline, err := os.ReadFile("/proc/cmdline")
	if err != nil {
		return fmt.Errorf("read the kernel's command line: %w", err)
	}
	words := strings.Fields(string(cmdline))
	if !slices.Contains(words, pid1.InstallerMode) {
		return errdefs.Preconditionf("this machine was not started from the installer of Cocoon OS")
	}
	log, err := logging.New(stderr, "info", "text")
	if err != nil {
		return err
	}
	root, err := disk.ParseRoot(string(cmdline))
	if err != nil {
		return err
	}
	keys, err := signers(osKeys)
	if err != nil {
		return err
	}
	version, err := os.ReadFile(osVersion)
	if err != nil {
		return fmt.Errorf("read the version of the system: %w", err)
	}
	text, err := os.ReadFile(slotSize)
	if err != nil {
		return fmt.Errorf("read the size of slots: %w", err)
	}
	slot, err := strconv.ParseInt(strings.TrimSpace(string(text)), 10, 32)
	if err != nil {
		return fmt.Errorf("read the size of slots: %w", err)
	}
	seal, err := identity.NewSeal()
	if err != nil {
		return err
	}
	console, err := pid1.Console()
	if err != nil {
		return err
	}
	i := install.New(install.Config{
		Root: root, SysBlock: "/sys/block", Dev: "/dev", BootDir: bootDir(), LoaderDir: loaderDir, StateDir: pid1.StateDir, WorkDir: "/run/cocoon/install",
		SlotMiB: slot, Keys: keys, Arch: runtime.GOARCH, Open: slices.Contains(words, openInstaller), Run: runProgram, Log: log,
	}, seal)
	return appliance.Installer(ctx, appliance.InstallerConfig{
		Listen: ":" + appliance.DefaultPort, Version: strings.TrimSpace(string(version)), Console: console,
	}, i, log)
}

// bootDir returns where process 1 mounts the boot partition.
func bootDir() string { return filepath.Dir(filepath.Dir(filepath.Dir(pid1.BootEnvironment))) }

// runProgram runs a program of the system. It is a disk.Run.
func runProgram(ctx context.Context, program string, args ...string) ([]byte, error) {
	var said bytes.Buffer
	cmd := exec.CommandContext(ctx, program, args...) //nolint:gosec // of the system, with words of ours
	cmd.Stderr = &said
	cmd.Env = append(os.Environ(), "LC_ALL=C", "LVM_SUPPRESS_FD_WARNINGS=1")
	out, err := cmd.Output()
	if err != nil {
		text := bytes.TrimSpace(said.Bytes())
		return out, fmt.Errorf("%s: %w: %s", program, err, text[max(0, len(text)-500):])
	}
	return out, nil
}
