package guest

import (
	"context"
	"net/netip"
	"time"

	"cocoonstack.io/cocoon/internal/vm"
)

// Attacher is the ability of an Agent to join the standard files of the main process.
type Attacher interface {
	// Attach writes s.Stdin to the main process, or to that of a container, and delivers what it writes from now on, until
	// it has ended and all is delivered. With an input that ends first it returns then, unless the process is asked to end
	// by that (vm.Process.StdinOnce). The process outlives it in any case. A session whose writers take nothing for half a
	// minute is ended, for the process waits for them.
	// Errors: FailedPrecondition when it does not run, or has no input and s has.
	Attach(ctx context.Context, a Attach, s Streams) error
}

// Attach says which process to join.
type Attach struct {
	Container string // as in Exec
	Rows      uint16 // size to give its terminal, in characters; 0 keeps it
	Cols      uint16
}

// Forwarder is the ability of an Agent to connect from inside the guest.
type Forwarder interface {
	// Forward connects to a TCP port: on the guest's loopback, IPv4 and then IPv6, or else at its other addresses. It
	// carries s.Stdin there and what comes from there to s.Stdout, until no more comes. The end of s.Stdin ends one
	// direction only. s.Stdin is not read before it is connected.
	// Errors: Unavailable when nobody listens.
	Forward(ctx context.Context, port int, s Streams) error
}

// Freezer is the ability of an Agent to hold the guest's file systems still, for a copy of its disks that is consistent.
type Freezer interface {
	// Freeze flushes and freezes the file systems and returns how many there are. One that fails leaves none frozen, as
	// far as the guest can be reached.
	Freeze(ctx context.Context) (int, error)
	// Thaw ends that and returns how many were frozen. Thawing what is not frozen is no error.
	Thaw(ctx context.Context) (int, error)
}

// NetworkReporter is the ability of an Agent to say which addresses the guest gave itself.
type NetworkReporter interface {
	Interfaces(ctx context.Context) ([]Interface, error)
}

// Interface is a network interface as the guest, which may lie, sees it.
type Interface struct {
	Name      string
	MAC       string // lower case, "" when it has none
	Addresses []netip.Prefix
}

// Settler is the ability of an Agent to get a guest ready to be saved, for the sake of those who are resumed from that.
type Settler interface {
	// Settle has the guest finish what each of them would have to finish otherwise, as writing to its disks. It changes
	// nothing that a program could notice, and a guest that is saved without it, or after an error of it, is as good.
	Settle(ctx context.Context) error
}

// Resumer is the ability of an Agent to bring a guest to itself that was resumed from saved state.
type Resumer interface {
	// Resumed tells the guest that time has passed and, for a clone, who it is now. It first thaws file systems that were
	// frozen when the state was saved, reseeds the kernel's random numbers, and sets the clock. Idempotent.
	Resumed(ctx context.Context, r Resumed) (ResumedReply, error)
}

// Resumed is what such a guest is told.
type Resumed struct {
	Now     time.Time
	Entropy []byte // of the host's generator; secret

	Clone    *CloneIdentity // nil: the guest is who it was
	Hostname string
	NICs     []vm.NIC // with the MACs and addresses that they shall have
	Hosts    []string // lines added to /etc/hosts

	Storage int64 // bytes of the writable disk, when it is larger than when the state was saved; its file system grows
}

// CloneIdentity is what two guests resumed from one state must not share.
type CloneIdentity struct {
	MACs        []string // that the guest's interfaces have, in the order of Resumed.NICs
	MachineID   string   // 32 hex digits
	SSHHostKeys bool     // make new ones, where the guest has any
}

// ResumedReply is what the guest answers.
type ResumedReply struct {
	LogSeq uint64 // of the last entry of its log; what came before it in a clone is the source's
	// Containers are where the logs of its containers stand, in their order, likewise. Nil: its agent does not know.
	Containers []LogPlace
}

// LogPlace is the last entry of a log of several runs; see LogEntry. The zero value is that of a log without any.
type LogPlace struct {
	Run int
	Seq uint64
}
