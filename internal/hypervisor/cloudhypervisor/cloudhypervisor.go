// Package cloudhypervisor runs VMs with Cloud Hypervisor: one detached, unprivileged process per VM, controlled over its HTTP API.
//
// A VM's process has a root of its own (proc.Root) with the files that the plan names, and nothing else. It inherits its API socket, console and
// logs as descriptors, and gets taps over the API. The package creates no disk, tap or image, keeps no record of VMs, and does not decide when
// VMs start or stop. It always needs KVM.
package cloudhypervisor

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"time"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/hypervisor"
	"cocoonstack.io/cocoon/internal/hypervisor/jail"
	"cocoonstack.io/cocoon/internal/hypervisor/savedmemory"
	"cocoonstack.io/cocoon/internal/vm"
)

// Name is the driver's name in records and handles.
const Name = "cloud-hypervisor"

// Default values of Config.
const (
	DefaultBinary     = "cloud-hypervisor"
	DefaultCgroup     = "cocoon"
	DefaultLogLimit   = 1 << 20 // bytes
	DefaultLaunchTime = time.Minute
)

// oldest is the first version whose API has all that the driver uses, and which survives a tap that refuses packets (see pass).
const oldest = 53

// Config configures a Driver. Zero fields take their defaults.
type Config struct {
	Binary     string        // name looked up in PATH, or a path
	Firmware   []string      // where a firmware for disk guests may be; the driver uses the first path that exists
	UIDBase    uint32        // first of the user ids for VM processes; each VM has its own, which is also its group id
	UIDCount   uint32        // number of user ids
	Users      *jail.Users   // the same user ids, shared with other drivers; nil: of this driver alone
	Cgroup     string        // folder in the cgroup v2 tree that holds one folder per VM
	Folder     string        // of the files of VMs: where its file system cannot give them to processes, the driver is not available; "": it does not look
	LogLimit   int64         // bytes of console log, and of each other log, kept per VM
	Templates  int64         // bytes of memory for saved guests from which no VM runs; default: a quarter of the host's
	LaunchTime time.Duration // time limit for a new process to start its VM; after it the launch fails. Huge pages, which it clears before, have a second more per GiB
	AnswerTime time.Duration // time limit for an answer that costs the process no time; after it the call fails
}

func (c Config) withDefaults() Config {
	set(&c.Binary, DefaultBinary)
	set(&c.UIDBase, jail.DefaultUIDBase)
	set(&c.UIDCount, jail.DefaultUIDCount)
	set(&c.Cgroup, DefaultCgroup)
	set(&c.LogLimit, DefaultLogLimit)
	set(&c.LaunchTime, DefaultLaunchTime)
	set(&c.AnswerTime, jail.DefaultAnswerTime)
	set(&c.Templates, savedmemory.HostBytes()/4)
	if c.Firmware == nil {
		c.Firmware = []string{"/usr/share/cloud-hypervisor/CLOUDHV.fd", "/usr/share/cloudhv-efi-x86-64/CLOUDHV.fd", "/usr/share/cloud-hypervisor/hypervisor-fw"}
	}
	return c
}

func set[T comparable](field *T, value T) {
	var zero T
	if *field == zero {
		*field = value
	}
}

// Driver is the driver of Cloud Hypervisor. Its methods are safe for concurrent use.
type Driver struct {
	cfg    Config
	log    *slog.Logger
	jail   *jail.Jail
	memory *savedmemory.Cache
	giving *jail.Giving

	version jail.Program[string]
}

// program is the program of the node.
type program struct{ path, version string }

var (
	_ hypervisor.Driver         = (*Driver)(nil)
	_ hypervisor.Checker        = (*Driver)(nil)
	_ hypervisor.DiskReader     = (*Driver)(nil)
	_ hypervisor.ExitTeller     = (*Driver)(nil)
	_ hypervisor.FirmwareTeller = (*Driver)(nil)
	_ hypervisor.MachineTeller  = (*Driver)(nil)
	_ hypervisor.Seeker         = (*Driver)(nil)
)

