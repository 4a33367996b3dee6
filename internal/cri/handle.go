package cri

import (
	"context"
	"encoding/json"
	"errors"
	"sync"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"cocoonstack.io/cocoon/internal/cri/relay"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/grpcerr"
)

// call is a method of CRI that this door knows.
type call struct {
	method  string
	service any
	unary   grpc.MethodHandler // one reply
	stream  grpc.StreamHandler // any number of replies
}

// calls returns the methods of both services of CRI, by their full names.
func calls(runtime cri.RuntimeServiceServer, images cri.ImageServiceServer) map[string]call {
	out := map[string]call{}
	add := func(d grpc.ServiceDesc, service any) {
		for _, m := range d.Methods {
			name := "/" + d.ServiceName + "/" + m.MethodName
			out[name] = call{method: name, service: service, unary: m.Handler}
		}
		for _, m := range d.Streams {
			name := "/" + d.ServiceName + "/" + m.StreamName
			out[name] = call{method: name, service: service, stream: m.Handler}
		}
	}
	add(cri.RuntimeService_ServiceDesc, runtime)
	add(cri.ImageService_ServiceDesc, images)
	return out
}

// handle answers every call. Its request is one message, which is read before it is decided who answers.
func (s *Server) handle(_ any, from grpc.ServerStream) error {
	method, _ := grpc.MethodFromServerStream(from)
	var request relay.Frame
	if err := from.RecvMsg(&request); err != nil {
		return err
	}
	c, known := s.calls[method]
	switch {
	case !known:
		return s.remote.Pass(from, method, request)
	case c.stream != nil:
		return statusOf(s.streamed(c, from, request))
	}
	reply, err := s.answer(from, c, request)
	if err != nil {
		return statusOf(err)
	}
	if reply == nil { // containerd has answered
		return nil
	}
	return from.SendMsg(reply)
}

// statusOf returns containerd's own status as it is, with its details, and that of an error of ours.
func statusOf(err error) error {
	if theirs, ok := errors.AsType[interface {
		error
		GRPCStatus() *status.Status
	}](err); ok {
		return theirs
	}
	return grpcerr.ToStatus(err)
}

// answer returns the reply to a call with one, a *relay.Frame or a message; nil: it was passed on whole.
func (s *Server) answer(from grpc.ServerStream, c call, request relay.Frame) (any, error) {
	decode := func(m any) error { return decoded(request, m) }
	return c.unary(c.service, from.Context(), decode, func(ctx context.Context, req any, _ *grpc.UnaryServerInfo, own grpc.UnaryHandler) (any, error) {
		who, err := s.router.route(ctx, req)
		if err != nil {
			return nil, err
		}
		switch who {
		case ours:
			return own(ctx, req)
		case both:
			return s.joined(ctx, c, request, func() (any, error) { return own(ctx, req) })
		case mixed:
			return nil, errdefs.New(errdefs.Internal, "%s has one reply, and both sides answer at the same time", c.method)
		case theirs:
		}
		if mend := gaps[c.method]; mend != nil {
			return s.mended(ctx, c, request, mend)
		}
		return nil, s.remote.PassUnary(from, c.method, request) //nolint:contextcheck // a stream has its own
	})
}

func decoded(request relay.Frame, into any) error {
	m, ok := into.(proto.Message)
	if !ok {
		return errdefs.New(errdefs.Internal, "a request is a %T", into)
	}
	if err := proto.Unmarshal(request, m); err != nil {
		return status.Errorf(codes.InvalidArgument, "the request is no %s: %v", m.ProtoReflect().Descriptor().Name(), err)
	}
	return nil
}

// joined returns containerd's answer with ours behind it. A message is the sum of its parts: that of a list has all items, and fields that
// this door does not know stay.
// Errors: those of containerd. A list without its pods would tell the kubelet that they are gone.
func (s *Server) joined(ctx context.Context, c call, request relay.Frame, own func() (any, error)) (any, error) {
	reply, err := s.remote.Invoke(ctx, c.method, request)
	if err != nil {
		return nil, err
	}
	mine, err := own()
	if err != nil {
		return nil, err
	}
	return appended(reply, mine)
}

func appended(reply relay.Frame, m any) (*relay.Frame, error) {
	b, err := proto.MarshalOptions{}.MarshalAppend(reply, m.(proto.Message))
	if err != nil {
		return nil, errdefs.New(errdefs.Internal, "encode a reply: %w", err)
	}
	return (*relay.Frame)(&b), nil
}

