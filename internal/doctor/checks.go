package doctor

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"os/user"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"time"

	"github.com/google/nftables"
	"golang.org/x/sys/unix"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/proc"
	"cocoonstack.io/cocoon/internal/sparse"
)

const (
	gib          = 1 << 30
	diskFail     = 1 * gib
	diskWarn     = 10 * gib
	memoryWarn   = 1 * gib
	oldestQEMU   = 7 // major version
	probeTimeout = 10 * time.Second
)

func (d doctor) root(context.Context) finding {
	if os.Geteuid() == 0 {
		return finding{status: OK, detail: "running as root"}
	}
	return finding{Warn, fmt.Sprintf("running as user %d: some checks see less, and cocoond itself needs root", os.Geteuid()), "sudo cocoon doctor"}
}

var versionRE = regexp.MustCompile(`version (\d+)\.(\d+)[.\d]*`)

func (d doctor) qemu(ctx context.Context) finding {
	pkg := apt("qemu-system-x86")
	if strings.Contains(d.cfg.QEMU, "aarch64") {
		pkg = apt("qemu-system-arm")
	}
	path, err := exec.LookPath(d.cfg.QEMU)
	if err != nil {
		return finding{Fail, d.cfg.QEMU + " is not installed", pkg}
	}
	ctx, cancel := context.WithTimeout(ctx, probeTimeout)
	defer cancel()
	out, err := exec.CommandContext(ctx, path, "--version").Output()
	if err != nil {
		return finding{Fail, fmt.Sprintf("%s does not run: %v", path, err), pkg}
	}
	m := versionRE.FindSubmatch(out)
	if m == nil {
		return finding{Warn, path + " does not say its version", ""}
	}
	detail := path + " " + strings.TrimPrefix(string(m[0]), "version ")
	if major, _ := strconv.Atoi(string(m[1])); major < oldestQEMU {
		return finding{Fail, fmt.Sprintf("%s is too old; %d.0 is needed", detail, oldestQEMU), pkg}
	}
	return finding{status: OK, detail: detail}
}

func (d doctor) acceleration(context.Context) finding {
	const slow = "guests are emulated, much slower: "
	kvm := filepath.Join(d.cfg.Dev, "kvm")
	f, err := os.OpenFile(kvm, os.O_RDWR, 0)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return finding{Warn, slow + "there is no " + kvm, "enable virtualisation in the firmware or, in a VM, nested virtualisation; then: sudo modprobe kvm"}
	case errors.Is(err, fs.ErrPermission):
		return finding{Warn, slow + "no permission to open " + kvm, "sudo usermod -aG kvm $USER"}
	case err != nil:
		return finding{Warn, slow + err.Error(), "sudo modprobe kvm"}
	}
	f.Close()
	if !d.hardwareVirtualisation() {
		return finding{Warn, slow + kvm + " opens, but the CPU shows neither vmx nor svm", "enable nested virtualisation for this machine where it is run"}
	}
	return finding{status: OK, detail: "KVM"}
}

func (d doctor) hardwareVirtualisation() bool {
	f, err := os.Open(filepath.Join(d.cfg.Proc, "cpuinfo"))
	if err != nil {
		return false
	}
	defer f.Close()
	s := bufio.NewScanner(f)
	s.Buffer(nil, 1<<20)
	for s.Scan() {
		name, value, _ := strings.Cut(s.Text(), ":")
		switch strings.TrimSpace(name) {
		case "flags":
			for flag := range strings.FieldsSeq(value) {
				if flag == "vmx" || flag == "svm" {
					return true
				}
			}
			return false
		case "CPU implementer": // ARM shows no flag; there a KVM device that opens works
			return true
		}
	}
	return false
}

func (d doctor) tunPath() string { return filepath.Join(d.cfg.Dev, "net", "tun") }

func (d doctor) tun(context.Context) finding {
	f, err := os.OpenFile(d.tunPath(), os.O_RDWR, 0)
	switch {
	case err == nil:
		f.Close()
		return finding{status: OK, detail: d.tunPath()}
	case errors.Is(err, fs.ErrNotExist):
		return finding{Fail, d.tunPath() + " is missing", fmt.Sprintf("sudo mkdir -p %s && sudo mknod -m 0666 %s c 10 200", filepath.Dir(d.tunPath()), d.tunPath())}
	case errors.Is(err, fs.ErrPermission):
		return finding{Warn, "no permission to open " + d.tunPath(), "sudo cocoon doctor"}
	}
	return finding{Fail, err.Error(), "sudo modprobe tun"}
}