// New returns a driver. It touches nothing; Probe reports whether it can work here.
func New(cfg Config, log *slog.Logger) (*Driver, error) {
	cfg = cfg.withDefaults()
	if cfg.LaunchTime < 0 || cfg.AnswerTime < 0 {
		return nil, errdefs.Invalidf("configuration of the driver of Cloud Hypervisor: the times for a launch and an answer must be positive")
	}
	for _, path := range cfg.Firmware {
		if !filepath.IsAbs(path) {
			return nil, errdefs.Invalidf("configuration of the driver of Cloud Hypervisor: the path %q of a firmware is not absolute", path)
		}
	}
	d := &Driver{cfg: cfg, log: log.With("component", Name), memory: savedmemory.NewCache(cfg.Templates), giving: &jail.Giving{Folder: cfg.Folder}}
	users, err := cfg.Users, error(nil)
	if users == nil {
		users, err = jail.NewUsers(cfg.UIDBase, cfg.UIDCount)
	}
	if err == nil {
		d.jail, err = jail.New(jail.Config{
			Users: users, Cgroup: cfg.Cgroup, LogLimit: cfg.LogLimit, Logs: []string{jail.ConsoleLog, programLog, eventLog}, Sockets: []string{apiSocket}, Mark: markOf,
		}, d.log)
	}
	if err != nil {
		return nil, fmt.Errorf("configuration of the driver of Cloud Hypervisor: %w", err)
	}
	return d, nil
}

// markPrefix begins the name of each process, which ends with the UUID of its VM.
const markPrefix = "cloud-hypervisor:"

func marker(uuid string) string { return markPrefix + uuid }

func markOf(args []string) string {
	if len(args) == 0 {
		return ""
	}
	uuid, ok := strings.CutPrefix(args[0], markPrefix)
	if !ok {
		return ""
	}
	return uuid
}

// Name implements hypervisor.Driver.
func (d *Driver) Name() string { return Name }

// RawOnly implements hypervisor.DiskReader: the program cannot change the disks of a guest, so nobody can put an overlay on one.
func (d *Driver) RawOnly() bool { return true }

// Firmware implements hypervisor.FirmwareTeller.
func (d *Driver) Firmware() vm.Firmware { return vm.FirmwareUEFI }

// Check implements hypervisor.Checker.
func (d *Driver) Check(_ context.Context, p hypervisor.Plan) error { return check(p, d.firmwarePath()) }

// Machine implements hypervisor.MachineTeller.
func (d *Driver) Machine(ctx context.Context, accel vm.Accel) (vm.Machine, error) {
	if accel == vm.AccelTCG {
		return vm.Machine{}, errdefs.Unsupportedf("Cloud Hypervisor needs kvm")
	}
	p, err := d.program(ctx)
	if err != nil {
		return vm.Machine{}, err
	}
	return machineOf(p.version), nil
}

// machineOf describes what a guest depends on. The format of saved state has no version of its own, so another version of the program is another machine.
func machineOf(version string) vm.Machine {
	return vm.Machine{Driver: Name, Version: version, Type: "snapshot-" + version, Arch: runtime.GOARCH, Accel: vm.AccelKVM, CPU: "host", Flags: jail.HostFlags()}
}

