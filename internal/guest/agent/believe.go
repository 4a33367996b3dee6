package agent

import (
	"math"
	"strings"
	"time"

	guestv1 "cocoonstack.io/cocoon/api/guest/v1"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/grpcerr"
	"cocoonstack.io/cocoon/internal/guest"
	"cocoonstack.io/cocoon/internal/vm"
)

// A guest may report anything. Its values go into records, metrics, the status of pods and terminals, so they are
// clamped to the range that those can hold. Nothing here verifies that they are true.

// Limits of accepted values.
const (
	maxCount = 1 << 30            // restarts, runs and processes
	maxBytes = math.MaxInt64 >> 8 // of memory, disks and networks; sums of them do not overflow
	maxTime  = 1e9                // seconds of CPU time: more than thirty years of one CPU
	maxWord  = 128                // bytes of a single word
	maxCode  = 255                // of an exit code
)

// infoOf converts what the guest reports about itself.
func infoOf(r *guestv1.InfoReply) guest.Info {
	return guest.Info{
		Version: word(r.GetVersion()), BootID: word(r.GetBootId()),
		SetUp: r.GetSetUp(), Process: r.GetProcess(), UptimeMS: within(r.GetUptimeMs(), math.MaxInt64),
	}
}

// waiting returns the guest.Waiting that the reply to a Setup tells of, or nil.
func waiting(r *guestv1.SetupReply) error {
	if r.GetWaiting() == "" {
		return nil
	}
	return guest.NewWaiting(grpcerr.Clean(r.GetWaiting()))
}

func statsOf(r *guestv1.StatsReply) guest.Stats {
	out := guest.Stats{
		CPUSeconds:  number(r.GetCpuSeconds(), maxTime),
		MemoryTotal: within(r.GetMemoryTotal(), maxBytes), MemoryUsed: within(r.GetMemoryUsed(), maxBytes),
		DiskTotal: within(r.GetDiskTotal(), maxBytes), DiskUsed: within(r.GetDiskUsed(), maxBytes),
		Processes: count(r.GetProcesses()), LoadAverage1: number(r.GetLoadAverage_1(), maxCount),
		NetworkRxBytes: within(r.GetNetworkRxBytes(), maxBytes), NetworkTxBytes: within(r.GetNetworkTxBytes(), maxBytes),
		Pressure: pressureOf(r.GetPressure()),
	}
	for _, c := range r.GetContainers() {
		out.Containers = append(out.Containers, guest.ContainerStats{
			Name: word(c.GetName()), CPUSeconds: number(c.GetCpuSeconds(), maxTime), Memory: within(c.GetMemory(), maxBytes),
			MemoryTotal: within(c.GetMemoryTotal(), maxBytes), Anonymous: within(c.GetAnonymous(), maxBytes),
			PageFaults: within(c.GetPageFaults(), math.MaxInt64), MajorFaults: within(c.GetMajorFaults(), math.MaxInt64),
			Written: writtenOf(c.GetWritten()), Pressure: pressureOf(c.GetPressure()),
		})
	}
	for _, v := range r.GetVolumes() {
		out.Volumes = append(out.Volumes, guest.VolumeStats{
			Name: word(v.GetName()), Size: within(v.GetSize(), maxBytes), Used: within(v.GetUsed(), maxBytes), Available: within(v.GetAvailable(), maxBytes),
			Inodes: within(v.GetInodes(), maxBytes), InodesFree: within(v.GetInodesFree(), maxBytes),
		})
	}
	return out
}

func writtenOf(w *guestv1.DiskUse) *guest.DiskUse {
	if w == nil {
		return nil
	}
	return &guest.DiskUse{Bytes: within(w.GetBytes(), maxBytes), Inodes: within(w.GetInodes(), maxBytes)}
}

func pressureOf(p *guestv1.Pressure) guest.Pressure {
	return guest.Pressure{CPU: stallOf(p.GetCpu()), Memory: stallOf(p.GetMemory()), IO: stallOf(p.GetIo())}
}

