package qemu

import (
	"bufio"
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

	"cocoonstack.io/cocoon/internal/hypervisor"
	"cocoonstack.io/cocoon/internal/proc"
	"cocoonstack.io/cocoon/internal/vm"
)

// cgroups is the part of the cgroup v2 tree that holds the VMs.
type cgroups struct {
	mount string // "" if there is no v2 tree
	name  string // name of our folder in it
}

var wantedControllers = []string{"cpu", "memory", "pids"}

func (d *Driver) cgroups() cgroups {
	f, err := os.Open("/proc/self/mountinfo")
	if err != nil {
		return cgroups{name: d.cfg.Cgroup}
	}
	defer f.Close()
	return cgroups{mount: findCgroup2(f), name: d.cfg.Cgroup}
}

// findCgroup2 returns the mount point of a writable cgroup v2 tree, also on hybrid hosts; "" if there is none.
func findCgroup2(mountinfo io.Reader) string {
	unescape := strings.NewReplacer(`\040`, " ", `\011`, "\t", `\012`, "\n", `\134`, `\`)
	for sc := bufio.NewScanner(mountinfo); sc.Scan(); {
		mount, fs, ok := strings.Cut(sc.Text(), " - ")
		fields := strings.Fields(mount)
		if !ok || len(fields) < 6 || !strings.HasPrefix(fs, "cgroup2 ") {
			continue
		}
		if slices.Contains(strings.Split(fields[5], ","), "rw") {
			return unescape.Replace(fields[4])
		}
	}
	return ""
}

func (g cgroups) usable() bool {
	return g.mount != "" && unix.Access(g.mount, unix.W_OK) == nil
}

func (g cgroups) notes() []string {
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

func (g cgroups) path(id vm.ID) string { return filepath.Join(g.mount, g.name, string(id)) }

// make creates the cgroup of p and opens it. It returns nil without error if the host has no usable tree.
func (g cgroups) make(p hypervisor.Plan, overhead int64) (*os.File, error) {
	if !g.usable() {
		return nil, nil
	}
	path := g.path(p.ID)
	if err := g.mkdir(path); err != nil {
		return nil, fmt.Errorf("make cgroup: %w", err)
	}
	limit(path, p, overhead)
	f, err := os.Open(path)
	if err != nil {
		return nil, fmt.Errorf("open cgroup: %w", err)
	}
	return f, nil
}

// mkdir creates the folder of a VM and our folder above it, which the end of another VM may have just removed as empty.
func (g cgroups) mkdir(path string) error {
	parent := filepath.Dir(path)
	for try := 0; ; try++ {
		if err := os.MkdirAll(parent, 0o755); err != nil {
			return err
		}
		enable(g.mount)
		enable(parent)
		err := os.Mkdir(path, 0o755)
		if err == nil || errors.Is(err, os.ErrExist) {
			return nil
		}
		if !errors.Is(err, os.ErrNotExist) || try == 100 {
			return err
		}
	}
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

// limit bounds what a broken or hostile process can take from the host. The memory limit leaves room for QEMU itself (overhead,
// bytes) and never constrains the guest's own memory. If a controller is missing, its files do not exist.
func limit(path string, p hypervisor.Plan, overhead int64) {
	for file, value := range map[string]int64{
		"memory.max":       p.Memory + p.Memory/8 + overhead,
		"memory.oom.group": 1,
		"pids.max":         int64(p.CPUs) + 512,
		"cpu.weight":       min(int64(p.CPUs)*100, 10000),
	} {
		full := filepath.Join(path, file)
		if _, err := os.Stat(full); err == nil {
			_ = os.WriteFile(full, []byte(strconv.FormatInt(value, 10)), 0)
		}
	}
}

// processes opens the processes in the cgroup of id; none if the host has no usable tree.
func (g cgroups) processes(id vm.ID) ([]*proc.Process, error) {
	if g.mount == "" || id == "" {
		return nil, nil
	}
	return proc.InCgroup(g.path(id))
}

// remove removes the cgroup of id, whose processes must have been killed. The kernel may need a moment to notice their end.
func (g cgroups) remove(id vm.ID) error {
	if g.mount == "" || id == "" {
		return nil
	}
	path := g.path(id)
	err := os.Remove(path)
	for deadline := time.Now().Add(5 * time.Second); errors.Is(err, unix.EBUSY) && time.Now().Before(deadline); {
		if unpopulated(path, deadline) != nil {
			break
		}
		err = os.Remove(path)
	}
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("remove cgroup: %w", err)
	}
	_ = os.Remove(filepath.Dir(path)) // succeeds after the last VM; the kernel refuses while other VMs are in it
	return nil
}

// unpopulated waits until the kernel reports that the cgroup has no process.
func unpopulated(path string, deadline time.Time) error {
	f, err := os.Open(filepath.Join(path, "cgroup.events"))
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
