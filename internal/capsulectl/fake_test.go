package capsulectl_test

import (
	"bytes"
	"context"
	"crypto/ed25519"
	"crypto/rand"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"maps"
	"math/big"
	"net"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/metadata"
	"google.golang.org/protobuf/proto"

	capsulev1 "cocoonstack.io/cocoon/api/capsule/v1"
	"cocoonstack.io/cocoon/internal/capsulectl"
	"cocoonstack.io/cocoon/internal/capsulewire"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/grpcerr"
	"cocoonstack.io/cocoon/internal/mdns"
)

const capsuleID = "3d1f6f0e-2a43-4f0c-9d0b-6a55c2a3d001"

// machine is an appliance in memory: real TLS and tokens, workloads that are ready at once.
type machine struct {
	capsulev1.UnimplementedCapsuleServiceServer
	capsulev1.UnimplementedIdentityServiceServer
	capsulev1.UnimplementedInstallServiceServer

	addr, fingerprint string

	mu        sync.Mutex
	keys      map[string]*capsulev1.AuthorizedKey
	public    map[string]ed25519.PublicKey
	seen      map[string]bool // IDs of tokens
	closed    bool            // the claim window
	workloads map[string]*capsulev1.Workload
	volumes   map[string]*capsulev1.Volume
	calls     []string // of verbs that change a workload
	copied    []string // dest, then names in the archive
	sends     []byte   // archive that CopyFrom sends
	pushed    int      // bytes of the last update or image
	infos     []*capsulev1.GetInfoResponse
	confirmed bool
	prepare   func(*capsulev1.Workload) // what the machine does of itself before it answers Get
	denied    string                    // method that is refused
	disks     []*capsulev1.InstallDisk  // of an installer of ours
	open      bool                      // the installer asks for no code
	grown     uint64
	ahead     time.Duration // of its clock
	network   networkServer
}

type (
	workloadServer struct {
		capsulev1.UnimplementedWorkloadServiceServer
		*machine
	}
	volumeServer struct {
		capsulev1.UnimplementedVolumeServiceServer
		*machine
	}
	imageServer struct {
		capsulev1.UnimplementedImageServiceServer
		*machine
	}
)

