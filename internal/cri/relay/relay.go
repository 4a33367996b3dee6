// Package relay passes gRPC calls on to another server as bytes, whatever they are: methods and fields that nobody here knows
// arrive unchanged.
//
// It does not decide which calls are passed on, and reads no message.
package relay

import (
	"context"
	"errors"
	"fmt"
	"io"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/encoding"
	"google.golang.org/grpc/encoding/proto"
	"google.golang.org/grpc/mem"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
)

// MaxMessage is the maximum size of one message in bytes, the same as a kubelet's.
const MaxMessage = 16 << 20

// Frame is one message as bytes.
type Frame []byte

// Codec keeps every *Frame as it is, and gives everything else to the codec of protobuf.
type Codec struct{ other encoding.CodecV2 }

// NewCodec returns a Codec.
func NewCodec() Codec { return Codec{encoding.GetCodecV2(proto.Name)} }

// Marshal implements encoding.CodecV2.
func (c Codec) Marshal(v any) (mem.BufferSlice, error) {
	if f, ok := v.(*Frame); ok {
		return mem.BufferSlice{mem.SliceBuffer(*f)}, nil
	}
	return c.other.Marshal(v)
}

// Unmarshal implements encoding.CodecV2.
func (c Codec) Unmarshal(data mem.BufferSlice, v any) error {
	if f, ok := v.(*Frame); ok {
		*f = data.Materialize()
		return nil
	}
	return c.other.Unmarshal(data, v)
}

// Name implements encoding.CodecV2. Calls must look like those of protobuf, because they are.
func (Codec) Name() string { return proto.Name }

// Remote is a server to which calls are passed on. Safe for concurrent use.
type Remote struct{ conn *grpc.ClientConn }

// maxDelay is how long a server that has come back is not found, at most.
const maxDelay = 3 * time.Second

// Dial returns the server at the path of a unix socket. It does not connect, and the server need not be there.
func Dial(socket string) (*Remote, error) {
	delays := backoff.DefaultConfig
	delays.BaseDelay, delays.MaxDelay = 100*time.Millisecond, maxDelay
	conn, err := grpc.NewClient("unix:"+socket,
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithConnectParams(grpc.ConnectParams{Backoff: delays}),
		grpc.WithDefaultCallOptions(grpc.ForceCodecV2(NewCodec()), grpc.MaxCallRecvMsgSize(MaxMessage), grpc.MaxCallSendMsgSize(MaxMessage)))
	if err != nil {
		return nil, fmt.Errorf("connect to %s: %w", socket, err)
	}
	return &Remote{conn}, nil
}

// Close ends all calls.
func (r *Remote) Close() error { return r.conn.Close() }

// Invoke makes a call with one request and one reply. ctx is that of the call which is passed on, and its metadata goes along.
// Errors: the status of the server, or Unavailable.
func (r *Remote) Invoke(ctx context.Context, method string, request Frame) (Frame, error) {
	var reply Frame
	if err := r.conn.Invoke(forwarded(ctx), method, &request, &reply); err != nil {
		return nil, err
	}
	return reply, nil
}

// PassUnary is Pass for a call with one request and one reply.
func (r *Remote) PassUnary(from grpc.ServerStream, method string, request Frame) error {
	var reply Frame
	var header, trailer metadata.MD
	err := r.conn.Invoke(forwarded(from.Context()), method, &request, &reply, grpc.Header(&header), grpc.Trailer(&trailer))
	from.SetTrailer(trailer)
	if headerErr := from.SetHeader(header); err == nil {
		err = headerErr
	}
	if err != nil {
		return err
	}
	return from.SendMsg(&reply)
}

// Call makes a call with typed messages of protobuf.
func (r *Remote) Call(ctx context.Context, method string, request, reply any) error {
	return r.conn.Invoke(forwarded(ctx), method, request, reply)
}

// Stream makes a call with one request and any number of replies, and calls fn with each.
func (r *Remote) Stream(ctx context.Context, method string, request Frame, fn func(Frame) error) error {
	ctx, cancel := context.WithCancel(forwarded(ctx))
	defer cancel()
	s, err := r.conn.NewStream(ctx, &grpc.StreamDesc{ServerStreams: true}, method)
	if err != nil {
		return err
	}
	if err := s.SendMsg(&request); err != nil && !errors.Is(err, io.EOF) { // the status follows after EOF
		return err
	}
	if err := s.CloseSend(); err != nil {
		return err
	}
	for {
		var f Frame
		switch err := s.RecvMsg(&f); {
		case errors.Is(err, io.EOF):
			return nil
		case err != nil:
			return err
		}
		if err := fn(f); err != nil {
			return err
		}
	}
}

// Pass passes a whole call on, of which the first message has been read: messages both ways, header and trailer.
func (r *Remote) Pass(from grpc.ServerStream, method string, first Frame) error {
	ctx, cancel := context.WithCancel(forwarded(from.Context()))
	defer cancel()
	to, err := r.conn.NewStream(ctx, &grpc.StreamDesc{ServerStreams: true, ClientStreams: true}, method)
	if err != nil {
		return err
	}
	go func() { // ends with the call: either the client sends no more, or from is over
		if send(from, to, first) != nil {
			cancel()
		}
	}()
	defer func() { from.SetTrailer(to.Trailer()) }()
	header, err := to.Header()
	if err != nil {
		return err
	}
	if err := from.SetHeader(header); err != nil {
		return err
	}
	for {
		var f Frame
		switch err := to.RecvMsg(&f); {
		case errors.Is(err, io.EOF):
			return nil
		case err != nil:
			return err
		}
		if err := from.SendMsg(&f); err != nil {
			return err
		}
	}
}

// send passes on what the client sends, beginning with first.
func send(from grpc.ServerStream, to grpc.ClientStream, first Frame) error {
	f := first
	for {
		if err := to.SendMsg(&f); err != nil {
			return nil //nolint:nilerr // the call has a status, which the receiver gets
		}
		f = nil
		switch err := from.RecvMsg(&f); {
		case errors.Is(err, io.EOF):
			return to.CloseSend()
		case err != nil:
			return err
		}
	}
}

// forwarded returns the context of a call to another server, with the metadata of the call that it comes from. The library sets
// the reserved keys itself.
func forwarded(ctx context.Context) context.Context {
	in, ok := metadata.FromIncomingContext(ctx)
	if !ok {
		return ctx
	}
	out := metadata.MD{}
	for key, values := range in {
		switch key {
		case ":authority", "content-type", "user-agent", "grpc-accept-encoding":
		default:
			out[key] = values
		}
	}
	return metadata.NewOutgoingContext(ctx, out)
}

// Missing reports whether the server does not know the method that was called.
func Missing(err error) bool { return status.Code(err) == codes.Unimplemented }
