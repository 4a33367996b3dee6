// Package block is the volume store of block devices that the configuration of a node names: disks of a SAN, logical volumes,
// partitions. Each is a volume of a fixed size. It also has the devices that other programs of the node lend, such as CSI drivers.
//
// The store makes, formats and removes no device, and reads nothing of what is on one. It does not look for devices: it uses only those
// that are named or lent.
package block

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"cocoonstack.io/cocoon/internal/atomicfile"
	"cocoonstack.io/cocoon/internal/blockdev"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/filelock"
	"cocoonstack.io/cocoon/internal/keylock"
	"cocoonstack.io/cocoon/internal/vm"
	"cocoonstack.io/cocoon/internal/volume"
	"cocoonstack.io/cocoon/internal/volume/record"
)

var _ volume.Store = (*Store)(nil)

// Kind is the kind of all volumes of this store.
const Kind = "block"

// Config configures the store.
type Config struct {
	Dir     string            // of the records; absolute; created when missing, mode 0700
	Devices map[string]string // absolute paths by NAME or NAMESPACE/NAME; a path of /dev/disk/by-id leads to the same device after a boot
	Log     *slog.Logger      // nil discards

	Taken func(owner vm.Owner, name string) (bool, error) // whether a volume of another store has the name; nil: none has

	Files bool // regular files stand for devices, in tests
}

// Store implements volume.Store. Its folder has a file ID.json for each volume, and the file lock.
//
// While a volume is attached, the store has its device open exclusively: the host cannot mount it or use it for another device. Its
// number and its name in /dev then stay the same, too.
type Store struct {
	cfg  Config
	lock *os.File
	boot string // id of this boot of the machine

	locks keylock.Locks[vm.ID] // of volumes that are being changed

	mu  sync.Mutex
	all map[vm.ID]*entry
}

// entry is one volume. Its record and its device are written under its lock and Store.mu, so that one of the two is enough to read
// them.
type entry struct {
	id     vm.ID
	rec    recorded
	named  bool  // in the configuration
	bad    error // its record is damaged
	device *device
}

// recorded is the record of one volume.
type recorded struct {
	volume.Volume
	Path   string            `json:"path"` // of the device, as in the configuration
	Device blockdev.Identity `json:"device"`
	Lent   bool              `json:"lent,omitempty"` // by a program that says when the device goes away; see Store.Lend
	Boot   string            `json:"boot,omitempty"` // of a lent device: the boot of the machine in which it was lent
}

func (r recorded) clone() recorded {
	return recorded{Volume: r.Clone(), Path: r.Path, Device: r.Device, Lent: r.Lent, Boot: r.Boot}
}

// New locks the store's folder and reads the records. A device that the configuration names for the first time becomes a volume. If a
// device is missing or was replaced, only its volume is unusable, and New logs it. A volume that the configuration no longer names is
// removed from the list, unless a VM has it attached. While a record is damaged, no device becomes a volume, because the record may be
// that of the device. Close ends the lock.
// Errors: InvalidArgument for an invalid configuration, FailedPrecondition if another process has the store open.
func New(ctx context.Context, cfg Config) (*Store, error) {
	if !filepath.IsAbs(cfg.Dir) {
		return nil, errdefs.Invalidf("the folder of the store of block devices %q must be an absolute path", cfg.Dir)
	}
	if err := Check(cfg.Devices); err != nil {
		return nil, err
	}
	cfg.Dir = filepath.Clean(cfg.Dir)
	cfg.Log = cmp.Or(cfg.Log, slog.New(slog.DiscardHandler))
	s := &Store{cfg: cfg, all: map[vm.ID]*entry{}}
	if err := s.open(ctx); err != nil {
		return nil, fmt.Errorf("open the store of block devices %s: %w", cfg.Dir, record.Full(err))
	}
	return s, nil
}

