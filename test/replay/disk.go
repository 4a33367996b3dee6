//go:build replay

package replay

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
)

const sector = 512

// write is what a machine wrote at once.
type write struct {
	sector int64
	data   []byte
	flags  uint64
}

// readLog reads a log of QEMU's driver blklogwrites, whose form is that of dm-log-writes.
func readLog(path string) ([]write, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	head := make([]byte, sector)
	if _, err := io.ReadFull(f, head); errors.Is(err, io.EOF) { // nothing was written
		return nil, nil
	} else if err != nil {
		return nil, fmt.Errorf("read %s: %w", path, err)
	}
	le := binary.LittleEndian
	if le.Uint64(head) != 0x6a736677736872 || le.Uint32(head[24:]) != sector {
		return nil, fmt.Errorf("%s is no log of writes in sectors of %d bytes", path, sector)
	}
	var all []write
	for range le.Uint64(head[16:]) {
		if _, err := io.ReadFull(f, head); err != nil {
			return nil, fmt.Errorf("read %s: %w", path, err)
		}
		w := write{sector: int64(le.Uint64(head)), flags: le.Uint64(head[16:])}
		const discard = 4
		if n := le.Uint64(head[8:]); n > 0 && w.flags&discard == 0 {
			w.data = make([]byte, n*sector)
			if _, err := io.ReadFull(f, w.data); err != nil {
				return nil, fmt.Errorf("read %s: %w", path, err)
			}
		}
		if len(w.data) > 0 {
			all = append(all, w)
		}
	}
	return all, nil
}

// state is a disk: what differs from a base, by sector. Equal disks have equal sums, whatever way they came about.
type state struct {
	changed map[int64][]byte
	sum     [32]byte
}

func (s state) clone() state { return state{maps.Clone(s.changed), s.sum} }

// put writes a sector. base is what it is if nothing was written.
func (s *state) put(base *os.File, at int64, data []byte) error {
	original := make([]byte, sector)
	if _, err := base.ReadAt(original, at*sector); err != nil && !errors.Is(err, io.EOF) {
		return err
	}
	old, had := s.changed[at]
	if had {
		s.toggle(at, old)
	}
	if bytes.Equal(original, data) {
		delete(s.changed, at)
		return nil
	}
	s.changed[at] = bytes.Clone(data)
	s.toggle(at, data)
	return nil
}

// toggle takes a sector into the sum, or out of it.
func (s *state) toggle(at int64, data []byte) {
	h := sha256.Sum256(append(binary.LittleEndian.AppendUint64(nil, uint64(at)), data...))
	for i := range s.sum {
		s.sum[i] ^= h[i]
	}
}

// apply writes a whole write.
func (s *state) apply(base *os.File, w write) error {
	for i := 0; i < len(w.data); i += sector {
		if err := s.put(base, w.sector+int64(i/sector), w.data[i:i+sector]); err != nil {
			return err
		}
	}
	return nil
}

// states returns each disk that a power cut can leave while the writes go to base: after each of them, and with only one sector of one with several. Each is
// there once. last is the one after all.
func states(base *os.File, writes []write) (all []state, prefixes, torn int, err error) {
	s := state{changed: map[int64][]byte{}}
	seen := map[[32]byte]bool{s.sum: true}
	all = append(all, s.clone())
	add := func(s state) {
		if !seen[s.sum] {
			seen[s.sum] = true
			all = append(all, s.clone())
		}
	}
	for _, w := range writes {
		if n := len(w.data) / sector; n > 1 {
			for i := range n {
				part := s.clone()
				if err := part.put(base, w.sector+int64(i), w.data[i*sector:(i+1)*sector]); err != nil {
					return nil, 0, 0, err
				}
				torn++
				add(part)
			}
		}
		if err := s.apply(base, w); err != nil {
			return nil, 0, 0, err
		}
		prefixes++
		add(s)
	}
	return all, prefixes, torn, nil
}

// with changes the file to the state, calls f, and changes it back.
func (s state) with(file *os.File, base *os.File, f func()) error {
	for at, data := range s.changed {
		if _, err := file.WriteAt(data, at*sector); err != nil {
			return err
		}
	}
	f()
	for at := range s.changed {
		original := make([]byte, sector)
		if _, err := base.ReadAt(original, at*sector); err != nil && !errors.Is(err, io.EOF) {
			return err
		}
		if _, err := file.WriteAt(original, at*sector); err != nil {
			return err
		}
	}
	return nil
}
