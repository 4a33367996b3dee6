package cocoond

import (
	"bytes"
	"context"
	"crypto/ed25519"
	"crypto/x509"
	"encoding/pem"
	"fmt"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	capsulev1 "cocoonstack.io/cocoon/api/capsule/v1"
	"cocoonstack.io/cocoon/internal/appliance"
	"cocoonstack.io/cocoon/internal/appliance/bootctl"
	"cocoonstack.io/cocoon/internal/appliance/disk"
	"cocoonstack.io/cocoon/internal/appliance/machine"
	"cocoonstack.io/cocoon/internal/appliance/pid1"
	"cocoonstack.io/cocoon/internal/appliance/update"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/journal"
)

// Files of Cocoon OS.
const (
	osVersion = "/etc/cocoon/version"
	osKeys    = "/etc/cocoon/os-signing.pub.pem"
)

// restartDelay lets the answer to whoever asked for a restart arrive.
const restartDelay = 2 * time.Second

// booted returns how this machine was started, and the kernel's command line that says so.
func booted() (boot bootctl.Boot, cmdline string, err error) {
	text, err := os.ReadFile("/proc/cmdline")
	if err != nil {
		return boot, "", fmt.Errorf("read the kernel's command line: %w", err)
	}
	return bootctl.ParseBoot(string(text)), string(text), nil
}

// screen returns a writer to the person in front of a machine that runs Cocoon OS; nil for another machine.
func screen(log *slog.Logger) io.Writer {
	if machine.Slot() == "" {
		return nil
	}
	console, err := pid1.Console()
	if err != nil {
		log.Warn("nothing is shown on the console", "err", err)
		return nil
	}
	return console
}

// system returns the machine: one that runs Cocoon OS if a slot of it was started.
func (a *applianceDoor) system(ctx context.Context, docs journal.Documents, g gates) (appliance.System, error) {
	host := &machine.Host{StateDir: a.cfg.StateDir, Log: a.cfg.recent}
	boot, cmdline, err := booted()
	if err != nil {
		return nil, err
	}
	if boot.Slot == bootctl.None {
		return host, nil
	}
	version, err := os.ReadFile(osVersion)
	if err != nil {
		return nil, fmt.Errorf("read the version of the system: %w", err)
	}
	keys, err := signers(osKeys)
	if err != nil {
		return nil, err
	}
	u, err := update.Open(ctx, update.Config{
		Boot: boot, Control: bootctl.New(pid1.BootEnvironment, boot), Keys: keys, Version: strings.TrimSpace(string(version)), Arch: runtime.GOARCH,
		Slot:    func(s bootctl.Slot) (string, error) { return disk.SlotDevice(cmdline, s) },
		BootDir: bootDir(), Documents: docs, Age: machine.Uptime, Log: a.log,
		Restart: func() error { return unix.Kill(1, unix.SIGTERM) }, // process 1 restarts the machine then
		Health:  update.Health{Gates: g.all(), Running: g.running, Missing: g.missing}, Copies: a.stateCopies(),
		Evidence: update.Evidence{Dir: a.updateDir(), BootID: g.boot, Said: a.said, Watchdog: pid1.ResetByWatchdog, Crash: pid1.LastWords},
	})
	if err != nil {
		return nil, err
	}
	if !boot.Trial {
		logFailure(a.log, "what the kernel said in a panic is not cleared", pid1.ClearLastWords())
	}
	go u.Run(ctx)
	root, err := disk.ParseRoot(cmdline)
	if err != nil {
		return nil, err
	}
	grower := &disk.Grower{
		Root: root, Group: disk.Group{Run: runProgram, Log: a.log}, Documents: docs, SysBlock: "/sys/block", Dev: "/dev", Log: a.log,
	}
	logFailure(a.log, "the disk does not grow", grower.Resume(ctx))
	return &cocoonOS{Host: host, updater: u, grower: grower}, nil
}

