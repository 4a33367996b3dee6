package machine

import (
	"context"
	"fmt"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
)

// Settle implements guestagent.Machine. It opens the files that Resume and Forget will open, and looks up the paths
// that they will look up. The kernel then has the names, found or not found, and the files' pages in memory.
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

// flush writes pending data to the disks until that is done or ctx ends. The write continues after ctx ends.
func (m *Machine) flush(ctx context.Context) error {
	done := make(chan struct{})
	go func() { // ends when all data is on the disks
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
