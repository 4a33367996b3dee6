package vm

import "time"

// CloneSpec asks for a VM that goes on from a snapshot. Zero values are the snapshot's own.
type CloneSpec struct {
	Snapshot    string            // name or id; "" with FromDir
	FromDir     string            // absolute folder with an exported snapshot, which no store knows
	Name        string            // "": cocoon-clone-<id>
	Labels      map[string]string // as in Spec
	CPUs        int               // only the snapshot's is possible, unless Cold
	Memory      int64             // bytes; likewise
	Storage     int64             // bytes; more than the snapshot's grows the disk
	NICs        []NICSpec         // as many as the snapshot has, unless Cold
	Hostname    string            // "": the name
	SSHHostKeys bool              // the clone makes its own
	Cold        bool              // boot from the snapshot's disks instead of going on from its memory
	StopGrace   time.Duration
}

// SaveSpec asks for a snapshot of a VM.
type SaveSpec struct {
	Name        string // of the snapshot
	Description string
	Quiesce     bool // freeze the guest's file systems for the instant; fails when the guest cannot
	Labels      map[string]string
}