// said returns the last lines of the kernel, which has those of process 1, and of this daemon.
func (a *applianceDoor) said() string {
	const lines, most = 15, 3000 // of each
	var own bytes.Buffer
	_ = a.cfg.recent.Read(context.Background(), lines, false, func(p []byte) error { // it does not fail
		own.Write(p)
		return nil
	})
	var b strings.Builder
	for _, log := range [][]byte{pid1.KernelLog(lines), own.Bytes()} {
		b.WriteString(strings.ToValidUTF8(string(log[max(0, len(log)-most):]), "?"))
	}
	return b.String()
}

// signers reads the keys that sign updates. Errors: DataLoss.
func signers(path string) (keys []ed25519.PublicKey, err error) {
	text, err := os.ReadFile(filepath.Clean(path))
	if err != nil {
		return nil, fmt.Errorf("read the keys that sign updates: %w", err)
	}
	for block, rest := pem.Decode(text); block != nil; block, rest = pem.Decode(rest) {
		key, err := x509.ParsePKIXPublicKey(block.Bytes)
		public, ok := key.(ed25519.PublicKey)
		if err != nil || !ok {
			return nil, errdefs.DataLossf("%s has something else than keys of Ed25519", path)
		}
		keys = append(keys, public)
	}
	return keys, nil
}

// cocoonOS is a machine that runs Cocoon OS.
type cocoonOS struct {
	*machine.Host
	updater *update.Updater
	grower  *disk.Grower
}

// Info implements appliance.System.
func (o *cocoonOS) Info(ctx context.Context) (*capsulev1.GetInfoResponse, error) {
	info, err := o.Host.Info(ctx)
	if err != nil {
		return nil, err
	}
	s := o.updater.State()
	info.ActiveSlot, info.PendingSlot, info.LastVersion, info.RolledBackBecause = slotName(s.Active), slotName(s.Pending), s.Good, s.Because
	info.RolledBackLog = s.Log
	info.PendingPolicy, info.PendingFailing = string(s.Policy), s.Failing
	if device, size, room, err := o.grower.Disk(); err == nil {
		info.BootDisk, info.DiskTotalBytes, info.DiskGrowableBytes = device, uint64(size), uint64(room)
	}
	if s.Left > 0 {
		info.PendingDeadlineUnix = time.Now().Add(s.Left).Unix()
	}
	return info, nil
}

// slotName returns the documented name of a slot; "" for none.
func slotName(s bootctl.Slot) string {
	if s == bootctl.None {
		return ""
	}
	return "slot_" + string(s)
}

// Update implements appliance.System.
func (o *cocoonOS) Update(ctx context.Context, r io.Reader, about *capsulev1.UpdateOSMetadata) (slot, version string, err error) {
	s, version, err := o.updater.Stage(ctx, r, about.GetTotalBytes(), about.GetSha256Hex(), update.Options{
		Policy: update.Policy(about.GetPolicy()), Deadline: time.Duration(about.GetDeadlineSeconds()) * time.Second, AllowDowngrade: about.GetAllowDowngrade(),
	})
	if err != nil {
		return "", "", err
	}
	return slotName(s), version, o.Reboot(ctx)
}

// Confirm implements appliance.System.
func (o *cocoonOS) Confirm(ctx context.Context) (slot, version string, err error) {
	s, version, err := o.updater.Confirm(ctx)
	return slotName(s), version, err
}

// Reboot implements appliance.System.
func (o *cocoonOS) Reboot(context.Context) error {
	time.AfterFunc(restartDelay, func() { _ = o.updater.Reboot() }) // process 1 always takes the signal
	return nil
}

// GrowDisk implements appliance.System.
func (o *cocoonOS) GrowDisk(ctx context.Context) (*capsulev1.GrowDiskResponse, error) {
	size, err := o.grower.Grow(ctx)
	if err != nil {
		return nil, err
	}
	return &capsulev1.GrowDiskResponse{
		GrownBytes: uint64(size.Grown), DiskTotalBytes: uint64(size.Disk), PermTotalBytes: uint64(size.Perm), ThinpoolTotalBytes: uint64(size.Pool),
	}, nil
}