// newMachine serves a machine until the test ends.
func newMachine(t testing.TB) *machine {
	t.Helper()
	m := &machine{
		keys: map[string]*capsulev1.AuthorizedKey{}, public: map[string]ed25519.PublicKey{}, seen: map[string]bool{},
		workloads: map[string]*capsulev1.Workload{}, volumes: map[string]*capsulev1.Volume{},
	}
	public, private, err := ed25519.GenerateKey(rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{SerialNumber: big.NewInt(1), NotAfter: time.Now().Add(time.Hour)}
	der, err := x509.CreateCertificate(rand.Reader, template, template, public, private)
	if err != nil {
		t.Fatal(err)
	}
	m.fingerprint = capsulewire.Fingerprint(der)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	m.addr = l.Addr().String()
	s := grpc.NewServer(
		grpc.Creds(credentials.NewTLS(&tls.Config{MinVersion: tls.VersionTLS13, Certificates: []tls.Certificate{{Certificate: [][]byte{der}, PrivateKey: private}}})),
		grpc.UnaryInterceptor(func(ctx context.Context, req any, i *grpc.UnaryServerInfo, h grpc.UnaryHandler) (any, error) {
			if err := m.admit(ctx, i.FullMethod); err != nil {
				_ = grpc.SetTrailer(ctx, m.time())
				return nil, grpcerr.ToStatus(err)
			}
			answer, err := h(ctx, req)
			return answer, grpcerr.ToStatus(err)
		}),
		grpc.StreamInterceptor(func(srv any, s grpc.ServerStream, i *grpc.StreamServerInfo, h grpc.StreamHandler) error {
			if err := m.admit(s.Context(), i.FullMethod); err != nil {
				s.SetTrailer(m.time())
				return grpcerr.ToStatus(err)
			}
			return grpcerr.ToStatus(h(srv, s))
		}),
	)
	capsulev1.RegisterCapsuleServiceServer(s, m)
	capsulev1.RegisterIdentityServiceServer(s, m)
	capsulev1.RegisterInstallServiceServer(s, m)
	capsulev1.RegisterWorkloadServiceServer(s, &workloadServer{machine: m})
	capsulev1.RegisterVolumeServiceServer(s, &volumeServer{machine: m})
	capsulev1.RegisterImageServiceServer(s, &imageServer{machine: m})
	capsulev1.RegisterNetworkServiceServer(s, &m.network)
	done := make(chan struct{})
	go func() { defer close(done); _ = s.Serve(l) }()
	t.Cleanup(func() { s.Stop(); <-done })
	return m
}

// time is what a machine says when it refuses a token.
func (m *machine) time() metadata.MD {
	m.mu.Lock()
	defer m.mu.Unlock()
	return metadata.Pairs(capsulewire.TimeHeader, strconv.FormatInt(time.Now().Add(m.ahead).Unix(), 10))
}

func (m *machine) admit(ctx context.Context, method string) error {
	if method == "/capsule.v1.IdentityService/Adopt" || strings.HasPrefix(method, "/capsule.v1.InstallService/") {
		return nil
	}
	md, _ := metadata.FromIncomingContext(ctx)
	token, ok := strings.CutPrefix(strings.Join(md.Get("authorization"), ""), "Bearer ")
	if !ok {
		return errdefs.Unauthenticatedf("no token")
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	c, err := capsulewire.Verify(token, capsuleID, time.Now().Add(m.ahead), func(kid string) (ed25519.PublicKey, bool) { k, ok := m.public[kid]; return k, ok })
	switch {
	case err != nil:
		return err
	case m.seen[c.ID]:
		return errdefs.Unauthenticatedf("the token was used before")
	case m.denied != "" && strings.HasSuffix(method, m.denied):
		return errdefs.Deniedf("this needs the role admin")
	}
	m.seen[c.ID] = true
	return nil
}

// prepares sets what the machine does; a call that was given up may still run.
func (m *machine) prepares(fn func(*capsulev1.Workload)) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.prepare = fn
}

func (m *machine) enroll(key []byte, name string, role capsulev1.Role) *capsulev1.AuthorizedKey {
	kid := capsulewire.Kid(key)
	m.public[kid] = key
	m.keys[kid] = &capsulev1.AuthorizedKey{Kid: kid, Name: name, Role: role, AddedAtUnix: 1_790_000_000}
	return m.keys[kid]
}

func (m *machine) Adopt(_ context.Context, r *capsulev1.AdoptRequest) (*capsulev1.AdoptResponse, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	kid := capsulewire.Kid(r.GetPubkey())
	if m.keys[kid] == nil {
		if m.closed || len(m.keys) > 0 {
			return nil, errdefs.Preconditionf("adoption window closed")
		}
		m.enroll(r.GetPubkey(), r.GetName(), capsulev1.Role_ROLE_ADMIN)
	}
	return &capsulev1.AdoptResponse{CapsuleId: capsuleID, Kid: kid, TlsFingerprintSha256: m.fingerprint}, nil
}

func (m *machine) WhoAmI(context.Context, *capsulev1.WhoAmIRequest) (*capsulev1.WhoAmIResponse, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, k := range m.keys {
		return &capsulev1.WhoAmIResponse{CapsuleId: capsuleID, Kid: k.GetKid(), Name: k.GetName(), Role: k.GetRole()}, nil
	}
	return nil, errdefs.NotFoundf("no key")
}

func (m *machine) KeyAdd(_ context.Context, r *capsulev1.KeyAddRequest) (*capsulev1.KeyAddResponse, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	return &capsulev1.KeyAddResponse{Key: m.enroll(r.GetPubkey(), r.GetName(), r.GetRole())}, nil
}

func (m *machine) KeyList(context.Context, *capsulev1.KeyListRequest) (*capsulev1.KeyListResponse, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	keys := slices.SortedFunc(maps.Values(m.keys), func(a, b *capsulev1.AuthorizedKey) int { return strings.Compare(a.GetName(), b.GetName()) })
	return &capsulev1.KeyListResponse{Keys: keys}, nil
}

func (m *machine) KeyRemove(_ context.Context, r *capsulev1.KeyRemoveRequest) (*capsulev1.KeyRemoveResponse, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.keys[r.GetKid()] == nil {
		return nil, errdefs.NotFoundf("there is no key %s", r.GetKid())
	}
	delete(m.keys, r.GetKid())
	return &capsulev1.KeyRemoveResponse{}, nil
}

func (m *machine) Audit(_ context.Context, r *capsulev1.AuditRequest) (*capsulev1.AuditResponse, error) {
	all := []*capsulev1.AuditEntry{
		{TimeUnix: 1_790_000_000, Name: "ann", Method: "/capsule.v1.WorkloadService/Apply", Object: "web", Code: "OK", Peer: "192.0.2.1"},
		{TimeUnix: 1_790_000_001, Name: "bob\x1b[2J", Method: "/capsule.v1.CapsuleService/RebootNode", Code: "PermissionDenied"},
	}
	return &capsulev1.AuditResponse{Entries: all[len(all)-min(len(all), int(r.GetTail())+len(all)*b2i(r.GetTail() == 0)):]}, nil
}

func b2i(b bool) int {
	if b {
		return 1
	}
	return 0
}

func (m *machine) GetInfo(context.Context, *capsulev1.GetInfoRequest) (*capsulev1.GetInfoResponse, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if len(m.infos) == 0 {
		return &capsulev1.GetInfoResponse{
			Hostname: "lab", ShortId: "capsule-a3f2", CapsuleVersion: "v1", ActiveSlot: "slot_a", MemoryTotalBytes: 4 << 30, MemoryAvailableBytes: 1 << 30,
			LocalTimeUnix: 1000, UptimeSeconds: 3661, CpuCores: 2, CpuModel: "CPU", CapsuleId: capsuleID,
		}, nil
	}
	next := m.infos[0]
	m.infos = m.infos[1:]
	if next == nil {
		return nil, errdefs.Unavailablef("it reboots")
	}
	return next, nil
}

func (*machine) StreamLogs(r *capsulev1.CapsuleLogsRequest, s grpc.ServerStreamingServer[capsulev1.CapsuleLogChunk]) error {
	return s.Send(&capsulev1.CapsuleLogChunk{Data: fmt.Appendf(nil, "daemon %v %d\n", r.GetFollow(), r.GetTailLines())})
}

func (*machine) RebootNode(context.Context, *capsulev1.RebootNodeRequest) (*capsulev1.RebootNodeResponse, error) {
	return &capsulev1.RebootNodeResponse{Message: "reboots"}, nil
}

func (m *machine) UpdateOS(s grpc.ClientStreamingServer[capsulev1.UpdateOSRequest, capsulev1.UpdateOSResponse]) error {
	hash := sha256.New()
	first, err := s.Recv()
	if err != nil {
		return err
	}
	for {
		r, err := s.Recv()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return err
		}
		hash.Write(r.GetChunk())
		m.mu.Lock()
		m.pushed += len(r.GetChunk())
		m.mu.Unlock()
		if bytes.HasPrefix(r.GetChunk(), []byte("unsigned")) {
			return errdefs.Invalidf("the bundle has no signature")
		}
	}
	if sum := hex.EncodeToString(hash.Sum(nil)); sum != first.GetMetadata().GetSha256Hex() || m.pushed != int(first.GetMetadata().GetTotalBytes()) {
		return errdefs.Invalidf("the bundle differs from its checksum")
	}
	return s.SendAndClose(&capsulev1.UpdateOSResponse{NextSlot: "slot_b", NextVersion: "v2", RebootScheduled: true})
}

