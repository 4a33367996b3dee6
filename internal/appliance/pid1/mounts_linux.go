package pid1

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"cocoonstack.io/cocoon/internal/appliance/disk"
	"cocoonstack.io/cocoon/internal/appliance/uplink"
)

// mountKernel mounts what the kernel offers. What is mounted already is no error.
func mountKernel() error {
	var errs []error
	for _, f := range []struct {
		kind, dir, options string
		flags              uintptr
	}{
		{"proc", "/proc", "", unix.MS_NOSUID | unix.MS_NODEV | unix.MS_NOEXEC},
		{"sysfs", "/sys", "", unix.MS_NOSUID | unix.MS_NODEV | unix.MS_NOEXEC},
		{"devtmpfs", "/dev", "mode=0755", unix.MS_NOSUID},
		{"devpts", "/dev/pts", "mode=0620,ptmxmode=0666", unix.MS_NOSUID | unix.MS_NOEXEC},
		{"tmpfs", "/dev/shm", "mode=1777", unix.MS_NOSUID | unix.MS_NODEV},
		{"tmpfs", "/run", "mode=0755", unix.MS_NOSUID | unix.MS_NODEV},
		{"tmpfs", "/tmp", "mode=1777", unix.MS_NOSUID | unix.MS_NODEV},
		{"cgroup2", "/sys/fs/cgroup", "", unix.MS_NOSUID | unix.MS_NODEV | unix.MS_NOEXEC},
	} {
		if err := os.MkdirAll(f.dir, 0o755); err != nil {
			errs = append(errs, err)
		}
		if err := unix.Mount(f.kind, f.dir, f.kind, f.flags, f.options); err != nil && !errors.Is(err, unix.EBUSY) {
			errs = append(errs, fmt.Errorf("mount %s: %w", f.dir, err))
		}
	}
	for path, to := range map[string]string{"/dev/fd": "/proc/self/fd", "/dev/ptmx": "pts/ptmx"} {
		_ = os.Remove(path)
		errs = append(errs, os.Symlink(to, path))
	}
	// Containers and namespaces of VMs see what is mounted later.
	errs = append(errs, unix.Mount("", "/", "", unix.MS_REC|unix.MS_SHARED, ""), os.MkdirAll(logDir, 0o755))
	return errors.Join(errs...)
}

func loopback() error {
	lo, err := netlink.LinkByName("lo")
	if err != nil {
		return err
	}
	return netlink.LinkSetUp(lo)
}

// wanted are modules that no device asks for. The kernel may have any of them built in.
var wanted = []string{
	"dm-mod", "dm-thin-pool", "dm-snapshot", "ext4", "vfat", "nls_cp437", "nls_ascii", "nls_iso8859-1", "overlay", "loop", "fuse",
	"tun", "bridge", "br_netfilter", "veth", "vhost_net", "vhost_vsock", "nf_tables", "nft_masq", "nft_nat", "nf_conntrack",
}

// modules loads the drivers of the devices that there are, as their aliases say, and the modules in wanted. One that cannot be loaded is no error: nobody may
// need it.
func (m *machine) modules(ctx context.Context) error {
	aliases := slices.Clone(wanted)
	for _, pattern := range []string{"/sys/bus/*/devices/*/modalias", "/sys/devices/system/cpu/modalias"} {
		files, err := filepath.Glob(pattern)
		if err != nil {
			return err
		}
		for _, file := range files {
			if text, err := os.ReadFile(file); err == nil && len(bytes.TrimSpace(text)) != 0 {
				aliases = append(aliases, strings.TrimSpace(string(text)))
			}
		}
	}
	slices.Sort(aliases)
	aliases = slices.Compact(aliases)
	_, err := m.run(ctx, "modprobe", append([]string{"-a", "-b", "-q"}, aliases...)...)
	if exit := (*exec.ExitError)(nil); errors.As(err, &exit) {
		return nil
	}
	return err
}

// mountBoot mounts the partition with the boot files.
func (m *machine) mountBoot() error {
	device, err := m.root.Partition("/sys/block", "/dev", disk.BootPartition)
	if err != nil {
		return err
	}
	if err := os.MkdirAll(bootDir, 0o755); err != nil {
		return err
	}
	flags := uintptr(0)
	if m.installer {
		flags = unix.MS_RDONLY
	}
	if err := unix.Mount(device, bootDir, "vfat", flags|unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC|unix.MS_NOATIME, "fmask=0077,dmask=0077"); err != nil {
		return fmt.Errorf("mount %s: %w", device, err)
	}
	return nil
}

// name gives the machine the name in the file hostname of dir, or one made of its first link's address.
func (m *machine) name(dir string) error {
	name := "capsule"
	if links, err := uplink.ListLinks(); err == nil && len(links) > 0 {
		if mac, err := net.ParseMAC(links[0].GetMac()); err == nil && len(mac) == 6 {
			name = fmt.Sprintf("capsule-%x", []byte(mac[3:]))
		}
	}
	if dir != "" {
		if text, err := os.ReadFile(filepath.Join(dir, "hostname")); err == nil && strings.TrimSpace(string(text)) != "" {
			name = strings.TrimSpace(string(text))
		}
	}
	if err := unix.Sethostname([]byte(name)); err != nil {
		return fmt.Errorf("set the name %q: %w", name, err)
	}
	return nil
}