// fixTun makes the device node; it cannot help if the driver is missing.
func (d doctor) fixTun() error {
	if err := os.MkdirAll(filepath.Dir(d.tunPath()), 0o755); err != nil {
		return err
	}
	err := unix.Mknod(d.tunPath(), unix.S_IFCHR|0o666, int(unix.Mkdev(10, 200)))
	if err != nil && !errors.Is(err, fs.ErrExist) {
		return fmt.Errorf("mknod %s: %w", d.tunPath(), err)
	}
	return nil
}

func (d doctor) nftables(context.Context) finding {
	c, err := nftables.New()
	if err == nil {
		_, err = c.ListTables()
	}
	switch {
	case err == nil:
		return finding{status: OK, detail: "the kernel answers"}
	case os.Geteuid() != 0 && errors.Is(err, fs.ErrPermission):
		return finding{Warn, "not seen without root", "sudo cocoon doctor"}
	}
	return finding{Fail, fmt.Sprintf("the kernel does not answer: %v", err), "sudo modprobe nf_tables"}
}

func (d doctor) cgroup(context.Context) finding {
	root := filepath.Join(d.cfg.Sys, "fs/cgroup")
	if b, err := os.ReadFile(filepath.Join(root, "cgroup.controllers")); err == nil {
		return finding{status: OK, detail: "controllers: " + strings.TrimSpace(string(b))}
	}
	const remedy = "boot with systemd.unified_cgroup_hierarchy=1"
	if _, err := os.Stat(filepath.Join(root, "unified/cgroup.procs")); err == nil {
		return finding{Warn, "mounted beside version 1, without controllers: VMs run without limits of their own", remedy}
	}
	return finding{Warn, "not mounted: VMs run without limits of their own", remedy}
}

func (d doctor) userns(context.Context) finding {
	path := filepath.Join(d.cfg.Proc, "sys/user/max_user_namespaces")
	b, err := os.ReadFile(path)
	if err != nil {
		return finding{Warn, "the kernel has none", "use a kernel with CONFIG_USER_NS"}
	}
	if n := strings.TrimSpace(string(b)); n != "0" {
		return finding{status: OK, detail: "up to " + n}
	}
	return finding{Warn, "switched off", "sudo sysctl user.max_user_namespaces=10000"}
}

func (d doctor) memory(context.Context) finding {
	b, err := os.ReadFile(filepath.Join(d.cfg.Proc, "meminfo"))
	if err != nil {
		return finding{Warn, err.Error(), ""}
	}
	for line := range bytes.Lines(b) {
		fields := strings.Fields(string(line))
		if len(fields) < 2 || fields[0] != "MemAvailable:" {
			continue
		}
		kib, err := strconv.ParseInt(fields[1], 10, 64)
		if err != nil {
			break
		}
		detail := fmt.Sprintf("%.1f GiB available", float64(kib)*1024/gib)
		if kib*1024 < memoryWarn {
			return finding{Warn, detail + ": few VMs fit", "stop other programs, or give VMs less with --memory 256M"}
		}
		return finding{status: OK, detail: detail}
	}
	return finding{Warn, "the kernel does not say how much is available", ""}
}

func (d doctor) mkfs(context.Context) finding {
	for _, name := range []string{"mkfs.ext4", "/usr/sbin/mkfs.ext4", "/sbin/mkfs.ext4"} { // sbin is not in the PATH of all users
		if path, err := exec.LookPath(name); err == nil {
			return finding{status: OK, detail: path}
		}
	}
	return finding{Fail, "mkfs.ext4 is not installed", apt("e2fsprogs")}
}

func (d doctor) conversion(context.Context) finding {
	for _, need := range []struct{ program, pkg string }{{"qemu-img", "qemu-utils"}, {"prlimit", "util-linux"}} {
		if _, err := exec.LookPath(need.program); err != nil {
			return finding{Warn, need.program + " is not installed", apt(need.pkg)}
		}
	}
	return finding{status: OK, detail: "qemu-img and prlimit are there"}
}

func (d doctor) tpm(context.Context) finding {
	path, err := exec.LookPath("swtpm")
	if err != nil {
		return finding{Warn, "swtpm is not installed: no guest has a TPM", apt("swtpm")}
	}
	return finding{status: OK, detail: path}
}

func (d doctor) guest(context.Context) finding {
	for _, path := range []string{d.cfg.Kernel, d.cfg.Initrd} {
		if fi, err := os.Stat(path); err != nil || !fi.Mode().IsRegular() {
			return finding{Fail, path + " is missing", "make guest"}
		}
	}
	return finding{status: OK, detail: d.cfg.Kernel + ", " + d.cfg.Initrd}
}

