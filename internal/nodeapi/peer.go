package nodeapi

import (
	"context"
	"log/slog"
	"net"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/credentials"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/unixsocket"
)

// peerCredentials logs which process connected to the unix socket. The file mode decides who may connect.
type peerCredentials struct{ log *slog.Logger }

type peerInfo struct {
	credentials.CommonAuthInfo
	unix.Ucred
}

func (peerInfo) AuthType() string { return "unix" }

func (p peerCredentials) ServerHandshake(c net.Conn) (net.Conn, credentials.AuthInfo, error) {
	cred, err := unixsocket.Peer(c)
	if err != nil {
		return nil, nil, err
	}
	p.log.Debug("client connected", "peer_pid", cred.Pid, "peer_uid", cred.Uid, "peer_gid", cred.Gid)
	return c, peerInfo{credentials.CommonAuthInfo{SecurityLevel: credentials.PrivacyAndIntegrity}, *cred}, nil
}

func (peerCredentials) ClientHandshake(context.Context, string, net.Conn) (net.Conn, credentials.AuthInfo, error) {
	return nil, nil, errdefs.Unsupportedf("these credentials are a server's")
}

func (peerCredentials) Info() credentials.ProtocolInfo {
	return credentials.ProtocolInfo{SecurityProtocol: "unix"}
}

func (p peerCredentials) Clone() credentials.TransportCredentials { return p }

func (peerCredentials) OverrideServerName(string) error { return nil }
