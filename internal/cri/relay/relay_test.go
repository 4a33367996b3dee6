package relay_test

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net"
	"path/filepath"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	"cocoonstack.io/cocoon/internal/cri/relay"
)

// serve serves every method with handler at a socket, and returns its path.
func serve(t *testing.T, handler grpc.StreamHandler) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "s.sock")
	l, err := (&net.ListenConfig{}).Listen(t.Context(), "unix", path)
	if err != nil {
		t.Fatal(err)
	}
	s := grpc.NewServer(grpc.ForceServerCodecV2(relay.NewCodec()), grpc.UnknownServiceHandler(handler))
	done := make(chan error, 1)
	go func() { done <- s.Serve(l) }()
	t.Cleanup(func() {
		s.Stop()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
	return path
}

// relayed returns a client of a server that passes every call on to handler.
func relayed(t *testing.T, handler grpc.StreamHandler) *grpc.ClientConn {
	t.Helper()
	remote, err := relay.Dial(serve(t, handler))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { remote.Close() })
	path := serve(t, func(_ any, s grpc.ServerStream) error {
		method, _ := grpc.MethodFromServerStream(s)
		var first relay.Frame
		if err := s.RecvMsg(&first); err != nil {
			return err
		}
		if method == "/a.B/Unary" {
			return remote.PassUnary(s, method, first)
		}
		return remote.Pass(s, method, first)
	})
	conn, err := grpc.NewClient("unix:"+path, grpc.WithTransportCredentials(insecure.NewCredentials()), grpc.WithDefaultCallOptions(grpc.ForceCodecV2(relay.NewCodec())))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	return conn
}

// TestPassKeepsEveryByte: messages that are no protobuf at all arrive as they are, with metadata, header, trailer and status.
func TestPassKeepsEveryByte(t *testing.T) {
	odd := relay.Frame{0xff, 0x00, 0x7f, 0x01, 0xfe}
	conn := relayed(t, func(_ any, s grpc.ServerStream) error {
		method, _ := grpc.MethodFromServerStream(s)
		md, _ := metadata.FromIncomingContext(s.Context())
		if err := s.SetHeader(metadata.Pairs("method", method, "got", md.Get("asked")[0])); err != nil {
			return err
		}
		s.SetTrailer(metadata.Pairs("end", "yes"))
		var f relay.Frame
		if err := s.RecvMsg(&f); err != nil {
			return err
		}
		return s.SendMsg(&f)
	})
	for _, method := range []string{"/some.Service/Unknown", "/a.B/Unary"} {
		var header, trailer metadata.MD
		var reply relay.Frame
		ctx := metadata.AppendToOutgoingContext(t.Context(), "asked", "this")
		if err := conn.Invoke(ctx, method, &odd, &reply, grpc.Header(&header), grpc.Trailer(&trailer)); err != nil {
			t.Fatal(err)
		}
		if !bytes.Equal(reply, odd) {
			t.Errorf("%s: got % x, want % x", method, reply, odd)
		}
		if header.Get("method")[0] != method || header.Get("got")[0] != "this" || trailer.Get("end")[0] != "yes" {
			t.Errorf("%s: header %v, trailer %v", method, header, trailer)
		}
	}
}

func TestPassKeepsTheStatus(t *testing.T) {
	conn := relayed(t, func(any, grpc.ServerStream) error { return status.Error(codes.ResourceExhausted, "no more") })
	for _, method := range []string{"/a.B/C", "/a.B/Unary"} {
		var in, out relay.Frame
		err := conn.Invoke(t.Context(), method, &in, &out)
		if s := status.Convert(err); s.Code() != codes.ResourceExhausted || s.Message() != "no more" {
			t.Errorf("%s: got %v", method, err)
		}
	}
}

// TestPassStreamsBothWays: a call may have many messages in both directions, and one that the client gives up ends for the server.
func TestPassStreamsBothWays(t *testing.T) {
	ended := make(chan struct{})
	conn := relayed(t, func(_ any, s grpc.ServerStream) error {
		defer close(ended)
		for {
			var f relay.Frame
			if err := s.RecvMsg(&f); errors.Is(err, io.EOF) {
				return nil
			} else if err != nil {
				return err
			}
			if err := s.SendMsg(&f); err != nil {
				return err
			}
		}
	})
	ctx, cancel := context.WithCancel(t.Context())
	s, err := conn.NewStream(ctx, &grpc.StreamDesc{ServerStreams: true, ClientStreams: true}, "/a.B/C")
	if err != nil {
		t.Fatal(err)
	}
	for _, text := range []string{"one", "two", "three"} {
		f, got := relay.Frame(text), relay.Frame(nil)
		if err := s.SendMsg(&f); err != nil {
			t.Fatal(err)
		}
		if err := s.RecvMsg(&got); err != nil || string(got) != text {
			t.Fatalf("got %q, %v; want %q", got, err, text)
		}
	}
	cancel()
	<-ended
}

func TestNobodyThere(t *testing.T) {
	remote, err := relay.Dial(filepath.Join(t.TempDir(), "none.sock"))
	if err != nil {
		t.Fatal(err)
	}
	defer remote.Close()
	if _, err := remote.Invoke(t.Context(), "/a.B/C", nil); status.Code(err) != codes.Unavailable {
		t.Errorf("got %v, want Unavailable", err)
	}
}
