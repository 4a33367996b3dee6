package nodewire

import (
	"math"
	"slices"

	nodev1 "cocoonstack.io/cocoon/api/node/v1"
	"cocoonstack.io/cocoon/internal/guest"
)

// EncodeExec returns e as the first message of an exec; stdin tells whether the client will send input.
func EncodeExec(ref string, e guest.Exec, stdin bool) *nodev1.ExecStart {
	return &nodev1.ExecStart{
		Ref: ref, Command: slices.Clone(e.Command), Env: EncodeEnv(e.Env), Workdir: e.WorkDir, User: e.User,
		Tty: e.TTY, Size: EncodeWinSize(guest.WinSize{Rows: e.Rows, Cols: e.Cols}), Stdin: stdin,
		Container: e.Container,
	}
}

// DecodeExec returns the command in m.
func DecodeExec(m *nodev1.ExecStart) (ref string, e guest.Exec, stdin bool) {
	size := DecodeWinSize(m.GetSize())
	return m.GetRef(), guest.Exec{
		Command: cloneSlice(m.GetCommand()), Env: DecodeEnv(m.GetEnv()), WorkDir: m.GetWorkdir(), User: m.GetUser(),
		TTY: m.GetTty(), Rows: size.Rows, Cols: size.Cols, Container: m.GetContainer(),
	}, m.GetStdin()
}

// EncodeAttach returns a as the first message of an attached session; stdin tells whether the client will send input.
func EncodeAttach(ref string, a guest.Attach, stdin bool) *nodev1.ExecStart {
	return &nodev1.ExecStart{
		Ref: ref, Container: a.Container, Size: EncodeWinSize(guest.WinSize{Rows: a.Rows, Cols: a.Cols}), Stdin: stdin,
	}
}

// DecodeAttach returns the process that m asks to attach to.
func DecodeAttach(m *nodev1.ExecStart) (ref string, a guest.Attach, stdin bool) {
	size := DecodeWinSize(m.GetSize())
	return m.GetRef(), guest.Attach{Container: m.GetContainer(), Rows: size.Rows, Cols: size.Cols}, m.GetStdin()
}

// EncodeWinSize returns w as a message.
func EncodeWinSize(w guest.WinSize) *nodev1.WinSize {
	return &nodev1.WinSize{Rows: uint32(w.Rows), Cols: uint32(w.Cols)}
}

// DecodeWinSize returns the size in m; values beyond a terminal's range become its limit.
func DecodeWinSize(m *nodev1.WinSize) guest.WinSize {
	return guest.WinSize{Rows: uint16(min(m.GetRows(), math.MaxUint16)), Cols: uint16(min(m.GetCols(), math.MaxUint16))}
}

// EncodeLogOptions returns o as a request for the log of ref.
func EncodeLogOptions(ref string, o guest.LogOptions) *nodev1.LogsRequest {
	return &nodev1.LogsRequest{
		Ref: ref, Follow: o.Follow, Tail: int64(o.Tail), SinceNs: EncodeTime(o.Since), Previous: o.Previous, Serial: o.Serial, From: o.From,
		Container: o.Container,
	}
}

// DecodeLogOptions returns the options in m.
func DecodeLogOptions(m *nodev1.LogsRequest) (ref string, o guest.LogOptions) {
	return m.GetRef(), guest.LogOptions{
		Follow: m.GetFollow(), Tail: int(m.GetTail()), Since: DecodeTime(m.GetSinceNs()), Previous: m.GetPrevious(), Serial: m.GetSerial(), From: m.GetFrom(),
		Container: m.GetContainer(),
	}
}

// EncodeLogEntry returns e as a message.
func EncodeLogEntry(e guest.LogEntry) *nodev1.LogEntry {
	return &nodev1.LogEntry{Seq: e.Seq, TimeNs: EncodeTime(e.Time), Stream: e.Stream, Data: slices.Clone(e.Data), Run: int64(e.Run), End: e.End}
}

