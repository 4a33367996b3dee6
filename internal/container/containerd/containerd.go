// Package containerd runs containers with containerd and runc, in a namespace of containerd of their own. It keeps no state in memory
// that matters: the record of a container, its state and its exit code are in containerd's database, and the exit code of a container
// that ended while nobody watched is in its shim, and in a file (package shimlog), until it is recorded.
//
// File systems of containers are overlayfs on containerd's root folder. The devmapper snapshotter is not used, although volumes are thin
// LVs: LVM and containerd would both hand out device ids of one thin pool, neither knows of the other's, and containerd's own table of
// them is known to differ from the pool's after a crash.
//
// A container that is not privileged has the default capabilities and seccomp profile of containerd, its masked and read-only paths, no
// new privileges, and a cgroup of its own, of version 1 or 2 as the node has it. The package attaches no networks and mounts no volumes.
//
// When this process is killed while containerd makes a task, containerd may keep the folder of that task, and a shim that answers nothing.
// The next start or removal of the container ends and removes both (endOrphans).
package containerd

import (
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"sync"
	"time"

	"github.com/containerd/containerd/v2/client"
	"github.com/containerd/containerd/v2/core/mount"
	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"

	"cocoonstack.io/cocoon/internal/container"
	"cocoonstack.io/cocoon/internal/container/containerd/shimlog"
	"cocoonstack.io/cocoon/internal/keylock"
)

// Namespace is the default namespace of containerd.
const Namespace = "capsule"

const (
	snapshotter = "overlayfs"
	runtimeName = "io.containerd.runc.v2"
)

// Config says where containerd is, and where files of containers are.
type Config struct {
	Socket    string // of containerd
	Namespace string // default: Namespace
	Root      string // folder for logs and other files of containers; kept when the node stops
	State     string // folder for what ends with the node, such as the streams of execs
	Logger    string // absolute path of a program that runs shimlog.Serve if its arguments are shimlog.Command and a folder

	Cgroup   string // parent of the cgroups of containers; default: "/" and the namespace
	Runc     string // path of runc; default: of that name in containerd's PATH
	RuncRoot string // folder of runc's own state; default: that of containerd's shim

	Registries map[string]Registry // by host[:port]
	Log        *slog.Logger
}

// Registry says how a registry is reached.
type Registry struct {
	Mirrors  []string // host[:port][/path], asked first, in order
	CA       string   // path of a PEM file whose certificates are trusted in addition to the system's
	Insecure bool     // plain HTTP is allowed, and certificates are not verified
}

// again is how a containerd that was away is looked for: it is on this machine, so often.
var again = backoff.Config{BaseDelay: 50 * time.Millisecond, Multiplier: 1.6, Jitter: 0.2, MaxDelay: time.Second}

// Runtime implements the contract with one containerd.
type Runtime struct {
	cfg    Config
	client *client.Client
	locks  keylock.Locks[string] // by container: of Start, Stop, Remove and of recording an end

	removals sync.WaitGroup // of execs that have ended

	mu    sync.Mutex
	execs map[string]bool // those of this process that have not ended
}

var (
	_ container.Runtime = (*Runtime)(nil)
	_ container.Images  = (*Runtime)(nil)
	_ container.Access  = (*Runtime)(nil)
)

// Open returns a runtime, and removes what a killed process of before has left in the folder State. containerd need not run yet. Only one
// process at a time may use a namespace.
func Open(cfg Config) (*Runtime, error) {
	if cfg.Namespace == "" {
		cfg.Namespace = Namespace
	}
	if cfg.Cgroup == "" {
		cfg.Cgroup = "/" + cfg.Namespace
	}
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	r := &Runtime{cfg: cfg, execs: map[string]bool{}}
	if err := os.RemoveAll(r.streams()); err != nil {
		return nil, fmt.Errorf("remove the streams of earlier execs: %w", err)
	}
	for _, dir := range []string{cfg.Root, r.streams(), r.mounts()} {
		if err := os.MkdirAll(dir, 0o700); err != nil {
			return nil, fmt.Errorf("make a folder for containers: %w", err)
		}
	}
	// containerd's client mounts the file system of a container for a moment to read its /etc/passwd.
	if err := mount.SetTempMountLocation(r.mounts()); err != nil {
		return nil, fmt.Errorf("set the folder of mounts: %w", err)
	}
	if _, err := mount.CleanupTempMounts(0); err != nil {
		return nil, fmt.Errorf("remove mounts of an earlier process: %w", err)
	}
	c, err := client.New(cfg.Socket, client.WithDefaultNamespace(cfg.Namespace), client.WithDefaultRuntime(runtimeName),
		client.WithExtraDialOpts([]grpc.DialOption{grpc.WithConnectParams(grpc.ConnectParams{Backoff: again, MinConnectTimeout: time.Second})}))
	if err != nil {
		return nil, fmt.Errorf("connect to containerd at %s: %w", cfg.Socket, err)
	}
	r.client = c
	return r, nil
}

// Close ends the connection to containerd, half a minute after the last exec at the latest. Containers go on.
// Preconditions: no call is in progress.
func (r *Runtime) Close() error {
	r.removals.Wait()
	return r.client.Close()
}

func (r *Runtime) streams() string { return filepath.Join(r.cfg.State, "exec") }

func (r *Runtime) mounts() string { return filepath.Join(r.cfg.State, "mounts") }

// files is the folder of a container's files; its log is in it.
func (r *Runtime) files(id string) string { return filepath.Join(r.cfg.Root, id) }

func (r *Runtime) logs(id string) string { return shimlog.Log(r.files(id)) }
