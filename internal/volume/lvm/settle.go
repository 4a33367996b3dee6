package lvm

import (
	"context"
	"errors"
	"slices"
	"time"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/volume"
	"cocoonstack.io/cocoon/internal/volume/index"
	"cocoonstack.io/cocoon/internal/volume/record"
)

// settle removes what operations that did not end have left. Until it has succeeded once, it also compares the records with the logical
// volumes: it says which are missing or unknown, and gives volumes that have grown their size. No volume can be made or grown before.
func (s *Store) settle(ctx context.Context) error {
	s.mu.Lock()
	first := s.extent == 0
	s.mu.Unlock()
	var all map[string]logical
	var extent int64
	var err error
	if first {
		all, extent, err = s.examine(ctx)
	}
	if first && err == nil {
		s.compare(ctx, all)
	}
	finishAll(ctx, s, s.volumes)
	finishAll(ctx, s, s.snapshots)
	if first {
		for _, e := range s.volumes.Entries() {
			s.attached(ctx, e)
		}
		s.mu.Lock()
		s.extent, s.fault = extent, err
		s.mu.Unlock()
	}
	return err
}

// compare compares the records with the logical volumes, while nobody makes or removes any.
func (s *Store) compare(ctx context.Context, all map[string]logical) {
	known := map[string]bool{}
	compared(ctx, s, s.volumes, all, known)
	compared(ctx, s, s.snapshots, all, known)
	for _, e := range s.volumes.Entries() {
		s.follow(ctx, e, all)
	}
	for name, l := range all {
		if (ours(name) || slices.Contains(l.tags, tag)) && !known[name] {
			s.cfg.Log.Warn("logical volume without a record kept; remove it with lvremove if nobody needs it", "op", "open", "lv", s.vg+"/"+name, "size", l.size)
		}
	}
}

// compared marks the objects of a table whose logical volumes are missing. known gets the logical volumes that are on record.
func compared[R index.Record[R]](ctx context.Context, s *Store, x *table[R], all map[string]logical, known map[string]bool) {
	for _, e := range x.Entries() {
		release, err := x.LockID(ctx, e.ID)
		if err != nil {
			return
		}
		known[e.Rec.LV] = true
		for _, lv := range e.Rec.Gone {
			known[lv] = true
		}
		if l, there := all[e.Rec.LV]; e.Bad == nil && e.Rec.LV != "" && (!there || l.pool != s.pool) {
			x.damage(e, errdefs.DataLossf("its logical volume %s/%s is missing in thin pool %s", s.vg, e.Rec.LV, s.pool), s.cfg.Log)
		}
		release()
	}
}

// finishAll finishes or undoes what was begun with the objects of a table.
func finishAll[R index.Record[R]](ctx context.Context, s *Store, x *table[R]) {
	for _, e := range x.Entries() {
		if !x.unfinished(e) {
			continue
		}
		release, err := x.LockID(ctx, e.ID)
		if err != nil {
			return
		}
		if x.unfinished(e) {
			if err := finish(ctx, s, x, e); err != nil {
				s.cfg.Log.Warn("logical volume that is to be removed is left, and tried again later", "kind", x.kind.Noun, "id", string(e.ID), "lv", e.Rec.Gone, "err", err)
			}
		}
		release()
	}
}

// examine returns what report does, if the pool is one. Errors: FailedPrecondition if it is none, Unavailable if LVM does not say.
func (s *Store) examine(ctx context.Context) (map[string]logical, int64, error) {
	all, extent, err := s.report(ctx)
	if err != nil {
		return nil, 0, errdefs.Unavailablef("thin pool %s cannot be examined: %w", s.cfg.Pool, err)
	}
	pool, ok := all[s.pool]
	if !ok || !slices.Contains(pool.layout, "thin") || !slices.Contains(pool.layout, "pool") {
		return nil, 0, errdefs.Preconditionf("%s is not a thin pool; make one with `lvcreate --type thin-pool -L SIZE -n %s %s`", s.cfg.Pool, s.pool, s.vg)
	}
	if !pool.active {
		if _, err := s.lvm.run(ctx, "lvchange", "-y", "-ay", s.cfg.Pool); err != nil {
			return nil, 0, err
		}
	}
	return all, extent, nil
}

