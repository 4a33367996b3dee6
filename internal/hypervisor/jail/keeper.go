package jail

import (
	"bytes"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"sync"
	"time"
)

// keepInterval is how often log sizes are checked. A log can exceed its limit by what a guest prints in this time.
const keepInterval = time.Second

// Keeper bounds the logs of all VMs with one timer, which runs only while there are VMs. The hypervisor writes the logs itself, so
// nothing is lost while the daemon is away; a log that grew too long meanwhile is cut when the VM is adopted.
type Keeper struct {
	limit int64    // bytes of one log
	names []string // of the logs in each folder

	trims sync.Mutex // held while a log is cut

	mu    sync.Mutex
	dirs  map[string]int // folders of VMs, with the number of their instances
	timer *time.Timer
}

// Add begins to bound the logs in dir, once more if it is bound already.
func (k *Keeper) Add(dir string) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.dirs == nil {
		k.dirs = map[string]int{}
	}
	k.dirs[dir]++
	if k.timer == nil {
		k.timer = time.AfterFunc(0, k.tick)
	}
}

// Drop ends one Add. The logs are bounded then, too: nobody bounds those of a process that has ended, and they stay.
func (k *Keeper) Drop(dir string) {
	k.bound(dir)
	k.mu.Lock()
	defer k.mu.Unlock()
	k.dirs[dir]--
	if k.dirs[dir] <= 0 {
		delete(k.dirs, dir)
	}
	if len(k.dirs) == 0 && k.timer != nil {
		k.timer.Stop()
		k.timer = nil
	}
}

func (k *Keeper) tick() {
	k.mu.Lock()
	dirs := make([]string, 0, len(k.dirs))
	for d := range k.dirs {
		dirs = append(dirs, d)
	}
	k.mu.Unlock()
	for _, d := range dirs {
		k.bound(d)
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.timer != nil {
		k.timer.Reset(keepInterval)
	}
}

func (k *Keeper) bound(dir string) {
	k.trims.Lock()
	defer k.trims.Unlock()
	for _, name := range k.names {
		_ = trim(filepath.Join(dir, name), k.limit) // an error means that the folder is being removed. If not, the next check finds it again
	}
}

// trim cuts a file longer than limit down to its last limit/2 bytes, from the start of a line. A writer with O_APPEND continues
// after that; what it writes during the cut itself (some µs) may be lost.
func trim(path string, limit int64) error {
	st, err := os.Lstat(path)
	if err != nil || !st.Mode().IsRegular() || st.Size() <= limit {
		return err
	}
	f, err := os.OpenFile(path, os.O_RDWR|os.O_APPEND, 0)
	if err != nil {
		return fmt.Errorf("trim log: %w", err)
	}
	defer f.Close()
	end, err := f.Seek(0, io.SeekEnd)
	if err != nil {
		return fmt.Errorf("trim log: %w", err)
	}
	tail, err := io.ReadAll(io.NewSectionReader(f, end-limit/2, limit/2))
	if err != nil {
		return fmt.Errorf("trim log: %w", err)
	}
	if nl := bytes.IndexByte(tail, '\n'); nl >= 0 {
		tail = tail[nl+1:]
	}
	if err := f.Truncate(0); err != nil {
		return fmt.Errorf("trim log: %w", err)
	}
	if _, err := f.Write(tail); err != nil {
		return fmt.Errorf("trim log: %w", err)
	}
	return nil
}