// Probe implements hypervisor.Driver.
func (d *Driver) Probe(ctx context.Context) (hypervisor.Info, error) {
	p, err := d.program(ctx)
	if err != nil {
		return hypervisor.Info{}, err
	}
	if err := d.giving.Check("Cloud Hypervisor"); err != nil {
		return hypervisor.Info{}, err
	}
	if problem := jail.ReadKVM().Problem(); problem != "" {
		return hypervisor.Info{}, errdefs.Unavailablef("Cloud Hypervisor needs KVM: %s", problem)
	}
	info := hypervisor.Info{Version: p.version, Accel: vm.AccelKVM, Why: "Cloud Hypervisor works with kvm alone", Isolated: d.jail.Cgroups.Usable()}
	if os.Geteuid() != 0 {
		info.Notes = append(info.Notes, "starting VMs needs root: each VM gets its own user, namespaces and cgroup")
	}
	if d.firmwarePath() == "" {
		info.Notes = append(info.Notes, "it boots no disk images, because there is no firmware at "+strings.Join(d.cfg.Firmware, " or ")+"; see docs/hypervisors.md")
	} else {
		info.Firmware = []vm.Firmware{vm.FirmwareUEFI}
	}
	info.Notes = append(info.Notes, d.jail.Cgroups.Notes()...)
	return info, nil
}

func (d *Driver) firmwarePath() string {
	for _, path := range d.cfg.Firmware {
		if st, err := os.Stat(path); err == nil && st.Mode().IsRegular() {
			return path
		}
	}
	return ""
}

// program finds the program and asks for its version.
func (d *Driver) program(ctx context.Context) (program, error) {
	path, err := jail.FindProgram(d.cfg.Binary, "Cloud Hypervisor", "install the program from https://github.com/cloud-hypervisor/cloud-hypervisor/releases as /usr/local/bin/cloud-hypervisor")
	if err != nil {
		return program{}, err
	}
	version, err := d.version.Facts(ctx, path, ask)
	return program{path, version}, err
}

func ask(ctx context.Context, path string) (string, error) {
	text, err := jail.Output(ctx, path, "--version")
	if err == nil {
		text, err = versionOf(text)
	}
	if err != nil {
		return "", fmt.Errorf("ask %s for its version: %w", path, err)
	}
	return text, nil
}

// versionOf reads what the program prints, such as "cloud-hypervisor v53.0".
func versionOf(text string) (string, error) {
	fields := strings.Fields(text)
	if len(fields) < 2 || fields[0] != "cloud-hypervisor" {
		return "", errdefs.Unavailablef("it answers %.40q, so it is not Cloud Hypervisor", text)
	}
	version := strings.TrimPrefix(fields[1], "v")
	major, _, _ := strings.Cut(version, ".")
	switch n, err := strconv.Atoi(major); {
	case err != nil:
		return "", errdefs.Unavailablef("it answers %.40q, so its version is not known", text)
	case n < oldest:
		return "", errdefs.Unavailablef("its version is %s; install version %d or newer", version, oldest)
	}
	return version, nil
}

// Reap implements hypervisor.Driver.
func (d *Driver) Reap(ctx context.Context, id vm.ID, dir string) error {
	return d.jail.Reap(ctx, id, dir)
}

// Seek implements hypervisor.Seeker with one scan of all processes.
func (d *Driver) Seek(ctx context.Context, ids []vm.ID) (map[vm.ID][]int, error) {
	return d.jail.Seek(ctx, ids)
}

// Adopt implements hypervisor.Driver.
func (d *Driver) Adopt(ctx context.Context, raw hypervisor.Handle) (hypervisor.Instance, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	h, err := decodeHandle(raw)
	if err != nil {
		return nil, err
	}
	p, err := d.jail.Open(h.Handle, marker(h.UUID), func() bool { return jail.Listens(ctx, h.Dir, apiSocket) }, nil)
	if err != nil {
		return nil, err
	}
	i := newInstance(d, h, raw, p)
	i.recall()
	i.Supervise(ctx, i.supervise)
	return i, nil
}

// LastExit implements hypervisor.ExitTeller.
func (d *Driver) LastExit(_ context.Context, raw hypervisor.Handle) (hypervisor.Exit, error) {
	h, err := decodeHandle(raw)
	if err != nil {
		return hypervisor.Exit{}, err
	}
	reason, err := h.lastReason()
	return h.LastExit(reason, err, jail.Ended)
}
