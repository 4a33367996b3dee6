// Package machine is the VM that the agent runs in: its host name, addresses, name resolution and power.
//
// It implements guestagent.Machine with system calls only, for images that bring no tools. It does not talk to the
// host, and it must never run outside of a VM.
package machine

import (
	"context"
	"fmt"
	"os"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/guestagent"
)

// Machine is the VM.
type Machine struct {
	init bool

	disk   *os.File // see New
	frozen []frozen

	root    string // of files
	files   [len(paths)]kept
	urandom int      // descriptor of /dev/urandom; 0: it is not open yet
	net     *netlink // see link
}

var _ guestagent.Machine = (*Machine)(nil)

// New returns the VM that we run in. init says that we are its PID 1; disk, if not nil, is the file system of the
// writable layer, to which no path leads.
func New(init bool, disk *os.File) *Machine {
	return machineAt("", init, disk)
}

// machineAt is New for a machine whose files are below root.
func machineAt(root string, init bool, disk *os.File) *Machine {
	m := &Machine{init: init, disk: disk, root: root}
	for i, path := range paths {
		m.files[i] = kept{path: root + path, own: i != fileDBusID}
	}
	return m
}

// Files that say who the machine is.
const (
	fileMachineID = iota
	fileDBusID    // a copy of the machine id, on some a file of its own
	fileHosts
	fileHostname
	fileResolvConf
)

var paths = [...]string{"/etc/machine-id", "/var/lib/dbus/machine-id", "/etc/hosts", "/etc/hostname", "/etc/resolv.conf"}

// linkPatience is how long an interface that is being plugged in may take to appear.
const linkPatience = 2 * time.Second

// Identify implements guestagent.Machine.
func (m *Machine) Identify(ctx context.Context, id guestagent.Identity) error {
	if err := setHostname(id.Hostname); err != nil {
		return err
	}
	if err := m.configure(ctx, id.NICs, nil); err != nil {
		return err
	}
	if m.init { // elsewhere it is somebody else's to make
		if err := ensureMachineID(m.files[fileMachineID].path); err != nil {
			return err
		}
	}
	return m.writeFiles(id, anew)
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

// writeFiles writes who the machine is, but for its machine id, by means of write. Without a name server resolv.conf is
// left alone.
func (m *Machine) writeFiles(id guestagent.Identity, write func(k *kept, text string) error) error {
	hostname := id.Hostname
	if hostname != "" {
		hostname += "\n"
	}
	for _, f := range []struct {
		file int
		text string
	}{{fileHosts, hosts(id)}, {fileHostname, hostname}, {fileResolvConf, resolvConf(id)}} {
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
	if id.Hostname != "" {
		b.WriteString(own + "\t" + id.Hostname + "\n")
	}
	for _, line := range id.Hosts {
		b.WriteString(oneLine(line) + "\n")
	}
	return b.String()
}

// maxNameServers is how many libc looks at.
const maxNameServers = 3

func resolvConf(id guestagent.Identity) string {
	var b strings.Builder
	n := 0
	for _, nic := range id.NICs {
		for _, server := range nic.DNS {
			if n++; n <= maxNameServers {
				b.WriteString("nameserver " + oneLine(server) + "\n")
			}
		}
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
	PowerOff()
}

// PowerOff kills what runs, writes everything to disk and cuts the power. It needs to be called by PID 1.
func PowerOff() {
	_ = unix.Kill(-1, unix.SIGKILL)
	unix.Sync()
	_ = unix.Reboot(unix.LINUX_REBOOT_CMD_POWER_OFF)
	select {} // the power went; if it did not, PID 1 must not return: the kernel would panic
}

// noLink is the error for an interface that is not there.
func noLink(mac string) error {
	return errdefs.NotFoundf("the guest has no interface with the address %s", mac)
}
