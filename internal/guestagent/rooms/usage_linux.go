package rooms

import (
	"os"
	"path"
	"time"

	"golang.org/x/sys/unix"
)

// written is what programs of a room have written to the disk, as it was counted at some time.
type written struct {
	bytes, inodes int64
	known         bool
	counting      bool
	next          time.Time // not before then is it counted again
}

// usageAge is how old a count may be when it is asked for. One that takes long is repeated even less often: a room may have millions of files.
const (
	usageAge   = 10 * time.Second
	usageShare = 20 // counting takes at most the 20th part of the time
)

// Written returns what programs of the room called name have written to the disk, in bytes of its blocks and in files. It returns what was counted last, and
// counts again in the background if that is old. It is false for a room of which nothing is known: there is no disk, or it was not counted yet.
func (k *Keeper) Written(name string) (bytes, inodes int64, known bool) {
	k.mu.Lock()
	defer k.mu.Unlock()
	r := k.rooms[name]
	if r == nil || name == "" || k.disk == nil {
		return 0, 0, false
	}
	if w := &r.written; !w.counting && time.Now().After(w.next) {
		w.counting = true
		go k.count(r, path.Join(k.writtenFiles(), name, "upper")) // ends with the count
	}
	return r.written.bytes, r.written.inodes, r.written.known
}

func (k *Keeper) count(r *room, folder string) {
	began := time.Now()
	bytes, inodes := size(folder)
	took := time.Since(began)
	k.mu.Lock()
	defer k.mu.Unlock()
	r.written = written{bytes: bytes, inodes: inodes, known: true, next: time.Now().Add(max(usageAge, usageShare*took))}
}

// Limits of what is looked at, because the files are those of any program.
const (
	deepest   = 256     // folders in each other; what is further down does not count
	mostLinks = 100_000 // files with several names that are known; of others, each name counts
	batch     = 512     // entries of a folder that are read at once
)

// size returns the bytes and the inodes of a folder with its content. A file with several names counts once. A file that is deleted during the count may
// be missing.
func size(folder string) (bytes, inodes int64) {
	s := &sizes{linked: map[uint64]bool{}}
	s.enter(unix.AT_FDCWD, folder, 0)
	return s.bytes, s.inodes
}

type sizes struct {
	bytes, inodes int64
	linked        map[uint64]bool // by inode: all are on one file system
}

// enter counts the folder called name in another one, with all that is in it. It follows no link.
func (s *sizes) enter(parent int, name string, depth int) {
	fd, err := unix.Openat(parent, name, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return
	}
	f := os.NewFile(uintptr(fd), name)
	defer f.Close()
	var st unix.Stat_t
	if unix.Fstat(fd, &st) == nil {
		s.add(&st)
	}
	for {
		entries, err := f.ReadDir(batch)
		for _, e := range entries {
			switch {
			case e.IsDir() && depth < deepest:
				s.enter(fd, e.Name(), depth+1)
			case e.IsDir():
			case unix.Fstatat(fd, e.Name(), &st, unix.AT_SYMLINK_NOFOLLOW) == nil:
				s.add(&st)
			}
		}
		if err != nil { // io.EOF, or it is gone
			return
		}
	}
}

func (s *sizes) add(st *unix.Stat_t) {
	if st.Nlink > 1 && st.Mode&unix.S_IFMT != unix.S_IFDIR {
		if s.linked[st.Ino] {
			return
		}
		if len(s.linked) < mostLinks {
			s.linked[st.Ino] = true
		}
	}
	s.bytes, s.inodes = s.bytes+st.Blocks*512, s.inodes+1
}
