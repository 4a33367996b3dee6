package agent

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"io"
	"math"
	"net"
	"slices"
	"strings"
	"testing"
	"time"
	"unicode"
	"unicode/utf8"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	guestv1 "cocoonstack.io/cocoon/api/guest/v1"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/grpcerr"
	"cocoonstack.io/cocoon/internal/guest"
	"cocoonstack.io/cocoon/internal/guest/link"
	"cocoonstack.io/cocoon/internal/vm"
)

// asked are the calls that a guest answers, each with the reply of an honest guest.
var asked = []struct {
	name string
	good proto.Message
	call func(ctx context.Context, t *testing.T, s *session) error
}{
	{"Info", &guestv1.InfoReply{Version: "v1", BootId: "b", UptimeMs: 7}, func(ctx context.Context, t *testing.T, s *session) error {
		i, err := s.Info(ctx)
		line(t, i.Version)
		line(t, i.BootID)
		inside(t, i.UptimeMS, math.MaxInt64)
		return err
	}},
	{"Wait", &guestv1.WaitReply{Code: 3}, func(ctx context.Context, t *testing.T, s *session) error {
		x, err := s.Wait(ctx)
		inside(t, int64(x.Code), maxCode)
		stamp(t, x.StartedAt)
		stamp(t, x.FinishedAt)
		return err
	}},
	{"Stats", &guestv1.StatsReply{CpuSeconds: 1.5, MemoryTotal: 1 << 30, Containers: []*guestv1.ContainerStats{{Name: "web", CpuSeconds: 1}}}, askStats},
	{"Logs", &guestv1.LogEntry{Seq: 1, Data: []byte("hello\n")}, func(ctx context.Context, t *testing.T, s *session) error {
		return s.Logs(ctx, 0, func(e guest.LogEntry) error {
			stamp(t, e.Time)
			inside(t, int64(e.Run), maxCount)
			if len(e.Data) > maxMessage || e.Stream != "stdout" && e.Stream != "stderr" {
				t.Errorf("an entry of %d bytes of %q", len(e.Data), e.Stream)
			}
			return nil
		})
	}},
	{"Containers", &guestv1.ContainersReply{Containers: []*guestv1.ContainerStatus{
		{Name: "web", State: "running", Restarts: 2, Last: &guestv1.ContainerExit{Code: 1, Reason: "Error", Message: "a\nb"}},
	}}, askContainers},
	{"Exec", &guestv1.ExecOutput{Output: &guestv1.ExecOutput_ExitCode{ExitCode: 137}}, func(ctx context.Context, t *testing.T, s *session) error {
		code, err := s.Exec(ctx, guest.Exec{Command: []string{"true"}}, guest.Streams{Stdin: strings.NewReader("in"), Stdout: io.Discard})
		inside(t, int64(code), maxCode)
		return err
	}},
	{"Resumed", &guestv1.ResumedReply{LogSeq: 5, Containers: []*guestv1.LogPlace{{Run: 1, Seq: 2}}}, func(ctx context.Context, t *testing.T, s *session) error {
		r, err := s.Resumed(ctx, guest.Resumed{})
		for _, p := range r.Containers {
			inside(t, int64(p.Run), maxCount)
		}
		return err
	}},
	{"Freeze", &guestv1.FreezeReply{Count: 2}, func(ctx context.Context, t *testing.T, s *session) error {
		n, err := s.Freeze(ctx)
		inside(t, int64(n), maxCount)
		return err
	}},
}

func askStats(ctx context.Context, t *testing.T, s *session) error {
	st, err := s.Stats(ctx)
	for _, n := range []int64{st.MemoryTotal, st.MemoryUsed, st.DiskTotal, st.DiskUsed, st.NetworkRxBytes, st.NetworkTxBytes} {
		inside(t, n, maxBytes)
	}
	inside(t, int64(st.Processes), maxCount)
	for _, x := range []float64{st.CPUSeconds, st.LoadAverage1} {
		finite(t, x)
	}
	for _, c := range st.Containers {
		line(t, c.Name)
		finite(t, c.CPUSeconds)
		inside(t, c.Memory, maxBytes)
	}
	return err
}

func askContainers(ctx context.Context, t *testing.T, s *session) error {
	return s.Containers(ctx, func(all []guest.ContainerState) error {
		for _, s := range all {
			c := s.Status
			line(t, s.Name)
			if !slices.Contains([]vm.ContainerState{vm.ContainerWaiting, vm.ContainerRunning, vm.ContainerTerminated}, c.State) {
				t.Errorf("state %q", c.State)
			}
			line(t, c.Reason)
			shown(t, c.Message)
			stamp(t, c.StartedAt)
			inside(t, int64(c.Restarts), maxCount)
			if u := c.User; u != nil {
				if len(u.Groups) > vm.MaxUserGroups {
					t.Errorf("%d groups", len(u.Groups))
				}
				for _, id := range append(slices.Clone(u.Groups), u.UID, u.GID) {
					inside(t, id, math.MaxUint32)
				}
			}
			for _, x := range []*vm.ContainerExit{c.Exit, c.Last} {
				if x != nil {
					inside(t, int64(x.Code), maxCode)
					line(t, x.Reason)
					shown(t, x.Message)
					stamp(t, x.StartedAt)
					stamp(t, x.FinishedAt)
				}
			}
		}
		return nil
	})
}

