package jail

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"cocoonstack.io/cocoon/internal/proc"
	"cocoonstack.io/cocoon/internal/vm"
)

// trees is the part of the cgroup trees that holds the VMs, or one VM.
type trees struct {
	mount string // of the v2 tree; "" if there is none
	name  string // name of our folder in it
	v1    []hierarchy

	parent string   // of one VM: the cgroup in which it is; "" for our folder
	made   []string // folders of parent that were made for the VM, the innermost first
}

var wantedControllers = []string{"cpu", "memory", "pids"}

func (c Cgroups) trees() trees {
	mounts, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		return trees{name: c.name}
	}
	return trees{mount: findCgroup2(bytes.NewReader(mounts)), name: c.name, v1: findCgroup1(bytes.NewReader(mounts))}
}

// findCgroup2 returns the mount point of a writable cgroup v2 tree, also on hybrid hosts; "" if there is none.
func findCgroup2(mountinfo io.Reader) string {
	for sc := bufio.NewScanner(mountinfo); sc.Scan(); {
		mount, fs, ok := strings.Cut(sc.Text(), " - ")
		fields := strings.Fields(mount)
		if !ok || len(fields) < 6 || !strings.HasPrefix(fs, "cgroup2 ") {
			continue
		}
		if slices.Contains(strings.Split(fields[5], ","), "rw") {
			return proc.MountPath(fields[4])
		}
	}
	return ""
}

func (g trees) usable() bool {
	return g.mount != "" && unix.Access(g.mount, unix.W_OK) == nil
}

func (g trees) notes() []string {
	if !g.usable() {
		return []string{"no writable cgroup v2 tree is mounted; VM processes share the daemon's cgroup"}
	}
	have := words(filepath.Join(g.mount, "cgroup.controllers"))
	var missing []string
	for _, c := range wantedControllers {
		if !slices.Contains(have, c) {
			missing = append(missing, c)
		}
	}
	if len(missing) == 0 {
		return nil
	}
	return []string{fmt.Sprintf("the cgroup v2 tree at %s has no controllers %s (cgroup v1 has them); each VM has its own cgroup, but without limits",
		g.mount, strings.Join(missing, ", "))}
}

func words(path string) []string {
	data, err := os.ReadFile(path)
	if err != nil {
		return nil
	}
	return strings.Fields(string(data))
}

// path returns the folder of id in the v2 tree.
func (g trees) path(id vm.ID) string {
	if g.parent != "" && len(g.v1) == 0 {
		return filepath.Join(g.mount, g.parent, vm.CgroupPrefix+string(id))
	}
	return filepath.Join(g.mount, g.name, string(id))
}

// make creates the cgroup of id and opens it. It returns nil without error if the host has no usable tree.
func (g trees) make(id vm.ID, b Bounds) (*os.File, error) {
	if !g.usable() {
		return nil, nil
	}
	path := g.path(id)
	if err := g.mkdir(path); err != nil {
		return nil, fmt.Errorf("make cgroup: %w", err)
	}
	limit(path, b)
	f, err := os.Open(path)
	if err != nil {
		return nil, fmt.Errorf("open cgroup: %w", err)
	}
	return f, nil
}

// mkdir creates the folder of a VM and our folder above it, which the end of another VM may have just removed as empty.
func (g trees) mkdir(path string) error {
	parent := filepath.Dir(path)
	for try := 0; ; try++ {
		if err := os.MkdirAll(parent, 0o755); err != nil {
			return err
		}
		g.enableTo(parent)
		err := os.Mkdir(path, 0o755)
		if err == nil || errors.Is(err, os.ErrExist) {
			return nil
		}
		if !errors.Is(err, os.ErrNotExist) || try == 100 {
			return err
		}
	}
}

// enableTo delegates the wanted controllers to the folders in dir, and in those above it.
func (g trees) enableTo(dir string) {
	if dir != g.mount && g.below(dir) {
		g.enableTo(filepath.Dir(dir))
	}
	enable(dir)
}

