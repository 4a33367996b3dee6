package chunked_test

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"cocoonstack.io/cocoon/internal/snapshot"
	"cocoonstack.io/cocoon/internal/snapshot/chunked"
)

// TestPullEarlyNoLoader: a pull fails if the process that loads the memory ends before it has read its job, which is longer than what fits into a pipe. While it only does
// not read, the pull waits, and can be given up.
func TestPullEarlyNoLoader(t *testing.T) {
	_, _, ref := early(t)
	long := snapshot.Auth{Token: strings.Repeat("x", 100<<10)}
	s := newStore(t)
	c := client(t, s, nil)
	before := zombies(t)
	t.Setenv(envLoader, loaderDies)
	if _, _, err := c.PullEarly(t.Context(), ref, "x", long, nil); !errors.Is(err, unix.EPIPE) {
		t.Errorf("it has died: %v", err)
	}
	empty(t, s)
	t.Setenv(envLoader, loaderHangs)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	ended := make(chan error, 1)
	go func() {
		_, _, err := c.PullEarly(ctx, ref, "x", long, nil)
		ended <- err
	}()
	loaders(t, true)
	cancel()
	if err := <-ended; !errors.Is(err, context.Canceled) {
		t.Errorf("it hangs: %v", err)
	}
	empty(t, s)
	if after := zombies(t); !slices.Equal(before, after) {
		t.Errorf("nobody has waited for %q; before for %q", after, before)
	}
}

// TestPullEarlyNotOffered: a pull that fails after the process that loads the memory has started leaves none.
func TestPullEarlyNotOffered(t *testing.T) {
	_, _, ref := early(t)
	s := newStore(t)
	before := zombies(t)
	_, _, err := client(t, s, nil).PullEarly(t.Context(), ref, "x", token, func(p snapshot.Progress) {
		if p.Phase != "fetching" {
			return
		}
		if drafts, err := filepath.Glob(filepath.Join(s.dir, "tmp", "*")); err != nil || len(drafts) != 1 || os.WriteFile(filepath.Join(drafts[0], "other"), nil, 0o600) != nil {
			t.Errorf("drafts: %q, %v", drafts, err)
		}
	})
	if err == nil || !strings.Contains(err.Error(), "a file other") {
		t.Error(err)
	}
	empty(t, s)
	if after := zombies(t); !slices.Equal(before, after) {
		t.Errorf("nobody has waited for %q; before for %q", after, before)
	}
}

// loaders waits until a process loads memory, or none.
func loaders(t *testing.T, some bool) {
	t.Helper()
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	for ; ; <-tick.C {
		all, err := filepath.Glob("/proc/[0-9]*/cmdline")
		if err != nil {
			t.Fatal(err)
		}
		found := false
		for _, path := range all {
			text, _ := os.ReadFile(path)
			found = found || strings.HasPrefix(string(text), "cocoon-load-memory\x00"+chunked.LoadCommand)
		}
		if found == some {
			return
		}
	}
}

// zombies waits until no child of this process runs. It returns the children that have ended and that nobody has waited for.
func zombies(t *testing.T) (out []string) {
	t.Helper()
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	for ; ; <-tick.C {
		all, err := filepath.Glob("/proc/[0-9]*/stat")
		if err != nil {
			t.Fatal(err)
		}
		alive := false
		out = nil
		for _, path := range all {
			text, _ := os.ReadFile(path)
			f := strings.Fields(string(text[strings.LastIndexByte(string(text), ')')+1:])) // state, parent, …
			if len(f) < 2 || f[1] != itoa(os.Getpid()) {
				continue
			}
			if f[0] == "Z" {
				out = append(out, filepath.Dir(path))
			} else {
				alive = true
			}
		}
		if !alive {
			return out
		}
	}
}
