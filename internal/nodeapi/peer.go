package nodeapi

import (
	"context"
	"log/slog"
	"net"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/credentials"

	"cocoonstack.io/cocoon/internal/errdefs"
)

// peerCredentials logs which process connected to the unix socket. The file mode decides who may connect.
type peerCredentials struct{ log *slog.Logger }

type peerInfo struct {
	credentials.CommonAuthInfo
	unix.Ucred
}

func (peerInfo) AuthType() string { return "unix" }

func (p peerCredentials) ServerHandshake(c net.Conn) (net.Conn, credentials.AuthInfo, error) {
	cred, err := peerOf(c)
	if err != nil {
		return nil, nil, err
	}
	p.log.Debug("client connected", "peer_pid", cred.Pid, "peer_uid", cred.Uid, "peer_gid", cred.Gid)
	return c, peerInfo{credentials.CommonAuthInfo{SecurityLevel: credentials.PrivacyAndIntegrity}, *cred}, nil
}

func peerOf(c net.Conn) (*unix.Ucred, error) {
	if l, ok := c.(*limitedConn); ok {
		c = l.Conn
	}
	uc, ok := c.(*net.UnixConn)
	if !ok {
		return nil, errdefs.New(errdefs.Internal, "a connection of the node API's socket is a %T", c)
	}
	raw, err := uc.SyscallConn()
	if err != nil {
		return nil, err
	}
	var cred *unix.Ucred
	var credErr error
	if err := raw.Control(func(fd uintptr) { cred, credErr = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED) }); err != nil {
		return nil, err
	}
	return cred, credErr
}

func (peerCredentials) ClientHandshake(context.Context, string, net.Conn) (net.Conn, credentials.AuthInfo, error) {
	return nil, nil, errdefs.Unsupportedf("these credentials are a server's")
}

func (peerCredentials) Info() credentials.ProtocolInfo {
	return credentials.ProtocolInfo{SecurityProtocol: "unix"}
}

func (p peerCredentials) Clone() credentials.TransportCredentials { return p }

func (peerCredentials) OverrideServerName(string) error { return nil }
