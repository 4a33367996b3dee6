package main

import (
	"bufio"
	"fmt"
	"os"
	"path/filepath"
)

// packInitramfs writes an uncompressed cpio archive (newc). In an emulated guest, unpacking costs 0.2 s with gzip, 0.1 s with LZ4,
// and almost nothing without compression. It holds the agent as /init, the modules, the folders and console for init, and e2fsck, which
// few guests ever need, compressed.
func packInitramfs(agent, modules, check, out string) (err error) {
	f, err := os.Create(out)
	if err != nil {
		return err
	}
	defer func() {
		if cerr := f.Close(); err == nil {
			err = cerr
		}
	}()
	w := &archive{w: bufio.NewWriterSize(f, 1<<20)}
	for _, dir := range []string{"dev", "proc", "sys", "run", "tmp", "etc", "modules", "mnt", "mnt/lower", "mnt/upper", "mnt/root"} {
		w.add(entry{name: dir, mode: 0o040755})
	}
	w.add(entry{name: "dev/console", mode: 0o020600, major: 5, minor: 1})
	files, err := filepath.Glob(filepath.Join(modules, "*"))
	if err != nil {
		return err
	}
	for _, path := range files {
		w.addFile("modules/"+filepath.Base(path), path, 0o100644)
	}
	w.addFile("init", agent, 0o100755)
	w.addFile("e2fsck.gz", check, 0o100644)
	w.add(entry{name: "TRAILER!!!"})
	if w.err == nil {
		w.err = w.w.Flush()
	}
	return w.err
}

type entry struct {
	name         string
	mode         uint32
	major, minor uint32
	data         []byte
}

// archive writes entries. It keeps the first error and then writes nothing more.
type archive struct {
	w   *bufio.Writer
	ino uint32
	off int
	err error
}

func (a *archive) addFile(name, path string, mode uint32) {
	data, err := os.ReadFile(path)
	if err != nil && a.err == nil {
		a.err = err
	}
	a.add(entry{name: name, mode: mode, data: data})
}

func (a *archive) add(e entry) {
	a.ino++
	nlink := 1
	if e.mode&0o170000 == 0o040000 {
		nlink = 2
	}
	// ino mode uid gid nlink mtime size devmajor devminor rdevmajor rdevminor namesize check
	a.write(fmt.Appendf(nil, "070701%08x%08x%08x%08x%08x%08x%08x%08x%08x%08x%08x%08x%08x%s\x00",
		a.ino, e.mode, 0, 0, nlink, 0, len(e.data), 0, 0, e.major, e.minor, len(e.name)+1, 0, e.name))
	a.pad()
	a.write(e.data)
	a.pad()
}

func (a *archive) write(p []byte) {
	if a.err != nil {
		return
	}
	var n int
	n, a.err = a.w.Write(p)
	a.off += n
}

// pad fills up to the next multiple of four, as newc requires.
func (a *archive) pad() { a.write(make([]byte, (4-a.off%4)%4)) }
