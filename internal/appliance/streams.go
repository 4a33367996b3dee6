package appliance

import (
	"bytes"
	"context"
	"errors"
	"io"
	"maps"
	"path"
	"slices"
	"strings"
	"sync"

	capsulev1 "cocoonstack.io/cocoon/api/capsule/v1"
	"cocoonstack.io/cocoon/internal/appliance/reconcile"
	"cocoonstack.io/cocoon/internal/appliance/workload"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/guest"
	"cocoonstack.io/cocoon/internal/vm"
)

// Logs implements capsulev1.WorkloadServiceServer.
func (s *workloads) Logs(req *capsulev1.WorkloadLogsRequest, stream capsulev1.WorkloadService_LogsServer) error {
	r, d, err := s.driver(stream.Context(), req.GetName())
	if err != nil {
		return err
	}
	o := reconcile.LogOptions{Follow: req.GetFollow(), Tail: int(max(req.GetTailLines(), 0)), Serial: req.GetSource() == capsulev1.LogSource_LOG_SOURCE_SERIAL}
	if o.Serial && r.Workload.GetKind() != capsulev1.WorkloadKind_WORKLOAD_KIND_MICRO_VM {
		return errdefs.Invalidf("workload %s is a container; only a MicroVM has a serial console", r.Name())
	}
	err = d.Logs(stream.Context(), r.Name(), o, func(p []byte) error { return stream.Send(&capsulev1.WorkloadLogChunk{Data: p}) })
	if o.Serial {
		err = notRunning(r, err)
	}
	return err
}

// driver returns a workload that the caller may use, with its driver.
func (s *workloads) driver(ctx context.Context, name string) (workload.Row, reconcile.Driver, error) {
	r, err := s.find(ctx, name)
	if err != nil {
		return r, nil, err
	}
	d, err := s.door.deps.Workloads.Driver(r.Workload)
	return r, d, err
}

// Exec implements capsulev1.WorkloadServiceServer.
func (s *workloads) Exec(stream capsulev1.WorkloadService_ExecServer) error {
	first, err := stream.Recv()
	if err != nil {
		return err
	}
	c := first.GetConfig()
	if c == nil || len(c.GetCommand()) == 0 {
		return errdefs.Invalidf("the first message of an exec names a workload and a command")
	}
	r, d, err := s.driver(stream.Context(), c.GetName())
	if err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(stream.Context())
	defer cancel()
	e := guest.Exec{Command: c.GetCommand(), TTY: c.GetTty()}
	for _, name := range slices.Sorted(maps.Keys(c.GetEnv())) {
		if name == "" || strings.ContainsAny(name, "=\x00") {
			return errdefs.Invalidf("%.80q is not the name of a variable", name)
		}
		e.Env = append(e.Env, vm.EnvVar{Name: name, Value: c.GetEnv()[name]})
	}
	in, input := io.Pipe()
	defer in.Close()
	resize := make(chan guest.WinSize, 1)
	go func() { // ends with this call, whose return ends Recv and the pipe
		defer cancel()
		listen(ctx, stream, input, resize)
	}()
	var mu sync.Mutex // of Send
	send := func(m *capsulev1.WorkloadExecServerMessage) error {
		mu.Lock()
		defer mu.Unlock()
		return stream.Send(m)
	}
	code, err := d.Exec(ctx, r.Name(), e, guest.Streams{
		Stdin: in, Resize: resize,
		Stdout: writer(func(p []byte) error {
			return send(&capsulev1.WorkloadExecServerMessage{Payload: &capsulev1.WorkloadExecServerMessage_Stdout{Stdout: p}})
		}),
		Stderr: writer(func(p []byte) error {
			return send(&capsulev1.WorkloadExecServerMessage{Payload: &capsulev1.WorkloadExecServerMessage_Stderr{Stderr: p}})
		}),
	})
	if err != nil {
		if _, gone := d.Get(ctx, r.Name()); gone != nil {
			return notRunning(r, gone)
		}
		return err
	}
	return send(&capsulev1.WorkloadExecServerMessage{Payload: &capsulev1.WorkloadExecServerMessage_Exit{Exit: &capsulev1.WorkloadExecExit{ExitCode: int32(code)}}})
}

// listen passes the client's messages on until the client is gone. If the client has only ended its input, it waits for the end of the
// call.
func listen(ctx context.Context, stream capsulev1.WorkloadService_ExecServer, input *io.PipeWriter, resize chan guest.WinSize) {
	for {
		m, err := stream.Recv()
		switch {
		case errors.Is(err, io.EOF):
			input.Close()
			<-ctx.Done()
			return
		case err != nil:
			input.CloseWithError(err)
			return
		}
		switch p := m.GetPayload().(type) {
		case *capsulev1.WorkloadExecClientMessage_Stdin:
			if len(p.Stdin) == 0 {
				input.Close()
				continue
			}
			_, _ = input.Write(p.Stdin) // the command may have closed its input
		case *capsulev1.WorkloadExecClientMessage_Resize:
			size := guest.WinSize{Rows: uint16(min(p.Resize.GetRows(), 65535)), Cols: uint16(min(p.Resize.GetCols(), 65535))}
			for sent := false; !sent; { // only the last size counts
				select {
				case resize <- size:
					sent = true
				default:
					select {
					case <-resize:
					default:
					}
				}
			}
		}
	}
}

