package filelock

import (
	"errors"
	"path/filepath"
	"testing"
	"time"
)

func TestTake(t *testing.T) {
	path := filepath.Join(t.TempDir(), "lock")
	first, err := Take(t.Context(), path)
	if err != nil {
		t.Fatal(err)
	}
	if f, err := Take(t.Context(), path); !errors.Is(err, ErrTaken) {
		t.Errorf("%v, %v", f, err)
	}
	time.AfterFunc(50*time.Millisecond, func() { first.Close() })
	second, err := Take(t.Context(), path) // the holder is about to release it
	if err != nil {
		t.Fatal(err)
	}
	second.Close()
	if _, err := Take(t.Context(), filepath.Join(t.TempDir(), "none", "lock")); err == nil || errors.Is(err, ErrTaken) {
		t.Errorf("a folder that is not there: %v", err)
	}
}
