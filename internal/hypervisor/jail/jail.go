// Package jail is the place in which one hypervisor process runs: a user of its own, cgroups, a runtime folder with sockets and
// logs, taps as descriptors. It finds what is left of a VM by the user, the cgroups and the mark of its processes.
//
// Every driver that runs processes stands on it. It knows no hypervisor: which arguments a process has, what its sockets mean
// and when it ends are the driver's business. The process itself is started by package proc.
package jail

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"log/slog"
	"path/filepath"
	"slices"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/proc"
	"cocoonstack.io/cocoon/internal/vm"
)

// Config says how the jails of one driver differ from those of others.
type Config struct {
	Users    *Users
	Cgroup   string   // folder in the cgroup v2 tree that holds one folder per VM; a single name
	LogLimit int64    // bytes kept of each log
	Logs     []string // names of logs in runtime folders
	Sockets  []string // names of what is removed from a runtime folder when its VM has ended
	// Mark returns the UUID (of package jail) of the VM to which a process with these arguments belongs, "" if they name none. A process of
	// a user that is not ours is never ours, whatever it says.
	Mark func(args []string) string
}

// Jail makes the places of the VMs of one driver. It is safe for concurrent use.
type Jail struct {
	Users   *Users
	Cgroups Cgroups
	Logs    *Keeper
	cfg     Config
}

// New returns a Jail. It touches nothing.
func New(cfg Config, log *slog.Logger) (*Jail, error) {
	if cfg.Cgroup != filepath.Base(cfg.Cgroup) || cfg.Cgroup == "." || cfg.Cgroup == ".." {
		return nil, errdefs.Invalidf("cgroup %q must be a single name", cfg.Cgroup)
	}
	if cfg.LogLimit < 4096 {
		return nil, errdefs.Invalidf("a log cannot be limited to %d bytes; the least is 4096", cfg.LogLimit)
	}
	return &Jail{Users: cfg.Users, Cgroups: Cgroups{name: cfg.Cgroup, log: log}, Logs: &Keeper{limit: cfg.LogLimit, names: cfg.Logs}, cfg: cfg}, nil
}

// Find opens the processes of the VM that has UUID want, on the word of their arguments and their user. The caller closes them.
func (j *Jail) Find(ctx context.Context, want string) ([]*proc.Process, error) {
	return proc.Find(ctx, j.ours, func(_ int, args []string) bool { return j.cfg.Mark(args) == want })
}

// ours reports whether a process has one of our users. It is asked before the arguments are read: others can take theirs away, and would be waited for.
func (j *Jail) ours(pid int) bool {
	uid, err := proc.UID(pid)
	return err == nil && j.Users.Owns(uid)
}

// Reap ends every process of a VM, and removes its sockets and cgroups. A process is ours if it is in one of the VM's cgroups. It
// is there from its first instruction, so no crash of the daemon can hide it. On hosts without a cgroup tree it is ours if it runs
// as one of our users and has the VM's mark. Both are set only when it becomes the hypervisor. Until then it holds the daemon's
// lock, which it inherited, so the next daemon cannot run yet.
func (j *Jail) Reap(ctx context.Context, id vm.ID, dir string) error {
	found, err := j.Find(ctx, UUID(id))
	born, berr := j.Cgroups.Processes(id, dir, nil)
	err = errors.Join(err, berr)
	for _, p := range append(found, born...) {
		err = errors.Join(err, p.Kill(ctx), p.Close())
	}
	if err == nil {
		err = j.Clear(id, dir, nil)
	}
	if err != nil {
		return fmt.Errorf("reap VM %s: %w", id, err)
	}
	return nil
}

// Seek returns the processes of each VM in ids that has any, with one scan of all processes. It changes nothing.
func (j *Jail) Seek(ctx context.Context, ids []vm.ID) (map[vm.ID][]int, error) {
	byUUID := make(map[string]vm.ID, len(ids))
	for _, id := range ids {
		byUUID[UUID(id)] = id
	}
	found := map[vm.ID][]int{}
	note := func(id vm.ID, p *proc.Process) error {
		if !slices.Contains(found[id], p.PID()) {
			found[id] = append(found[id], p.PID())
		}
		return p.Close()
	}
	owners := map[int]vm.ID{}
	all, err := proc.Find(ctx, j.ours, func(pid int, args []string) bool {
		id, ok := byUUID[j.cfg.Mark(args)]
		if ok {
			owners[pid] = id
		}
		return ok
	})
	for _, p := range all {
		err = errors.Join(err, note(owners[p.PID()], p))
	}
	trees := j.Cgroups.trees()
	for _, id := range ids {
		born, gerr := trees.processes(id)
		err = errors.Join(err, gerr, ctx.Err())
		for _, p := range born {
			err = errors.Join(err, note(id, p))
		}
	}
	if err != nil {
		return found, fmt.Errorf("look for processes of VMs: %w", err)
	}
	return found, nil
}

// Clear removes the sockets and the cgroups of a VM that has no process. known is where its cgroups are, nil if only the runtime
// folder says so.
func (j *Jail) Clear(id vm.ID, dir string, known *Place) error {
	return errors.Join(j.RemoveSockets(dir), j.Cgroups.Remove(id, dir, known))
}

// RemoveSockets removes the sockets in the runtime folder dir, which need not exist.
func (j *Jail) RemoveSockets(dir string) error { return removeNames(dir, j.cfg.Sockets) }

// UUID is the UUID by which the guest knows its VM, and by which we find it in the process list: a version 8 UUID (RFC 9562)
// made from the hash of its id.
func UUID(id vm.ID) string {
	sum := sha256.Sum256([]byte("cocoonstack.io/vm/" + string(id)))
	sum[6], sum[8] = sum[6]&0x0f|0x80, sum[8]&0x3f|0x80
	return fmt.Sprintf("%x-%x-%x-%x-%x", sum[0:4], sum[4:6], sum[6:8], sum[8:10], sum[10:16])
}
