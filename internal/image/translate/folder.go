package translate

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"cocoonstack.io/cocoon/internal/image"
)

// settled is how long a file must be unchanged before its times show every change. File system clocks are coarse: two
// writes in one tick have the same time.
const settled = 2 * time.Second

// folder holds the mapping files of a directory. A file is read again when it was replaced or touched. Sub-folders and
// names that start with a dot are ignored, so that a mounted ConfigMap shows only its keys.
type folder struct {
	path     string
	files    map[string]*file
	mappings []*mapping             // sorted by name
	unread   []image.MappingProblem // what could not be read
}

type file struct {
	stamp   stamp
	mapping *mapping
	problem string // why there is no mapping
}

// stamp changes when a file changes. A young stamp proves nothing.
type stamp struct {
	dev, ino     uint64
	size         int64
	mtime, ctime syscall.Timespec
	young        bool
}

func stampOf(info fs.FileInfo, now time.Time) stamp {
	s := stamp{size: info.Size()}
	if st, ok := info.Sys().(*syscall.Stat_t); ok {
		s.dev, s.ino, s.mtime, s.ctime = st.Dev, st.Ino, st.Mtim, st.Ctim
		s.young = now.Sub(time.Unix(st.Ctim.Unix())) < settled
	}
	return s
}

// refresh reads changed files and reports whether anything changed.
func (f *folder) refresh() bool {
	if f.path == "" {
		return false
	}
	entries, err := os.ReadDir(f.path) // sorted by name
	if errors.Is(err, fs.ErrNotExist) {
		err = nil
	}
	if err != nil {
		// Keep the mappings read before: a folder that cannot be read now says nothing about them.
		had := len(f.unread) > 0
		f.unread = []image.MappingProblem{f.problem("", "the folder of mappings cannot be read: "+reason(err))}
		return !had
	}
	before, changed := f.files, len(f.unread) > 0
	f.files, f.mappings, f.unread = map[string]*file{}, nil, nil
	for _, e := range entries {
		name := e.Name()
		if strings.HasPrefix(name, ".") {
			continue
		}
		now := f.load(name, before[name])
		if now == nil {
			continue
		}
		changed = changed || now != before[name]
		f.files[name] = now
		if now.problem != "" {
			f.unread = append(f.unread, f.problem(name, now.problem))
			continue
		}
		f.mappings = append(f.mappings, now.mapping)
	}
	return changed || len(f.files) != len(before)
}

// load returns old if the file still has the same content, and nil if there is no file.
func (f *folder) load(name string, old *file) *file {
	now := time.Now()
	path := filepath.Join(f.path, name)
	info, err := os.Stat(path)
	if err != nil {
		if _, lerr := os.Lstat(path); errors.Is(lerr, fs.ErrNotExist) {
			return nil // removed since it was listed
		}
		return old.or(&file{problem: "it cannot be read: " + reason(err)})
	}
	if info.IsDir() {
		return nil
	}
	if !info.Mode().IsRegular() {
		return old.or(&file{problem: "it is not a regular file"})
	}
	s := stampOf(info, now)
	if old != nil && old.stamp == s && !s.young && old.mapping != nil {
		return old
	}
	text, err := read(path)
	if err != nil {
		return old.or(&file{problem: "it cannot be read: " + reason(err)})
	}
	if old != nil && old.mapping != nil && old.mapping.text == text {
		old.stamp = s
		return old
	}
	return &file{stamp: s, mapping: parseMapping(SourceFiles, name, text)}
}

// or returns f if it reports the same problem as now.
func (f *file) or(now *file) *file {
	if f != nil && f.mapping == nil && f.problem == now.problem {
		return f
	}
	return now
}

// read reads a file and never blocks: a regular file may have become a pipe meanwhile.
func read(path string) (string, error) {
	f, err := os.OpenFile(path, os.O_RDONLY|syscall.O_NONBLOCK, 0)
	if err != nil {
		return "", err
	}
	defer f.Close()
	if info, err := f.Stat(); err != nil || !info.Mode().IsRegular() {
		return "", errors.New("it is not a regular file")
	}
	text, err := io.ReadAll(io.LimitReader(f, maxMapping+1)) // one byte more: the parser reports a file that is too large
	return string(text), err
}

// reason is an error without the path, because the problem already names the file.
func reason(err error) string {
	if perr, ok := errors.AsType[*fs.PathError](err); ok {
		return perr.Err.Error()
	}
	return fmt.Sprint(err)
}

func (f *folder) problem(mapping, message string) image.MappingProblem {
	return image.MappingProblem{Source: SourceFiles, Mapping: mapping, Message: message}
}