// Check returns an InvalidArgument error unless devices can be Config.Devices.
func Check(devices map[string]string) error {
	paths := map[string]string{}
	for _, name := range slices.Sorted(maps.Keys(devices)) {
		namespace, short := split(name)
		err := vm.Volumes.ValidateName(short)
		if err == nil && namespace != "" {
			err = vm.Volumes.ValidateName(namespace)
		}
		if err != nil || strings.HasPrefix(name, "/") {
			return errdefs.Invalidf("invalid name %q of a volume on a device; use NAME or NAMESPACE/NAME: %w", name, err)
		}
		path := devices[name]
		if !filepath.IsAbs(path) || filepath.Clean(path) != path {
			return errdefs.Invalidf("volume %s: the device %q must be an absolute path, such as /dev/disk/by-id/wwn-…", name, path)
		}
		if other, twice := paths[path]; twice {
			return errdefs.Invalidf("the volumes %s and %s are both on %s; leave one out", other, name, path)
		}
		paths[path] = name
	}
	return nil
}

// split returns the namespace, "" for a volume of the operator, and the name in it.
func split(name string) (namespace, short string) {
	if namespace, short, ok := strings.Cut(name, "/"); ok {
		return namespace, short
	}
	return "", name
}

func (s *Store) open(ctx context.Context) error {
	boot, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return err
	}
	s.boot = strings.TrimSpace(string(boot))
	if err := os.MkdirAll(s.cfg.Dir, 0o700); err != nil {
		return err
	}
	if err := atomicfile.SyncDir(filepath.Dir(s.cfg.Dir)); err != nil {
		return err
	}
	lock, err := filelock.Take(ctx, filepath.Join(s.cfg.Dir, "lock"))
	if errors.Is(err, filelock.ErrTaken) {
		return errdefs.Preconditionf("another process uses it; stop that process first: is cocoond running twice?")
	}
	if err != nil {
		return err
	}
	if err := s.load(); err != nil {
		lock.Close()
		return err
	}
	s.lock = lock
	return nil
}

// Close releases the devices and unlocks the store's folder for other processes. The store must not be used afterwards.
func (s *Store) Close() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	errs := []error{s.lock.Close()}
	for _, e := range s.all {
		if e.device != nil {
			errs = append(errs, e.device.Close())
		}
	}
	return errors.Join(errs...)
}

// suffix ends the name of a record.
const suffix = ".json"

func (s *Store) file(id vm.ID) string { return filepath.Join(s.cfg.Dir, string(id)+suffix) }

// load reads the records and compares them with the configuration.
func (s *Store) load() error {
	entries, err := os.ReadDir(s.cfg.Dir)
	if err != nil {
		return err
	}
	known := map[string]bool{}
	for _, f := range entries {
		id, isRecord := strings.CutSuffix(f.Name(), suffix)
		switch {
		case f.Name() == "lock":
			continue
		case strings.HasPrefix(f.Name(), ".") && strings.Contains(f.Name(), suffix+".tmp-"): // what was about to replace a record
			if err := os.Remove(filepath.Join(s.cfg.Dir, f.Name())); err != nil {
				return err
			}
			continue
		case !isRecord || !vm.ID(id).Valid():
			s.cfg.Log.Warn("unknown entry in the store of block devices ignored", "path", filepath.Join(s.cfg.Dir, f.Name()))
			continue
		}
		e := s.read(vm.ID(id))
		s.all[e.id] = e
		name := e.rec.Owner.Qualify(e.rec.Name)
		if path, ok := s.cfg.Devices[name]; ok && e.bad == nil && !e.rec.Lent {
			e.named, e.rec.Path = true, path
			known[name] = true
		}
	}
	if err := s.settle(); err != nil {
		return err
	}
	for _, name := range slices.Sorted(maps.Keys(s.cfg.Devices)) {
		if known[name] {
			continue
		}
		namespace, short := split(name)
		if _, err := s.add(vm.Owner{Namespace: namespace}, volume.Spec{Name: short}, s.cfg.Devices[name], false); err != nil {
			s.cfg.Log.Error("device is not a volume", "op", "open", "volume", name, "err", err)
		}
	}
	return nil
}