func inside(t *testing.T, n, most int64) {
	t.Helper()
	if n < 0 || n > most {
		t.Errorf("%d is believed", n)
	}
}

func finite(t *testing.T, x float64) {
	t.Helper()
	if !(x >= 0 && x <= math.MaxInt64) {
		t.Errorf("%v is believed", x)
	}
}

func line(t *testing.T, s string) {
	t.Helper()
	shown(t, s)
	if len(s) > maxWord || strings.ContainsAny(s, "\n\t") {
		t.Errorf("%d bytes of %q as a word", len(s), s)
	}
}

func shown(t *testing.T, s string) {
	t.Helper()
	bad := strings.ContainsFunc(s, func(r rune) bool { return unicode.IsControl(r) && r != '\n' && r != '\t' })
	if bad || !utf8.ValidString(s) || len(s) > grpcerr.MaxMessage {
		t.Errorf("%q is shown", s)
	}
}

func stamp(t *testing.T, at time.Time) {
	t.Helper()
	if _, err := at.MarshalJSON(); err != nil {
		t.Errorf("time %v: %v", at, err)
	}
}

// verbatim sends bytes unchanged, as messages of any type that the host expects.
type verbatim struct{}

func (verbatim) Marshal(v any) ([]byte, error)      { return *v.(*[]byte), nil }
func (verbatim) Unmarshal(data []byte, v any) error { *v.(*[]byte) = data; return nil }
func (verbatim) Name() string                       { return "proto" }

// pieces cuts data at the lengths in data: two bytes of length precede each piece; the rest is the last piece.
func pieces(data []byte) (out [][]byte) {
	for len(data) > 2 {
		n := min(int(binary.BigEndian.Uint16(data)), len(data)-2)
		out, data = append(out, data[2:2+n]), data[2+n:]
	}
	return out
}

func piece(m proto.Message) []byte {
	b, err := proto.Marshal(m)
	if err != nil {
		panic(err)
	}
	return append(binary.BigEndian.AppendUint16(nil, uint16(len(b))), b...)
}

// only is a listener for one connection.
type only struct{ conns chan net.Conn }

func (o only) Accept() (net.Conn, error) {
	if c, ok := <-o.conns; ok {
		return c, nil
	}
	return nil, net.ErrClosed
}
func (only) Close() error   { return nil }
func (only) Addr() net.Addr { return &net.UnixAddr{} }

// FuzzMessages makes a guest answer each call with arbitrary messages and then an arbitrary status. The host's results
// stay in the range that it can hold and show, and no guest can make the host believe that the host's own caller has
// gone.
func FuzzMessages(f *testing.F) {
	for i, a := range asked {
		f.Add(uint8(i), piece(a.good), uint8(0), "")
		f.Add(uint8(i), append(piece(a.good), piece(a.good)...), uint8(codes.Unavailable), "gone")
	}
	f.Add(uint8(0), piece(&guestv1.InfoReply{Version: "\x1b[2J\nforged", UptimeMs: -1}), uint8(0), "")
	f.Add(uint8(2), piece(&guestv1.StatsReply{CpuSeconds: math.NaN(), LoadAverage_1: math.Inf(1), MemoryUsed: math.MinInt64}), uint8(0), "")
	f.Add(uint8(4), piece(&guestv1.ContainersReply{Containers: []*guestv1.ContainerStatus{{State: "running", Restarts: -1, Message: "\x1b]0;x"}}}), uint8(0), "")
	f.Add(uint8(4), piece(&guestv1.ContainersReply{Containers: []*guestv1.ContainerStatus{{State: "running", User: &guestv1.ContainerUser{Uid: -1, Gid: 1 << 40, Groups: make([]int64, vm.MaxUserGroups+1)}}}}), uint8(0), "")
	f.Add(uint8(4), piece(&guestv1.ContainersReply{Containers: []*guestv1.ContainerStatus{{State: "elsewhere"}}}), uint8(0), "")
	f.Add(uint8(5), piece(&guestv1.ExecOutput{Output: &guestv1.ExecOutput_ExitCode{ExitCode: 256}}), uint8(0), "")
	f.Add(uint8(3), []byte{}, uint8(codes.Canceled), "your caller has gone")
	f.Add(uint8(1), []byte{}, uint8(codes.DeadlineExceeded), "\x1b[31m")
	f.Fuzz(func(t *testing.T, which uint8, data []byte, code uint8, text string) {
		near, far := net.Pipe()
		srv := grpc.NewServer(grpc.ForceServerCodec(verbatim{}), grpc.UnknownServiceHandler(func(_ any, st grpc.ServerStream) error {
			for _, p := range pieces(data) {
				if err := st.SendMsg(&p); err != nil {
					return err
				}
			}
			return status.Error(codes.Code(code), text)
		}))
		conns := make(chan net.Conn, 1)
		conns <- far
		close(conns)
		served := make(chan struct{})
		go func() {
			defer close(served)
			_ = srv.Serve(only{conns})
		}()
		s := newSession(near)
		defer func() {
			s.Close()
			srv.Stop()
			<-served
		}()
		if _, err := s.rpc(t.Context()); err != nil { // so that Resumed also uses gRPC
			t.Fatal(err)
		}
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		a := asked[int(which)%len(asked)]
		told(t, ctx, a.name, a.call(ctx, t, s))
	})
}

