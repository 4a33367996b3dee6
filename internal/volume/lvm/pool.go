package lvm

import (
	"context"
	"errors"
	"fmt"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/volume"
)

// level is how full a pool is, in the order of concern.
type level int

const (
	calm level = iota
	warned
	refusing
)

// filled returns how full the pool is now, as the kernel knows it.
// Errors: Unavailable if the pool has no device.
func (s *Store) filled() (filled, error) {
	f, err := s.kernel.thinPool(deviceName(s.vg, s.pool) + usedPool)
	if errors.Is(err, errNoDevice) { // LVM gives a pool without volumes its own name
		f, err = s.kernel.thinPool(deviceName(s.vg, s.pool))
	}
	if errors.Is(err, errNoDevice) {
		return f, errdefs.Unavailablef("thin pool %s is not active; activate it with `lvchange -ay %s`", s.cfg.Pool, s.cfg.Pool)
	}
	if err != nil {
		return f, fmt.Errorf("thin pool %s: %w", s.cfg.Pool, err)
	}
	return f, nil
}

// Pools implements volume.Pooled. There is one.
func (s *Store) Pools(context.Context) []volume.Pool {
	p := volume.Pool{Kind: Kind, Name: s.cfg.Pool}
	f, err := s.filled()
	if err == nil {
		p.Size, p.Used, p.MetadataSize, p.MetadataUsed = f.size, f.used, f.metaSize, f.metaUsed
		err = errorOf(s.examined(), func() error { return s.admits(f) })
	}
	if err != nil {
		p.Fault = err.Error()
	} else {
		p.Free = max(f.size/percent*int64(s.cfg.Refuse)-f.used, 0)
	}
	return []volume.Pool{p}
}

const percent = 100

func (s *Store) level(f filled) level {
	full := func(used, size int64, limit int) bool { return size > 0 && used >= size/percent*int64(limit) }
	switch {
	case f.fault != "", full(f.used, f.size, s.cfg.Refuse), full(f.metaUsed, f.metaSize, s.cfg.Refuse):
		return refusing
	case full(f.used, f.size, s.cfg.Warn), full(f.metaUsed, f.metaSize, s.cfg.Warn):
		return warned
	}
	return calm
}

// String describes f for messages.
func (f filled) String() string {
	part := func(used, size int64) int64 { return used * percent / max(size, 1) }
	return fmt.Sprintf("%d %% of its data and %d %% of its metadata are in use", part(f.used, f.size), part(f.metaUsed, f.metaSize))
}

// admits returns an error unless volumes can be made and grown in a pool that is as full as f.
// Errors: FailedPrecondition, ResourceExhausted, Unavailable.
func (s *Store) admits(f filled) error {
	switch {
	case f.unsafe:
		return errdefs.Preconditionf("thin pool %s does not zero its blocks, so a volume would have what another has deleted; run `lvchange --zero y %s`", s.cfg.Pool, s.cfg.Pool)
	case f.fault != "":
		return errdefs.Unavailablef("thin pool %s: %s; see `lvs -a -o+lv_health_status %s`", s.cfg.Pool, f.fault, s.vg)
	case s.level(f) == refusing:
		return errdefs.Exhaustedf("thin pool %s is too full: %s, and from %d %% on nothing is made or grown; extend it (`lvextend -L +SIZE %s`, with --poolmetadatasize for metadata), or remove volumes and their snapshots",
			s.cfg.Pool, f, s.cfg.Refuse, s.cfg.Pool)
	}
	return nil
}

// guard returns an error unless volumes can be made and grown now. Errors: those of admits and filled.
func (s *Store) guard() error {
	if err := s.examined(); err != nil {
		return err
	}
	f, err := s.filled()
	if err != nil {
		return err
	}
	return s.admits(f)
}

// watch says in the log how full the pool is, if that is not what was said before.
func (s *Store) watch(said level) level {
	f, err := s.filled()
	if err != nil { // said when the pool was examined, and by whoever needs it
		return said
	}
	is := s.level(f)
	if is == said {
		return said
	}
	switch is {
	case calm:
		s.cfg.Log.Info("thin pool has room again", "pool", s.cfg.Pool, "state", f.String())
	case warned:
		s.cfg.Log.Warn("thin pool is filling", "pool", s.cfg.Pool, "state", f.String())
	case refusing:
		s.cfg.Log.Error("thin pool is too full; no volume can be made or grown, and when it is full, guests are paused", "pool", s.cfg.Pool, "state", f.String(), "err", f.fault)
	}
	return is
}
