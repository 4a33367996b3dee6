// Package pid1 is process 1 of an appliance: it makes a bare kernel a machine on which the daemon runs, and keeps the daemon running.
//
// It is small on purpose. A step that fails is logged, and the next ones go on, so that the daemon answers whatever is broken. It never
// ends; the daemon is a child of it, which is started again when it crashes, and nothing else dies with it. It knows no VMs.
package pid1

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"os/signal"
	"runtime/debug"
	"slices"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"cocoonstack.io/cocoon/internal/appliance/bootctl"
	"cocoonstack.io/cocoon/internal/appliance/disk"
)

// Config says what runs. Its zero value runs nothing.
type Config struct {
	Version   string
	Children  []Child
	Installer []Child // instead of Children, on a machine that was started to install the system
	Port      int     // of the daemon, for the banner

	// TrialDeadline is when a system on trial that nobody confirmed restarts, counted from the start of the kernel. It is later than the daemon's own, and
	// for a daemon that does not live to keep that.
	TrialDeadline time.Duration
}

// Where things are.
const (
	permDir = "/perm"
	bootDir = "/boot"
	ownDir  = StateDir
	logDir  = "/run/log"

	// EndingFile is in the folder of what the daemon keeps until the machine ends. It is there when the machine ends, and not only the daemon.
	EndingFile = "machine-ends"
	endingPath = "/run/cocoon/" + EndingFile

	// StateDir is where the daemon and process 1 keep their state.
	StateDir = permDir + "/cocoon"

	// BootEnvironment is the file of bootctl.New, once process 1 has mounted the boot partition.
	BootEnvironment = bootDir + "/EFI/BOOT/grubenv"
)

type machine struct {
	cfg     Config
	log     *slog.Logger
	console *console
	reaper  *reaper
	boot    bootctl.Boot
	root    disk.Root

	life     life
	dogs     watchdogs
	children *supervisor

	installer bool // the system is not installed on this machine: its disks are left alone
}

// InstallerMode is the word of the kernel's command line that makes a machine an installer.
const InstallerMode = "capsule.mode=installer"

// Run is process 1. It returns only if it is not process 1.
func Run(cfg Config) error {
	if os.Getpid() != 1 {
		return fmt.Errorf("this is process %d, and no machine starts with it; run it as /sbin/init", os.Getpid())
	}
	m := &machine{cfg: cfg, console: newConsole(), reaper: newReaper()}
	m.log = slog.New(slog.NewTextHandler(m.console, &slog.HandlerOptions{ReplaceAttr: withoutTime}))
	orders := make(chan os.Signal, 8)
	signal.Notify(orders, syscall.SIGTERM, syscall.SIGINT, syscall.SIGUSR1, syscall.SIGUSR2, syscall.SIGPWR)
	wake := wakes() // before anybody can send one: it would end process 1
	for _, entry := range []string{"PATH=/usr/sbin:/usr/bin", "HOME=/root", "TERM=linux", "SSL_CERT_FILE=/etc/ssl/certs/ca-certificates.crt"} {
		name, value, _ := strings.Cut(entry, "=")
		_ = os.Setenv(name, value)
	}
	ctx, stop := context.WithCancel(context.Background())
	go m.guard("reap", func() error { m.reaper.run(); return nil })
	m.children = newSupervisor(m.cfg.Children, m.reaper, m.log, logDir)
	m.children.life = &m.life
	m.life.begin(prepareLimit)
	m.prepare(ctx, orders)
	if m.installer {
		m.children.children = m.cfg.Installer
	}
	go m.guard("listen to the daemon", func() error { return m.life.listen(notifySocket) })
	m.life.begin(m.children.firstBeat())
	m.children.start(ctx)
	go m.guard("uplink", func() error { m.uplink(ctx, wake); return nil })
	if m.boot.Trial && m.cfg.TrialDeadline > 0 {
		go m.guard("watch the trial", func() error { m.watchTrial(orders); return nil })
	}
	for {
		order := <-orders
		m.log.Info("ending all processes", "signal", order)
		stop()
		m.life.begin(endLimit)
		if !m.installer { // the installer runs no workloads
			m.guard("say that the machine ends", func() error { return os.WriteFile(endingPath, nil, 0o600) })
		}
		m.children.stop(daemonGrace, childGrace)
		m.life.begin(endLimit) // after the end of the daemon
		m.end(order)
		_ = os.Remove(endingPath)
		ctx, stop = context.WithCancel(context.Background())
		m.log.Error("the machine goes on: the kernel did not end it")
		m.children.start(ctx)
	}
}

// wakes returns a channel that gets a value for each SIGHUP, as long as somebody takes them.
func wakes() <-chan struct{} {
	hups, out := make(chan os.Signal, 1), make(chan struct{}, 1)
	signal.Notify(hups, syscall.SIGHUP)
	go func() {
		for range hups {
			select {
			case out <- struct{}{}:
			default:
			}
		}
	}()
	return out
}

