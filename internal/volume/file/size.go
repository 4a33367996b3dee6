package file

import (
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/volume"
	"cocoonstack.io/cocoon/internal/volume/record"
)

// followData gives a volume the size of its data, which are longer if a process was killed while it grew the volume.
// Errors: DataLoss if the data cannot be those of v.
func (s *Store) followData(v *volume.Volume, size int64) error {
	if size < v.Size || size > volume.MaxSize || size%volume.Block != 0 {
		return wrongSize(size, v.Size)
	}
	if size == v.Size {
		return nil
	}
	s.cfg.Log.Info("volume has grown before the last stop; its record follows", "op", "open", "volume", string(v.ID), "size", size)
	v.Size = size
	if err := record.Write(s.volumes.path(v.ID, s.volumes.file), v); err != nil {
		s.cfg.Log.Warn("size of a volume not recorded; the next start repeats that", "volume", string(v.ID), "err", record.Full(err))
	}
	return nil
}

// matchData checks the size of a snapshot's data, which never changes.
func matchData(s *volume.Snapshot, size int64) error {
	if size != s.Size {
		return wrongSize(size, s.Size)
	}
	return nil
}

func wrongSize(size, want int64) error {
	return errdefs.DataLossf("its data have %d bytes, but its record says %d", size, want)
}