// settle removes volumes that the configuration does not name any more, and opens the devices of those that are attached.
func (s *Store) settle() error {
	for id, e := range s.all {
		log := s.cfg.Log.With("op", "open", "volume", cmp.Or(e.rec.Name, string(id)))
		switch {
		case e.bad != nil:
			log.Warn("damaged record of a device ignored", "err", e.bad)
		case !e.named && !e.rec.Lent && len(e.rec.Attachments) == 0:
			if err := os.Remove(s.file(id)); err != nil {
				return err
			}
			delete(s.all, id)
			log.Info("volume forgotten, because the configuration does not name its device any more")
		case s.lostSince(e): // another device may be at its path now
		default:
			dev, err := s.claim(e)
			switch {
			case err != nil:
				log.Warn("device cannot be used", "err", err)
			case len(e.rec.Attachments) > 0:
				e.device = dev
			default:
				e.release(dev)
			}
		}
	}
	return nil
}

// read reads one record. A damaged one stays where it is.
func (s *Store) read(id vm.ID) *entry {
	e := &entry{id: id}
	text, err := record.Read(s.file(id))
	if err == nil {
		e.rec.Volume, err = record.Volume(text, Kind)
	}
	if err == nil {
		err = json.Unmarshal(text, &e.rec)
	}
	if err == nil && e.rec.ID != id {
		err = errdefs.DataLossf("it is that of %s", e.rec.ID)
	}
	if err != nil {
		e.bad = errdefs.DataLossf("the record of the device is damaged: %w; repair %s, or move it away, and restart cocoond", err, s.file(id))
	}
	return e
}

// add makes a volume of a device, which the configuration names or a program has lent.
func (s *Store) add(owner vm.Owner, spec volume.Spec, path string, lent bool) (volume.Volume, error) {
	e := &entry{id: vm.NewID(), named: !lent, rec: recorded{Path: path, Lent: lent}}
	if lent {
		e.rec.Boot = s.boot
	}
	if s.cfg.Taken != nil {
		if taken, err := s.cfg.Taken(owner, spec.Name); err != nil || taken {
			return volume.Volume{}, cmp.Or(err, vm.Volumes.Taken(owner.Qualify(spec.Name)))
		}
	}
	dev, err := s.openDevice(path)
	if err != nil {
		return volume.Volume{}, err
	}
	defer dev.Close()
	size := whole(dev.id.Size)
	if _, err := volume.RoundSize(size); err != nil {
		return volume.Volume{}, err
	}
	e.rec.Volume = volume.Volume{ID: e.id, Name: spec.Name, Owner: owner, Kind: Kind, Size: size, CreatedAt: now(), Labels: maps.Clone(spec.Labels)}
	e.rec.Device = dev.id
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, other := range s.all {
		switch {
		case other.bad != nil:
			return volume.Volume{}, errdefs.Preconditionf("it may be the device of a volume with a damaged record: %w", other.bad)
		case other.rec.Name == spec.Name && other.rec.Owner.Namespace == owner.Namespace:
			return volume.Volume{}, vm.Volumes.Taken(owner.Qualify(spec.Name))
		case other.rec.Device == dev.id && dev.id != (blockdev.Identity{Size: dev.id.Size}):
			return volume.Volume{}, errdefs.Preconditionf("%s is the device of volume %s already", path, other.rec.Owner.Qualify(other.rec.Name))
		}
	}
	if err := record.Write(s.file(e.id), e.rec); err != nil {
		return volume.Volume{}, err
	}
	s.all[e.id] = e
	return e.rec.Clone(), nil
}

// now is the time in the form that a record keeps.
func now() time.Time { return time.Now().UTC().Round(0) }
