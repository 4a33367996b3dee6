package appliance

import (
	"context"
	"crypto/tls"
	"fmt"
	"io"
	"log/slog"
	"net"
	"time"

	"golang.org/x/net/netutil"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/peer"

	capsulev1 "cocoonstack.io/cocoon/api/capsule/v1"
	"cocoonstack.io/cocoon/internal/appliance/install"
	"cocoonstack.io/cocoon/internal/capsulewire"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/grpcerr"
	"cocoonstack.io/cocoon/internal/mdns"
)

// InstallerConfig configures the door of a machine that was started from the installer.
type InstallerConfig struct {
	Listen  string // host:port
	Silent  bool   // the machine is not announced on its networks
	Version string
	Console io.Writer // in front of the machine
}

// maxInstallers bounds the connections of strangers, who need no token.
const maxInstallers = 32

// Installer serves the installation of the machine until ctx ends, and nothing else. It has the certificate that the installed machine will have.
func Installer(ctx context.Context, cfg InstallerConfig, i *install.Installer, log *slog.Logger) error {
	seal := i.Seal()
	certificate, err := seal.TLS()
	if err != nil {
		return err
	}
	l, err := (&net.ListenConfig{}).Listen(ctx, "tcp", cfg.Listen)
	if err != nil {
		return fmt.Errorf("serve the installer: %w", err)
	}
	d := &installDoor{cfg: cfg, installer: i, log: log}
	if !cfg.Silent {
		go (&announcer{log: log}).run(ctx, d.announcement(l.Addr()), nil)
	}
	s := grpc.NewServer(
		grpc.Creds(credentials.NewTLS(&tls.Config{MinVersion: tls.VersionTLS13, Certificates: []tls.Certificate{certificate}})),
		grpc.MaxRecvMsgSize(1<<16), grpc.ConnectionTimeout(20*time.Second), grpc.MaxConcurrentStreams(4),
		// Clients ask every 15 s whether the machine is still there. A connection without a call keeps others out.
		grpc.KeepaliveEnforcementPolicy(keepalive.EnforcementPolicy{MinTime: 5 * time.Second, PermitWithoutStream: true}),
		grpc.KeepaliveParams(keepalive.ServerParameters{Time: 20 * time.Second, Timeout: 20 * time.Second, MaxConnectionIdle: time.Minute}),
		grpc.UnaryInterceptor(func(ctx context.Context, req any, _ *grpc.UnaryServerInfo, handle grpc.UnaryHandler) (any, error) {
			resp, err := handle(ctx, req)
			return resp, grpcerr.ToStatus(err)
		}),
		grpc.StreamInterceptor(func(srv any, ss grpc.ServerStream, _ *grpc.StreamServerInfo, handle grpc.StreamHandler) error {
			return grpcerr.ToStatus(handle(srv, ss))
		}),
	)
	capsulev1.RegisterInstallServiceServer(s, d)
	d.banner(capsulewire.Fingerprint(certificate.Certificate[0]))
	log.Info("the installer serves", "addr", l.Addr().String(), "short_id", seal.ShortID)
	defer context.AfterFunc(ctx, s.Stop)()
	if err := s.Serve(netutil.LimitListener(l, maxInstallers)); ctx.Err() == nil {
		return fmt.Errorf("the installer ended by itself: %w", err)
	}
	return nil
}

// installDoor implements InstallService.
type installDoor struct {
	capsulev1.UnimplementedInstallServiceServer
	cfg       InstallerConfig
	installer *install.Installer
	log       *slog.Logger
}

// banner tells the person in front of the machine what others cannot know.
func (d *installDoor) banner(fingerprint string) {
	fmt.Fprintf(d.cfg.Console, "\n  Cocoon OS %s, installer %s\n%s", d.cfg.Version, d.installer.Seal().ShortID, shownCertificate(fingerprint))
	if d.installer.Open() {
		fmt.Fprintf(d.cfg.Console, "  whoever asks first may overwrite data\n\n")
		return
	}
	fmt.Fprintf(d.cfg.Console, "  code, to overwrite data: %s\n\n", d.installer.Code())
}

