// Package container is the contract of a runtime of ordinary containers, which share the kernel of the node.
//
// A runtime keeps images and containers, and tells how containers end. It restarts nothing, attaches no network and mounts no
// volume: its caller gives it paths, and compares what there should be with what there is.
package container

import (
	"context"
	"io"
	"time"

	"cocoonstack.io/cocoon/internal/vm"
)

// Spec is what a container is made of. It never changes: for other values, the container is removed and created again.
type Spec struct {
	ID       string            `json:"id"`                 // unique on the node
	Image    string            `json:"image"`              // as for EnsureImage
	Command  []string          `json:"command,omitempty"`  // instead of the entrypoint and the arguments of the image
	Args     []string          `json:"args,omitempty"`     // instead of the arguments of the image
	Env      []vm.EnvVar       `json:"env,omitempty"`      // added to that of the image
	WorkDir  string            `json:"workDir,omitempty"`  // "": as the image says
	User     string            `json:"user,omitempty"`     // name or number, with :GROUP or not; "": as the image says
	Hostname string            `json:"hostname,omitempty"` // "": the ID
	Network  Network           `json:"network"`
	Files    Files             `json:"files"`
	Mounts   []Mount           `json:"mounts,omitempty"`
	Host     Host              `json:"host"`
	Limits   Limits            `json:"limits"`
	Labels   map[string]string `json:"labels,omitempty"` // of the caller, such as the hash of its own object
}

// Network is where a container is connected. The zero value has loopback only.
type Network struct {
	Host  bool   `json:"host,omitempty"`  // it shares the node's
	NetNS string `json:"netNS,omitempty"` // or joins the network namespace at this path, which must be there at each start
}

// Files are the contents of files that the container sees instead of those of its image. "": those of the image.
type Files struct {
	Hosts      string `json:"hosts,omitempty"`      // /etc/hosts
	ResolvConf string `json:"resolvConf,omitempty"` // /etc/resolv.conf
}

// Mount shows a path of the node in a container. The source must be there at each start.
type Mount struct {
	Source   string `json:"source"`
	Path     string `json:"path"` // in the container; made if it is missing
	ReadOnly bool   `json:"readOnly,omitempty"`
}

// Host is what a container has of the node beyond what is safe. Each of its fields gives the node to who controls the container.
type Host struct {
	Privileged bool     `json:"privileged,omitempty"` // all capabilities and devices, no filter of system calls, /sys can be written
	PID        bool     `json:"pid,omitempty"`        // the processes of the node
	IPC        bool     `json:"ipc,omitempty"`        // its shared memory and message queues
	Mount      bool     `json:"mount,omitempty"`      // mounts that one of both makes below a path of BindPaths are visible to the other
	BindPaths  []string `json:"bindPaths,omitempty"`  // paths of the node, at the same paths of the container
}

// Limits bound what a container uses. 0: no limit.
type Limits struct {
	CPU    int64 `json:"cpu,omitempty"`    // thousandths of a CPU
	Memory int64 `json:"memory,omitempty"` // bytes, without swap
	PIDs   int64 `json:"pids,omitempty"`   // processes and threads
}

// Phase is where a container is in its life.
type Phase string

// The phases. A container that has exited can be started again; it keeps its files. A container is being removed also when a removal was
// interrupted: then it can only be removed again, or created anew.
const (
	Created  Phase = "created"
	Running  Phase = "running"
	Exited   Phase = "exited"
	Removing Phase = "removing"
)

// ExitUnknown is the exit code of a container whose end nobody saw, because the node or the shim of the container ended with it.
const ExitUnknown = -1

// State is how a container is.
type State struct {
	Phase      Phase
	PID        int       // of its main process on the node, while it runs
	ExitCode   int       // of the last run, if it has exited: 128+n for death by signal n, or ExitUnknown
	OOMKilled  bool      // the last run was killed because its memory was used up
	StartedAt  time.Time // of the last run; zero: never
	FinishedAt time.Time // zero: it has not ended, or nobody saw when
	Reason     string    // why it has exited, in words, if the exit code does not say so
}

// Container is a container that the runtime keeps.
type Container struct {
	Spec      Spec
	Digest    string // of its image's manifest when it was created
	CreatedAt time.Time
	State     State
}

// Runtime keeps containers. Methods on different containers never wait for each other, and calls of Start, Stop and Remove of one
// container follow each other.
//
// Errors: all return Unavailable while the runtime does not answer. Containers go on meanwhile, and the call can be repeated: what a call
// that failed, or a process that was killed, has done of its work is completed, or undone, by the next call for the same container.
type Runtime interface {
	// Create makes a container and its file system, and starts nothing. It first completes a removal that was interrupted.
	// Errors: InvalidArgument, AlreadyExists (also if the container there is the same), NotFound when the image is not there.
	Create(ctx context.Context, s Spec) error

	// Start starts the main process. A container that runs is no error.
	// Errors: NotFound, FailedPrecondition when a source or a namespace is missing, the program cannot be started, or it is being removed.
	Start(ctx context.Context, id string) error

	// Stop sends the image's stop signal, or SIGTERM, to the main process, and kills the whole container with its execs after grace, at
	// once if that is 0. It returns when the container has ended and its exit code is recorded. A container that does not run is no error.
	// Errors: NotFound.
	Stop(ctx context.Context, id string, grace time.Duration) error

	// Remove kills what runs, and removes the container with its file system and, unless keepLog is true, its log. A container that is
	// not there is no error; what is left of it is removed then, too.
	Remove(ctx context.Context, id string, keepLog bool) error

	// Inspect returns one container. Errors: NotFound.
	Inspect(ctx context.Context, id string) (Container, error)

	// List returns all containers, sorted by ID.
	List(ctx context.Context) ([]Container, error)

	// Wait returns the state of a container that does not run: at once, or when it has ended. Errors: NotFound.
	Wait(ctx context.Context, id string) (State, error)

	// Watch calls fn with the state of each container, and again on each change. What ended before the call, or while no process
	// watched, is recorded like all other ends. It calls fn from one goroutine at a time. It ends with ctx, with the error of fn, or with
	// Unavailable; the caller watches again then, and gets all states again. Removals are not reported.
	Watch(ctx context.Context, fn func(id string, s State) error) error
}