func (d doctor) firmware(context.Context) finding {
	for _, path := range []string{
		"/usr/share/OVMF/OVMF_CODE.fd", "/usr/share/OVMF/OVMF_CODE_4M.fd", "/usr/share/edk2/ovmf/OVMF_CODE.fd",
		"/usr/share/edk2/x64/OVMF_CODE.4m.fd", "/usr/share/AAVMF/AAVMF_CODE.fd",
	} {
		if _, err := os.Stat(path); err == nil {
			return finding{status: OK, detail: path}
		}
	}
	return finding{Warn, "no OVMF: only disk images that boot with a BIOS run", apt("ovmf")}
}

func (d doctor) folder(path string) func(context.Context) finding {
	return func(context.Context) finding {
		fi, err := os.Stat(path)
		switch {
		case err == nil && fi.IsDir():
			return finding{status: OK, detail: path}
		case err == nil:
			return finding{Fail, path + " is not a folder", "move it out of the way"}
		case errors.Is(err, fs.ErrNotExist):
			return finding{Warn, path + " is not there yet; cocoond makes it", "sudo install -d -m 0711 " + path}
		}
		return finding{Warn, err.Error(), "sudo cocoon doctor"}
	}
}

func makeFolder(path string) func() error {
	return func() error {
		if err := os.MkdirAll(path, 0o711); err != nil {
			return err
		}
		return os.Chmod(path, 0o711) //nolint:gosec // hypervisors, which have other users, pass through
	}
}

// space checks the file system that holds, or will hold, the state.
func (d doctor) space(context.Context) finding {
	dir := d.cfg.StateDir
	var st unix.Statfs_t
	for {
		err := unix.Statfs(dir, &st)
		if err == nil {
			break
		}
		if parent := filepath.Dir(dir); errors.Is(err, fs.ErrNotExist) && parent != dir {
			dir = parent
			continue
		}
		return finding{Warn, fmt.Sprintf("%s: %v", dir, err), ""}
	}
	free := st.Bavail * uint64(st.Bsize)
	f := finding{status: OK, detail: fmt.Sprintf("%.1f GiB free for %s", float64(free)/gib, d.cfg.StateDir)}
	switch {
	case free < diskFail:
		f.status, f.remedy = Fail, "free some space, or move the state with --state-dir"
	case free < diskWarn:
		f.status, f.remedy = Warn, "free some space, or move the state with --state-dir"
	}
	return f
}

func (d doctor) group(context.Context) finding {
	if _, err := user.LookupGroup(d.cfg.Group); err != nil {
		return finding{Warn, fmt.Sprintf("there is no group %s: root alone may use cocoon", d.cfg.Group), fmt.Sprintf("sudo groupadd --system %[1]s && sudo usermod -aG %[1]s $USER", d.cfg.Group)}
	}
	return finding{status: OK, detail: "members of " + d.cfg.Group + " may use cocoon"}
}

// reflink tests with two unnamed files whether the state's file system shares the blocks of copies. Snapshots do not
// need it: they link files that nobody writes to any more.
func (d doctor) reflink(context.Context) finding {
	err := sparse.CanClone(d.cfg.StateDir, d.cfg.StateDir)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return finding{status: OK, detail: "not examined: " + d.cfg.StateDir + " is not there yet"}
	case errdefs.Is(err, errdefs.Unsupported):
		return finding{status: OK, detail: "no: snapshots use hard links, and full copies where links are not possible"}
	case err != nil:
		return finding{status: OK, detail: fmt.Sprintf("not examined: %v", err)}
	}
	return finding{status: OK, detail: "yes: copies share their blocks"}
}

// mapped tests whether the file system of the state supports idmapped mounts. Such a mount gives a file to the user of one VM.
func (d doctor) mapped(context.Context) finding {
	if os.Geteuid() != 0 {
		return finding{status: OK, detail: "not examined without root"}
	}
	err := proc.CanGive(d.cfg.StateDir)
	switch {
	case errdefs.IsNotFound(err):
		return finding{status: OK, detail: "not examined: " + d.cfg.StateDir + " is not there yet"}
	case errdefs.Is(err, errdefs.Unsupported):
		return finding{Warn, err.Error(), "with Linux 5.12 or later, put the state on ext4, xfs or btrfs with --state-dir; QEMU runs without that"}
	case err != nil:
		return finding{status: OK, detail: fmt.Sprintf("not examined: %v", err)}
	}
	return finding{status: OK, detail: "yes: " + d.cfg.StateDir + " can map users"}
}

// userfaultfd looks for the device by which a process is told of the memory that it lacks.
func (d doctor) userfaultfd(context.Context) finding {
	path := filepath.Join(d.cfg.Dev, "userfaultfd")
	if _, err := os.Stat(path); err != nil {
		return finding{Warn, path + " is missing: clones begin when all of their memory is here", "use Linux 6.1 or later with CONFIG_USERFAULTFD"}
	}
	return finding{status: OK, detail: path}
}
