// Package qemu runs VMs with QEMU: one detached, unprivileged process per VM, controlled over QMP.
//
// A VM's process opens nothing below the state folder by itself. It inherits disks, kernel, taps and listening sockets as
// descriptors, so it needs no permission on any path there. The package creates no disk, tap or image, keeps no record of VMs,
// and does not decide when VMs start or stop.
package qemu

import (
	"context"
	"crypto/sha256"
	"fmt"
	"hash/fnv"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"time"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/hypervisor"
	"cocoonstack.io/cocoon/internal/vm"
)

// Name is the driver's name in records and handles.
const Name = "qemu"

// Default values of Config.
const (
	DefaultBinary     = "qemu-system-x86_64"
	DefaultUIDBase    = 0x70000000 // above every range that distributions and systemd assign
	DefaultUIDCount   = 0x0fffffff
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
	set(&c.MemoryCache, hostMemory()/8)
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
	logs   keeper
	memory templates
	tscKHz func() int // see newTSC

	trustEmulator bool // for tests that save a running guest without KVM; see save.tracked

	mu    sync.Mutex
	uids  map[uint32]bool // user ids of the instances in use
	facts factsCache
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
	case cfg.TBSize < 1 || cfg.SparePorts < 0 || cfg.LogLimit < 4096 || cfg.LaunchTime < 0 || cfg.MemoryCache < 0:
		return nil, errdefs.Invalidf("configuration of the qemu driver: sizes must be positive and logs at least 4096 bytes")
	case cfg.UIDBase+cfg.UIDCount < cfg.UIDBase || cfg.UIDBase < 1000:
		return nil, errdefs.Invalidf("configuration of the qemu driver: invalid range of user ids (first %d, count %d); the first must be at least 1000", cfg.UIDBase, cfg.UIDCount)
	case cfg.Cgroup != filepath.Base(cfg.Cgroup) || cfg.Cgroup == "." || cfg.Cgroup == "..":
		return nil, errdefs.Invalidf("configuration of the qemu driver: cgroup %q must be a single name", cfg.Cgroup)
	}
	d := &Driver{cfg: cfg, log: log.With("component", "qemu"), tscKHz: newTSC(), uids: map[uint32]bool{}}
	d.logs.limit = cfg.LogLimit
	d.memory.budget = cfg.MemoryCache
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
	facts, err := d.binaryFacts(ctx, bin)
	if err != nil {
		return hypervisor.Info{}, err
	}
	accel, why, err := readKVMFacts().resolve(vm.AccelAuto)
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
	groups := d.cgroups()
	info.Isolated = groups.usable()
	info.Notes = append(info.Notes, groups.notes()...)
	return info, nil
}

func (d *Driver) binary() (string, error) {
	bin, err := exec.LookPath(d.cfg.Binary)
	if err != nil {
		return "", errdefs.Unavailablef("QEMU is not installed (%w); run `apt-get install qemu-system-x86`", err)
	}
	return filepath.Abs(bin)
}

// factsCache caches the facts of one binary as long as its file is unchanged.
type factsCache struct {
	path  string
	size  int64
	mtime time.Time
	value binaryFacts
}

func (d *Driver) binaryFacts(ctx context.Context, bin string) (binaryFacts, error) {
	st, err := os.Stat(bin)
	if err != nil {
		return binaryFacts{}, errdefs.Unavailablef("look at QEMU: %w", err)
	}
	key := factsCache{path: bin, size: st.Size(), mtime: st.ModTime()}
	d.mu.Lock()
	known := d.facts
	d.mu.Unlock()
	if key.value = known.value; key == known {
		return known.value, nil
	}
	if key.value, err = ask(ctx, bin); err != nil {
		return binaryFacts{}, err
	}
	d.mu.Lock()
	d.facts = key
	d.mu.Unlock()
	return key.value, nil
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

// uuidOf is the UUID by which the guest knows its VM, and by which we find it in the process list: a version 8 UUID (RFC 9562)
// made from the hash of its id.
func uuidOf(id vm.ID) string {
	sum := sha256.Sum256([]byte("cocoonstack.io/vm/" + string(id)))
	sum[6], sum[8] = sum[6]&0x0f|0x80, sum[8]&0x3f|0x80
	return fmt.Sprintf("%x-%x-%x-%x-%x", sum[0:4], sum[4:6], sum[6:8], sum[8:10], sum[10:16])
}

// takeUID assigns a user id to VM id. It depends only on the id, unless another instance in use has the same one.
func (d *Driver) takeUID(id vm.ID) (uint32, error) {
	h := fnv.New32a()
	_, _ = h.Write([]byte(id))
	first := h.Sum32() % d.cfg.UIDCount
	d.mu.Lock()
	defer d.mu.Unlock()
	for i := range d.cfg.UIDCount {
		uid := d.cfg.UIDBase + (first+i)%d.cfg.UIDCount
		if !d.uids[uid] {
			d.uids[uid] = true
			return uid, nil
		}
	}
	return 0, errdefs.Exhaustedf("all %d user ids for VMs are in use; configure a larger range", d.cfg.UIDCount)
}

func (d *Driver) holdUID(uid uint32) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.uids[uid] = true
}

func (d *Driver) dropUID(uid uint32) {
	d.mu.Lock()
	defer d.mu.Unlock()
	delete(d.uids, uid)
}

func (d *Driver) ownUID(uid uint32) bool {
	return uid >= d.cfg.UIDBase && uid-d.cfg.UIDBase < d.cfg.UIDCount
}