func stallOf(s *guestv1.Stall) *guest.Stall {
	if s == nil {
		return nil
	}
	waits := func(w *guestv1.Waits) guest.Waits {
		return guest.Waits{
			Total: time.Duration(within(w.GetTotalNs(), math.MaxInt64)), Avg10: number(w.GetAvg10(), 100), Avg60: number(w.GetAvg60(), 100), Avg300: number(w.GetAvg300(), 100),
		}
	}
	return &guest.Stall{Some: waits(s.GetSome()), Full: waits(s.GetFull())}
}

// containersOf fails when a container is in an unknown state.
func containersOf(r *guestv1.ContainersReply) (all []guest.ContainerState, err error) {
	for _, c := range r.GetContainers() {
		s := vm.ContainerStatus{
			State: vm.ContainerState(c.GetState()), Reason: word(c.GetReason()), Message: grpcerr.Clean(c.GetMessage()),
			StartedAt: moment(c.GetStartedUnixNano()), Exit: exit(c.GetExit()), Last: exit(c.GetLast()), Restarts: count(c.GetRestarts()),
			User: userOf(c.GetUser()),
		}
		switch s.State {
		case vm.ContainerWaiting, vm.ContainerCreated, vm.ContainerRunning, vm.ContainerTerminated:
		default:
			return nil, errdefs.New(errdefs.Internal, "the guest reports an unknown container state %q", word(c.GetState()))
		}
		all = append(all, guest.ContainerState{Name: word(c.GetName()), Status: s})
	}
	return all, nil
}

func userOf(u *guestv1.ContainerUser) *vm.ContainerUser {
	if u == nil {
		return nil
	}
	out := &vm.ContainerUser{UID: within(u.GetUid(), math.MaxUint32), GID: within(u.GetGid(), math.MaxUint32)}
	for _, g := range u.GetGroups()[:min(len(u.GetGroups()), vm.MaxUserGroups)] {
		out.Groups = append(out.Groups, within(g, math.MaxUint32))
	}
	return out
}

func exit(x *guestv1.ContainerExit) *vm.ContainerExit {
	if x == nil {
		return nil
	}
	return &vm.ContainerExit{
		Code: code(x.GetCode()), Reason: word(x.GetReason()), Message: grpcerr.Clean(x.GetMessage()),
		StartedAt: moment(x.GetStartedUnixNano()), FinishedAt: moment(x.GetFinishedUnixNano()),
	}
}

func entryOf(e *guestv1.LogEntry) guest.LogEntry {
	name := "stdout"
	if e.GetStderr() {
		name = "stderr"
	}
	return guest.LogEntry{Seq: e.GetSeq(), Time: time.Unix(0, e.GetTimeUnixNano()), Stream: name, Data: e.GetData(), Run: count(e.GetRun())}
}

func resumedOf(r *guestv1.ResumedReply) guest.ResumedReply {
	out := guest.ResumedReply{LogSeq: r.GetLogSeq()}
	for _, c := range r.GetContainers() {
		out.Containers = append(out.Containers, guest.LogPlace{Run: count(c.GetRun()), Seq: c.GetSeq(), Name: word(c.GetName())})
	}
	return out
}

// moment is a time of the guest's clock; 0 gives the zero time.
func moment(ns int64) time.Time {
	if ns == 0 {
		return time.Time{}
	}
	return time.Unix(0, ns).UTC()
}

// code is an exit code; an invalid one becomes the largest, so that it never means success.
func code(n int32) int {
	if n < 0 || n > maxCode {
		return maxCode
	}
	return int(n)
}

func count(n int32) int { return int(within(int64(n), maxCount)) }

func within(n, most int64) int64 { return min(max(n, 0), most) }

// number is x, or 0 when x is not a valid number.
func number(x, most float64) float64 {
	if !(x > 0) { // also NaN
		return 0
	}
	return min(x, most)
}

// word is one line of text, as a table column needs it.
func word(s string) string {
	s = grpcerr.Clean(s)
	if len(s) > maxWord {
		s = strings.ToValidUTF8(s[:maxWord], "")
	}
	return strings.Map(func(r rune) rune {
		if r == '\n' || r == '\t' {
			return ' '
		}
		return r
	}, s)
}
