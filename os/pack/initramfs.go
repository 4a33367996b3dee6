package main

import (
	"bufio"
	"compress/gzip"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
)

// packInitramfs writes the tree dir as a cpio archive (newc), with a console. Owners are root, times are zero, and names are in order: the same tree
// gives the same bytes.
func packInitramfs(dir, out string) (err error) {
	f, err := os.Create(out)
	if err != nil {
		return err
	}
	defer func() { err = errors2(err, f.Close()) }()
	buf := bufio.NewWriterSize(f, 1<<20)
	z, err := gzip.NewWriterLevel(buf, gzip.BestCompression)
	if err != nil {
		return err
	}
	a := &archive{w: z}
	err = filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil || path == dir {
			return err
		}
		name, err := filepath.Rel(dir, path)
		if err != nil {
			return err
		}
		return a.addFile(name, path, d)
	})
	if err == nil {
		err = a.add(entry{name: "dev/console", mode: 0o020600, major: 5, minor: 1})
	}
	if err == nil {
		err = a.add(entry{name: "TRAILER!!!"})
	}
	if err == nil {
		err = z.Close()
	}
	if err == nil {
		err = buf.Flush()
	}
	return err
}

func errors2(first, second error) error {
	if first != nil {
		return first
	}
	return second
}

// entry is a file of an archive; mode has its type.
type entry struct {
	name         string
	mode         uint32
	major, minor uint32 // of a device
	data         []byte
}

type archive struct {
	w    io.Writer
	next uint32 // inode
}

func (a *archive) addFile(name, path string, d fs.DirEntry) error {
	info, err := d.Info()
	if err != nil {
		return err
	}
	e := entry{name: name, mode: uint32(info.Mode().Perm())}
	switch {
	case d.IsDir():
		e.mode |= 0o040000
	case info.Mode()&fs.ModeSymlink != 0:
		e.mode = 0o120777
		to, err := os.Readlink(path)
		if err != nil {
			return err
		}
		e.data = []byte(to)
	case info.Mode().IsRegular():
		e.mode |= 0o100000
		if e.data, err = os.ReadFile(path); err != nil {
			return err
		}
	default:
		return fmt.Errorf("%s is no file, folder or link", path)
	}
	return a.add(e)
}

// add writes a header, the name and the content, the last two each padded to four bytes.
func (a *archive) add(e entry) error {
	a.next++
	header := fmt.Sprintf("070701%08X%08X%08X%08X%08X%08X%08X%08X%08X%08X%08X%08X%08X%s\x00",
		a.next, e.mode, 0, 0, 1, 0, len(e.data), 0, 0, e.major, e.minor, len(e.name)+1, 0, e.name)
	for _, part := range []string{header, string(e.data)} {
		if _, err := io.WriteString(a.w, part+"\x00\x00\x00"[:(4-len(part)%4)%4]); err != nil {
			return err
		}
	}
	return nil
}
