package qga

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/guest"
)

// peer is an agent that gives the answers of a test. It answers syncs by itself.
type peer struct {
	answer func(command string, args json.RawMessage) string // "" means no answer
	deaf   atomic.Int64                                      // number of syncs that stay unanswered
	heard  []string
}

func (p *peer) serve(conn net.Conn) {
	in := bufio.NewReader(conn)
	out := make(chan string, 1000) // a pipe has no buffer, a socket has one
	defer close(out)
	go func() {
		for s := range out {
			_, _ = io.WriteString(conn, s)
		}
	}()
	hungUp := false
	for {
		line, err := in.ReadBytes('\n')
		if err != nil || hungUp {
			conn.Close()
			return
		}
		delimited := bytes.HasPrefix(line, []byte{sentinel})
		var r struct {
			Execute   string          `json:"execute"`
			Arguments json.RawMessage `json:"arguments"`
		}
		if json.Unmarshal(bytes.TrimPrefix(line, []byte{sentinel}), &r) != nil {
			continue
		}
		var reply string
		switch {
		case strings.HasPrefix(r.Execute, "guest-sync"):
			if p.deaf.Add(-1) >= 0 {
				continue
			}
			var a struct {
				ID int64 `json:"id"`
			}
			_ = json.Unmarshal(r.Arguments, &a)
			reply = fmt.Sprintf("{\"return\": %d}\n", a.ID)
			if delimited {
				reply = "{\"error\": {\"class\": \"GenericError\", \"desc\": \"stray byte\"}}\n\xff" + reply
			}
		default:
			p.heard = append(p.heard, r.Execute)
			reply = p.answer(r.Execute, r.Arguments)
		}
		switch hungUp = reply == "hang up"; {
		case hungUp && r.Execute != "guest-shutdown": // otherwise at the next request
			conn.Close()
			return
		case !hungUp && reply != "":
			out <- reply
		}
	}
}

// dial connects to p through a pipe, whose deadlines work in a synctest bubble.
func (p *peer) dial(context.Context) (net.Conn, error) {
	ours, theirs := net.Pipe()
	go p.serve(theirs) // ends when ours is closed
	return ours, nil
}

func say(lines ...string) func(string, json.RawMessage) string {
	return func(string, json.RawMessage) string {
		if len(lines) == 0 {
			return ""
		}
		line := lines[0]
		if len(lines) > 1 {
			lines = lines[1:]
		}
		return line
	}
}

// TestHostileAnswers uses an agent that answers anything. After each answer, the next command finds a working link.
func TestHostileAnswers(t *testing.T) {
	const good = "{\"return\": {\"version\": \"1\"}}\n"
	for name, tt := range map[string]struct {
		answer string
		class  errdefs.Class
	}{
		"garbage":             {"\x00\xfe garbage\n", errdefs.Unavailable},
		"not an object":       {"7\n", errdefs.Unavailable},
		"neither":             {"{}\n", errdefs.Unavailable},
		"another form":        {"{\"return\": [1]}\n", errdefs.Unavailable},
		"two in a line":       {"{\"return\": {}}{\"return\": {}}\n", errdefs.Unavailable},
		"endless line":        {strings.Repeat("x", answerLimit+1) + "\n", errdefs.ResourceExhausted},
		"deep":                {strings.Repeat("[", 100000) + "\n", errdefs.Unavailable},
		"error":               {"{\"error\": {\"class\": \"GenericError\", \"desc\": \"no\\u0007\"}}\n", errdefs.FailedPrecondition},
		"unknown command":     {"{\"error\": {\"class\": \"CommandNotFound\", \"desc\": \"disabled\"}}\n", errdefs.Unsupported},
		"silence":             {"", errdefs.Unavailable},
		"a late false answer": {"\xff{\"return\": 1}\n{\"return\": 1}\n", errdefs.Unavailable},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				p := &peer{answer: say(tt.answer, good)}
				a, err := Connector{}.Connect(t.Context(), p.dial)
				if err != nil {
					t.Fatal(err)
				}
				defer a.Close()
				if _, err := a.Info(t.Context()); !errdefs.Is(err, tt.class) || strings.Contains(err.Error(), "\a") {
					t.Fatalf("%v, want %v", err, tt.class)
				}
				if err := a.(*session).call(t.Context(), "guest-info", nil, nil, answerLimit); err != nil {
					t.Errorf("the next command: %v", err)
				}
			})
		})
	}
}

func TestSilentGuestIsAskedRarely(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := &peer{}
		p.deaf.Store(1 << 30)
		ctx, cancel := context.WithTimeout(t.Context(), time.Hour)
		defer cancel()
		_, err := Connector{}.Connect(ctx, p.dial)
		if !errdefs.Is(err, errdefs.DeadlineExceeded) {
			t.Errorf("Connect: %v", err)
		}
		if asked := 1<<30 - p.deaf.Load(); asked < 60 || asked > 130 {
			t.Errorf("asked %d times in an hour", asked)
		}
	})
}

