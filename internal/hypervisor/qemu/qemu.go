// Package qemu runs VMs with QEMU: one detached, unprivileged process per VM, controlled over QMP.
//
// A VM's process opens nothing below the state folder by itself. It inherits disks, kernel, taps and listening sockets as
// descriptors, so it needs no permission on any path there. The package creates no disk, tap or image, keeps no record of VMs,
// and does not decide when VMs start or stop.
package qemu

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"time"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/hypervisor"
	"cocoonstack.io/cocoon/internal/hypervisor/jail"
	"cocoonstack.io/cocoon/internal/hypervisor/savedmemory"
	"cocoonstack.io/cocoon/internal/hypervisor/tsc"
	"cocoonstack.io/cocoon/internal/vm"
)

// Name is the driver's name in records and handles.
const Name = "qemu"

// Default values of Config.
const (
	DefaultBinary     = "qemu-system-x86_64"
	DefaultUIDBase    = jail.DefaultUIDBase
	DefaultUIDCount   = jail.DefaultUIDCount
	DefaultCgroup     = "cocoon"
	DefaultTBSize     = 128 // MiB; without a limit the code cache of a busy guest grows to 600 MiB
	DefaultSparePorts = 4
	DefaultLogLimit   = 1 << 20 // bytes
	DefaultLaunchTime = time.Minute
)

// Config configures a Driver. Zero fields take their defaults.
type Config struct {
	Binary       string        // name looked up in PATH, or a path
	UIDBase      uint32        // first of the user ids for VM processes; each VM has its own, which is also its group id
	UIDCount     uint32        // number of user ids
	Users        *jail.Users   // the same user ids, shared with other drivers; nil: of this driver alone
	Cgroup       string        // folder in the cgroup v2 tree that holds one folder per VM
	TBSize       int           // MiB of translated code that emulation may keep per VM
	SparePorts   int           // free hot-plug ports per VM
	LogLimit     int64         // bytes of console log, and of QEMU's own log, kept per VM
	LaunchTime   time.Duration // time limit for a new process to answer; after it the launch fails
	MemoryCache  int64         // bytes of saved memory kept loaded while no VM uses it; default an eighth of the host's
	FirmwareDirs []string      // folders to search for OVMF, qboot and SeaBIOS
	SWTPM        string        // name looked up in PATH, or a path
	Virtiofsd    []string      // where virtiofsd may be; the driver uses the first path that exists
}

func (c Config) withDefaults() Config {
	set(&c.Binary, DefaultBinary)
	set(&c.SWTPM, "swtpm")
	set(&c.UIDBase, DefaultUIDBase)
	set(&c.UIDCount, DefaultUIDCount)
	set(&c.Cgroup, DefaultCgroup)
	set(&c.TBSize, DefaultTBSize)
	set(&c.SparePorts, DefaultSparePorts)
	set(&c.LogLimit, DefaultLogLimit)
	set(&c.LaunchTime, DefaultLaunchTime)
	set(&c.MemoryCache, savedmemory.HostBytes()/8)
	if c.FirmwareDirs == nil {
		c.FirmwareDirs = []string{"/usr/share/OVMF", "/usr/share/edk2/ovmf", "/usr/share/edk2/x64", "/usr/share/qemu", "/usr/share/seabios"}
	}
	if c.Virtiofsd == nil {
		c.Virtiofsd = []string{"/usr/lib/qemu/virtiofsd", "/usr/libexec/virtiofsd", "/usr/lib/virtiofsd"}
	}
	return c
}

func set[T comparable](field *T, value T) {
	var zero T
	if *field == zero {
		*field = value
	}
}

// Driver is the QEMU driver. Its methods are safe for concurrent use.
type Driver struct {
	cfg    Config
	log    *slog.Logger
	jail   *jail.Jail
	memory *savedmemory.Cache
	tscKHz func() int // see tsc.New

	trustEmulator bool // for tests that save a running guest without KVM; see save.tracked

	facts jail.Program[binaryFacts]
}

