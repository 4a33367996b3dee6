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

// jump is how far revisions leap when the past is given up, so that none is used twice.
const jump = 1 << 10

// syncs makes commits survive a power cut. One sync serves all that wait when it begins.
type syncs struct {
	log  *os.File // the write-ahead log, which stays the same file as long as the database is open
	mark *os.File // how far the synced journal has come

	mu   sync.Mutex // held during a sync
	upTo int64      // revision that is synced
	err  error      // of a sync that failed: what the kernel dropped then is not known
}

// open opens the log and makes the names of the files durable.
func (s *syncs) open(path string) (err error) {
	if s.log, err = os.OpenFile(path+"-wal", os.O_RDWR|os.O_CREATE, 0o600); err != nil {
		return err
	}
	return atomicfile.SyncDir(filepath.Dir(path))
}

func (s *syncs) close(revision int64, clean bool) (err error) {
	if s.log != nil && clean {
		clean = s.log.Sync() == nil // should SQLite have left something in it
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

// Sync implements journal.Journal. It does not hold up commits.
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
	reached := j.revision.Load() // all commits until now are in the log, or in the file, which SQLite has synced then
	if err := s.log.Sync(); err != nil {
		s.err = errdefs.New(errdefs.DataLoss, "the journal cannot be written to the disk: %w; mend the disk and start cocoond anew", err)
		return s.err
	}
	s.upTo = reached
	if j.synced != nil {
		j.synced()
	}
	// The mark is not synced each time: it never says more than the journal holds, and after a power cut it may say less.
	return s.note(reached)
}

// markSize is the length of the mark, which is one line and within one sector.
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

// note writes down how far the journal has come.
func (s *syncs) note(revision int64) error {
	if s.mark == nil {
		return nil
	}
	if _, err := s.mark.WriteAt(formatMark(revision), 0); err != nil {
		return errdefs.New(errdefs.Internal, "write the mark of the journal: %w", err)
	}
	return nil
}

// markPath is where the mark of the journal at path is.
func markPath(path string) string { return path + ".mark" }

func readMark(path string) (int64, error) {
	text, err := os.ReadFile(markPath(path))
	if errors.Is(err, fs.ErrNotExist) || err == nil && len(text) == 0 { // a journal from before there were marks
		return 0, nil
	}
	if err != nil {
		return 0, err
	}
	revision, ok := parseMark(text)
	if !ok {
		return 0, journal.Refuse("its mark %s, which says how far it had come, cannot be read", markPath(path))
	}
	return revision, nil
}

// verify refuses a journal that is older than its mark, and opens the mark.
func (j *Journal) verify(ctx context.Context, cfg Config) error {
	revision := j.revision.Load()
	mark, err := readMark(cfg.Path)
	switch {
	case errdefs.Is(err, errdefs.DataLoss) && cfg.Older: // whatever it said
	case err != nil:
		return err
	case mark > revision && !cfg.Older:
		return journal.Refuse("it is at revision %d and had been at %d", revision, mark)
	case mark > revision:
		if err := j.leap(ctx, mark+jump); err != nil {
			return fmt.Errorf("go on from an older state: %w", err)
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

// leap gives up the history and goes on from a revision that nobody has seen.
func (j *Journal) leap(ctx context.Context, revision int64) error {
	nothing, err := json.Marshal(struct{}{})
	if err != nil {
		return err
	}
	tx, err := j.conn.BeginTx(ctx, nil)
	if err != nil {
		return err
	}
	defer func() { _ = tx.Rollback() }() // after a commit it does nothing
	if _, err := tx.ExecContext(ctx, `DELETE FROM events`); err != nil {
		return err
	}
	// A row that keeps the revision. It is told to nobody: who has seen the one before it does not exist.
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
