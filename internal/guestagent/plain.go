package guestagent

import (
	"context"

	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	guestv1 "cocoonstack.io/cocoon/api/guest/v1"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/grpcerr"
	"cocoonstack.io/cocoon/internal/guest/link"
)

// plainListener is a listener whose sessions may begin with plain messages (link.Port).
type plainListener interface {
	HandlePlain(func(message []byte) []byte)
}

// plain answers one message: a Resumed, which is the first request to a resumed guest.
func (s *Server) plain(ctx context.Context, message []byte) []byte {
	reply, err := s.resumedPlain(ctx, message)
	if err == nil {
		var b []byte
		if b, err = proto.Marshal(reply); err == nil {
			return append([]byte{link.PlainAnswer}, b...)
		}
	}
	st := status.Convert(grpcerr.ToStatus(err))
	return append([]byte{link.PlainRefusal, byte(st.Code())}, st.Message()...)
}

func (s *Server) resumedPlain(ctx context.Context, message []byte) (*guestv1.ResumedReply, error) {
	if len(message) == 0 || message[0] != link.PlainResumed {
		return nil, errdefs.Unsupportedf("this agent does not know the request that came before the session")
	}
	r := &guestv1.ResumedRequest{}
	if err := proto.Unmarshal(message[1:], r); err != nil {
		return nil, errdefs.Invalidf("the request cannot be read: %w", err)
	}
	return s.Resumed(ctx, r)
}
