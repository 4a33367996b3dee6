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
		Ref: ref, Follow: o.Follow, Tail: int64(o.Tail), SinceNs: EncodeTime(o.Since), Previous: o.Previous, Serial: o.Serial,
		Container: o.Container,
	}
}

// DecodeLogOptions returns the options in m.
func DecodeLogOptions(m *nodev1.LogsRequest) (ref string, o guest.LogOptions) {
	return m.GetRef(), guest.LogOptions{
		Follow: m.GetFollow(), Tail: int(m.GetTail()), Since: DecodeTime(m.GetSinceNs()), Previous: m.GetPrevious(), Serial: m.GetSerial(),
		Container: m.GetContainer(),
	}
}

// EncodeLogEntry returns e as a message.
func EncodeLogEntry(e guest.LogEntry) *nodev1.LogEntry {
	return &nodev1.LogEntry{Seq: e.Seq, TimeNs: EncodeTime(e.Time), Stream: e.Stream, Data: slices.Clone(e.Data), Run: int64(e.Run)}
}

// DecodeLogEntry returns the entry in m.
func DecodeLogEntry(m *nodev1.LogEntry) guest.LogEntry {
	return guest.LogEntry{Seq: m.GetSeq(), Time: DecodeTime(m.GetTimeNs()), Stream: m.GetStream(), Data: m.GetData(), Run: int(m.GetRun())}
}

// EncodeStats returns s as a message.
func EncodeStats(s guest.Stats) *nodev1.StatsResponse {
	return &nodev1.StatsResponse{
		CpuSeconds: s.CPUSeconds, MemoryTotal: s.MemoryTotal, MemoryUsed: s.MemoryUsed, DiskTotal: s.DiskTotal, DiskUsed: s.DiskUsed,
		Processes: int64(s.Processes), LoadAverage1: s.LoadAverage1, NetworkRxBytes: s.NetworkRxBytes, NetworkTxBytes: s.NetworkTxBytes,
		Containers: each(s.Containers, func(c guest.ContainerStats) *nodev1.ContainerStats {
			return &nodev1.ContainerStats{Name: c.Name, CpuSeconds: c.CPUSeconds, Memory: c.Memory}
		}),
		Volumes: each(s.Volumes, func(v guest.VolumeStats) *nodev1.VolumeStats {
			return &nodev1.VolumeStats{Name: v.Name, Size: v.Size, Used: v.Used, Available: v.Available, Inodes: v.Inodes, InodesFree: v.InodesFree}
		}),
	}
}

// DecodeStats returns the stats in m.
func DecodeStats(m *nodev1.StatsResponse) guest.Stats {
	return guest.Stats{
		CPUSeconds: m.GetCpuSeconds(), MemoryTotal: m.GetMemoryTotal(), MemoryUsed: m.GetMemoryUsed(), DiskTotal: m.GetDiskTotal(), DiskUsed: m.GetDiskUsed(),
		Processes: int(m.GetProcesses()), LoadAverage1: m.GetLoadAverage1(), NetworkRxBytes: m.GetNetworkRxBytes(), NetworkTxBytes: m.GetNetworkTxBytes(),
		Containers: each(m.GetContainers(), func(c *nodev1.ContainerStats) guest.ContainerStats {
			return guest.ContainerStats{Name: c.GetName(), CPUSeconds: c.GetCpuSeconds(), Memory: c.GetMemory()}
		}),
		Volumes: each(m.GetVolumes(), func(v *nodev1.VolumeStats) guest.VolumeStats {
			return guest.VolumeStats{Name: v.GetName(), Size: v.GetSize(), Used: v.GetUsed(), Available: v.GetAvailable(), Inodes: v.GetInodes(), InodesFree: v.GetInodesFree()}
		}),
	}
}