// DecodeLogEntry returns the entry in m.
func DecodeLogEntry(m *nodev1.LogEntry) guest.LogEntry {
	return guest.LogEntry{Seq: m.GetSeq(), Time: DecodeTime(m.GetTimeNs()), Stream: m.GetStream(), Data: m.GetData(), Run: int(m.GetRun()), End: m.GetEnd()}
}

// EncodeDescription returns d as a message.
func EncodeDescription(d guest.Description) *nodev1.DescribeResponse {
	return &nodev1.DescribeResponse{
		Agent: d.Agent, Hostname: d.Hostname, Timezone: d.Timezone.Name, TimezoneOffset: int64(d.Timezone.Offset),
		Os: &nodev1.GuestOS{
			Id: d.OS.ID, Name: d.OS.Name, PrettyName: d.OS.PrettyName, Version: d.OS.Version, VersionId: d.OS.VersionID,
			KernelRelease: d.OS.KernelRelease, KernelVersion: d.OS.KernelVersion, Machine: d.OS.Machine,
		},
		Users: each(d.Users, func(u guest.User) *nodev1.GuestUser {
			return &nodev1.GuestUser{Name: u.Name, Domain: u.Domain, SinceNs: EncodeTime(u.Since)}
		}),
		FileSystems: each(d.FileSystems, func(f guest.FileSystem) *nodev1.GuestFileSystem {
			return &nodev1.GuestFileSystem{Device: f.Device, Path: f.Path, Type: f.Type, Total: f.Total, Used: f.Used, Disks: each(f.Disks, func(k guest.FileSystemDisk) *nodev1.GuestDisk { return &nodev1.GuestDisk{Serial: k.Serial, Bus: k.Bus} })}
		}),
	}
}

// DecodeDescription returns the description in m.
func DecodeDescription(m *nodev1.DescribeResponse) guest.Description {
	o := m.GetOs()
	return guest.Description{
		Agent: m.GetAgent(), Hostname: m.GetHostname(), Timezone: guest.Timezone{Name: m.GetTimezone(), Offset: int(m.GetTimezoneOffset())},
		OS: guest.OS{
			ID: o.GetId(), Name: o.GetName(), PrettyName: o.GetPrettyName(), Version: o.GetVersion(), VersionID: o.GetVersionId(),
			KernelRelease: o.GetKernelRelease(), KernelVersion: o.GetKernelVersion(), Machine: o.GetMachine(),
		},
		Users: each(m.GetUsers(), func(u *nodev1.GuestUser) guest.User {
			return guest.User{Name: u.GetName(), Domain: u.GetDomain(), Since: DecodeTime(u.GetSinceNs())}
		}),
		FileSystems: each(m.GetFileSystems(), func(f *nodev1.GuestFileSystem) guest.FileSystem {
			return guest.FileSystem{Device: f.GetDevice(), Path: f.GetPath(), Type: f.GetType(), Total: f.GetTotal(), Used: f.GetUsed(), Disks: each(f.GetDisks(), func(k *nodev1.GuestDisk) guest.FileSystemDisk {
				return guest.FileSystemDisk{Serial: k.GetSerial(), Bus: k.GetBus()}
			})}
		}),
	}
}

// EncodeLogins returns the message for l, for the VM ref.
func EncodeLogins(ref string, l guest.Logins) *nodev1.SetLoginsRequest {
	m := &nodev1.SetLoginsRequest{Ref: ref, Passwords: l.Passwords, Keys: map[string]*nodev1.AuthorizedKeys{}}
	for user, keys := range l.Keys {
		m.Keys[user] = &nodev1.AuthorizedKeys{Lines: keys}
	}
	return m
}

// DecodeLogins returns the logins in m.
func DecodeLogins(m *nodev1.SetLoginsRequest) guest.Logins {
	l := guest.Logins{Passwords: m.GetPasswords(), Keys: map[string][]string{}}
	for user, keys := range m.GetKeys() {
		l.Keys[user] = keys.GetLines()
	}
	return l
}