// Images keeps the images of containers. References are those of docker: a name without host is one of Docker Hub, and without a tag it
// is latest. A reference with a digest is never another image.
type Images interface {
	// EnsureImage returns an image, and pulls it if it is not there.
	// Errors: InvalidArgument for a bad reference, NotFound when the registry does not have it, FailedPrecondition when it denies access,
	// Unavailable, Unsupported when there is none for this machine, DataLoss.
	EnsureImage(ctx context.Context, p Pull) (Image, error)

	// ImportImage reads an archive (OCI or docker, tar), and returns its images. A name that is not "" is given to the image of an
	// archive that has one. Names that exist are moved to the new images.
	// Errors: InvalidArgument for an archive that is none, or names nothing.
	ImportImage(ctx context.Context, r io.Reader, name string) ([]Image, error)

	// ListImages returns all images, sorted by reference.
	ListImages(ctx context.Context) ([]Image, error)

	// RemoveImage removes an image. One that is not there is no error. Errors: FailedPrecondition when a container uses it.
	RemoveImage(ctx context.Context, ref string) error

	// PruneImages removes the images that no container uses and keep is false of, and returns them.
	PruneImages(ctx context.Context, keep func(Image) bool) ([]Image, error)
}

// Pull says which image is wanted.
type Pull struct {
	Ref      string
	Always   bool // ask the registry even if an image of this name is there
	Username string
	Password string         // or an identity token, if Username is ""
	Progress func(Progress) // may be nil; called from one goroutine
}

// Progress of a pull.
type Progress struct {
	Done  int64 // bytes that were fetched or were there
	Total int64 // bytes; grows while the parts of the image become known
}

// Image is an image that the runtime keeps.
type Image struct {
	Ref       string // as it is kept: with host and tag or digest
	Digest    string // of its manifest, or of the index of its manifests
	Size      int64  // bytes of its parts for this machine, as fetched
	CreatedAt time.Time
	Used      bool // a container was made of it
}

// Access is what users do with containers that are there. Errors: as of Runtime.
type Access interface {
	// Exec runs a command in a container and returns its exit code (128+n for death by signal n). It returns when the command has ended
	// and its output was delivered; what processes that the command has left write later is dropped. The end of ctx kills the command.
	// The caller closes s.Stdin afterwards.
	// Errors: NotFound, FailedPrecondition when the container does not run or the command cannot be started.
	Exec(ctx context.Context, id string, e Exec, s Streams) (int, error)

	// Logs calls fn with the output of a container, the oldest first. With Follow it goes on until the container does not run and
	// everything was delivered (then nil), ctx ends, or fn fails. A log outlives its container if Remove was told so.
	// Errors: NotFound, when there is neither the container nor a log.
	Logs(ctx context.Context, id string, o LogOptions, fn func(LogEntry) error) error

	// Stats returns what a container uses now. Errors: NotFound, FailedPrecondition when it does not run.
	Stats(ctx context.Context, id string) (Stats, error)
}

// Exec is one command to run. Env is added to the container's environment.
type Exec struct {
	Command []string
	Env     []vm.EnvVar
	WorkDir string // "": the container's
	User    string // "": the container's
	TTY     bool
	Rows    uint16 // first size of the terminal, in characters; 0 for the default
	Cols    uint16
}

// Streams are the ends of an Exec. A nil reader is an empty stdin; nil writers discard output. With TTY, Stderr is unused.
type Streams struct {
	Stdin   io.Reader
	Stdout  io.Writer
	Stderr  io.Writer
	Resize  <-chan WinSize // may be nil
	Signals <-chan int     // POSIX signal numbers for the command; may be nil
}

// WinSize is the size of a terminal in characters.
type WinSize struct{ Rows, Cols uint16 }

// LogOptions selects entries of a log.
type LogOptions struct {
	Follow bool
	Tail   int       // last lines only; negative for all
	Since  time.Time // zero for all
}

// LogEntry is a line of a container's output, or a part of a long or unfinished one.
type LogEntry struct {
	Time   time.Time
	Stream string // stdout or stderr
	Data   []byte // with its newline; a part without one has none
}

// Stats is what a container uses.
type Stats struct {
	CPU         time.Duration // of all CPUs since its start
	Memory      int64         // bytes, without file pages that are not in use
	MemoryTotal int64         // bytes, with all file pages
	PIDs        int64         // processes and threads
	Read        int64         // bytes read from disks since its start
	Written     int64         // bytes written to disks since its start
}