// told checks the error of a call whose ctx has not ended.
func told(t *testing.T, ctx context.Context, name string, err error) {
	t.Helper()
	if ctx.Err() != nil {
		t.Fatalf("%s hangs: %v", name, err)
	}
	if err == nil {
		return
	}
	if errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("%s: the guest says that our caller has gone: %v", name, err)
	}
	if len(err.Error()) > grpcerr.MaxMessage+300 {
		t.Errorf("%s: an error of %d bytes", name, len(err.Error()))
	}
	shown(t, err.Error()[:min(len(err.Error()), grpcerr.MaxMessage)])
}

// FuzzBytes makes a guest answer with bytes of no particular protocol, and hang up. The host's call ends and the
// session is over. An unreadable answer is Unavailable and never the success of a plain call.
func FuzzBytes(f *testing.F) {
	good, err := proto.Marshal(&guestv1.ResumedReply{LogSeq: 9})
	if err != nil {
		f.Fatal(err)
	}
	plain := func(m string) []byte { // see package link
		return append(binary.BigEndian.AppendUint32([]byte("\xc0CKP"), uint32(len(m))), m...)
	}
	f.Add(uint8(6), true, plain(string(link.PlainAnswer)+string(good)))
	f.Add(uint8(6), true, plain(string(link.PlainRefusal)+"\x09not now\x1b[2J"))
	f.Add(uint8(6), true, plain(string(link.PlainRefusal)+"\x01gone"))
	f.Add(uint8(6), true, plain(string(link.PlainRefusal)+"\x00"))
	f.Add(uint8(6), true, []byte("\xc0CKP\xff\xff\xff\xff"))
	f.Add(uint8(0), false, []byte("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"))
	f.Add(uint8(0), false, []byte("\x00\x00\x00\x04\x00\x00\x00\x00\x00\x00\x00\x00\x04\x01\x00\x00\x00\x00"))                                                                     // SETTINGS and their ack
	f.Add(uint8(5), false, []byte("\x00\x00\x00\x04\x00\x00\x00\x00\x00\x00\x00\x08\x07\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00"))                                             // and GOAWAY
	f.Add(uint8(1), false, bytes.Repeat([]byte("\x00\x00\x08\x06\x00\x00\x00\x00\x00--------"), 40))                                                                               // PINGs
	f.Add(uint8(3), false, []byte("\x00\x00\x00\x04\x00\x00\x00\x00\x00\x00\xff\xff\x01\x04\x00\x00\x00\x01"+strings.Repeat("\x40\x01a\x01b", 64)))                                // headers whose end never comes
	f.Add(uint8(3), false, []byte("\x00\x00\x00\x04\x00\x00\x00\x00\x00\x00\x00\x04\x08\x00\x00\x00\x00\x00\x7f\xff\xff\xff\x00\x00\x04\x03\x00\x00\x00\x00\x01\x00\x00\x00\x08")) // window and reset
	f.Fuzz(func(t *testing.T, which uint8, plainly bool, data []byte) {
		near, far := net.Pipe()
		guestEnds := make(chan struct{})
		go func() {
			defer close(guestEnds)
			defer far.Close()
			go func() { _, _ = io.Copy(io.Discard, far) }() // until far is closed
			_, _ = far.Write(data)
		}()
		s := newSession(near)
		defer func() { s.Close(); <-guestEnds }()
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		a := asked[int(which)%len(asked)]
		if plainly {
			reply, err := s.Resumed(ctx, guest.Resumed{Entropy: []byte("secret")})
			told(t, ctx, "Resumed", err)
			if err == nil && !bytes.HasPrefix(data, []byte("\xc0CKP")) {
				t.Errorf("%q is the answer %v", data, reply)
			}
			return
		}
		err := a.call(ctx, t, s)
		told(t, ctx, a.name, err)
		select {
		case <-s.Done():
		case <-ctx.Done():
			t.Error("the guest has hung up, and the session goes on")
		}
		if err != nil && errdefs.Is(err, errdefs.Internal) && len(data) == 0 {
			t.Errorf("a guest that hangs up: %v", err)
		}
	})
}
