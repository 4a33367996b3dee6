// Package firecracker runs VMs with Firecracker: one detached, unprivileged process per VM, controlled over its HTTP API.
//
// A VM's process has a root of its own (proc.Root) with the files that the plan names, and nothing else, and an empty network namespace. Its sockets are in a folder
// that its user owns. The package creates no disk, tap or image, keeps no record of VMs, and does not decide when VMs start or stop. It always needs
// KVM.
package firecracker

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"regexp"
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
const Name = "firecracker"

// Default values of Config.
const (
	DefaultBinary     = "firecracker"
	DefaultCgroup     = "cocoon"
	DefaultLogLimit   = 1 << 20 // bytes
	DefaultLaunchTime = time.Minute
)

// oldest is the first version whose API has all that the driver uses.
var oldest = [2]int{1, 14}

// Config configures a Driver. Zero fields take their defaults.
type Config struct {
	Binary     string        // name looked up in PATH, or a path
	UIDBase    uint32        // first of the user ids for VM processes; each VM has its own, which is also its group id
	UIDCount   uint32        // number of user ids
	Users      *jail.Users   // the same user ids, shared with other drivers; nil: of this driver alone
	Cgroup     string        // folder in the cgroup v2 tree that holds one folder per VM
	Folder     string        // of the files of VMs: where its file system cannot give them to processes, the driver is not available; "": it does not look
	LogLimit   int64         // bytes of console log, and of each other log, kept per VM
	Templates  int64         // bytes of memory for saved guests from which no VM runs; default: a quarter of the host's
	LaunchTime time.Duration // time limit for a new process to start its VM; after it the launch fails. It stands still while memory comes later
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
	return c
}

func set[T comparable](field *T, value T) {
	var zero T
	if *field == zero {
		*field = value
	}
}

// Driver is the driver of Firecracker. Its methods are safe for concurrent use.
type Driver struct {
	cfg    Config
	log    *slog.Logger
	jail   *jail.Jail
	memory *savedmemory.Cache
	giving *jail.Giving

	facts jail.Program[facts]
}

// program is the program of the node.
type program struct {
	path string
	facts
}

// facts are what a program says of itself.
type facts struct {
	version string
	format  string // of saved state
}

var (
	_ hypervisor.Driver        = (*Driver)(nil)
	_ hypervisor.Checker       = (*Driver)(nil)
	_ hypervisor.DiskReader    = (*Driver)(nil)
	_ hypervisor.ExitTeller    = (*Driver)(nil)
	_ hypervisor.LateLoader    = (*Driver)(nil)
	_ hypervisor.MachineTeller = (*Driver)(nil)
	_ hypervisor.Seeker        = (*Driver)(nil)
)

// New returns a driver. It touches nothing; Probe reports whether it can work here.
func New(cfg Config, log *slog.Logger) (*Driver, error) {
	cfg = cfg.withDefaults()
	if cfg.LaunchTime < 0 || cfg.AnswerTime < 0 {
		return nil, errdefs.Invalidf("configuration of the driver of Firecracker: the times for a launch and an answer must be positive")
	}
	d := &Driver{cfg: cfg, log: log.With("component", Name), memory: savedmemory.NewCache(cfg.Templates), giving: &jail.Giving{Folder: cfg.Folder}}
	users, err := cfg.Users, error(nil)
	if users == nil {
		users, err = jail.NewUsers(cfg.UIDBase, cfg.UIDCount)
	}
	if err == nil {
		d.jail, err = jail.New(jail.Config{
			Users: users, Cgroup: cfg.Cgroup, LogLimit: cfg.LogLimit, Logs: []string{jail.ConsoleLog, programLog, errorLog, memoryLog}, Mark: markOf,
		}, d.log)
	}
	if err != nil {
		return nil, fmt.Errorf("configuration of the driver of Firecracker: %w", err)
	}
	return d, nil
}

// markPrefix begins the name of each process, which ends with the UUID of its VM.
const markPrefix = "firecracker:"

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

// RawOnly implements hypervisor.DiskReader.
func (d *Driver) RawOnly() bool { return true }

// Check implements hypervisor.Checker.
func (d *Driver) Check(_ context.Context, p hypervisor.Plan) error { return check(p) }