// prepare takes the steps before the daemon starts. None of them waits for a network.
func (m *machine) prepare(ctx context.Context, orders chan<- os.Signal) {
	for _, step := range []struct {
		name string
		do   func() error
	}{
		{"mount the kernel's file systems", mountKernel},
		{"open the console", m.console.open},
		{"mount what a panic leaves", mountPstore},
		{"read the command line", m.readCommandLine},
		{"find watchdogs", func() error { return m.watchdogs(orders) }},
		{"set up the loopback link", loopback},
		{"load modules", func() error { return m.modules(ctx) }},
		{"open the CPU's virtualization", func() error { return openKVM("/dev/kvm", "kvm") }},
		{"find more watchdogs", func() error { return m.moreWatchdogs(ctx) }},
		{"name the machine", func() error { return m.name("") }},
		{"mount the boot partition", m.mountBoot},
		{"find the volumes", func() error {
			if m.installer {
				return nil
			}
			return m.storage(ctx)
		}},
		{"name the machine", func() error { return m.name(ownDir) }},
	} {
		begin := time.Now()
		if m.guard(step.name, step.do) {
			m.log.Info("done", "op", step.name, "dur", time.Since(begin).Round(time.Millisecond))
		}
	}
}

// watchdogs opens the watchdogs that the initramfs has started, and begins to feed them.
func (m *machine) watchdogs(orders chan<- os.Signal) error {
	n, err := m.dogs.find(watchdogDevices)
	m.log.Info("watchdogs are fed", "count", n)
	go m.guard("feed the watchdog", func() error { m.keep(orders); return nil })
	return err
}

// moreWatchdogs opens those of drivers that were loaded since, or the kernel's own if there is none.
func (m *machine) moreWatchdogs(ctx context.Context) error {
	n, err := m.dogs.find(watchdogDevices)
	if n > 0 || err != nil {
		return err
	}
	if _, err := m.run(ctx, "modprobe", "softdog"); err != nil {
		return err
	}
	_, err = m.dogs.find(watchdogDevices)
	return err
}

// guard runs a step, logs its error or panic, and reports whether it succeeded.
func (m *machine) guard(name string, do func() error) (ok bool) {
	defer func() {
		if r := recover(); r != nil {
			ok = false
			m.log.Error("panic", "op", name, "err", fmt.Sprint(r), "stack", string(debug.Stack()))
		}
	}()
	if err := do(); err != nil {
		m.log.Error("failed", "op", name, "err", err)
		return false
	}
	return true
}

func (m *machine) readCommandLine() error {
	text, err := os.ReadFile("/proc/cmdline")
	if err != nil {
		return err
	}
	m.boot = bootctl.ParseBoot(string(text))
	m.installer = slices.Contains(strings.Fields(string(text)), InstallerMode)
	m.log.Info("started", "version", m.cfg.Version, "slot", string(m.boot.Slot), "trial", m.boot.Trial)
	m.root, err = disk.ParseRoot(string(text))
	return err
}

// watchTrial restarts the machine if, at the deadline, the system is still on trial. The clock is the kernel's since its start: no clock that somebody sets.
func (m *machine) watchTrial(orders chan<- os.Signal) {
	<-time.After(m.cfg.TrialDeadline - age())
	if !m.onTrial() {
		return
	}
	m.log.Error("nobody confirmed the update in time: restarting", "err", bootctl.New(BootEnvironment, m.boot).MarkBad())
	orders <- syscall.SIGTERM
}

// age returns the time since the kernel started, by its own clock. Without one it is none.
func age() time.Duration {
	var up unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_BOOTTIME, &up); err != nil {
		return 0
	}
	return time.Duration(up.Nano())
}

// end ends the machine: SIGUSR1 halts, SIGUSR2 switches off, each other one restarts. These are busybox' words. It returns if that is impossible.
func (m *machine) end(order os.Signal) {
	_ = unix.Kill(-1, unix.SIGTERM)
	m.reaper.settle(3 * time.Second)
	_ = unix.Kill(-1, unix.SIGKILL)
	m.reaper.settle(3 * time.Second)
	unix.Sync()
	for _, dir := range []string{permDir, bootDir} {
		if err := unix.Unmount(dir, 0); err != nil {
			m.log.Warn("not unmounted", "path", dir, "err", err)
		}
	}
	unix.Sync()
	how := unix.LINUX_REBOOT_CMD_RESTART // a watchdog that is armed restarts a machine whose kernel hangs now
	switch order {
	case syscall.SIGUSR1:
		how = unix.LINUX_REBOOT_CMD_HALT
	case syscall.SIGUSR2, syscall.SIGPWR:
		how = unix.LINUX_REBOOT_CMD_POWER_OFF
	}
	if how != unix.LINUX_REBOOT_CMD_RESTART {
		if err := m.dogs.disarm(); err != nil {
			m.log.Warn("failed", "op", "disarm the watchdog", "err", err)
		}
	}
	if err := unix.Reboot(how); err != nil {
		m.log.Error("failed", "op", "end the machine", "err", err)
	}
}

// withoutTime drops the time of a log line: the kernel's log has its own.
func withoutTime(_ []string, a slog.Attr) slog.Attr {
	if a.Key == slog.TimeKey {
		return slog.Attr{}
	}
	return a
}
