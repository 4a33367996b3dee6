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
}

var _ guestagent.Machine = (*Machine)(nil)

// New returns the VM that we run in. init says that we are its PID 1; disk, if not nil, is the file system of the
// writable layer, to which no path leads.
func New(init bool, disk *os.File) *Machine { return &Machine{init: init, disk: disk} }

// linkPatience is how long an interface that is being plugged in may take to appear.
const linkPatience = 2 * time.Second

// Identify implements guestagent.Machine.
func (m *Machine) Identify(ctx context.Context, id guestagent.Identity) error {
	if err := setHostname(id.Hostname); err != nil {
		return err
	}
	if err := configure(ctx, id.NICs, nil); err != nil {
		return err
	}
	if m.init { // elsewhere it is somebody else's to make
		if err := ensureMachineID("/etc/machine-id"); err != nil {
			return err
		}
	}
	return writeFiles("/etc", id, replace)
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

// writeFiles writes hostname, hosts and resolv.conf below etc by means of write. Without a name server resolv.conf is
// left alone.
func writeFiles(etc string, id guestagent.Identity, write func(path, text string) error) error {
	for _, f := range []struct{ name, text string }{
		{"hosts", hosts(id)}, {"hostname", id.Hostname}, {"resolv.conf", resolvConf(id)},
	} {
		switch {
		case f.text == "":
			continue
		case f.name == "hostname":
			f.text += "\n"
		}
		if err := write(etc+"/"+f.name, f.text); err != nil {
			return fmt.Errorf("write %s/%s: %w", etc, f.name, err)
		}
	}
	return nil
}

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

func oneLine(s string) string { return strings.NewReplacer("\n", " ", "\r", " ").Replace(s) }

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
