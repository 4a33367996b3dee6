package capsulectl_test

import (
	"archive/tar"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"
	"strconv"
	"strings"

	"google.golang.org/grpc"
	"google.golang.org/protobuf/proto"

	capsulev1 "cocoonstack.io/cocoon/api/capsule/v1"
	"cocoonstack.io/cocoon/internal/errdefs"
)

func (s *workloadServer) find(name string) (*capsulev1.Workload, error) {
	if w := s.workloads[name]; w != nil {
		return w, nil
	}
	return nil, errdefs.NotFoundf("there is no workload %s", name)
}

func (s *workloadServer) Apply(_ context.Context, r *capsulev1.WorkloadApplyRequest) (*capsulev1.WorkloadApplyResponse, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	w := proto.CloneOf(r.GetWorkload())
	answer := &capsulev1.WorkloadApplyResponse{Workload: w, Action: capsulev1.ApplyAction_APPLY_ACTION_CREATED}
	if strings.Contains(w.GetContainer().GetImage(), "conflict") {
		return nil, errdefs.Preconditionf("port 80 is that of another")
	}
	if old := s.workloads[w.GetName()]; old != nil {
		answer.Action = capsulev1.ApplyAction_APPLY_ACTION_UNCHANGED
		w.Generation = old.GetGeneration()
		if was, is := old.GetContainer().GetImage(), w.GetContainer().GetImage(); was != is {
			answer.Action = capsulev1.ApplyAction_APPLY_ACTION_CHANGED
			answer.Changes = []*capsulev1.FieldChange{{Path: "container.image", Old: strconv.Quote(was), New: strconv.Quote(is)}, {Path: "hostname", New: `"h"`}}
		}
	}
	if answer.GetAction() != capsulev1.ApplyAction_APPLY_ACTION_UNCHANGED {
		w.Generation++
	}
	if !r.GetDryRun() {
		s.workloads[w.GetName()] = w
	}
	return answer, nil
}

func (s *workloadServer) Get(_ context.Context, r *capsulev1.WorkloadGetRequest) (*capsulev1.Workload, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	w, err := s.find(r.GetName())
	if err != nil {
		return nil, err
	}
	w.Status = &capsulev1.WorkloadStatus{Phase: capsulev1.WorkloadPhase_WORKLOAD_PHASE_RUNNING, Ready: true, ObservedGeneration: w.GetGeneration(), StartedAtUnix: 1}
	if s.prepare != nil {
		s.prepare(w)
	}
	return proto.CloneOf(w), nil
}

func (s *workloadServer) List(context.Context, *capsulev1.WorkloadListRequest) (*capsulev1.WorkloadListResponse, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	answer := &capsulev1.WorkloadListResponse{}
	for _, name := range slices.Sorted(maps.Keys(s.workloads)) {
		answer.Workloads = append(answer.Workloads, proto.CloneOf(s.workloads[name]))
	}
	return answer, nil
}

func (s *workloadServer) verb(verb, name string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if _, err := s.find(name); err != nil {
		return err
	}
	s.calls = append(s.calls, verb+" "+name)
	if verb == "delete" {
		delete(s.workloads, name)
	}
	return nil
}

func (s *workloadServer) Delete(_ context.Context, r *capsulev1.WorkloadDeleteRequest) (*capsulev1.WorkloadDeleteResponse, error) {
	return &capsulev1.WorkloadDeleteResponse{}, s.verb("delete", r.GetName())
}

func (s *workloadServer) Restart(_ context.Context, r *capsulev1.WorkloadRestartRequest) (*capsulev1.WorkloadRestartResponse, error) {
	return &capsulev1.WorkloadRestartResponse{}, s.verb("restart", r.GetName())
}

func (s *workloadServer) Stop(_ context.Context, r *capsulev1.WorkloadStopRequest) (*capsulev1.WorkloadStopResponse, error) {
	return &capsulev1.WorkloadStopResponse{}, s.verb("stop", r.GetName())
}

func (s *workloadServer) Start(_ context.Context, r *capsulev1.WorkloadStartRequest) (*capsulev1.WorkloadStartResponse, error) {
	return &capsulev1.WorkloadStartResponse{}, s.verb("start", r.GetName())
}

