package guestagent

import (
	"fmt"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	guestv1 "cocoonstack.io/cocoon/api/guest/v1"
	"cocoonstack.io/cocoon/internal/guestagent/launch"
	"cocoonstack.io/cocoon/internal/guestagent/rooms"
	"cocoonstack.io/cocoon/internal/guestagent/seccomp"
	"cocoonstack.io/cocoon/internal/vm"
)

// This file limits what processes of the guest may do, and decides which signal ends them.

// limits are the limits of a process and of the commands beside it. nil: it has all rights of its user.
type limits struct {
	vm.Security
	keep   uint64         // bit n: capability n stays in the bounding set
	filter seccomp.Filter // instead of the default one; nil: none
}

func limitsOf(m *guestv1.Security) (*limits, error) {
	if m == nil {
		return nil, nil
	}
	l := &limits{Security: vm.Security{
		Capabilities: m.GetCapabilities(), NoNewPrivileges: m.GetNoNewPrivileges(),
		Groups: m.GetGroups(), StrictGroups: m.GetStrictGroups(), Filtered: m.GetFiltered(),
		Masked: m.GetMasked(), ReadOnly: m.GetReadOnly(), SystemCalls: systemCalls(m.GetSystemCalls()),
	}}
	if err := l.Validate(); err != nil {
		return nil, err
	}
	for _, name := range l.Capabilities {
		n, _ := vm.CapabilityNumber(name)
		l.keep |= 1 << n
	}
	if l.SystemCalls != nil {
		var kernel unix.Utsname
		err := unix.Uname(&kernel)
		if err == nil {
			l.filter, err = seccomp.Compile(l.SystemCalls, unix.ByteSliceToString(kernel.Release[:]))
		}
		if err != nil {
			return nil, err
		}
	}
	return l, nil
}

func systemCalls(m *guestv1.SystemCalls) *vm.SystemCalls {
	if m == nil {
		return nil
	}
	out := &vm.SystemCalls{Default: callAction(m.GetDefault())}
	for _, r := range m.GetRules() {
		rule := vm.CallRule{Calls: r.GetCalls(), Action: callAction(r.GetAction()), Since: r.GetSince(), Before: r.GetBefore()}
		for _, a := range r.GetArgs() {
			rule.Args = append(rule.Args, vm.CallArg{Index: int(a.GetIndex()), Op: a.GetOp(), Value: a.GetValue(), Mask: a.GetMask()})
		}
		out.Rules = append(out.Rules, rule)
	}
	return out
}

func callAction(m *guestv1.CallAction) vm.CallAction {
	return vm.CallAction{Do: m.GetDo(), Data: int(m.GetData())}
}

// covers returns what a process does not see or change in its room.
func covers(p *guestv1.Process) rooms.Covers {
	return rooms.Covers{ReadOnlyRoot: p.GetReadOnlyRoot(), Masked: p.GetSecurity().GetMasked(), ReadOnly: p.GetSecurity().GetReadOnly()}
}

// networks reports whether a process is given the right to configure the network.
func (l *limits) networks() bool {
	n, _ := vm.CapabilityNumber("NET_ADMIN")
	return l != nil && l.keep&(1<<n) != 0
}

// limitsFor returns the limits of a process. If the process can configure the network, limitsFor loads the kernel modules of the interfaces that it can
// create.
func (s *Server) limitsFor(m *guestv1.Security) (*limits, error) {
	l, err := limitsOf(m)
	if err == nil && l.networks() && s.cfg.Links != nil {
		_ = s.cfg.Links() // without them, it cannot make bridges
	}
	return l, err
}

// privileged reports whether a process may get all rights over its machine.
func (l *limits) privileged() bool {
	n, _ := vm.CapabilityNumber("SYS_ADMIN")
	return l == nil || l.keep&(1<<n) != 0
}

// impose limits this thread for good. A process that the thread starts is limited in the same way. The thread keeps the
// rights that it needs to start a process of any user: only an exec takes the capabilities away.
func (l *limits) impose() error {
	if err := launch.Bound(l.keep); err != nil {
		return err
	}
	if l.NoNewPrivileges {
		if err := unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0); err != nil {
			return fmt.Errorf("set no_new_privs: %w", err)
		}
	}
	if l.Filtered {
		return seccomp.Load(l.Capabilities)
	}
	return nil
}

// filters returns the filter of the system calls of a process; nil: it has none.
func (l *limits) filters() (seccomp.Filter, error) {
	if l.filter == nil && l.Filtered {
		return seccomp.Default(l.Capabilities)
	}
	return l.filter, nil
}

// groups returns the additional groups of a process of u. volumes are the groups of the volumes.
func (l *limits) groups(u user, volumes []uint32) []uint32 {
	if l == nil {
		return slices.Concat(u.groups, volumes)
	}
	all := []uint32{u.gid}
	add := func(gid uint32) {
		if !slices.Contains(all, gid) && len(all) < maxGroups {
			all = append(all, gid)
		}
	}
	if !l.StrictGroups {
		for _, g := range u.listed {
			add(g)
		}
	}
	for _, g := range l.Groups {
		add(uint32(g))
	}
	for _, g := range volumes {
		add(g)
	}
	return all
}

// Real-time signals, as the C libraries count them.
const (
	sigRTMin = unix.Signal(34)
	sigRTMax = unix.Signal(64)
)

// parseSignal returns the signal with that name or number. It is SIGTERM if there is none: images can hold any text.
func parseSignal(s string) unix.Signal {
	if n, err := strconv.Atoi(s); err == nil && n > 0 && n <= int(sigRTMax) {
		return unix.Signal(n)
	}
	name := "SIG" + strings.TrimPrefix(strings.ToUpper(s), "SIG")
	if n := unix.SignalNum(name); n != 0 {
		return n
	}
	sig := stopSignal
	for prefix, base := range map[string]unix.Signal{"SIGRTMIN": sigRTMin, "SIGRTMAX": sigRTMax} {
		rest, ok := strings.CutPrefix(name, prefix)
		if !ok {
			continue
		}
		if n, err := strconv.Atoi(rest); rest == "" || err == nil && (base == sigRTMin) == (rest[0] == '+') && n >= -30 && n <= 30 {
			sig = base + unix.Signal(n)
		}
	}
	return sig
}
