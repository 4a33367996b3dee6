package qga

import (
	"context"
	"errors"
	"math"
	"net"
	"net/netip"
	"strconv"
	"strings"
	"time"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/guest"
)

// maxInterfaces limits the number of interfaces, and of addresses of each, that are accepted.
const maxInterfaces = 64

// Interfaces implements guest.NetworkReporter.
func (s *session) Interfaces(ctx context.Context) ([]guest.Interface, error) {
	var found []reported
	if err := s.call(ctx, "guest-network-get-interfaces", nil, &found, answerLimit); err != nil {
		return nil, err
	}
	return interfaces(found), nil
}

// reported is an interface in the protocol's terms.
type reported struct {
	Name string `json:"name"`
	MAC  string `json:"hardware-address"`
	IPs  []struct {
		Address string `json:"ip-address"`
		Prefix  int    `json:"prefix"`
	} `json:"ip-addresses"`
}

// interfaces converts the entries that are well-formed.
func interfaces(found []reported) []guest.Interface {
	var out []guest.Interface
	for _, r := range found[:min(len(found), maxInterfaces)] {
		i := guest.Interface{Name: printable(r.Name)}
		if mac, err := net.ParseMAC(r.MAC); err == nil {
			i.MAC = mac.String()
		}
		for _, ip := range r.IPs[:min(len(r.IPs), maxInterfaces)] {
			addr, err := netip.ParseAddr(ip.Address)
			if err != nil {
				continue
			}
			if p := netip.PrefixFrom(addr.WithZone(""), ip.Prefix); p.IsValid() {
				i.Addresses = append(i.Addresses, p)
			}
		}
		out = append(out, i)
	}
	return out
}

// freezeLimit is the timeout of a freeze alone: it writes out all unwritten data in the guest's memory.
const freezeLimit = patience

// Freeze implements guest.Freezer.
func (s *session) Freeze(ctx context.Context) (int, error) {
	ctx, cancel := context.WithTimeout(ctx, freezeLimit)
	defer cancel()
	var n int
	err := s.call(ctx, "guest-fsfreeze-freeze", nil, &n, answerLimit)
	if refused := new(refusal); errdefs.Is(err, errdefs.Unsupported) || errors.As(err, &refused) {
		return 0, err // nothing was frozen
	}
	if err != nil { // file systems may be frozen, and nobody would thaw them
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), patience)
		defer cancel()
		_, thawed := s.Thaw(ctx)
		return 0, errors.Join(err, thawed)
	}
	s.frozen.Store(true)
	return n, nil
}

// Frozen implements guest.FreezeReporter. Only what the agent has frozen counts.
func (s *session) Frozen(ctx context.Context) (bool, error) {
	var state string
	err := s.call(ctx, "guest-fsfreeze-status", nil, &state, answerLimit)
	return state == "frozen", err
}

// Thaw implements guest.Freezer.
func (s *session) Thaw(ctx context.Context) (int, error) {
	var n int
	if err := s.call(ctx, "guest-fsfreeze-thaw", nil, &n, answerLimit); err != nil {
		return 0, err
	}
	s.frozen.Store(false)
	return n, nil
}

// ReadClock implements guest.ClockReader.
func (s *session) ReadClock(ctx context.Context) (time.Time, error) {
	var ns int64
	if err := s.call(ctx, "guest-get-time", nil, &ns, answerLimit); err != nil {
		return time.Time{}, err
	}
	return time.Unix(0, ns), nil
}

// clockError is how far a clock may be off that was just set.
const clockError = time.Second

// SetClock implements guest.ClockSetter. The agent fails when it has set the clock but finds no hardware clock to write to, so
// a clock that is right afterwards is enough.
func (s *session) SetClock(ctx context.Context, now time.Time) error {
	began := time.Now()
	err := s.call(ctx, "guest-set-time", map[string]int64{"time": now.UnixNano()}, nil, answerLimit)
	if !errdefs.IsFailedPrecondition(err) {
		return err
	}
	if is, failed := s.ReadClock(ctx); failed == nil && is.Sub(now.Add(time.Since(began))).Abs() < clockError {
		return nil
	}
	return err
}