var (
	_ hypervisor.Driver        = (*Driver)(nil)
	_ hypervisor.ExitTeller    = (*Driver)(nil)
	_ hypervisor.MachineTeller = (*Driver)(nil)
	_ hypervisor.Seeker        = (*Driver)(nil)
)

// New returns a driver. It touches nothing; Probe reports whether it can work here.
func New(cfg Config, log *slog.Logger) (*Driver, error) {
	cfg = cfg.withDefaults()
	switch {
	case cfg.TBSize < 1 || cfg.SparePorts < 0 || cfg.LaunchTime < 0 || cfg.MemoryCache < 0:
		return nil, errdefs.Invalidf("configuration of the qemu driver: sizes must be positive")
	}
	d := &Driver{cfg: cfg, log: log.With("component", "qemu"), memory: savedmemory.NewCache(cfg.MemoryCache), tscKHz: tsc.New()}
	users, err := cfg.Users, error(nil)
	if users == nil {
		users, err = jail.NewUsers(cfg.UIDBase, cfg.UIDCount)
	}
	if err == nil {
		d.jail, err = jail.New(jail.Config{
			Users: users, Cgroup: cfg.Cgroup, LogLimit: cfg.LogLimit, Logs: []string{consoleLog, qemuLog, shareLog}, Sockets: sockets, Mark: markOf,
		}, d.log)
	}
	if err != nil {
		return nil, fmt.Errorf("configuration of the qemu driver: %w", err)
	}
	return d, nil
}

// Name implements hypervisor.Driver.
func (d *Driver) Name() string { return Name }

// Probe implements hypervisor.Driver.
func (d *Driver) Probe(ctx context.Context) (hypervisor.Info, error) {
	bin, err := d.binary()
	if err != nil {
		return hypervisor.Info{}, err
	}
	facts, err := d.facts.Facts(ctx, bin, ask)
	if err != nil {
		return hypervisor.Info{}, err
	}
	accel, why, err := resolve(jail.ReadKVM(), vm.AccelAuto)
	if err != nil {
		return hypervisor.Info{}, err
	}
	if accel == vm.AccelTCG {
		go d.tscKHz() // so that the first launch does not wait for the measurement
	}
	info := hypervisor.Info{Version: facts.version, Accel: accel, Why: why, Firmware: []vm.Firmware{vm.FirmwareBIOS}}
	if code, _ := d.ovmf(false); code != "" {
		info.Firmware = append(info.Firmware, vm.FirmwareUEFI)
	} else {
		info.Notes = append(info.Notes, "UEFI guests need OVMF; run `apt-get install ovmf`")
	}
	if code, _ := d.ovmf(true); code == "" {
		info.Notes = append(info.Notes, "guests with Secure Boot need OVMF with Microsoft's keys; run `apt-get install ovmf`")
	}
	if _, err := d.swtpm(); err != nil {
		info.Notes = append(info.Notes, "guests with a TPM need swtpm; run `apt-get install swtpm`")
	}
	if d.firmware("qboot.rom") == "" {
		info.Notes = append(info.Notes, "qboot.rom is missing; container guests boot through SeaBIOS, which takes longer")
	}
	if os.Geteuid() != 0 {
		info.Notes = append(info.Notes, "starting VMs needs root: each VM gets its own user, namespaces and cgroup")
	}
	info.Isolated = d.jail.Cgroups.Usable()
	info.Notes = append(info.Notes, d.jail.Cgroups.Notes()...)
	return info, nil
}

func (d *Driver) binary() (string, error) {
	return jail.FindProgram(d.cfg.Binary, "QEMU", "run `apt-get install qemu-system-x86`")
}

// firmware finds a firmware file by name, "" if this host does not have it.
func (d *Driver) firmware(name string) string {
	for _, dir := range d.cfg.FirmwareDirs {
		path := filepath.Join(dir, name)
		if st, err := os.Stat(path); err == nil && st.Mode().IsRegular() {
			return path
		}
	}
	return ""
}
