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

// reseed mixes its input into the kernel's random numbers and has it use them now. Which of the two interpreters a guest
// has differs; without one the kernel does it within a minute.
const reseed = `cat >/dev/urandom
python3 -c 'import fcntl; fcntl.ioctl(open("/dev/urandom", "wb"), 0x5207)' 2>/dev/null ||
perl -e 'open(F, ">", "/dev/urandom"); ioctl(F, 0x5207, 0) or exit 1' 2>/dev/null || true
`

// forget removes what the source would otherwise go on as in the clone's next boot or lease.
const forget = `rm -f /var/lib/systemd/random-seed /var/lib/dhcp/*.lease* /var/lib/dhclient/*.lease* /run/systemd/netif/leases/*
`

// newHostKeys is for clones that asked for keys of their own. cloud-init makes some too, where it is let.
const newHostKeys = `if command -v ssh-keygen >/dev/null && ls /etc/ssh/ssh_host_* >/dev/null 2>&1; then rm -f /etc/ssh/ssh_host_*; ssh-keygen -q -A; fi
`

// rereadHostKeys has the SSH server, which read its keys when it started, take those that there are now.
const rereadHostKeys = `systemctl try-restart ssh.service 2>/dev/null || systemctl try-restart sshd.service 2>/dev/null || true
`

// Resumed implements guest.Resumer. A clone runs the commands that package postclone has for its kind of guest: by
// cloud-init, else for systemd-networkd. What an agent does not allow is left out for a guest that is who it was; a clone
// is told then that its agent cannot do it.
// Errors beyond the contract's: Unsupported when commands are switched off in the agent or the guest is of no known kind,
// FailedPrecondition when the commands fail, with what they said last.
func (s *session) Resumed(ctx context.Context, r guest.Resumed) (guest.ResumedReply, error) {
	if err := s.resumed(ctx, r); err != nil {
		return guest.ResumedReply{}, fmt.Errorf("bring a resumed guest to itself by qemu-guest-agent: %w", err)
	}
	return guest.ResumedReply{}, nil
}

func (s *session) resumed(ctx context.Context, r guest.Resumed) error {
	began := time.Now()
	if _, err := s.Thaw(ctx); notAllowed(err) != nil {
		return err
	}
	err := s.call(ctx, "guest-set-time", map[string]int64{"time": r.Now.Add(time.Since(began)).UnixNano()}, nil, answerLimit)
	if notAllowed(err) != nil { // it fails too where there is no hardware clock to write it to
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

// notAllowed returns err unless it says that the guest's operator, or the state of the guest, does not let it be done.
func notAllowed(err error) error {
	if errdefs.Is(err, errdefs.Unsupported) || errdefs.IsFailedPrecondition(err) || errdefs.IsNotFound(err) {
		return nil
	}
	return err
}

// refusedScript makes it one class of error that no command can be run.
func refusedScript(err error) error {
	if notAllowed(err) == nil {
		return errdefs.As(errdefs.Unsupported, err)
	}
	return err
}

// script has the shell run commands, with stdin as their input.
func (s *session) script(ctx context.Context, commands string, stdin []byte) (execStatus, error) {
	return s.run(ctx, execArgs{Path: "/bin/sh", Arg: []string{"-c", commands}, Input: stdin, Capture: true}, nil)
}

// identity are the commands by which the guest becomes the clone.
func (s *session) identity(ctx context.Context, r guest.Resumed) (string, error) {
	for i, n := range r.NICs {
		if i < len(r.Clone.MACs) && !strings.EqualFold(r.Clone.MACs[i], n.MAC) {
			return "", errdefs.Unsupportedf("its interface %d is still the source's", i)
		}
	}
	class, err := s.class(ctx)
	if err != nil {
		return "", err
	}
	text, err := postclone.Commands(class, postclone.Clone{
		ID:       vm.ID(r.Clone.MachineID), // for cloud-init it is another instance: what is as unique as the VM's own id will do
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

// class finds out what configures the guest's network.
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
	return "", errdefs.Unsupportedf("it has neither cloud-init nor systemd-networkd")
}

// lastLine is what a failed command said in the end.
func lastLine(b []byte) string {
	lines := strings.Split(strings.TrimSpace(string(b)), "\n")
	return printable(lines[len(lines)-1])
}