// Probe implements hypervisor.Driver.
func (d *Driver) Probe(ctx context.Context) (hypervisor.Info, error) {
	p, err := d.program(ctx)
	if err != nil {
		return hypervisor.Info{}, err
	}
	if err := d.giving.Check("Firecracker"); err != nil {
		return hypervisor.Info{}, err
	}
	if problem := jail.ReadKVM().Problem(); problem != "" {
		return hypervisor.Info{}, errdefs.Unavailablef("Firecracker needs KVM: %s", problem)
	}
	info := hypervisor.Info{Version: p.version, Accel: vm.AccelKVM, Why: "Firecracker works with kvm alone", Isolated: d.jail.Cgroups.Usable()}
	if os.Geteuid() != 0 {
		info.Notes = append(info.Notes, "starting VMs needs root: each VM gets its own user, namespaces and cgroup")
	}
	info.Notes = append(info.Notes, d.jail.Cgroups.Notes()...)
	return info, nil
}

// Machine implements hypervisor.MachineTeller.
func (d *Driver) Machine(ctx context.Context, accel vm.Accel) (vm.Machine, error) {
	if accel == vm.AccelTCG {
		return vm.Machine{}, errdefs.Unsupportedf("Firecracker needs kvm")
	}
	p, err := d.program(ctx)
	if err != nil {
		return vm.Machine{}, err
	}
	return machineOf(p.facts), nil
}

// machineOf describes what a guest depends on. The type is the format of the saved state, which a program reads if it writes it.
func machineOf(f facts) vm.Machine {
	return vm.Machine{Driver: Name, Version: f.version, Type: "snapshot-" + f.format, Arch: runtime.GOARCH, Accel: vm.AccelKVM, CPU: "host", Flags: jail.HostFlags()}
}

// program finds the program and asks for its version.
func (d *Driver) program(ctx context.Context) (program, error) {
	path, err := jail.FindProgram(d.cfg.Binary, "Firecracker", "install the program from https://github.com/firecracker-microvm/firecracker/releases as /usr/local/bin/firecracker")
	if err != nil {
		return program{}, err
	}
	known, err := d.facts.Facts(ctx, path, ask)
	return program{path, known}, err
}

func ask(ctx context.Context, path string) (f facts, err error) {
	f.version, err = jail.Output(ctx, path, "--version")
	if err == nil {
		f.version, err = versionOf(f.version)
	}
	if err == nil {
		f.format, err = jail.Output(ctx, path, "--snapshot-version")
	}
	if err == nil {
		f.format, err = formatOf(f.format)
	}
	if err != nil {
		return facts{}, fmt.Errorf("ask %s for its version: %w", path, err)
	}
	return f, nil
}

var (
	versionRE = regexp.MustCompile(`(?m)^Firecracker v((\d{1,6})\.(\d{1,6})\.\d{1,6}\S{0,40})`)
	formatRE  = regexp.MustCompile(`(?m)^v(\d{1,6}\.\d{1,6}\.\d{1,6})\r?$`)
)

// versionOf reads what the program prints, which begins with a line such as "Firecracker v1.16.1".
func versionOf(text string) (string, error) {
	m := versionRE.FindStringSubmatch(text)
	if m == nil {
		return "", errdefs.Unavailablef("it answers %.40q, so it is not Firecracker, or its version is not known", text)
	}
	major, _ := strconv.Atoi(m[2])
	minor, _ := strconv.Atoi(m[3])
	if major < oldest[0] || major == oldest[0] && minor < oldest[1] {
		return "", errdefs.Unavailablef("its version is %s; install version %d.%d or newer", m[1], oldest[0], oldest[1])
	}
	return m[1], nil
}

// formatOf reads the version of the format of saved state, such as "v10.0.0".
func formatOf(text string) (string, error) {
	m := formatRE.FindStringSubmatch(text)
	if m == nil {
		return "", errdefs.Unavailablef("it answers %.40q, so the format of its saved state is not known", text)
	}
	return m[1], nil
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
	p, err := d.jail.Open(h.Handle, marker(h.UUID), func() bool { return h.RecordedLater(marker(h.UUID)) }, nil)
	if err != nil {
		return nil, err
	}
	i := newInstance(d, h, raw, p)
	i.adoptPager()
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
	return h.LastExit(reason, err, h.exit)
}
