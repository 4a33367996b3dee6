// Package lvm is the volume store on a thin pool of LVM: each volume and each snapshot is a thin logical volume.
//
// It makes no volume group and no pool, and grows neither. It reads nothing of what is on a volume, except to export it. It changes
// only logical volumes that it has made, and says which those are by their names, their tag, and its records.
package lvm

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"time"

	"cocoonstack.io/cocoon/internal/atomicfile"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/filelock"
	"cocoonstack.io/cocoon/internal/vm"
	"cocoonstack.io/cocoon/internal/volume"
	"cocoonstack.io/cocoon/internal/volume/record"
)

var (
	_ volume.Store       = (*Store)(nil)
	_ volume.Maker       = (*Store)(nil)
	_ volume.Snapshotter = (*Store)(nil)
	_ volume.LiveChecker = (*Store)(nil)
	_ volume.Cloner      = (*Store)(nil)
	_ volume.Carrier     = (*Store)(nil)
	_ volume.Pooled      = (*Store)(nil)
)

// Kind is the kind of all volumes of this store.
const Kind = "lvm"

// Defaults of Config, in percent of the pool's space for data, or of that for metadata.
const (
	DefaultWarn   = 80
	DefaultRefuse = 90
)

// Config configures the store.
type Config struct {
	Dir    string // of the records; absolute; created when missing, mode 0700
	Pool   string // VG/POOL, a thin pool
	Warn   int    // how full the pool is when the log says so; 0: DefaultWarn
	Refuse int    // how full it is when no volume can be made or grown; 0: DefaultRefuse
	Log    *slog.Logger
}

// Store implements volume.Store and all its abilities. Its folder:
//
//	lock                 held by the process that has the store open
//	commands             held by that process and by each lvm that it starts
//	volumes/<id>.json    the record of one volume, mode 0600
//	snapshots/<id>.json  the record of one snapshot
//
// A record names the logical volume with the bytes, and before each command those that the command makes or removes. So the next New
// knows what a killed process left.
//
// A volume has a device on the node only while it is in use and shortly after, and then the store has the device open exclusively:
// the host cannot mount what a guest wrote.
type Store struct {
	cfg       Config
	vg, pool  string
	lock      *os.File
	lvm       *runner
	kernel    *kernel
	volumes   *table[volume.Volume]
	snapshots *table[volume.Snapshot]

	mu     sync.Mutex
	extent int64 // bytes; the sizes of logical volumes are multiples of it. 0: the pool has not been examined
	fault  error // why the pool could not be examined
}

var poolForm = regexp.MustCompile(`^[A-Za-z0-9_+.][A-Za-z0-9_+.-]{0,126}$`) // lvm(8), VALID NAMES

// Check returns an InvalidArgument error unless pool can be Config.Pool.
func Check(pool string) error {
	vg, name, _ := strings.Cut(pool, "/")
	for _, part := range []string{vg, name} {
		if !poolForm.MatchString(part) || part == "." || part == ".." {
			return errdefs.Invalidf("invalid thin pool %q; use VG/POOL, as `lvs` names them", pool)
		}
	}
	return nil
}

func (c *Config) complete() error {
	if err := Check(c.Pool); err != nil {
		return err
	}
	if !filepath.IsAbs(c.Dir) {
		return errdefs.Invalidf("the folder of the store of logical volumes %q must be an absolute path", c.Dir)
	}
	c.Dir = filepath.Clean(c.Dir)
	c.Warn, c.Refuse = cmp.Or(c.Warn, DefaultWarn), cmp.Or(c.Refuse, DefaultRefuse)
	c.Log = cmp.Or(c.Log, slog.New(slog.DiscardHandler))
	return CheckLimits(c.Warn, c.Refuse)
}

