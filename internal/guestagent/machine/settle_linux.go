package machine

import (
	"context"
	"fmt"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
)

// Settle implements guestagent.Machine. What Resume and Forget will open is opened and what they will look at is looked
// at: the kernel then has the names, found or not found, and the pages of the files in memory.
func (m *Machine) Settle(ctx context.Context) error {
	if _, err := m.random(); err != nil {
		return err
	}
	s, err := m.link()
	if err != nil {
		return err
	}
	s.nearby()
	if _, err := s.addresses(); err != nil {
		return err
	}
	for i := range m.files {
		m.files[i].open()
	}
	for _, s := range sources {
		_, _ = os.ReadDir(filepath.Join(m.root+"/", s.dir))
	}
	return m.flush(ctx)
}

// flush writes to the disks what waits for that, or until ctx ends. It goes on with it then.
func (m *Machine) flush(ctx context.Context) error {
	done := make(chan struct{})
	go func() { // ends when the disks have it all
		defer close(done)
		unix.Sync()
	}()
	select {
	case <-done:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("write the file systems to their disks: %w", context.Cause(ctx))
	}
}