// streamed answers a call with any number of replies.
func (s *Server) streamed(c call, from grpc.ServerStream, request relay.Frame) error {
	to := &oneRequest{ServerStream: from, ctx: from.Context(), request: request}
	to.before = func(req any) (bool, error) {
		who, err := s.router.route(from.Context(), req)
		switch {
		case err != nil:
			return false, err
		case who == ours:
			return true, nil
		case who == theirs:
			return false, s.remote.Pass(from, c.method, request)
		case who == mixed:
			s.mix(to, c, request)
			return true, nil
		}
		// An older containerd does not know the method. Then the kubelet asks for the list in one message.
		err = s.remote.Stream(from.Context(), c.method, request, func(f relay.Frame) error { return from.SendMsg(&f) })
		return err == nil, err
	}
	err := c.stream(c.service, to)
	cause := context.Cause(to.ctx)
	if to.stop != nil {
		to.stop()
	}
	switch {
	case to.answered:
		return to.err
	case from.Context().Err() == nil && cause != nil: // containerd has ended it
		return cause
	}
	return err
}

// mix sends containerd's replies between ours, until the first of both ends.
func (s *Server) mix(to *oneRequest, c call, request relay.Frame) {
	ctx, cancel := context.WithCancelCause(to.ctx)
	done := make(chan struct{})
	to.ctx, to.stop = ctx, func() {
		cancel(nil)
		<-done
	}
	go func() {
		defer close(done)
		cancel(s.remote.Stream(ctx, c.method, request, func(f relay.Frame) error { return to.SendMsg(&f) }))
	}()
}

// oneRequest is a stream whose one request has been read, and asks before what to do with it.
type oneRequest struct {
	grpc.ServerStream
	ctx      context.Context //nolint:containedctx // that of the stream
	request  relay.Frame
	before   func(req any) (own bool, err error)
	answered bool // by containerd alone, with err
	err      error
	stop     func() // ends what sends containerd's replies; nil: nothing does

	sending sync.Mutex
}

func (o *oneRequest) Context() context.Context { return o.ctx }

func (o *oneRequest) SendMsg(m any) error {
	o.sending.Lock()
	defer o.sending.Unlock()
	return o.ServerStream.SendMsg(m)
}

func (o *oneRequest) RecvMsg(m any) error {
	if err := decoded(o.request, m); err != nil {
		return err
	}
	own, err := o.before(m)
	if err != nil || !own {
		o.answered, o.err = true, err
		return errAnswered
	}
	return nil
}

var errAnswered = status.Error(codes.Aborted, "containerd has answered")

// mend changes what an older containerd answers.
type mend func(s *Server, ctx context.Context, reply relay.Frame, err error) (any, error)

// gaps are the calls that some containerd answers in a way that a kubelet stumbles over.
var gaps = map[string]mend{
	// containerd 1.6 does not know sandboxes and containers that are gone, and CRI wants stopping them to succeed.
	cri.RuntimeService_StopPodSandbox_FullMethodName: noneToStop,
	cri.RuntimeService_StopContainer_FullMethodName:  noneToStop,
	// containerd before 2.0 does not have the method, without which a kubelet from 1.38 on does not start.
	cri.RuntimeService_RuntimeConfig_FullMethodName: runtimeConfig,
}

func (s *Server) mended(ctx context.Context, c call, request relay.Frame, by mend) (any, error) {
	reply, err := s.remote.Invoke(ctx, c.method, request)
	return by(s, ctx, reply, err)
}

func noneToStop(_ *Server, _ context.Context, reply relay.Frame, err error) (any, error) {
	if status.Code(err) == codes.NotFound {
		return &relay.Frame{}, nil
	}
	return &reply, err
}

// runtimeConfig reads the cgroup driver in what an older containerd tells of its configuration.
func runtimeConfig(s *Server, ctx context.Context, reply relay.Frame, err error) (any, error) {
	if !relay.Missing(err) {
		return &reply, err
	}
	var st cri.StatusResponse
	if err := s.remote.Call(ctx, cri.RuntimeService_Status_FullMethodName, &cri.StatusRequest{Verbose: true}, &st); err != nil {
		return nil, err
	}
	var told struct {
		Containerd struct {
			DefaultRuntimeName string `json:"defaultRuntimeName"`
			Runtimes           map[string]struct {
				Options map[string]any `json:"options"`
			} `json:"runtimes"`
		} `json:"containerd"`
	}
	if err := json.Unmarshal([]byte(st.GetInfo()["config"]), &told); err != nil {
		return nil, errdefs.Preconditionf("containerd neither knows RuntimeConfig nor tells its configuration (%w); use containerd 1.6 or later", err)
	}
	driver := cri.CgroupDriver_CGROUPFS
	if systemd, _ := told.Containerd.Runtimes[told.Containerd.DefaultRuntimeName].Options["SystemdCgroup"].(bool); systemd {
		driver = cri.CgroupDriver_SYSTEMD
	}
	return &cri.RuntimeConfigResponse{Linux: &cri.LinuxRuntimeConfiguration{CgroupDriver: driver}}, nil
}