func TestLateGuestIsFound(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := &peer{}
		p.deaf.Store(5)
		a, err := Connector{}.Connect(t.Context(), p.dial)
		if err != nil {
			t.Fatal(err)
		}
		a.Close()
	})
}

func TestLostSession(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := &peer{answer: say("hang up")}
		a, err := Connector{}.Connect(t.Context(), p.dial)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := a.Info(t.Context()); !errdefs.IsUnavailable(err) {
			t.Errorf("Info: %v", err)
		}
		<-a.Done()
	})
}

// TestRebootIsNoticed uses a guest that stops answering without closing its port.
func TestRebootIsNoticed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := &peer{}
		a, err := Connector{}.Connect(t.Context(), p.dial)
		if err != nil {
			t.Fatal(err)
		}
		go func() {
			<-time.After(3 * heartbeat)
			p.deaf.Store(1 << 30)
		}()
		began := time.Now()
		if _, err := a.Wait(t.Context()); !errdefs.IsUnavailable(err) {
			t.Errorf("Wait: %v", err)
		}
		if d := time.Since(began); d < 3*heartbeat || d > 5*heartbeat {
			t.Errorf("noticed after %s", d)
		}
		<-a.Done()
	})
}

func TestPoweroff(t *testing.T) {
	for name, tt := range map[string]struct {
		answer string
		class  errdefs.Class // Internal: no error
	}{
		"accepted":     {"", errdefs.Internal},
		"off already":  {"hang up", errdefs.Internal},
		"not known":    {"{\"error\": {\"class\": \"CommandNotFound\", \"desc\": \"\"}}\n", errdefs.Unsupported},
		"not possible": {"{\"error\": {\"class\": \"GenericError\", \"desc\": \"\"}}\n", -1},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				p := &peer{answer: say(tt.answer)}
				a, err := Connector{}.Connect(t.Context(), p.dial)
				if err != nil {
					t.Fatal(err)
				}
				defer a.Close()
				err = a.Poweroff(t.Context(), time.Second)
				if tt.class == errdefs.Internal && err != nil || tt.class != errdefs.Internal && err == nil || tt.class > 0 && !errdefs.Is(err, tt.class) {
					t.Errorf("Poweroff: %v", err)
				}
			})
		})
	}
}

// TestFreeze thaws possibly frozen file systems when the answer does not come.
func TestFreeze(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := &peer{answer: func(command string, _ json.RawMessage) string {
			switch command {
			case "guest-fsfreeze-thaw":
				return "{\"return\": 2}\n"
			case "guest-exec":
				return "{\"error\": {\"class\": \"CommandNotFound\", \"desc\": \"\"}}\n"
			}
			return ""
		}}
		a, err := Connector{}.Connect(t.Context(), p.dial)
		if err != nil {
			t.Fatal(err)
		}
		defer a.Close()
		f := a.(guest.FreezeReporter)
		if _, err := f.Freeze(t.Context()); err == nil {
			t.Error("a freeze without answer succeeded")
		}
		if want := []string{"guest-fsfreeze-freeze", "guest-fsfreeze-thaw"}; fmt.Sprint(p.heard) != fmt.Sprint(want) {
			t.Errorf("heard %v", p.heard)
		}
		p.answer = say("{\"return\": 2}\n", "{\"error\": {\"class\": \"CommandNotFound\", \"desc\": \"\"}}\n")
		if n, err := f.Freeze(t.Context()); n != 2 || err != nil {
			t.Errorf("Freeze = %d, %v", n, err)
		}
		if _, err := a.Stats(t.Context()); !errdefs.IsFailedPrecondition(err) {
			t.Errorf("Stats of a frozen guest: %v", err)
		}
	})
}

func FuzzReply(f *testing.F) {
	for _, s := range []string{
		"{\"return\": {}}\n", "{\"error\": {\"class\": \"GenericError\", \"desc\": \"x\"}}\n", "\xff{\"return\": 5}\n", "\xff\xff\n\n{}",
		"{\"return\": [{\"name\": \"eth0\", \"hardware-address\": \"02:00:00:00:00:01\", \"ip-addresses\": [{\"ip-address\": \"fe80::1%eth0\", \"prefix\": 64}]}]}\n",
		"{\"return\": {\"exited\": true, \"exitcode\": -1, \"signal\": 999, \"out-data\": \"aGk=\"}}\n",
	} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		r := bufio.NewReaderSize(bytes.NewReader(data), 16)
		for {
			line, err := readLine(r, 200)
			if err != nil {
				break
			}
			if len(line) > 200 {
				t.Fatalf("a line of %d bytes", len(line))
			}
			var x execStatus
			if decode(line, &x) == nil && (x.code() < 0 || x.code() > 255) {
				t.Fatalf("code %d", x.code())
			}
			var found []reported
			if decode(line, &found) == nil {
				for _, i := range interfaces(found) {
					for _, a := range i.Addresses {
						if !a.IsValid() || a.Addr().Zone() != "" {
							t.Fatalf("address %v", a)
						}
					}
				}
			}
			answers(line, 5)
		}
		if err := skip(bufio.NewReaderSize(bytes.NewReader(data), 16)); err == nil && bytes.IndexByte(data, sentinel) < 0 {
			t.Fatal("a sentinel out of nothing")
		}
	})
}

