// Package machine is the VM that the agent runs in: its host name, addresses, name resolution and power.
//
// It implements guestagent.Machine with system calls only, for images that bring no tools. It does not talk to the
// host, and it must never run outside of a VM.
package machine

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/guestagent"
	"cocoonstack.io/cocoon/internal/vm"
)

// Machine is the VM.
type Machine struct {
	init bool

	disk    *os.File          // see New
	volumes func() []*os.File // see New
	frozen  []frozen

	root    string // root folder of all files
	files   [len(paths)]kept
	urandom int      // descriptor of /dev/urandom; 0: not open yet
	net     *netlink // see link
}

var _ guestagent.Machine = (*Machine)(nil)

// New returns the VM that this process runs in. init means that the process is PID 1; disk, if not nil, is the file
// system of the writable layer, which no path reaches. volumes returns folders of the other mounted file systems that
// can be written to, wherever they are mounted; nil: there are none.
func New(init bool, disk *os.File, volumes func() []*os.File) *Machine {
	m := machineAt("", init, disk)
	if volumes != nil {
		m.volumes = volumes
	}
	return m
}

// machineAt is New for a machine whose files are under root.
func machineAt(root string, init bool, disk *os.File) *Machine {
	m := &Machine{init: init, disk: disk, volumes: func() []*os.File { return nil }, root: root}
	for i, path := range paths {
		m.files[i] = kept{path: root + path, own: i != fileDBusID}
	}
	return m
}

// Files that hold the identity of the machine.
const (
	fileMachineID = iota
	fileDBusID    // a copy of the machine id, on some systems a separate file
	fileHosts
	fileHostname
	fileResolvConf
)

var paths = [...]string{"/etc/machine-id", "/var/lib/dbus/machine-id", "/etc/hosts", "/etc/hostname", "/etc/resolv.conf"}

// linkPatience is the timeout for an interface that is being plugged in to appear.
const linkPatience = 2 * time.Second

// Identify implements guestagent.Machine.
func (m *Machine) Identify(ctx context.Context, id guestagent.Identity) error {
	if err := setHostname(id.Hostname); err != nil {
		return err
	}
	if err := m.configure(ctx, id.NICs, nil); err != nil {
		return err
	}
	if m.init { // if not PID 1, another program makes it
		if err := ensureMachineID(m.files[fileMachineID].path); err != nil {
			return err
		}
	}
	return m.writeFiles(id, anew)
}

// Tune implements guestagent.Machine.
func (m *Machine) Tune(settings []vm.Sysctl) error { return tune("/proc/sys", settings) }

func tune(folder string, settings []vm.Sysctl) error {
	root, err := os.OpenRoot(folder)
	if err != nil {
		return fmt.Errorf("open the settings of the kernel: %w", err)
	}
	defer root.Close()
	for _, s := range settings {
		f, err := root.OpenFile(s.Path(), os.O_WRONLY, 0)
		if err == nil {
			_, err = f.WriteString(s.Value)
			err = errors.Join(err, f.Close())
		}
		if errors.Is(err, fs.ErrNotExist) {
			return errdefs.Invalidf("sysctl %s: the kernel of the guest has no such setting", s.Name)
		}
		if err != nil {
			return errdefs.Invalidf("sysctl %s: the kernel of the guest refuses the value %q: %w", s.Name, s.Value, err)
		}
	}
	return nil
}

func setHostname(name string) error {
	if name == "" {
		return nil
	}
	if err := unix.Sethostname([]byte(name)); err != nil {
		return fmt.Errorf("set the host name to %q: %w", name, err)
	}
	return nil
}

// writeFiles writes the identity files of the machine, except the machine id, with the function write. Without a name
// server resolv.conf stays unchanged.
func (m *Machine) writeFiles(id guestagent.Identity, write func(k *kept, text string) error) error {
	hostname := id.Hostname
	if hostname != "" {
		hostname += "\n"
	}
	for _, f := range []struct {
		file int
		text string
	}{{fileHosts, hosts(id)}, {fileHostname, hostname}, {fileResolvConf, vm.ResolvConf(id.NICs, id.Resolver)}} {
		if f.text == "" {
			continue
		}
		if err := write(&m.files[f.file], f.text); err != nil {
			return fmt.Errorf("write %s: %w", m.files[f.file].path, err)
		}
	}
	return nil
}

// anew writes a file of a machine that boots.
func anew(k *kept, text string) error { return replace(k.path, text) }

func hosts(id guestagent.Identity) string {
	var b strings.Builder
	b.WriteString("127.0.0.1\tlocalhost\n::1\tlocalhost ip6-localhost ip6-loopback\n")
	own := "127.0.1.1"
	for _, nic := range id.NICs {
		if nic.IP != "" {
			own = nic.IP
			break
		}
	}
	known := slices.ContainsFunc(id.Hosts, func(line string) bool {
		f := strings.Fields(line)
		return len(f) > 1 && f[0] == own && slices.Contains(f, id.Hostname)
	})
	if id.Hostname != "" && !known { // a line of the host may have a longer name, which must be the first one
		b.WriteString(own + "\t" + id.Hostname + "\n")
	}
	for _, line := range id.Hosts {
		b.WriteString(oneLine(line) + "\n")
	}
	return b.String()
}

func oneLine(s string) string {
	if !strings.ContainsAny(s, "\r\n") {
		return s
	}
	return strings.NewReplacer("\n", " ", "\r", " ").Replace(s)
}

// Off implements guestagent.Machine.
func (m *Machine) Off() {
	if !m.init {
		_ = unix.Kill(1, unix.Signal(34+4)) // SIGRTMIN+4: systemd's orderly power-off
		return
	}
	PowerOff(m.volumes(), m.disk)
}

// PowerOff kills all processes, writes everything to disk and cuts the power. The file systems of volumes, folders of which are
// given, become read-only, so that the next machine finds them clean. disk is a folder of the writable disk's file system; nil: none.
// The caller must be PID 1.
func PowerOff(volumes []*os.File, disk *os.File) {
	_ = unix.Kill(-1, unix.SIGKILL)
	protect(volumes)
	syncAll(disk)
	off("/proc/cmdline", "/sys/kernel/reboot/type", unix.Reboot)
	select {} // if the power is still on, PID 1 must not return: the kernel would panic
}

// off cuts the power. A machine that cannot do that itself says so in the arguments of the kernel (vm.ArgOff), and ends when its keyboard controller resets it.
func off(cmdline, resetBy string, reboot func(how int) error) {
	args, err := os.ReadFile(cmdline)
	if err == nil && slices.Contains(strings.Fields(string(args)), vm.ArgOff) {
		if os.WriteFile(resetBy, []byte("kbd"), 0) == nil {
			_ = reboot(unix.LINUX_REBOOT_CMD_RESTART)
		}
	}
	_ = reboot(unix.LINUX_REBOOT_CMD_POWER_OFF)
}

// serverPatience is how long a power-off waits for NFS servers to take what was written: one that is away never does.
const serverPatience = 5 * time.Second

// syncAll writes everything to disks and servers, the disk first. It does not wait for ever for a server.
func syncAll(disk *os.File) {
	if _, err := os.Stat("/proc/fs/nfsfs"); err != nil { // the kernel has no NFS
		unix.Sync()
		return
	}
	if disk != nil {
		_ = unix.Syncfs(int(disk.Fd())) // the power goes off all the same
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		unix.Sync()
	}()
	select {
	case <-done:
	case <-time.After(serverPatience):
	}
}

// noLink is the error for a missing interface.
func noLink(mac string) error {
	return errdefs.NotFoundf("the guest has no interface with the address %s", mac)
}
