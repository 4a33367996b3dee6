package vm

import (
	"strings"
	"time"

	"cocoonstack.io/cocoon/internal/errdefs"
)

// CloneSpec asks for a VM that resumes from a snapshot. Zero values mean the snapshot's own.
type CloneSpec struct {
	Snapshot    string            // name or id; "" with FromDir
	FromDir     string            // absolute path of a folder with an exported snapshot that no store knows
	Name        string            // "": cocoon-clone-<id>
	Labels      map[string]string // as in Spec
	CPUs        int               // must equal the snapshot's, unless Cold or Keep.Size
	Memory      int64             // bytes; must equal the snapshot's, unless Cold or Keep.Size
	Storage     int64             // bytes; a larger value than the snapshot's grows the disk
	DiskRate    DiskRate          // each of its limits that is not 0 replaces the snapshot's
	NICs        []NICSpec         // as many as the snapshot has, unless Cold or Keep.NICs
	Policed     bool              // of all its interfaces, whatever those of the snapshot are
	Hostname    string            // "": the name
	SSHHostKeys bool              // the clone generates new host keys
	Cold        bool              // boot from the snapshot's disks instead of resuming from its memory
	StopGrace   time.Duration
	DNS         *DNS // for a guest that does not boot itself; nil: the snapshot's
	Keep        Keep
}

// Keep says what a clone has of its snapshot although its spec has other values, for callers that do not know the snapshot.
type Keep struct {
	Size bool // CPUs and memory, if the guest resumes
	NICs bool // the number of interfaces: each is like the only one of the spec
}

// Validate rejects a clone of no snapshot or of two, and a folder whose path depends on where a process was started.
func (s CloneSpec) Validate() error {
	switch {
	case (s.Snapshot == "") == (s.FromDir == ""):
		return errdefs.Invalidf("a clone needs either a snapshot or a folder with one, not both")
	case s.FromDir != "" && !strings.HasPrefix(s.FromDir, "/"):
		return errdefs.Invalidf("clone of a snapshot: %q is not an absolute path", s.FromDir)
	case s.Keep.NICs && (len(s.NICs) != 1 || s.NICs[0].MAC != "" || len(s.NICs[0].Ports) > 0 || s.NICs[0].Masquerade.Asked()):
		return errdefs.Invalidf("a clone with as many interfaces as its snapshot needs one example, without MAC, ports and masquerade")
	}
	return nil
}

// SaveSpec asks for a snapshot of a VM.
type SaveSpec struct {
	Name        string // of the snapshot
	Description string
	Quiesce     bool // freeze the guest's file systems during the snapshot; fails when the guest cannot
	Labels      map[string]string
}
