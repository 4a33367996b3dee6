package jail

import (
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"time"

	"cocoonstack.io/cocoon/internal/errdefs"
)

// Program is a program of the node and what is known of it, such as its version, as long as its file is unchanged. Its methods are safe for concurrent use.
type Program[T any] struct {
	mu    sync.Mutex
	path  string
	size  int64
	mtime time.Time
	known T
}

// FindProgram returns the file of a program by its path, or by its name in PATH. title and remedy are for the error.
// Errors: Unavailable.
func FindProgram(name, title, remedy string) (string, error) {
	path, err := exec.LookPath(name)
	if err == nil {
		path, err = filepath.Abs(path)
	}
	if err == nil {
		path, err = filepath.EvalSymlinks(path)
	}
	if err != nil {
		return "", errdefs.Unavailablef("%s is not installed (%w); %s", title, err, remedy)
	}
	return path, nil
}

// Facts returns what ask says of the program at path, which it calls once for each file.
func (p *Program[T]) Facts(ctx context.Context, path string, ask func(ctx context.Context, path string) (T, error)) (known T, err error) {
	st, err := os.Stat(path)
	if err != nil {
		return known, errdefs.Unavailablef("look at %s: %w", path, err)
	}
	p.mu.Lock()
	known = p.known
	same := p.path == path && p.size == st.Size() && p.mtime.Equal(st.ModTime())
	p.mu.Unlock()
	if same {
		return known, nil
	}
	if known, err = ask(ctx, path); err != nil {
		return known, err
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.path, p.size, p.mtime, p.known = path, st.Size(), st.ModTime(), known
	return known, nil
}

// Output returns what the program at path prints with these arguments.
// Errors: Unavailable.
func Output(ctx context.Context, path string, args ...string) (string, error) {
	out, err := exec.CommandContext(ctx, path, args...).Output()
	if ctx.Err() != nil {
		return "", ctx.Err()
	}
	if err != nil {
		return "", errdefs.Unavailablef("%v: %w", args, err)
	}
	return string(out), nil
}
