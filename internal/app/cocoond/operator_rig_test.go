//go:build vm || cri

package cocoond_test

import (
	"archive/tar"
	"bytes"
	"crypto/ed25519"
	"errors"
	"io"
	"net"
	"strconv"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/status"

	capsulev1 "cocoonstack.io/cocoon/api/capsule/v1"
	"cocoonstack.io/cocoon/internal/capsulewire"
)

// operator is a client of an appliance with a key.
type operator struct {
	n         *node
	addr      string
	key       ed25519.PrivateKey
	workloads capsulev1.WorkloadServiceClient
	volumes   capsulev1.VolumeServiceClient
	images    capsulev1.ImageServiceClient
	identity  capsulev1.IdentityServiceClient
	capsule   capsulev1.CapsuleServiceClient
}

// newAppliance starts a daemon with the door of an appliance, and adopts it. In the settings, ADDR stands for the door's address.
func newAppliance(t *testing.T, config ...string) (*node, *operator) {
	t.Helper()
	addr := net.JoinHostPort("127.0.0.1", freePort(t))
	if len(config) == 0 {
		config = []string{"appliance: {listen: ADDR}"}
	}
	for i := range config {
		config[i] = strings.ReplaceAll(config[i], "ADDR", addr)
	}
	n := newNode(t, config...)
	ctx := t.Context()
	var fingerprint string
	n.until("the appliance answers", func() (ok bool) {
		var err error
		fingerprint, err = capsulewire.PeerFingerprint(ctx, addr)
		return err == nil
	})
	_, key, err := ed25519.GenerateKey(nil)
	if err != nil {
		t.Fatal(err)
	}
	adopter := dial(t, addr, fingerprint)
	resp, err := capsulev1.NewIdentityServiceClient(adopter).Adopt(ctx, &capsulev1.AdoptRequest{Pubkey: key.Public().(ed25519.PublicKey), Name: "test"})
	if err != nil || resp.GetTlsFingerprintSha256() != fingerprint {
		t.Fatalf("adopt: %v, %v", resp, err)
	}
	return n, operate(n, addr, key, dial(t, addr, fingerprint, grpc.WithPerRPCCredentials(capsulewire.Credentials(key, resp.GetCapsuleId()))))
}

func operate(n *node, addr string, key ed25519.PrivateKey, c *grpc.ClientConn) *operator {
	return &operator{
		n: n, addr: addr, key: key, workloads: capsulev1.NewWorkloadServiceClient(c), volumes: capsulev1.NewVolumeServiceClient(c),
		images: capsulev1.NewImageServiceClient(c), identity: capsulev1.NewIdentityServiceClient(c), capsule: capsulev1.NewCapsuleServiceClient(c),
	}
}

func dial(t *testing.T, addr, fingerprint string, opts ...grpc.DialOption) *grpc.ClientConn {
	t.Helper()
	again := grpc.ConnectParams{Backoff: backoff.Config{BaseDelay: 20 * time.Millisecond, Multiplier: 1.5, MaxDelay: 200 * time.Millisecond}, MinConnectTimeout: 20 * time.Second}
	c, err := grpc.NewClient(addr, append(opts, grpc.WithConnectParams(again), grpc.WithTransportCredentials(credentials.NewTLS(capsulewire.PinnedTLS(fingerprint))))...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return c
}

func freePort(t *testing.T) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	_, port, _ := net.SplitHostPort(l.Addr().String())
	return port
}

func microVM(name string, m *capsulev1.MicroVMSpec) *capsulev1.Workload {
	m.Image = demo
	return &capsulev1.Workload{Name: name, Kind: capsulev1.WorkloadKind_WORKLOAD_KIND_MICRO_VM, MicroVm: m}
}

func (o *operator) apply(w *capsulev1.Workload) {
	o.n.t.Helper()
	if _, err := o.workloads.Apply(o.n.t.Context(), &capsulev1.WorkloadApplyRequest{Workload: w}); err != nil {
		o.n.t.Fatalf("apply %s: %v", w.GetName(), err)
	}
}

func (o *operator) get(name string) *capsulev1.Workload {
	o.n.t.Helper()
	w, err := o.workloads.Get(o.n.t.Context(), &capsulev1.WorkloadGetRequest{Name: name})
	if err != nil {
		o.n.t.Fatal(err)
	}
	return w
}

// until waits until the status of a workload is as wanted.
func (o *operator) until(name, what string, ok func(*capsulev1.WorkloadStatus) bool) *capsulev1.WorkloadStatus {
	o.n.t.Helper()
	var st *capsulev1.WorkloadStatus
	defer func() {
		if o.n.t.Failed() {
			o.n.t.Logf("%s: %v", name, st)
		}
	}()
	o.n.until(name+" "+what, func() bool {
		st = o.get(name).GetStatus()
		return ok(st)
	})
	return st
}

