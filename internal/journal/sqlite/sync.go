package sqlite

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"hash/crc32"
	"io/fs"
	"os"
	"path/filepath"
	"sync"

	"cocoonstack.io/cocoon/internal/atomicfile"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/journal"
)

// jump is the distance that revisions skip when the history is discarded, so that no revision is used twice.
const jump = 1 << 10

// syncs makes commits survive a power cut. One sync serves all callers that wait when it begins.
type syncs struct {
	log  *os.File // the write-ahead log, which stays the same file while the database is open
	mark *os.File // holds the revision that the synced journal has reached

	mu   sync.Mutex // held during a sync
	upTo int64      // revision that is synced
	err  error      // of a failed sync: what the kernel dropped then is unknown
}

// open opens the log and makes the file names durable.
func (s *syncs) open(path string) (err error) {
	if s.log, err = os.OpenFile(path+"-wal", os.O_RDWR|os.O_CREATE, 0o600); err != nil {
		return err
	}
	return atomicfile.SyncDir(filepath.Dir(path))
}

func (s *syncs) close(revision int64, clean bool) (err error) {
	if s.log != nil && clean {
		clean = s.log.Sync() == nil // in case SQLite left something in it
	}
	if s.mark != nil {
		if clean {
			err = s.note(revision)
		}
		err = errors.Join(err, s.mark.Sync(), s.mark.Close())
	}
	if s.log != nil {
		err = errors.Join(err, s.log.Close())
	}
	return err
}

// Sync implements journal.Journal. It does not block commits.
func (j *Journal) Sync(ctx context.Context) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	want := j.revision.Load()
	s := &j.syncs
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.err != nil || s.upTo >= want {
		return s.err
	}
	reached := j.revision.Load() // all commits so far are in the log, or in the file, which SQLite then has synced
	if err := s.log.Sync(); err != nil {
		s.err = errdefs.New(errdefs.DataLoss, "the journal cannot be written to the disk: %w; repair the disk and restart cocoond", err)
		return s.err
	}
	s.upTo = reached
	if j.synced != nil {
		j.synced()
	}
	// The mark is not synced each time: it never claims more than the journal holds, and after a power cut it may claim
	// less.
	return s.note(reached)
}

// markSize is the length of the mark in bytes: one line, within one sector.
const markSize = 32

func formatMark(revision int64) []byte {
	text := fmt.Sprintf("%020d ", revision)
	return fmt.Appendf(nil, "%s%010d\n", text, crc32.ChecksumIEEE([]byte(text)))
}

func parseMark(text []byte) (revision int64, ok bool) {
	if len(text) != markSize {
		return 0, false
	}
	_, err := fmt.Sscanf(string(text), "%d", &revision)
	return revision, err == nil && string(formatMark(revision)) == string(text)
}

// note writes the reached revision into the mark.
func (s *syncs) note(revision int64) error {
	if s.mark == nil {
		return nil
	}
	if _, err := s.mark.WriteAt(formatMark(revision), 0); err != nil {
		return errdefs.New(errdefs.Internal, "write the mark of the journal: %w", err)
	}
	return nil
}

// markPath returns the path of the mark of the journal at path.
func markPath(path string) string { return path + ".mark" }

func readMark(path string) (int64, error) {
	text, err := os.ReadFile(markPath(path))
	if errors.Is(err, fs.ErrNotExist) || err == nil && len(text) == 0 { // a journal from before marks existed
		return 0, nil
	}
	if err != nil {
		return 0, err
	}
	revision, ok := parseMark(text)
	if !ok {
		return 0, journal.Refuse("its revision mark %s cannot be read", markPath(path))
	}
	return revision, nil
}

// verify refuses a journal that is older than its mark, and opens the mark.
func (j *Journal) verify(ctx context.Context, cfg Config) error {
	revision := j.revision.Load()
	mark, err := readMark(cfg.Path)
	switch {
	case errdefs.Is(err, errdefs.DataLoss) && cfg.Older: // ignore its content
	case err != nil:
		return err
	case mark > revision && !cfg.Older:
		return journal.Refuse("it is at revision %d, but it was at %d before", revision, mark)
	case !cfg.Older:
	case revision > 0 || mark > 0: // also if the mark claims less than the copies of records do, as after a power cut
		if err := j.leap(ctx, max(mark, revision)+jump); err != nil {
			return fmt.Errorf("continue with an older state: %w", err)
		}
	}
	if j.syncs.mark, err = os.OpenFile(markPath(cfg.Path), os.O_RDWR|os.O_CREATE, 0o600); err != nil {
		return err
	}
	if err := j.syncs.note(j.revision.Load()); err != nil {
		return err
	}
	return errors.Join(j.syncs.mark.Truncate(markSize), j.syncs.mark.Sync(), atomicfile.SyncDir(filepath.Dir(cfg.Path)))
}

// leap discards the history and continues from a revision that nobody has seen.
func (j *Journal) leap(ctx context.Context, revision int64) error {
	nothing, err := json.Marshal(struct{}{})
	if err != nil {
		return err
	}
	tx, err := j.conn.BeginTx(ctx, nil)
	if err != nil {
		return err
	}
	defer func() { _ = tx.Rollback() }() // no effect after a commit
	if _, err := tx.ExecContext(ctx, `DELETE FROM events`); err != nil {
		return err
	}
	// This row only stores the revision. No watcher gets it: that would need a watcher that has seen the revision
	// before it.
	if _, err := tx.ExecContext(ctx, `INSERT INTO events (revision, type, record) VALUES (?, '', ?)`, revision, nothing); err != nil {
		return err
	}
	if err := tx.Commit(); err != nil {
		return err
	}
	j.revision.Store(revision)
	j.written.Store(revision)
	j.oldest.Store(revision + 1)
	return j.syncs.log.Sync()
}
