package nodeapi

import (
	"crypto/tls"
	"crypto/x509"
	"os"

	"google.golang.org/grpc/credentials"

	"cocoonstack.io/cocoon/internal/errdefs"
)

// TLS names the PEM files for the TCP listener. Whoever holds a certificate of ClientCA has full power over the node.
type TLS struct {
	Cert     string `json:"cert,omitempty"`
	Key      string `json:"key,omitempty"`
	ClientCA string `json:"clientCA,omitempty"`
}

func (t TLS) credentials() (credentials.TransportCredentials, error) {
	if t.Cert == "" || t.Key == "" || t.ClientCA == "" {
		return nil, errdefs.Invalidf("serving the node API on TCP needs a certificate, its key and the CA of the clients (tls.cert, tls.key, tls.clientCA)")
	}
	pair, err := tls.LoadX509KeyPair(t.Cert, t.Key)
	if err != nil {
		return nil, errdefs.New(errdefs.InvalidArgument, "load the certificate of the node API: %w", err)
	}
	pem, err := os.ReadFile(t.ClientCA)
	if err != nil {
		return nil, errdefs.New(errdefs.InvalidArgument, "load the client CA of the node API: %w", err)
	}
	pool := x509.NewCertPool()
	if !pool.AppendCertsFromPEM(pem) {
		return nil, errdefs.Invalidf("%s holds no PEM certificate", t.ClientCA)
	}
	return credentials.NewTLS(&tls.Config{
		MinVersion: tls.VersionTLS13, Certificates: []tls.Certificate{pair},
		ClientAuth: tls.RequireAndVerifyClientCert, ClientCAs: pool,
	}), nil
}
