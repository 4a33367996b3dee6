package proclog

import (
	"fmt"
	"os"
	"path/filepath"
)

// Set is the logs of one VM: that of its main process, and one for each of its containers in a folder of its own.
type Set struct {
	Main       *Log
	containers map[string]*Log
	dir        string
}

// NewSet returns the logs in the folder of a VM. maxBytes bounds each of them; containers are the names of the
// containers.
func NewSet(dir string, maxBytes int64, containers ...string) *Set {
	s := &Set{Main: New(dir, maxBytes), containers: map[string]*Log{}, dir: dir}
	for _, name := range containers {
		s.containers[name] = New(s.folder(name), maxBytes)
	}
	return s
}

func (s *Set) folder(container string) string { return filepath.Join(s.dir, "containers", container) }

// Of returns the log of a container; "" is the main process.
func (s *Set) Of(container string) *Log {
	if container == "" {
		return s.Main
	}
	return s.containers[container]
}

// BeginForeign begins every log for a guest whose logs begin with those of another run; see Log.Skip.
func (s *Set) BeginForeign() error {
	if err := s.Main.BeginForeign(); err != nil {
		return err
	}
	for name, log := range s.containers {
		if err := os.MkdirAll(s.folder(name), 0o700); err != nil {
			return fmt.Errorf("begin log of container %s: %w", name, err)
		}
		if err := log.BeginForeign(); err != nil {
			return fmt.Errorf("container %s: %w", name, err)
		}
	}
	return nil
}

// Resume continues the log of a container, and returns it.
func (s *Set) Resume(container string) (*Log, error) {
	log := s.containers[container]
	if err := os.MkdirAll(s.folder(container), 0o700); err != nil {
		return nil, fmt.Errorf("log of container %s: %w", container, err)
	}
	if err := log.Resume(); err != nil {
		return nil, fmt.Errorf("log of container %s: %w", container, err)
	}
	return log, nil
}

// Finish ends every log: readers that follow one have got everything.
func (s *Set) Finish() {
	s.Main.Finish()
	for _, l := range s.containers {
		l.Finish()
	}
}