func (m *machine) GrowDisk(context.Context, *capsulev1.GrowDiskRequest) (*capsulev1.GrowDiskResponse, error) {
	return &capsulev1.GrowDiskResponse{GrownBytes: m.grown, DiskTotalBytes: 32 << 30, PermTotalBytes: 7 << 30, ThinpoolTotalBytes: 20 << 30}, nil
}

func (m *machine) UpdateConfirm(context.Context, *capsulev1.UpdateConfirmRequest) (*capsulev1.UpdateConfirmResponse, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.confirmed = true
	return &capsulev1.UpdateConfirmResponse{CommittedSlot: "slot_b", CommittedVersion: "v2"}, nil
}

func (m *machine) Status(context.Context, *capsulev1.InstallStatusRequest) (*capsulev1.InstallStatusResponse, error) {
	return &capsulev1.InstallStatusResponse{
		ShortId: "capsule-a3f2", TargetDisk: "/dev/sda", Targets: []string{"/dev/sda", "/dev/sdb"}, TargetSizeBytes: 1 << 40, Disks: m.disks, Open: m.open,
	}, nil
}

func (m *machine) Install(r *capsulev1.InstallRequest, s grpc.ServerStreamingServer[capsulev1.InstallProgress]) error {
	m.mu.Lock()
	m.calls = append(m.calls, "install "+r.GetTargetDisk()+" "+strconv.FormatBool(r.GetSeal())+" "+r.GetCode())
	if r.GetSeal() {
		m.enroll(r.GetOperatorPubkey(), r.GetOperatorName(), capsulev1.Role_ROLE_ADMIN)
	}
	m.mu.Unlock()
	for _, p := range []string{"verify", "write_slot_a", "write_slot_a"} {
		if err := s.Send(&capsulev1.InstallProgress{Phase: p, Message: "on it"}); err != nil {
			return err
		}
	}
	if r.GetTargetDisk() == "/dev/sdb" {
		return nil // it breaks off
	}
	return s.Send(&capsulev1.InstallProgress{Phase: "done", Percent: 100, Result: &capsulev1.InstallResult{CapsuleId: capsuleID, TlsFingerprintSha256: m.fingerprint}})
}

