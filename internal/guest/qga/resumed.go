package qga

import (
	"context"
	"fmt"
	"strings"
	"time"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/guest"
	"cocoonstack.io/cocoon/internal/postclone"
	"cocoonstack.io/cocoon/internal/vm"
)

// reseed mixes its input into the kernel's random numbers and makes the kernel use them now. Guests differ in which of
// the two interpreters they have; without one the kernel does it within a minute.
const reseed = `cat >/dev/urandom
python3 -c 'import fcntl; fcntl.ioctl(open("/dev/urandom", "wb"), 0x5207)' 2>/dev/null ||
perl -e 'open(F, ">", "/dev/urandom"); ioctl(F, 0x5207, 0) or exit 1' 2>/dev/null || true
`

// forget removes what the clone would otherwise take over from the source at its next boot or lease.
const forget = `rm -f /var/lib/systemd/random-seed /var/lib/dhcp/*.lease* /var/lib/dhclient/*.lease* /run/systemd/netif/leases/*
`

// newHostKeys is for clones that asked for their own keys. cloud-init also makes some, where it is allowed to.
const newHostKeys = `if command -v ssh-keygen >/dev/null && ls /etc/ssh/ssh_host_* >/dev/null 2>&1; then rm -f /etc/ssh/ssh_host_*; ssh-keygen -q -A; fi
`

// rereadHostKeys makes the SSH server, which read its keys when it started, use the current keys.
const rereadHostKeys = `systemctl try-restart ssh.service 2>/dev/null || systemctl try-restart sshd.service 2>/dev/null || true
`

// Resumed implements guest.Resumer. A clone runs the commands that package postclone has for its kind of guest: with
// cloud-init, else for systemd-networkd. A guest that keeps its identity skips what its agent does not allow; for a
// clone that is an error.
// Errors beyond the contract's: Unsupported when commands are switched off in the agent or the guest is of unknown kind,
// FailedPrecondition when the commands fail, with the last line of their output.
func (s *session) Resumed(ctx context.Context, r guest.Resumed) (guest.ResumedReply, error) {
	if err := s.resumed(ctx, r); err != nil {
		return guest.ResumedReply{}, fmt.Errorf("give a resumed guest its identity through qemu-guest-agent: %w", err)
	}
	return guest.ResumedReply{}, nil
}

func (s *session) resumed(ctx context.Context, r guest.Resumed) error {
	began := time.Now()
	if _, err := s.Thaw(ctx); notAllowed(err) != nil {
		return err
	}
	err := s.call(ctx, "guest-set-time", map[string]int64{"time": r.Now.Add(time.Since(began)).UnixNano()}, nil, answerLimit)
	if notAllowed(err) != nil { // it also fails without a hardware clock to write to
		return err
	}
	if _, err := s.script(ctx, reseed, r.Entropy); notAllowed(err) != nil || err != nil && r.Clone != nil {
		return refusedScript(err)
	}
	if r.Clone == nil {
		return nil
	}
	commands, err := s.identity(ctx, r)
	if err != nil {
		return err
	}
	x, err := s.script(ctx, commands, nil)
	if err != nil {
		return refusedScript(err)
	}
	if x.code() != 0 {
		return errdefs.Preconditionf("its commands ended with code %d: %s", x.code(), lastLine(x.Err))
	}
	return nil
}

// notAllowed returns err unless the guest's operator, or the state of the guest, does not allow the action.
func notAllowed(err error) error {
	if errdefs.Is(err, errdefs.Unsupported) || errdefs.IsFailedPrecondition(err) || errdefs.IsNotFound(err) {
		return nil
	}
	return err
}

// refusedScript maps every failure to run a command to one error class.
func refusedScript(err error) error {
	if notAllowed(err) == nil {
		return errdefs.As(errdefs.Unsupported, err)
	}
	return err
}

// script runs commands in the shell, with stdin as their input.
func (s *session) script(ctx context.Context, commands string, stdin []byte) (execStatus, error) {
	return s.run(ctx, execArgs{Path: "/bin/sh", Arg: []string{"-c", commands}, Input: stdin, Capture: true}, nil)
}

// identity returns the commands that give the guest the identity of the clone.
func (s *session) identity(ctx context.Context, r guest.Resumed) (string, error) {
	for i, n := range r.NICs {
		if i < len(r.Clone.MACs) && !strings.EqualFold(r.Clone.MACs[i], n.MAC) {
			return "", errdefs.Unsupportedf("its interface %d still has the MAC of the source VM", i)
		}
	}
	class, err := s.class(ctx)
	if err != nil {
		return "", err
	}
	text, err := postclone.Commands(class, postclone.Clone{
		ID:       vm.ID(r.Clone.MachineID), // cloud-init sees another instance: any value as unique as the VM's own id is enough
		Hostname: r.Hostname, NICs: r.NICs, MACs: r.Clone.MACs, MachineID: r.Clone.MachineID,
	})
	if err != nil {
		return "", err
	}
	text = "set -e\n" + forget + text
	if r.Clone.SSHHostKeys {
		text += newHostKeys
	}
	return text + rereadHostKeys, nil
}

// class finds out which software configures the guest's network.
func (s *session) class(ctx context.Context) (postclone.Class, error) {
	const look = `if command -v cloud-init >/dev/null; then echo cloud-init
elif systemctl is-enabled -q systemd-networkd 2>/dev/null; then echo networkd; fi`
	x, err := s.script(ctx, look, nil)
	if err != nil {
		return "", refusedScript(err)
	}
	switch strings.TrimSpace(string(x.Out)) {
	case "cloud-init":
		return postclone.CloudImage, nil
	case "networkd":
		return postclone.StaticOCI, nil
	}
	return "", errdefs.Unsupportedf("the guest has neither cloud-init nor systemd-networkd")
}

// lastLine is the last line that a failed command printed.
func lastLine(b []byte) string {
	lines := strings.Split(strings.TrimSpace(string(b)), "\n")
	return printable(lines[len(lines)-1])
}