// CheckLimits returns an InvalidArgument error unless warn and refuse can be those of a Config.
func CheckLimits(warn, refuse int) error {
	if warn < 1 || refuse > 100 || warn > refuse {
		return errdefs.Invalidf("a pool cannot warn at %d percent and refuse at %d; use 1 to 100, and the second not below the first", warn, refuse)
	}
	return nil
}

// New locks the store's folder, reads the records, and finishes or undoes what a killed process left. If the pool cannot be examined,
// New logs it, no volume can be made, and Run tries again. A record or logical volume that is damaged or missing blocks no other. Close
// ends the lock.
// Errors: InvalidArgument for an invalid configuration, FailedPrecondition if another process has the store open.
func New(ctx context.Context, cfg Config) (*Store, error) {
	if err := cfg.complete(); err != nil {
		return nil, err
	}
	s := &Store{cfg: cfg}
	s.vg, s.pool, _ = strings.Cut(cfg.Pool, "/")
	s.volumes = newTable(vm.Volumes, filepath.Join(cfg.Dir, "volumes"), record.Volume)
	s.snapshots = newTable(vm.VolumeSnapshots, filepath.Join(cfg.Dir, "snapshots"), record.Snapshot)
	s.kernel = &kernel{}
	if err := s.open(ctx); err != nil {
		return nil, fmt.Errorf("open the store of logical volumes %s: %w", cfg.Dir, record.Full(err))
	}
	if err := s.settle(ctx); err != nil {
		s.cfg.Log.Error("thin pool cannot be used", "op", "open", "pool", cfg.Pool, "err", err)
	}
	return s, nil
}

func (s *Store) open(ctx context.Context) (err error) {
	for _, dir := range []string{s.cfg.Dir, s.volumes.dir, s.snapshots.dir} {
		if err := os.MkdirAll(dir, 0o700); err != nil {
			return err
		}
	}
	if err := errors.Join(atomicfile.SyncDir(s.cfg.Dir), atomicfile.SyncDir(filepath.Dir(s.cfg.Dir))); err != nil {
		return err
	}
	s.lock, err = filelock.Take(ctx, filepath.Join(s.cfg.Dir, "lock"))
	if errors.Is(err, filelock.ErrTaken) {
		return errdefs.Preconditionf("another process uses it; stop that process first: is cocoond running twice?")
	}
	if err != nil {
		return err
	}
	if s.lvm, err = newRunner(ctx, filepath.Join(s.cfg.Dir, "commands")); err != nil {
		return errors.Join(err, s.lock.Close())
	}
	if err := errors.Join(s.volumes.load(s.cfg.Log), s.snapshots.load(s.cfg.Log)); err != nil {
		return errors.Join(err, s.lvm.Close(), s.lock.Close())
	}
	return nil
}

// Close releases the devices and unlocks the store's folder for other processes. The store must not be used afterwards.
func (s *Store) Close() error {
	errs := []error{s.lvm.Close(), s.kernel.Close()}
	for _, e := range s.volumes.Entries() {
		if e.Own.file != nil {
			errs = append(errs, e.Own.file.Close())
		}
	}
	return errors.Join(append(errs, s.lock.Close())...)
}

// Periods of Run.
const (
	watchPeriod = 10 * time.Second // between two looks at how full the pool is
	idleTime    = 10 * time.Second // how long the device of a volume that nobody uses stays
)

// Run watches how full the pool is, removes devices that nobody uses, and repeats what failed, until ctx ends.
func (s *Store) Run(ctx context.Context) error {
	tick := time.NewTicker(watchPeriod)
	defer tick.Stop()
	var said level
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
		if err := s.settle(ctx); err != nil {
			s.cfg.Log.Debug("thin pool still cannot be used", "pool", s.cfg.Pool, "err", err)
		}
		s.rest(ctx, idleTime)
		said = s.watch(said)
	}
}

// examined returns why the pool cannot be used; nil: it can.
func (s *Store) examined() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.fault
}

// now is the time in the form that a record keeps.
func now() time.Time { return time.Now().UTC().Round(0) }