// shownCertificate is the certificate for the person in front of the machine, as capsulectl shows it to the one who asks.
func shownCertificate(fingerprint string) string {
	return fmt.Sprintf("  certificate (SHA-256):\n%s\n", capsulewire.FingerprintRows(fingerprint))
}

// announcement is what others on the network learn of the installer.
func (d *installDoor) announcement(at net.Addr) mdns.Announcement {
	seal := d.installer.Seal()
	a := mdns.Announcement{CapsuleID: seal.ID, ShortID: seal.ShortID, Version: d.cfg.Version, Mode: mdns.ModeInstaller}
	if tcp, ok := at.(*net.TCPAddr); ok {
		a.Port = uint16(tcp.Port)
	}
	disks, err := d.installer.Disks()
	if err != nil {
		d.log.Warn("there is nothing to install on", "err", err)
	}
	for _, x := range disks {
		a.Targets = append(a.Targets, x.Path)
	}
	if len(disks) == 1 {
		a.TargetDisk, a.TargetSize = disks[0].Path, uint64(disks[0].Size)
	}
	return a
}

// Status implements capsulev1.InstallServiceServer.
func (d *installDoor) Status(context.Context, *capsulev1.InstallStatusRequest) (*capsulev1.InstallStatusResponse, error) {
	disks, err := d.installer.Disks()
	if err != nil {
		return nil, err
	}
	seal := d.installer.Seal()
	resp := &capsulev1.InstallStatusResponse{ShortId: seal.ShortID, CapsuleId: seal.ID, Version: d.cfg.Version, Open: d.installer.Open(), Installed: d.installer.Installed()}
	for _, x := range disks {
		resp.Targets = append(resp.Targets, x.Path)
		resp.Disks = append(resp.Disks, &capsulev1.InstallDisk{Path: x.Path, SizeBytes: uint64(x.Size), Model: x.Model, Serial: x.Serial, Holds: x.Holds})
	}
	if len(disks) == 1 { // with several, somebody has to choose
		resp.TargetDisk, resp.TargetSizeBytes = disks[0].Path, uint64(disks[0].Size)
	}
	return resp, nil
}

// Install implements capsulev1.InstallServiceServer.
func (d *installDoor) Install(req *capsulev1.InstallRequest, stream capsulev1.InstallService_InstallServer) error {
	from := "somebody"
	if p, ok := peer.FromContext(stream.Context()); ok {
		from = p.Addr.String()
	}
	fmt.Fprintf(d.cfg.Console, "%s asks for an installation on %.64q\n", from, req.GetTargetDisk())
	// A client that goes away stops the installation by the context of the stream.
	send := func(phase string, percent uint32, message string) {
		_ = stream.Send(&capsulev1.InstallProgress{Phase: phase, Percent: percent, Message: message})
	}
	result, err := d.installer.Install(stream.Context(), install.Request{
		Target: req.GetTargetDisk(), Operator: req.GetOperatorPubkey(), Name: req.GetOperatorName(), Seal: req.GetSeal(), Reinstall: req.GetReinstall(), Code: req.GetCode(),
	}, send)
	if err != nil {
		fmt.Fprintf(d.cfg.Console, "nothing was installed: %s\n", errdefs.ClassOf(err))
		return err
	}
	fmt.Fprintf(d.cfg.Console, "installed: take the installer out, and restart the machine\n")
	answer := &capsulev1.InstallResult{Kid: result.Kid}
	if result.Kid != "" { // otherwise the machine makes its own identity
		certificate, err := result.Seal.TLS()
		if err != nil {
			return err
		}
		answer.CapsuleId, answer.ShortId, answer.TlsFingerprintSha256 = result.Seal.ID, result.Seal.ShortID, capsulewire.Fingerprint(certificate.Certificate[0])
	}
	return stream.Send(&capsulev1.InstallProgress{Phase: install.Done, Percent: 100, Message: "take the installer out, and restart the machine", Result: answer})
}