func (o *operator) ready(name string) *capsulev1.WorkloadStatus {
	o.n.t.Helper()
	return o.until(name, "is ready", func(s *capsulev1.WorkloadStatus) bool { return s.GetReady() })
}

// exec runs a command with an input, and returns its output and its exit code.
func (o *operator) exec(name, input string, command ...string) (string, int) {
	o.n.t.Helper()
	s, err := o.workloads.Exec(o.n.t.Context())
	if err != nil {
		o.n.t.Fatal(err)
	}
	send := func(m *capsulev1.WorkloadExecClientMessage) {
		if err := s.Send(m); err != nil && !errors.Is(err, io.EOF) {
			o.n.t.Fatal(err)
		}
	}
	send(&capsulev1.WorkloadExecClientMessage{Payload: &capsulev1.WorkloadExecClientMessage_Config{Config: &capsulev1.WorkloadExecConfig{Name: name, Command: command, Env: map[string]string{"GREETING": "hello"}}}})
	if input != "" {
		send(&capsulev1.WorkloadExecClientMessage{Payload: &capsulev1.WorkloadExecClientMessage_Stdin{Stdin: []byte(input)}})
	}
	_ = s.CloseSend()
	var out strings.Builder
	for {
		m, err := s.Recv()
		if err != nil {
			o.n.t.Fatalf("exec %q in %s: %v", command, name, err)
		}
		switch p := m.GetPayload().(type) {
		case *capsulev1.WorkloadExecServerMessage_Stdout:
			out.Write(p.Stdout)
		case *capsulev1.WorkloadExecServerMessage_Stderr:
			out.Write(p.Stderr)
		case *capsulev1.WorkloadExecServerMessage_Exit:
			return out.String(), int(p.Exit.GetExitCode())
		}
	}
}

// logs returns the log of a workload.
func (o *operator) logs(req *capsulev1.WorkloadLogsRequest) string {
	o.n.t.Helper()
	s, err := o.workloads.Logs(o.n.t.Context(), req)
	if err != nil {
		o.n.t.Fatal(err)
	}
	var out strings.Builder
	for {
		m, err := s.Recv()
		if errors.Is(err, io.EOF) {
			return out.String()
		}
		if err != nil {
			o.n.t.Fatalf("logs: %v", err)
		}
		out.Write(m.GetData())
	}
}

// copyTo sends an archive with one file.
func (o *operator) copyTo(name, to, file, text string) {
	o.n.t.Helper()
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	err := errors.Join(w.WriteHeader(&tar.Header{Name: file, Mode: 0o644, Size: int64(len(text))}), second(io.WriteString(w, text)), w.Close())
	if err != nil {
		o.n.t.Fatal(err)
	}
	s, err := o.workloads.CopyTo(o.n.t.Context())
	if err != nil {
		o.n.t.Fatal(err)
	}
	_ = s.Send(&capsulev1.WorkloadCopyToRequest{Payload: &capsulev1.WorkloadCopyToRequest_Metadata{Metadata: &capsulev1.WorkloadCopyToMetadata{Name: name, DestPath: to}}})
	_ = s.Send(&capsulev1.WorkloadCopyToRequest{Payload: &capsulev1.WorkloadCopyToRequest_Chunk{Chunk: b.Bytes()}})
	if resp, err := s.CloseAndRecv(); err != nil || resp.GetBytesReceived() != int64(b.Len()) {
		o.n.t.Errorf("copy to %s: %v, %v", to, resp, err)
	}
}

func second[T any](_ T, err error) error { return err }

// copyFrom returns the name and the content of the first entry of an archive from a workload.
func (o *operator) copyFrom(name, path string) (string, string) {
	o.n.t.Helper()
	s, err := o.workloads.CopyFrom(o.n.t.Context(), &capsulev1.WorkloadCopyFromRequest{Name: name, SrcPath: path})
	if err != nil {
		o.n.t.Fatal(err)
	}
	var b bytes.Buffer
	for {
		m, err := s.Recv()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			o.n.t.Fatalf("copy from %s: %v", path, err)
		}
		b.Write(m.GetData())
	}
	r := tar.NewReader(&b)
	h, err := r.Next()
	if err != nil {
		o.n.t.Fatal(err)
	}
	text, err := io.ReadAll(r)
	if err != nil {
		o.n.t.Fatal(err)
	}
	return h.Name, string(text)
}

func parsePort(t *testing.T, s string) uint32 {
	t.Helper()
	n, err := strconv.ParseUint(s, 10, 16)
	if err != nil {
		t.Fatal(err)
	}
	return uint32(n)
}

func (o *operator) code(what string, err error, want codes.Code, words string) {
	o.n.t.Helper()
	if status.Code(err) != want || !strings.Contains(status.Convert(err).Message(), words) {
		o.n.t.Errorf("%s: %v, want %v with %q", what, err, want, words)
	}
}