func (*workloadServer) Logs(r *capsulev1.WorkloadLogsRequest, s grpc.ServerStreamingServer[capsulev1.WorkloadLogChunk]) error {
	for _, part := range []string{r.GetName(), " ", r.GetSource().String(), fmt.Sprintf(" %v %d\n", r.GetFollow(), r.GetTailLines())} {
		if err := s.Send(&capsulev1.WorkloadLogChunk{Data: []byte(part)}); err != nil {
			return err
		}
	}
	return nil
}

func (*workloadServer) Events(r *capsulev1.WorkloadEventsRequest, s grpc.ServerStreamingServer[capsulev1.WorkloadEvent]) error {
	return s.Send(&capsulev1.WorkloadEvent{Sequence: r.GetAfter() + 1, TimeUnix: 1_790_000_000, Workload: r.GetName(), Reason: "Started", Message: "it runs\x1b"})
}

// Exec knows the commands cat, which copies its input, echo, which also writes its variables, exit N, and size, which waits for one.
func (*workloadServer) Exec(s grpc.BidiStreamingServer[capsulev1.WorkloadExecClientMessage, capsulev1.WorkloadExecServerMessage]) error {
	first, err := s.Recv()
	if err != nil {
		return err
	}
	c := first.GetConfig()
	out := func(text string) error {
		return s.Send(&capsulev1.WorkloadExecServerMessage{Payload: &capsulev1.WorkloadExecServerMessage_Stdout{Stdout: []byte(text)}})
	}
	code := 0
	switch c.GetCommand()[0] {
	case "echo":
		err = out(strings.Join(append(c.GetCommand()[1:], c.GetEnv()["A"]), " ") + "\n")
	case "exit":
		code, _ = strconv.Atoi(c.GetCommand()[1])
		err = s.Send(&capsulev1.WorkloadExecServerMessage{Payload: &capsulev1.WorkloadExecServerMessage_Stderr{Stderr: []byte("to stderr\n")}})
	case "cat":
		for {
			m, rerr := s.Recv()
			if rerr != nil || m.GetPayload() != nil && m.GetResize() == nil && len(m.GetStdin()) == 0 {
				break
			}
			if err = out(string(m.GetStdin())); err != nil {
				return err
			}
		}
	case "size":
		m, rerr := s.Recv()
		if rerr != nil {
			return rerr
		}
		err = out(fmt.Sprintf("%d x %d\n", m.GetResize().GetCols(), m.GetResize().GetRows()))
	case "vanish":
		return nil
	}
	if err != nil {
		return err
	}
	return s.Send(&capsulev1.WorkloadExecServerMessage{Payload: &capsulev1.WorkloadExecServerMessage_Exit{Exit: &capsulev1.WorkloadExecExit{ExitCode: int32(code)}}})
}

func (s *workloadServer) CopyTo(stream grpc.ClientStreamingServer[capsulev1.WorkloadCopyToRequest, capsulev1.WorkloadCopyToResponse]) error {
	first, err := stream.Recv()
	if err != nil {
		return err
	}
	var data bytes.Buffer
	for {
		r, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return err
		}
		data.Write(r.GetChunk())
	}
	n := data.Len()
	copied := []string{first.GetMetadata().GetName() + ":" + first.GetMetadata().GetDestPath()}
	for r := tar.NewReader(&data); ; {
		h, err := r.Next()
		if err != nil {
			break
		}
		copied = append(copied, h.Name)
	}
	s.mu.Lock()
	s.copied = copied
	s.mu.Unlock()
	return stream.SendAndClose(&capsulev1.WorkloadCopyToResponse{BytesReceived: int64(n)})
}

func (s *workloadServer) CopyFrom(r *capsulev1.WorkloadCopyFromRequest, stream grpc.ServerStreamingServer[capsulev1.WorkloadCopyFromChunk]) error {
	if strings.Contains(r.GetSrcPath(), "missing") {
		return errdefs.NotFoundf("there is no %s in %s", r.GetSrcPath(), r.GetName())
	}
	s.mu.Lock()
	data := s.sends
	s.mu.Unlock()
	for part := range slices.Chunk(data, 700) {
		if err := stream.Send(&capsulev1.WorkloadCopyFromChunk{Data: part}); err != nil {
			return err
		}
	}
	if strings.Contains(r.GetSrcPath(), "broken") {
		return errdefs.New(errdefs.Internal, "tar failed")
	}
	return nil
}