// Stats implements guest.Agent. Unsupported in guests without /proc or that do not allow commands.
func (s *session) Stats(ctx context.Context) (guest.Stats, error) {
	out, err := s.capture(ctx, "cat", "/proc/stat", "/proc/meminfo", "/proc/loadavg", "/proc/net/dev")
	if err != nil {
		if errdefs.IsNotFound(err) {
			err = errdefs.As(errdefs.Unsupported, err)
		}
		return guest.Stats{}, err
	}
	st := parseStats(out)
	var disks []struct {
		Mountpoint string `json:"mountpoint"`
		Total      int64  `json:"total-bytes"`
		Used       int64  `json:"used-bytes"`
	}
	err = s.call(ctx, "guest-get-fsinfo", nil, &disks, answerLimit)
	for _, d := range disks {
		if d.Mountpoint == "/" && d.Used >= 0 && d.Used <= d.Total {
			st.DiskTotal, st.DiskUsed = d.Total, d.Used
		}
	}
	if err != nil && (ctx.Err() != nil || errdefs.IsUnavailable(err)) {
		return guest.Stats{}, err
	}
	return st, nil // an agent that does not report file systems leaves the disk values zero
}

// Mounts implements guest.MountReporter. The agent puts the vendor and the kind of a SCSI disk before its serial.
func (s *session) Mounts(ctx context.Context, serial string) (at []string, err error) {
	var all []struct {
		Mountpoint string `json:"mountpoint"`
		Disk       []struct {
			Serial string `json:"serial"`
		} `json:"disk"`
	}
	if err := s.call(ctx, "guest-get-fsinfo", nil, &all, answerLimit); err != nil {
		return nil, err
	}
	for _, fs := range all {
		for _, d := range fs.Disk {
			if d.Serial == serial || strings.HasSuffix(d.Serial, "_"+serial) {
				at = append(at, fs.Mountpoint)
			}
		}
	}
	return at, nil
}

// hertz is the unit in which the kernel shows times, on every architecture that we support.
const hertz = 100

// parseStats reads stat, meminfo, loadavg and net/dev of /proc, one after the other. Missing values stay zero.
func parseStats(out []byte) guest.Stats {
	var st guest.Stats
	var available int64
	for line := range strings.Lines(string(out)) {
		f := strings.Fields(line)
		if len(f) < 2 {
			continue
		}
		name, isName := strings.CutSuffix(f[0], ":")
		switch {
		case f[0] == "cpu" && len(f) >= 8: // user nice system idle iowait irq softirq steal
			for i, v := range f[1:min(len(f), 9)] {
				if i != 3 && i != 4 {
					st.CPUSeconds += float64(number(v)) / hertz
				}
			}
		case name == "MemTotal" && isName:
			st.MemoryTotal = number(f[1]) << 10
		case name == "MemAvailable" && isName:
			available = number(f[1]) << 10
		case len(f) == 5 && strings.Contains(f[3], "/"): // 0.00 0.01 0.05 1/84 312
			_, tasks, _ := strings.Cut(f[3], "/")
			st.Processes = int(number(tasks))
			if load, err := strconv.ParseFloat(f[0], 64); err == nil && load >= 0 && load < 1e6 {
				st.LoadAverage1 = load
			}
		case isName && len(f) == 17 && name != "lo":
			st.NetworkRxBytes = sum(st.NetworkRxBytes, number(f[1]))
			st.NetworkTxBytes = sum(st.NetworkTxBytes, number(f[9]))
		}
	}
	st.MemoryUsed = max(st.MemoryTotal-available, 0)
	return st
}

// number is a count from a guest, limited so that calculations with it do not overflow.
func number(s string) int64 {
	n, err := strconv.ParseInt(s, 10, 64)
	if err != nil || n < 0 || n > math.MaxInt64>>11 {
		return 0
	}
	return n
}

func sum(a, b int64) int64 { return min(a+b, math.MaxInt64>>11) }
