// Package local does for a node what a container orchestrator does with the node service of CSI drivers (CSI specification 1.12): it finds
// the drivers that run on this machine, and stages, publishes, grows and releases their volumes.
//
// A record on the disk names each publication from before its first call to the driver until after the last one. So what a process that
// was killed has left can be published again or removed. Secrets and the attributes of volumes, which may have tokens, are in no record.
// What a driver answers is not trusted.
//
// Below Config.Dir, records/ has the records, staged/DRIVER/VOLUME/globalmount is where a volume is staged, and
// published/NAMESPACE/HOLDER/NAME/mount where it is published. Drivers mount there, so these mounts must propagate to the process that has
// the Node; what they mounted is never removed, only what is empty.
package local

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"

	"cocoonstack.io/cocoon/internal/csinode"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/filelock"
	"cocoonstack.io/cocoon/internal/keylock"
	"cocoonstack.io/cocoon/internal/vm"
)

// Config configures a Node.
type Config struct {
	Plugins string       // folder in which drivers put their registration sockets, such as /var/lib/kubelet/plugins_registry
	Dir     string       // absolute folder below which volumes are staged and published; the drivers mount there
	Log     *slog.Logger // nil discards
}

// Node is the node service of all drivers of this machine. It is safe for concurrent use.
type Node struct {
	registry *registry
	dir      string
	log      *slog.Logger
	boot     string // id of this boot of the machine
	lock     *os.File
	limits   limits
	onStep   func(step string) // set by tests; see Node.step

	keys    keylock.Locks[string] // by id of the key; taken before that of the volume
	volumes keylock.Locks[string] // by id of the volume

	mu      sync.Mutex
	entries map[string]entry // publications by id of the key; changed only with the lock of the volume
}

// entry is one publication.
type entry struct {
	rec    record
	volume string // id of the volume
	bad    error  // the record is damaged; nil: it is not
}

// New makes the folders below Config.Dir and reads the records there. Close releases them.
//
// Errors: InvalidArgument if a folder is not absolute or Dir has a symbolic link in its path; FailedPrecondition if another process has Dir.
func New(ctx context.Context, cfg Config) (_ *Node, err error) {
	for _, dir := range []string{cfg.Plugins, cfg.Dir} {
		if !filepath.IsAbs(dir) || filepath.Clean(dir) != dir || strings.IndexByte(dir, 0) >= 0 {
			return nil, errdefs.Invalidf("folder of CSI drivers or their volumes: %q is not an absolute, clean path", dir)
		}
	}
	log := cmp.Or(cfg.Log, slog.New(slog.DiscardHandler))
	n := &Node{
		registry: &registry{plugins: cfg.Plugins, log: log, pauses: defaultPauses, drivers: map[string]*driver{}, changed: make(chan struct{})},
		dir:      cfg.Dir, log: log, limits: defaultLimits, entries: map[string]entry{},
	}
	if n.boot, err = bootID(); err != nil {
		return nil, err
	}
	if err := n.makeFolders(); err != nil {
		return nil, fmt.Errorf("make the folder of CSI volumes: %w", err)
	}
	n.lock, err = filelock.Take(ctx, filepath.Join(n.dir, lockName))
	if errors.Is(err, filelock.ErrTaken) {
		return nil, errdefs.Preconditionf("folder %s of CSI volumes: %w; stop the other process or use another folder", n.dir, err)
	}
	if err != nil {
		return nil, fmt.Errorf("folder %s of CSI volumes: %w", n.dir, err)
	}
	if err := n.load(); err != nil {
		return nil, errors.Join(fmt.Errorf("read the records of CSI volumes: %w", err), n.lock.Close())
	}
	return n, nil
}

const (
	lockName      = "lock"
	recordsName   = "records"
	stagedName    = "staged"
	publishedName = "published"
)

func (n *Node) makeFolders() error {
	if err := os.MkdirAll(n.dir, 0o700); err != nil {
		return err
	}
	if real, err := filepath.EvalSymlinks(n.dir); err != nil {
		return err
	} else if real != n.dir {
		return errdefs.Invalidf("%s has a symbolic link in its path; name its real path %s", n.dir, real)
	}
	for _, f := range []struct {
		path string
		mode os.FileMode
	}{{n.dir, 0o700}, {n.Root(), 0o700}, {n.below(stagedName), 0o700}, {n.below(recordsName), 0o700}} {
		if err := makeFolder(f.path, f.mode); err != nil {
			return err
		}
	}
	return nil
}

