// Package netns gives tests their own network namespaces, so that no test ever touches the host's network.
//
// Main runs a whole test binary in a fresh network and mount namespace: every goroutine and every child is inside, and
// the kernel removes links, rules and mounts when the last process ends, even after kill -9. New adds further
// namespaces. Without root, Main runs the tests as they are and Require skips those that need isolation. Product code
// enters namespaces in another way; this package is for tests only.
package netns

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"runtime"
	"syscall"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"cocoonstack.io/cocoon/internal/testkit/need"
)

// insideEnv marks the process that already runs in its own namespace.
const insideEnv = "COCOON_TEST_NETNS_INSIDE"

// Main is the body of a TestMain: os.Exit(netns.Main(m)).
func Main(m *testing.M) int {
	if os.Getenv(insideEnv) != "" {
		if err := settle(); err != nil {
			fmt.Fprintln(os.Stderr, "test network namespace:", err)
			return 1
		}
		return m.Run()
	}
	if os.Geteuid() != 0 {
		return m.Run()
	}
	code, err := again()
	if err != nil {
		fmt.Fprintln(os.Stderr, "run the tests in a network namespace:", err)
		return 1
	}
	return code
}

// Require gates a test on running inside Main's namespace.
func Require(t testing.TB) {
	t.Helper()
	need.Root(t)
	if os.Getenv(insideEnv) == "" {
		t.Fatal("the package's TestMain does not call netns.Main")
	}
}

// again runs this test binary in new namespaces and returns its exit code.
func again() (int, error) {
	// The child dies with this thread, so the thread must live as long as this process.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	cmd := exec.Command("/proc/self/exe", os.Args[1:]...)
	cmd.Args[0] = os.Args[0]
	cmd.Env = append(os.Environ(), insideEnv+"=1")
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags: syscall.CLONE_NEWNET | syscall.CLONE_NEWNS,
		Pdeathsig:  syscall.SIGKILL,
	}
	signals := make(chan os.Signal, 4)
	signal.Notify(signals, syscall.SIGINT, syscall.SIGTERM, syscall.SIGQUIT)
	defer signal.Stop(signals)
	if err := cmd.Start(); err != nil {
		return 0, err
	}
	done := make(chan error, 1)
	go func() { done <- cmd.Wait() }()
	for {
		select {
		case s := <-signals: // the time limit of go test sends SIGQUIT: the child prints its goroutines
			_ = cmd.Process.Signal(s)
		case err := <-done:
			if exit := (*exec.ExitError)(nil); err != nil && !errors.As(err, &exit) {
				return 0, err
			}
			if code := cmd.ProcessState.ExitCode(); code >= 0 {
				return code, nil
			}
			return 1, nil
		}
	}
}

// settle makes the new namespaces usable.
func settle() error {
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return fmt.Errorf("make mounts private: %w", err)
	}
	return presume()
}

// presumed are settings that a new namespace may inherit from the host, and the values that tests rely on.
var presumed = map[string]string{
	"ipv4/ip_forward":                 "0",
	"ipv6/conf/all/forwarding":        "0",
	"ipv6/conf/all/disable_ipv6":      "0",
	"ipv6/conf/default/disable_ipv6":  "0",
	"ipv6/conf/lo/disable_ipv6":       "0",
	"bridge/bridge-nf-call-iptables":  "0", // a module's default is 1; without it there is no such setting
	"ipv4/ip_unprivileged_port_start": "1024",
	"ipv4/ping_group_range":           "1\t0", // nobody
}

// presume gives the namespace of this thread what tests rely on, whatever the host has: the presumed settings, and loopback.
func presume() error {
	for key, value := range presumed {
		// A kernel without IPv6 lacks some.
		if err := os.WriteFile("/proc/sys/net/"+key, []byte(value), 0o644); err != nil && !errors.Is(err, os.ErrNotExist) {
			return fmt.Errorf("set %s: %w", key, err)
		}
	}
	lo, err := netlink.LinkByName("lo")
	if err != nil {
		return fmt.Errorf("find lo: %w", err)
	}
	return netlink.LinkSetUp(lo)
}

// New makes one more network namespace with loopback up, removed when the test ends, and returns its path. The path
// also works for other processes of the test, like that of `ip netns add`.
func New(t testing.TB) string {
	t.Helper()
	Require(t)
	path := filepath.Join(t.TempDir(), "netns")
	if err := os.WriteFile(path, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	err := onThread(func() error {
		if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
			return fmt.Errorf("unshare: %w", err)
		}
		if err := presume(); err != nil {
			return err
		}
		return unix.Mount(threadNS, path, "", unix.MS_BIND, "")
	})
	if err != nil {
		t.Fatal("make a network namespace:", err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(path, unix.MNT_DETACH); err != nil {
			t.Error("remove a network namespace:", err)
		}
	})
	return path
}

// Do runs fn on a thread inside the namespace at path. Goroutines that fn starts are outside; sockets and children that
// it makes stay inside.
func Do(t testing.TB, path string, fn func() error) {
	t.Helper()
	err := onThread(func() error {
		f, err := os.Open(path)
		if err != nil {
			return err
		}
		defer f.Close()
		if err := unix.Setns(int(f.Fd()), unix.CLONE_NEWNET); err != nil {
			return fmt.Errorf("enter %s: %w", path, err)
		}
		return fn()
	})
	if err != nil {
		t.Fatal(err)
	}
}

const threadNS = "/proc/thread-self/ns/net"

// onThread runs fn on a thread that ends afterwards: the thread is never unlocked.
func onThread(fn func() error) error {
	done := make(chan error, 1)
	go func() {
		runtime.LockOSThread()
		done <- fn()
	}()
	return <-done
}
