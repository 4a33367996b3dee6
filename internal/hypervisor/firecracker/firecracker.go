// Package firecracker runs VMs with Firecracker: one detached, unprivileged process per VM, controlled over its HTTP API.
//
// A VM's process has a root of its own (proc.Root) with the files that the plan names, and nothing else, and an empty network namespace. Its sockets are in a folder
// that its user owns. The package creates no disk, tap or image, keeps no record of VMs, and does not decide when VMs start or stop. It always needs
// KVM.
package firecracker

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"strconv"
	"strings"
	"sync"
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
	LogLimit   int64         // bytes of console log, and of each other log, kept per VM
	Templates  int64         // bytes of memory for saved guests from which no VM runs; default: a quarter of the host's
	LaunchTime time.Duration // time limit for a new process to answer; after it the launch fails
}

func (c Config) withDefaults() Config {
	set(&c.Binary, DefaultBinary)
	set(&c.UIDBase, jail.DefaultUIDBase)
	set(&c.UIDCount, jail.DefaultUIDCount)
	set(&c.Cgroup, DefaultCgroup)
	set(&c.LogLimit, DefaultLogLimit)
	set(&c.LaunchTime, DefaultLaunchTime)
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

	mu    sync.Mutex
	known program
}

// program is what is known of one file, as long as it is unchanged.
type program struct {
	path    string
	size    int64
	mtime   time.Time
	version string
	format  string // of saved state
}

var (
	_ hypervisor.Driver        = (*Driver)(nil)
	_ hypervisor.Checker       = (*Driver)(nil)
	_ hypervisor.DiskReader    = (*Driver)(nil)
	_ hypervisor.ExitTeller    = (*Driver)(nil)
	_ hypervisor.MachineTeller = (*Driver)(nil)
	_ hypervisor.Seeker        = (*Driver)(nil)
)

// New returns a driver. It touches nothing; Probe reports whether it can work here.
func New(cfg Config, log *slog.Logger) (*Driver, error) {
	cfg = cfg.withDefaults()
	if cfg.LaunchTime < 0 {
		return nil, errdefs.Invalidf("configuration of the driver of Firecracker: the time for a launch must be positive")
	}
	d := &Driver{cfg: cfg, log: log.With("component", Name), memory: savedmemory.NewCache(cfg.Templates)}
	users, err := cfg.Users, error(nil)
	if users == nil {
		users, err = jail.NewUsers(cfg.UIDBase, cfg.UIDCount)
	}
	if err == nil {
		d.jail, err = jail.New(jail.Config{
			Users: users, Cgroup: cfg.Cgroup, LogLimit: cfg.LogLimit, Logs: []string{consoleLog, programLog, errorLog}, Private: privateDir, Mark: markOf,
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
	return machineOf(p), nil
}

// machineOf describes what a guest depends on. The type is the format of the saved state, which a program reads if it writes it.
func machineOf(p program) vm.Machine {
	return vm.Machine{Driver: Name, Version: p.version, Type: "snapshot-" + p.format, Arch: runtime.GOARCH, Accel: vm.AccelKVM, CPU: "host", Flags: jail.HostFlags()}
}

// program finds the program and asks for its version.
func (d *Driver) program(ctx context.Context) (program, error) {
	path, err := exec.LookPath(d.cfg.Binary)
	if err == nil {
		path, err = filepath.Abs(path)
	}
	if err == nil {
		path, err = filepath.EvalSymlinks(path)
	}
	if err != nil {
		return program{}, errdefs.Unavailablef("Firecracker is not installed (%w); install the program from https://github.com/firecracker-microvm/firecracker/releases as /usr/local/bin/firecracker", err)
	}
	st, err := os.Stat(path)
	if err != nil {
		return program{}, errdefs.Unavailablef("look at Firecracker: %w", err)
	}
	p := program{path: path, size: st.Size(), mtime: st.ModTime()}
	d.mu.Lock()
	known := d.known
	d.mu.Unlock()
	if p.version, p.format = known.version, known.format; p == known {
		return known, nil
	}
	if p.version, p.format, err = ask(ctx, path); err != nil {
		return program{}, fmt.Errorf("ask %s for its version: %w", path, err)
	}
	d.mu.Lock()
	d.known = p
	d.mu.Unlock()
	return p, nil
}

func ask(ctx context.Context, path string) (version, format string, err error) {
	for arg, of := range map[string]*string{"--version": &version, "--snapshot-version": &format} {
		out, err := exec.CommandContext(ctx, path, arg).Output()
		if ctx.Err() != nil {
			return "", "", ctx.Err()
		}
		if err != nil {
			return "", "", errdefs.Unavailablef("%s: %w", arg, err)
		}
		*of = string(out)
	}
	if version, err = versionOf(version); err != nil {
		return "", "", err
	}
	format, err = formatOf(format)
	return version, format, err
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
	i, err := d.adopt(ctx, h)
	if err != nil {
		return nil, fmt.Errorf("adopt VM %s: %w", h.ID, err)
	}
	i.raw = append(hypervisor.Handle(nil), raw...)
	i.run(ctx)
	return i, nil
}

// LastExit implements hypervisor.ExitTeller.
func (d *Driver) LastExit(_ context.Context, raw hypervisor.Handle) (hypervisor.Exit, error) {
	h, err := decodeHandle(raw)
	if err != nil {
		return hypervisor.Exit{}, err
	}
	reason, err := h.lastReason()
	if err != nil {
		return hypervisor.Exit{}, fmt.Errorf("VM %s: %w", h.ID, err)
	}
	if reason == "" {
		return hypervisor.Exit{}, errdefs.NotFoundf("the end of VM %s was not recorded", h.ID)
	}
	return ended(reason), nil
}

// joinClear is the error of a VM that has ended, with what could not be removed of it.
func (d *Driver) joinClear(err error, h handle) error {
	return errors.Join(err, d.jail.Clear(h.ID, h.Dir, h.Cgroup))
}
