package appliance

import (
	"bytes"
	"context"
	"crypto/ed25519"
	"encoding/binary"
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/status"

	capsulev1 "cocoonstack.io/cocoon/api/capsule/v1"
	"cocoonstack.io/cocoon/internal/appliance/disk"
	"cocoonstack.io/cocoon/internal/appliance/identity"
	"cocoonstack.io/cocoon/internal/appliance/install"
	"cocoonstack.io/cocoon/internal/capsulewire"
	freeport "cocoonstack.io/cocoon/internal/testkit/port"
)

// screen is the console of a machine.
type screen struct {
	mu   sync.Mutex
	text bytes.Buffer
	on   chan struct{} // closed when something is on it
	once sync.Once
}

func (s *screen) Write(p []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if strings.Contains(string(p), "code") {
		s.once.Do(func() { close(s.on) })
	}
	return s.text.Write(p)
}

func (s *screen) said() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.text.String()
}

// fakeKernel makes the folders of a kernel with a stick of the installer and a disk of 16 GiB that holds something.
func fakeKernel(t *testing.T) (sysBlock, dev string) {
	t.Helper()
	sysBlock, dev = t.TempDir(), t.TempDir()
	for name, files := range map[string]map[string]string{
		"sda": {"size": "2048", "removable": "1", "ro": "0", "queue/logical_block_size": "512"},
		"sdb": {"size": "33554432", "removable": "0", "ro": "0", "queue/logical_block_size": "512", "device/model": "Fast", "serial": "S1"},
	} {
		for path, text := range files {
			path = filepath.Join(sysBlock, name, path)
			if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o755), os.WriteFile(path, []byte(text+"\n"), 0o600)); err != nil {
				t.Fatal(err)
			}
		}
		record := make([]byte, 512)
		if name == "sda" {
			binary.LittleEndian.PutUint32(record[0x1b8:], 0xb005ab1e)
		}
		record[510], record[511] = 0x55, 0xaa
		path := filepath.Join(dev, name)
		if err := os.WriteFile(path, record, 0o600); err != nil {
			t.Fatal(err)
		}
		if name == "sdb" {
			if err := os.Truncate(path, 16<<30); err != nil {
				t.Fatal(err)
			}
		}
	}
	return sysBlock, dev
}

// An installer answers two methods and no other one, with the certificate and the code that only its console shows, and a stranger can overwrite nothing.
func TestInstallerDoor(t *testing.T) {
	sysBlock, dev := fakeKernel(t)
	seal, err := identity.NewSeal()
	if err != nil {
		t.Fatal(err)
	}
	log := slog.New(slog.DiscardHandler)
	i := install.New(install.Config{Root: disk.Root{Signature: 0xb005ab1e, Number: 2}, SysBlock: sysBlock, Dev: dev, BootDir: t.TempDir(), WorkDir: t.TempDir(), SlotMiB: 64, Log: log}, seal)
	console := &screen{on: make(chan struct{})}
	addr, err := freeport.Free()
	if err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() {
		ended <- Installer(ctx, InstallerConfig{Listen: addr, Silent: true, Version: "v1", Console: console}, i, log)
	}()
	defer func() {
		stop()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	}()
	<-console.on
	certificate, err := seal.TLS()
	if err != nil {
		t.Fatal(err)
	}
	fingerprint := capsulewire.Fingerprint(certificate.Certificate[0])
	if said := console.said(); !strings.Contains(said, capsulewire.FingerprintRows(fingerprint)) || !strings.Contains(said, i.Code()) {
		t.Errorf("the console says\n%s", console.said())
	}
	conn, err := grpc.NewClient(addr, grpc.WithTransportCredentials(credentials.NewTLS(capsulewire.PinnedTLS(fingerprint))))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	c := capsulev1.NewInstallServiceClient(conn)
	s, err := c.Status(ctx, &capsulev1.InstallStatusRequest{}, grpc.WaitForReady(true))
	if err != nil {
		t.Fatal(err)
	}
	target := filepath.Join(dev, "sdb")
	if len(s.GetDisks()) != 1 || s.GetTargetDisk() != target || s.GetCapsuleId() != seal.ID || s.GetInstalled() || s.GetOpen() {
		t.Errorf("%v", s)
	}
	if d := s.GetDisks()[0]; d.GetModel() != "Fast" || d.GetSerial() != "S1" || !strings.Contains(d.GetHolds(), "partition table") || d.GetSizeBytes() != 16<<30 {
		t.Errorf("%v", d)
	}
	if strings.Contains(s.String(), i.Code()) {
		t.Error("the code is on the network")
	}
	for _, method := range []string{capsulev1.CapsuleService_GetInfo_FullMethodName, capsulev1.IdentityService_Adopt_FullMethodName, capsulev1.WorkloadService_Apply_FullMethodName} {
		if err := conn.Invoke(ctx, method, &capsulev1.GetInfoRequest{}, &capsulev1.GetInfoResponse{}); status.Code(err) != codes.Unimplemented {
			t.Errorf("%s: %v", method, err)
		}
	}
	before, err := os.ReadFile(filepath.Join(dev, "sda"))
	if err != nil {
		t.Fatal(err)
	}
	for name, tt := range map[string]struct {
		q    *capsulev1.InstallRequest
		want codes.Code
	}{
		"nothing said":                    {&capsulev1.InstallRequest{}, codes.FailedPrecondition},
		"as the documented program does":  {&capsulev1.InstallRequest{TargetDisk: target, OperatorPubkey: make([]byte, ed25519.PublicKeySize), OperatorName: "eve", Seal: true}, codes.FailedPrecondition},
		"a word and a wrong code":         {&capsulev1.InstallRequest{TargetDisk: target, Reinstall: true, Code: "AAAAAAAAAA"}, codes.InvalidArgument},
		"the stick":                       {&capsulev1.InstallRequest{TargetDisk: filepath.Join(dev, "sda"), Reinstall: true, Code: i.Code()}, codes.InvalidArgument},
		"a stick without a signed system": {&capsulev1.InstallRequest{TargetDisk: target, Reinstall: true, Code: i.Code()}, codes.Internal},
	} {
		stream, err := c.Install(ctx, tt.q)
		for err == nil {
			_, err = stream.Recv()
		}
		if status.Code(err) != tt.want {
			t.Errorf("%s: %v, want %s", name, err, tt.want)
		}
	}
	if now, err := os.ReadFile(filepath.Join(dev, "sda")); err != nil || !bytes.Equal(now, before) {
		t.Errorf("the stick changed, or %v", err)
	}
	head := make([]byte, 512)
	f, err := os.Open(target)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if _, err := f.Read(head); err != nil || head[510] != 0x55 {
		t.Errorf("the disk changed, or %v", err)
	}
	if !strings.Contains(console.said(), "asks for an installation") {
		t.Error("the console does not say who asked")
	}
}
