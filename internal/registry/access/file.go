package access

import (
	"fmt"
	"log/slog"
	"os"
	"sync"
	"time"

	"cocoonstack.io/cocoon/internal/errdefs"
)

const lookEvery = time.Second

// File is a token file that is read again when it changes. If the file becomes unreadable or invalid, the earlier
// tokens stay valid until it is repaired.
type File struct {
	path  string
	extra Tokens
	log   *slog.Logger

	mu     sync.Mutex
	tokens *Tokens
	seen   os.FileInfo
	looked time.Time
}

// Open reads the file at path. It also accepts static, if not empty, as a token that may do everything; then path may
// be empty.
func Open(path, static string, log *slog.Logger) (*File, error) {
	f := &File{path: path, log: log, tokens: &Tokens{}}
	if static != "" {
		f.extra.Add("static", static)
	}
	if path == "" {
		return f, nil
	}
	var err error
	f.tokens, f.seen, err = read(path)
	return f, err
}

func read(path string) (*Tokens, os.FileInfo, error) {
	file, err := os.Open(path)
	if err != nil {
		return nil, nil, errdefs.Preconditionf("token file: %w", err)
	}
	defer file.Close()
	fi, err := file.Stat()
	if err != nil {
		return nil, nil, fmt.Errorf("token file: %w", err)
	}
	if fi.Mode().Perm()&0o007 != 0 {
		return nil, nil, errdefs.Preconditionf("token file %s may be read or written by everybody; chmod 600 %s", path, path)
	}
	t, err := Parse(file)
	return t, fi, err
}

// Check returns the identity of a token.
func (f *File) Check(secret string, now time.Time) (Identity, error) {
	id, err := f.extra.Check(secret, now)
	if err == nil || f.path == "" {
		return id, err
	}
	return f.current(now).Check(secret, now)
}

func (f *File) current(now time.Time) *Tokens {
	f.mu.Lock()
	defer f.mu.Unlock()
	if d := now.Sub(f.looked); d >= 0 && d < lookEvery {
		return f.tokens
	}
	f.looked = now
	fi, err := os.Stat(f.path)
	if err == nil && f.seen != nil && os.SameFile(fi, f.seen) && fi.ModTime().Equal(f.seen.ModTime()) && fi.Size() == f.seen.Size() && fi.Mode() == f.seen.Mode() {
		return f.tokens
	}
	t, fi, err := read(f.path)
	if err != nil {
		f.log.Warn("token file unusable, the previous tokens stay valid", "err", err)
		return f.tokens
	}
	f.tokens, f.seen = t, fi
	f.log.Info("token file reloaded")
	return t
}