func (s *volumeServer) Create(_ context.Context, r *capsulev1.VolumeCreateRequest) (*capsulev1.Volume, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.volumes[r.GetName()] != nil {
		return nil, errdefs.Existsf("there is a volume %s", r.GetName())
	}
	s.volumes[r.GetName()] = &capsulev1.Volume{Name: r.GetName(), SizeBytes: max(r.GetSizeMib(), 32) << 20, HostPath: "/dev/x/" + r.GetName()}
	return proto.CloneOf(s.volumes[r.GetName()]), nil
}

func (s *volumeServer) Get(_ context.Context, r *capsulev1.VolumeGetRequest) (*capsulev1.Volume, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if v := s.volumes[r.GetName()]; v != nil {
		return proto.CloneOf(v), nil
	}
	return nil, errdefs.NotFoundf("there is no volume %s", r.GetName())
}

func (s *volumeServer) List(context.Context, *capsulev1.VolumeListRequest) (*capsulev1.VolumeListResponse, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	answer := &capsulev1.VolumeListResponse{}
	for _, name := range slices.Sorted(maps.Keys(s.volumes)) {
		answer.Volumes = append(answer.Volumes, proto.CloneOf(s.volumes[name]))
	}
	return answer, nil
}

func (s *volumeServer) Delete(_ context.Context, r *capsulev1.VolumeDeleteRequest) (*capsulev1.VolumeDeleteResponse, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !r.GetForce() {
		return nil, errdefs.Preconditionf("web names the volume")
	}
	delete(s.volumes, r.GetName())
	return &capsulev1.VolumeDeleteResponse{}, nil
}

func (s *volumeServer) Resize(_ context.Context, r *capsulev1.VolumeResizeRequest) (*capsulev1.Volume, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.volumes[r.GetName()].SizeBytes = r.GetNewSizeMib() << 20
	return proto.CloneOf(s.volumes[r.GetName()]), nil
}

func (*imageServer) List(context.Context, *capsulev1.ImageListRequest) (*capsulev1.ImageListResponse, error) {
	return &capsulev1.ImageListResponse{Images: []*capsulev1.Image{{Name: "app:dev", Digest: "sha256:abcdef0123456789", SizeBytes: 1 << 20}}}, nil
}

func (s *imageServer) Push(stream grpc.ClientStreamingServer[capsulev1.ImagePushRequest, capsulev1.ImagePushResponse]) error {
	n := 0
	for {
		r, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			return stream.SendAndClose(&capsulev1.ImagePushResponse{ImageRefs: []string{"app:dev"}, BytesReceived: uint64(n)})
		}
		if err != nil {
			return err
		}
		n += len(r.GetChunk())
	}
}

// operator is a person with a folder of contexts.
type operator struct {
	t     *testing.T
	env   map[string]string
	stdin string
	found []mdns.Entry
	slept []time.Duration
}

func newOperator(t *testing.T) *operator {
	t.Helper()
	return &operator{t: t, env: map[string]string{"CAPSULE_CONFIG_DIR": t.TempDir(), "USER": ""}}
}

// adopted returns an operator with the context lab.
func adopted(t *testing.T, m *machine) *operator {
	t.Helper()
	o := newOperator(t)
	o.ok("--capsule", m.addr, "adopt", "--yes", "--name", "lab")
	return o
}

func (o *operator) run(args ...string) (code int, out, errOut string) {
	o.t.Helper()
	var stdout, stderr bytes.Buffer
	code = capsulectl.Run(o.t.Context(), args, capsulectl.Options{
		Stdin: strings.NewReader(o.stdin), Stdout: &stdout, Stderr: &stderr, Getenv: func(k string) string { return o.env[k] }, Version: "v1",
		Completion: time.Minute,
		Browse:     func(context.Context, time.Duration) ([]mdns.Entry, error) { return slices.Clone(o.found), nil },
		Pause:      func(ctx context.Context, d time.Duration) error { o.slept = append(o.slept, d); return ctx.Err() },
	})
	return code, stdout.String(), stderr.String()
}

// ok runs a command that must succeed, and returns its output.
func (o *operator) ok(args ...string) string {
	o.t.Helper()
	code, out, errOut := o.run(args...)
	if code != 0 {
		o.t.Fatalf("capsulectl %s: %d\n%s%s", strings.Join(args, " "), code, out, errOut)
	}
	return out
}

// fails runs a command that must end with a code and say something.
func (o *operator) fails(code int, says string, args ...string) {
	o.t.Helper()
	got, out, errOut := o.run(args...)
	if got != code || !strings.Contains(errOut, says) {
		o.t.Errorf("capsulectl %s: %d, %q %q; want %d, %q", strings.Join(args, " "), got, out, errOut, code, says)
	}
}
