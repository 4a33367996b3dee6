// Package volumes makes the volumes of an OCI guest: folders of given files that are replaced as a whole; folders that
// start empty, on disk or in memory; disks of their own, as file systems or as devices; folders of servers; and the mounts that show them to programs.
//
// It does not talk to the host; the agent's server does. It never removes a volume: one in memory ends when the guest
// powers off, one on the VM's disk is removed with the VM, and one with a disk of its own is the host's.
package volumes

import (
	"context"
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"os"
	"sync"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/vm"
)

// Folders of the guest.
const (
	stagePath = "/run/.cocoon-volumes"    // shows the volumes in memory until all are mounted
	diskPath  = "/var/lib/cocoon/volumes" // in the writable layer, accessible to root only
)

// Machine is what the keeper needs of the machine for volumes with file systems of their own.
type Machine struct {
	// HasDisk means that the writable layer is on a disk, not in memory.
	HasDisk bool
	// Loop loads what the kernel needs to make disks of files. It may be called more than once.
	Loop func() error
	// NFS loads what the kernel needs to mount folders of NFS servers. It may be called more than once.
	NFS func() error
	// XFS loads what the kernel needs to mount xfs, if it can. It may be called more than once. Nil: it does nothing.
	XFS func() error
	// Plug loads what disks need that are plugged while the guest runs.
	Plug func() error
	// Run runs programs of the image.
	Run Run
	// Check is Run for e2fsck, which the guest brings. Errors: Unsupported if it does not.
	Check func(ctx context.Context, args ...string) (code int, output string, err error)
}

// Keeper owns the volumes of the guest it runs in. Its methods are safe for concurrent use.
type Keeper struct {
	stage   string
	layer   string // folder of the writable layer
	machine Machine

	disks mountedDisks

	mu      sync.Mutex
	store   *os.Root                     // holds the files, by volume; nil without any. Stays open after the path stage is removed.
	sums    map[string][sha256.Size]byte // of the content of volumes of files
	made    map[string]bool              // volumes that are ready to be mounted
	uses    map[string]diskUse           // of volumes that are disks
	volumes map[string]vm.Volume         // those that were to be made
	client  string                       // by which NFS servers know the guest
	tries   map[string]*nfsTry           // to mount folders of NFS servers that have not ended, or whose result nobody took, by volume
	mounted map[string]bool              // by path
	lacks   map[string]error             // parts of images' files that do not exist, by the folder where they are to be mounted
	texts   map[string]*os.File          // the files for messages, by path
	closed  bool                         // all volumes are mounted, and stage is removed
	vault   *os.File                     // mount namespace where the stage is still mounted, at vaultPath; nil before closed, or if it never was
}

// New returns the keeper of a guest without volumes.
func New(m Machine) *Keeper { return newKeeper(stagePath, diskPath, m) }

func newKeeper(stage, layer string, m Machine) *Keeper {
	return &Keeper{
		stage: stage, layer: layer, machine: m, disks: mountedDisks{byVolume: map[string]mountedDisk{}}, uses: map[string]diskUse{},
		sums: map[string][sha256.Size]byte{}, made: map[string]bool{}, volumes: map[string]vm.Volume{}, mounted: map[string]bool{}, lacks: map[string]error{}, texts: map[string]*os.File{}, tries: map[string]*nfsTry{},
	}
}

// Put makes v.Files the content of a volume of files. The same content again changes nothing.
func (k *Keeper) Put(_ context.Context, v vm.Volume) error {
	if v.Kind != vm.VolumeFiles {
		return errdefs.Invalidf("volume %s is not a volume of files, so it cannot be given files", v.Name)
	}
	if err := vm.ValidateFiles(v.Name, v.Files); err != nil {
		return err
	}
	sum, err := digest(v)
	if err != nil {
		return err
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	if old, ok := k.sums[v.Name]; ok && old == sum {
		return nil
	}
	if err := k.write(v); err != nil {
		return fmt.Errorf("write volume %s: %w", v.Name, err)
	}
	k.sums[v.Name] = sum
	return nil
}

// write fills the folder of v. Preconditions: mu is held.
func (k *Keeper) write(v vm.Volume) error {
	if err := k.open(); err != nil {
		return err
	}
	dir, err := k.folder(v)
	if err != nil {
		return err
	}
	defer dir.Close()
	return fill(dir, v.Files, v.Group)
}

// folder opens the folder of a volume of files and makes it if it is missing.
func (k *Keeper) folder(v vm.Volume) (*os.Root, error) {
	if _, err := k.store.Lstat(v.Name); os.IsNotExist(err) {
		if err := makeFolder(k.store, v.Name, v.Group); err != nil {
			return nil, err
		}
	}
	return k.store.OpenRoot(v.Name)
}

func digest(v vm.Volume) (sum [sha256.Size]byte, err error) {
	text, err := json.Marshal(struct {
		Files []vm.VolumeFile
		Group *int64
	}{v.Files, v.Group})
	if err != nil {
		return sum, fmt.Errorf("encode volume %s: %w", v.Name, err)
	}
	return sha256.Sum256(text), nil
}