func FuzzStats(f *testing.F) {
	f.Add([]byte("cpu  1 2 3 4 5 6 7 8 0 0\nMemTotal: 1000 kB\nMemAvailable: 300 kB\n0.50 0.10 0.01 1/84 312\n  eth0: 10 1 0 0 0 0 0 0 20 2 0 0 0 0 0 0\n"))
	f.Add([]byte("cpu 9223372036854775807 1 1 1 1 1 1 1\nMemTotal: -5\nnan 0 0 1/x 2\n"))
	f.Fuzz(func(t *testing.T, data []byte) {
		st := parseStats(data)
		if st.CPUSeconds < 0 || st.MemoryTotal < 0 || st.MemoryUsed < 0 || st.NetworkRxBytes < 0 || st.NetworkTxBytes < 0 || st.Processes < 0 || st.LoadAverage1 < 0 {
			t.Fatalf("%+v", st)
		}
		if id, up := parseBoot(data); up < 0 || len(id) != 0 && len(id) != 36 {
			t.Fatalf("%q, %d", id, up)
		}
	})
}

// TestClock reads and sets the clock of a guest. The agent sets it and fails where there is no hardware clock to write to.
func TestClock(t *testing.T) {
	now := time.Date(2030, 1, 2, 3, 4, 5, 0, time.UTC)
	const noHardware = `{"error": {"class": "GenericError", "desc": "hwclock failed"}}` + "\n"
	const off = `{"error": {"class": "CommandNotFound", "desc": "disabled"}}` + "\n"
	for name, tt := range map[string]struct {
		set, is string
		ok      bool
		class   errdefs.Class
	}{
		"set":                       {"{\"return\": {}}\n", "", true, 0},
		"set without hardware":      {noHardware, fmt.Sprintf("{\"return\": %d}\n", now.UnixNano()), true, 0},
		"not set":                   {noHardware, fmt.Sprintf("{\"return\": %d}\n", now.Add(-time.Hour).UnixNano()), false, errdefs.FailedPrecondition},
		"not set, and nobody knows": {noHardware, off, false, errdefs.FailedPrecondition},
		"switched off":              {off, off, false, errdefs.Unsupported},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				var asked string
				p := &peer{answer: func(command string, args json.RawMessage) string {
					if command == "guest-set-time" {
						asked = string(args)
						return tt.set
					}
					return tt.is
				}}
				a, err := Connector{}.Connect(t.Context(), p.dial)
				if err != nil {
					t.Fatal(err)
				}
				defer a.Close()
				err = a.(guest.ClockSetter).SetClock(t.Context(), now)
				if tt.ok && err != nil || !tt.ok && !errdefs.Is(err, tt.class) {
					t.Errorf("set: %v", err)
				}
				if want := fmt.Sprintf(`{"time":%d}`, now.UnixNano()); asked != want {
					t.Errorf("asked for %s, want %s", asked, want)
				}
			})
		})
	}
}

// A disk is found by its serial, with or without what the guest's system puts before it.
func TestMounts(t *testing.T) {
	p := &peer{answer: say(strings.ReplaceAll(`{"return": [
		{"mountpoint": "/", "disk": [{"serial": "root"}]}, {"mountpoint": "/run"},
		{"mountpoint": "/mnt", "disk": [{"serial": "0QEMU_QEMU_HARDDISK_vol-abc"}]}, {"mountpoint": "/b", "disk": [{"serial": "vol-abc"}]},
		{"mountpoint": "/other", "disk": [{"serial": "vol-abcd"}, {"serial": "xvol-abc"}]}]}`, "\n", " ") + "\n")}
	a, err := Connector{}.Connect(t.Context(), p.dial)
	if err != nil {
		t.Fatal(err)
	}
	defer a.Close()
	at, err := a.(guest.MountReporter).Mounts(t.Context(), "vol-abc")
	if err != nil || strings.Join(at, " ") != "/mnt /b" {
		t.Errorf("%v, %v", at, err)
	}
}