// finish removes the logical volumes that the record of e says are to be removed, and then the record, or its part about them.
// Preconditions: the lock of e is held.
func finish[R index.Record[R]](ctx context.Context, s *Store, x *table[R], e *entry[R]) error {
	for _, lv := range e.Rec.Gone {
		if err := s.remove(ctx, lv); err != nil {
			return err
		}
	}
	if e.Rec.LV == "" {
		if err := x.drop(e.ID); err != nil {
			return err
		}
		x.Forget(e)
		return nil
	}
	next := e.Rec.Clone()
	next.Gone = nil
	return x.Save(e, next)
}

// remove removes a logical volume. It is no error if there is none.
func (s *Store) remove(ctx context.Context, lv string) error {
	_, err := s.lvm.run(ctx, "lvremove", "-y", s.vg+"/"+lv)
	if err == nil {
		return nil
	}
	if all, _, err := s.report(ctx); err == nil {
		if _, there := all[lv]; !there {
			return nil
		}
	}
	return err
}

// follow gives the record of a volume the size of its logical volume, which is larger if a process was killed while it grew the volume.
func (s *Store) follow(ctx context.Context, e *entry[volume.Volume], all map[string]logical) {
	release, err := s.volumes.LockID(ctx, e.ID)
	if err != nil {
		return
	}
	defer release()
	l, there := all[e.Rec.LV]
	if !there || e.Bad != nil || e.Hidden || e.Rec.LV == "" {
		return
	}
	switch err := s.sized(e, l.size); {
	case errdefs.Is(err, errdefs.DataLoss):
		s.volumes.damage(e, err, s.cfg.Log)
	case err != nil:
		s.cfg.Log.Warn("size of a volume not recorded; the next start repeats that", "volume", string(e.ID), "err", err)
	}
}

// sized makes the record of e say size, the bytes that its logical volume has. Preconditions: the lock of e is held.
// Errors: DataLoss if no volume that was recorded like e can have that size.
func (s *Store) sized(e *entry[volume.Volume], size int64) error {
	has := e.Rec.Object.Size
	if size == has {
		return nil
	}
	if size < has || size > volume.MaxSize || size%volume.Block != 0 {
		return errdefs.DataLossf("its logical volume %s/%s has %d bytes, but its record says %d", s.vg, e.Rec.LV, size, has)
	}
	next := e.Rec.Clone()
	next.Object.Size = size
	s.cfg.Log.Info("volume has grown; its record follows", "volume", string(e.ID), "size", size)
	return record.Full(s.volumes.Save(e, next))
}

// attached opens the device of a volume that VMs have attached, and removes the device of one that nobody has.
func (s *Store) attached(ctx context.Context, e *entry[volume.Volume]) {
	release, err := s.volumes.LockID(ctx, e.ID)
	if err != nil {
		return
	}
	defer release()
	if e.Bad != nil || e.Hidden || e.Own.file != nil {
		return
	}
	log := s.cfg.Log.With("op", "open", "volume", e.Rec.Object.Name)
	if len(e.Rec.Object.Attachments) > 0 {
		if err := s.claim(ctx, e); err != nil {
			log.Warn("volume cannot be used", "err", err)
		}
		return
	}
	if _, _, err := s.kernel.thin(deviceName(s.vg, e.Rec.LV)); errors.Is(err, errNoDevice) || s.volumes.Readers(e) > 0 {
		return
	}
	if err := s.deactivate(ctx, e.Rec.LV); err != nil {
		log.Warn("device of a volume that nobody has is left", "err", err)
	}
}

// rest removes the devices of volumes that nobody has used for some time.
func (s *Store) rest(ctx context.Context, after time.Duration) {
	for _, e := range s.volumes.Entries() {
		if !s.idle(e, after) {
			continue
		}
		release, err := s.volumes.LockID(ctx, e.ID)
		if err != nil {
			return
		}
		if s.idle(e, after) {
			s.close(e)
			if err := s.deactivate(ctx, e.Rec.LV); err != nil {
				s.cfg.Log.Warn("device of a volume that nobody has is left", "volume", e.Rec.Object.Name, "err", err)
			}
		}
		release()
	}
}

// idle reports whether e has a device that nobody has used for some time.
func (s *Store) idle(e *entry[volume.Volume], after time.Duration) bool {
	var is bool
	s.volumes.Locked(func() {
		is = e.Own.file != nil && e.Reads == 0 && !e.Hidden && len(e.Rec.Object.Attachments) == 0 && time.Since(e.Own.idle) >= after
	})
	return is
}