// enable delegates the wanted controllers to the folders in dir. It ignores what the host does not allow; Probe reports that.
func enable(dir string) {
	have, on := words(filepath.Join(dir, "cgroup.controllers")), words(filepath.Join(dir, "cgroup.subtree_control"))
	for _, c := range wantedControllers {
		if slices.Contains(have, c) && !slices.Contains(on, c) {
			_ = os.WriteFile(filepath.Join(dir, "cgroup.subtree_control"), []byte("+"+c), 0)
		}
	}
}

// limit bounds what a broken or hostile process can take from the host. The memory limit leaves room for the hypervisor itself and
// never constrains the guest's own memory. If a controller is missing, its files do not exist.
func limit(path string, b Bounds) {
	for file, value := range map[string]int64{
		"memory.max":       b.Memory + b.Memory/8 + b.Overhead,
		"memory.oom.group": 1,
		"pids.max":         int64(b.CPUs) + 512,
		"cpu.weight":       min(int64(b.CPUs)*100, 10000),
	} {
		full := filepath.Join(path, file)
		if _, err := os.Stat(full); err == nil {
			_ = os.WriteFile(full, []byte(strconv.FormatInt(value, 10)), 0)
		}
	}
}

// processes opens the processes in the cgroups of id. A host without a usable tree has none.
func (g trees) processes(id vm.ID) (all []*proc.Process, err error) {
	if id == "" {
		return nil, nil
	}
	for _, dir := range g.all(id) {
		found, ferr := proc.InCgroup(dir)
		err = errors.Join(err, ferr)
		for _, p := range found {
			if slices.ContainsFunc(all, func(o *proc.Process) bool { return o.PID() == p.PID() }) {
				_ = p.Close()
				continue
			}
			all = append(all, p)
		}
	}
	return all, err
}

// remove removes the cgroups of id, whose processes must have been killed.
func (g trees) remove(id vm.ID) error {
	if id == "" {
		return nil
	}
	var err error
	if g.mount != "" {
		path := g.path(id)
		if err = removeCgroup(path); err == nil && path == filepath.Join(g.mount, g.name, string(id)) {
			_ = os.Remove(filepath.Dir(path)) // succeeds after the last VM; the kernel refuses while other VMs are in it
		}
	}
	if err = errors.Join(err, g.removeJoined(id)); err != nil {
		return fmt.Errorf("remove cgroup: %w", err)
	}
	return nil
}

// removeCgroup removes a cgroup. It waits until the kernel has noticed the end of its processes. A cgroup that does not exist is no error.
func removeCgroup(path string) error {
	err := os.Remove(path)
	for deadline := time.Now().Add(5 * time.Second); errors.Is(err, unix.EBUSY) && time.Now().Before(deadline); {
		if unpopulated(path, deadline) != nil {
			break
		}
		err = os.Remove(path)
	}
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	return err
}

// unpopulated waits until the kernel reports that the cgroup has no process. Version 1 does not report it, so there it waits for a moment.
func unpopulated(path string, deadline time.Time) error {
	f, err := os.Open(filepath.Join(path, "cgroup.events"))
	if errors.Is(err, os.ErrNotExist) {
		<-time.After(5 * time.Millisecond)
		return nil
	}
	if err != nil {
		return err
	}
	defer f.Close()
	for buf := make([]byte, 256); ; {
		n, err := f.ReadAt(buf, 0)
		if err != nil && !errors.Is(err, io.EOF) {
			return err
		}
		if strings.Contains(string(buf[:n]), "populated 0") {
			return nil
		}
		fds := []unix.PollFd{{Fd: int32(f.Fd()), Events: unix.POLLPRI}}
		left := time.Until(deadline).Milliseconds()
		if left <= 0 {
			return os.ErrDeadlineExceeded
		}
		if _, err := unix.Poll(fds, int(left)); err != nil && !errors.Is(err, unix.EINTR) {
			return err
		}
	}
}