// writer is a function that writes.
type writer func([]byte) error

func (w writer) Write(p []byte) (int, error) {
	if err := w(bytes.Clone(p)); err != nil { // the message may outlive the call
		return 0, err
	}
	return len(p), nil
}

// intoScript unpacks the archive of its input. COCOON_TO ends in a slash or is a folder: into it. Otherwise the only entry of the archive
// gets that path, and what was there is replaced by a rename.
const intoScript = `set -e
case "$COCOON_TO" in
*/) mkdir -p "$COCOON_TO" ;;
esac
if [ -d "$COCOON_TO" ]; then exec tar -xf - -C "$COCOON_TO"; fi
parent=$(dirname "$COCOON_TO")
mkdir -p "$parent"
room=$(mktemp -d "$parent/.cocoon-copy.XXXXXX")
trap 'rm -rf "$room"' EXIT
tar -xf - -C "$room"
name=$(ls -A "$room")
if [ "$(ls -A "$room" | wc -l)" -ne 1 ]; then echo 'the archive does not have exactly one entry' >&2; exit 1; fi
mv -f "$room/$name" "$COCOON_TO"
`

// fromScript packs COCOON_NAME of the folder COCOON_IN.
const fromScript = `cd "$COCOON_IN" && exec tar -cf - -- "$COCOON_NAME"`

// CopyTo implements capsulev1.WorkloadServiceServer.
func (s *workloads) CopyTo(stream capsulev1.WorkloadService_CopyToServer) error {
	first, err := stream.Recv()
	if err != nil {
		return err
	}
	meta := first.GetMetadata()
	if meta == nil || !path.IsAbs(meta.GetDestPath()) || strings.ContainsRune(meta.GetDestPath(), 0) {
		return errdefs.Invalidf("the first message of a copy names a workload and an absolute path in it")
	}
	in := &chunks{next: func() ([]byte, error) {
		m, err := stream.Recv()
		return m.GetChunk(), err
	}}
	err = s.shell(stream.Context(), meta.GetName(), intoScript, in, io.Discard, vm.EnvVar{Name: "COCOON_TO", Value: meta.GetDestPath()})
	if err != nil {
		return err
	}
	return stream.SendAndClose(&capsulev1.WorkloadCopyToResponse{BytesReceived: in.read})
}

// CopyFrom implements capsulev1.WorkloadServiceServer.
func (s *workloads) CopyFrom(req *capsulev1.WorkloadCopyFromRequest, stream capsulev1.WorkloadService_CopyFromServer) error {
	p := path.Clean(req.GetSrcPath())
	if !path.IsAbs(p) || p == "/" || strings.ContainsRune(p, 0) {
		return errdefs.Invalidf("%.200q is not the absolute path of a file or a folder in a workload, other than /", req.GetSrcPath())
	}
	out := writer(func(b []byte) error { return stream.Send(&capsulev1.WorkloadCopyFromChunk{Data: b}) })
	return s.shell(stream.Context(), req.GetName(), fromScript, nil, out, vm.EnvVar{Name: "COCOON_IN", Value: path.Dir(p)}, vm.EnvVar{Name: "COCOON_NAME", Value: path.Base(p)})
}

// maxStderr is the number of bytes of an error message of a script that are kept.
const maxStderr = 2 << 10

// shell runs a script in a workload. Errors: FailedPrecondition if the script fails, with what it says.
func (s *workloads) shell(ctx context.Context, name, script string, in io.Reader, out io.Writer, env ...vm.EnvVar) error {
	r, d, err := s.driver(ctx, name)
	if err != nil {
		return err
	}
	var said bytes.Buffer
	code, err := d.Exec(ctx, name, guest.Exec{Command: []string{"/bin/sh", "-c", script}, Env: env}, guest.Streams{Stdin: in, Stdout: out, Stderr: writer(func(p []byte) error {
		said.Write(p[:min(len(p), maxStderr-said.Len())])
		return nil
	})})
	switch {
	case errdefs.IsNotFound(err):
		if _, gone := d.Get(ctx, name); gone != nil {
			return notRunning(r, gone)
		}
		return errdefs.Preconditionf("workload %s has no /bin/sh, which copies need together with tar", name)
	case err != nil:
		return err
	case code != 0:
		return errdefs.Preconditionf("the copy failed in workload %s, with code %d: %s", name, code, strings.TrimSpace(strings.ToValidUTF8(said.String(), "�")))
	}
	return nil
}
