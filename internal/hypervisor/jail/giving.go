package jail

import (
	"os"
	"sync"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/proc"
)

// Giving says whether files below a folder can be given to processes with a root of their own (proc.CanGive). It asks the kernel until that succeeds
// once. It is safe for concurrent use.
type Giving struct {
	Folder string // "": whatever is asked about, it can

	mu  sync.Mutex
	can bool
}

// Check returns Unavailable if files in the folder cannot be given to processes. It looks only as root, and at a folder that is there. title is the program.
func (g *Giving) Check(title string) error {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.can || g.Folder == "" || os.Geteuid() != 0 {
		return nil
	}
	err := proc.CanGive(g.Folder)
	if errdefs.Is(err, errdefs.Unsupported) || errdefs.IsUnavailable(err) {
		return errdefs.Unavailablef("%s sees the files of its VMs by mounts that map users: %w", title, err)
	}
	g.can = err == nil
	return nil // any other error says nothing about the file system; a launch tells it
}