// makeFolder makes a folder with exactly this mode, or gives one that exists the mode.
func makeFolder(path string, mode os.FileMode) error {
	if err := os.Mkdir(path, mode); err != nil && !errors.Is(err, fs.ErrExist) {
		return err
	}
	if info, err := os.Lstat(path); err != nil {
		return err
	} else if !info.IsDir() {
		return errdefs.Preconditionf("%s is not a folder; remove it", path)
	}
	return os.Chmod(path, mode)
}

func (n *Node) below(parts ...string) string {
	return filepath.Join(append([]string{n.dir}, parts...)...)
}

func bootID() (string, error) {
	text, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return "", fmt.Errorf("read the id of this boot: %w", err)
	}
	return strings.TrimSpace(string(text)), nil
}

// Close releases the folder. Published volumes stay published. Preconditions: no other call is running.
func (n *Node) Close() error { return n.lock.Close() }

// Run finds the drivers that register, and forgets those whose sockets vanish, until ctx ends; then it returns nil. It may run once at a
// time. The drivers stay registered after it.
func (n *Node) Run(ctx context.Context) error { return n.registry.run(ctx) }

// Drivers returns the registered drivers, sorted by name.
func (n *Node) Drivers() []csinode.Driver { return n.registry.list() }

// Changed returns a channel that is closed when a driver registers or unregisters the next time.
func (n *Node) Changed() <-chan struct{} { return n.registry.next() }

// Root returns the folder below which all published paths are. It is absolute and clean.
func (n *Node) Root() string { return n.below(publishedName) }

// List returns all publications whose records can be read, also those that an interrupted call has left, sorted by key.
func (n *Node) List() []csinode.Published {
	n.mu.Lock()
	defer n.mu.Unlock()
	out := make([]csinode.Published, 0, len(n.entries))
	for _, e := range n.entries {
		if e.bad == nil {
			out = append(out, n.published(e.rec))
		}
	}
	slices.SortFunc(out, func(a, b csinode.Published) int { return a.Compare(b.Key) })
	return out
}

func (n *Node) published(r record) csinode.Published {
	return csinode.Published{
		Key: r.Key, Driver: r.Driver, Handle: r.Handle, Access: r.Access, ReadOnly: r.ReadOnly,
		Path: n.target(r.Key), Grouped: r.Grouped, Ready: r.Boot == n.boot,
	}
}

// Find checks that owner may have the folder path: a ready volume of owner is published exactly there, and, if write, not read-only.
// Owners are compared by namespace; the operator has those of all.
// Errors: FailedPrecondition with the reason and the remedy.
func (n *Node) Find(owner vm.Owner, path string, write bool) error {
	for _, p := range n.List() {
		if p.Path != path || !owner.Reaches(p.Owner) {
			continue
		}
		switch {
		case !p.Ready:
			return errdefs.Preconditionf("%s, at %s, is not published completely since the machine started; publish it again, as a new start of its pod does", p.Key, path)
		case write && p.ReadOnly:
			return errdefs.Preconditionf("%s, at %s, is published read-only; ask for it read-only", p.Key, path)
		}
		return nil
	}
	return errdefs.Preconditionf("%s is not the path of a published CSI volume of this namespace; use the volume through a claim of a pod", path)
}

// entry returns the publication with this key; false if there is none. Errors: DataLoss if its record is damaged.
func (n *Node) entry(k csinode.Key) (entry, bool, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	e, ok := n.entries[keyID(k)]
	return e, ok, e.bad
}

// others returns the other publications of a volume, also those with damaged records.
func (n *Node) others(volume string, k csinode.Key) []entry {
	n.mu.Lock()
	defer n.mu.Unlock()
	var out []entry
	for id, e := range n.entries {
		if e.volume == volume && id != keyID(k) {
			out = append(out, e)
		}
	}
	return out
}

// step tells tests that a step of a publication comes next.
func (n *Node) step(name string) {
	if n.onStep != nil {
		n.onStep(name)
	}
}
