package cocoond

import (
	"crypto/tls"
	"crypto/x509"
	"os"

	"cocoonstack.io/cocoon/internal/catalog"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/nodeclient"
)

// Peer names the files, all PEM, with which this node is a client of other nodes, to fetch snapshots from them.
type Peer struct {
	CA   string `json:"ca,omitempty"`   // authority for the other nodes' certificates
	Cert string `json:"cert,omitempty"` // client certificate that they accept: signed by their clientCA
	Key  string `json:"key,omitempty"`
}

// complete rejects an incomplete configuration and invalid files.
func (p Peer) complete() error {
	if p == (Peer{}) {
		return nil
	}
	if p.CA == "" || p.Cert == "" || p.Key == "" {
		return errdefs.Invalidf("peer needs ca, cert and key together")
	}
	_, err := p.tls()
	return err
}

// tls reads the files, which may be renewed while the process runs.
func (p Peer) tls() (*tls.Config, error) {
	pair, err := tls.LoadX509KeyPair(p.Cert, p.Key)
	if err != nil {
		return nil, errdefs.New(errdefs.InvalidArgument, "load the certificate for other nodes (peer.cert, peer.key): %w", err)
	}
	pem, err := os.ReadFile(p.CA)
	if err != nil {
		return nil, errdefs.New(errdefs.InvalidArgument, "load the CA of other nodes (peer.ca): %w", err)
	}
	pool := x509.NewCertPool()
	if !pool.AppendCertsFromPEM(pem) {
		return nil, errdefs.Invalidf("peer.ca: %s holds no PEM certificate", p.CA)
	}
	return &tls.Config{MinVersion: tls.VersionTLS13, Certificates: []tls.Certificate{pair}, RootCAs: pool}, nil
}

// dial returns the function that connects to other nodes, nil when they cannot be reached.
func (p Peer) dial() func(addr string) (catalog.Peer, error) {
	if p == (Peer{}) {
		return nil
	}
	return func(addr string) (catalog.Peer, error) {
		cfg, err := p.tls()
		if err != nil {
			return nil, errdefs.As(errdefs.FailedPrecondition, err)
		}
		return nodeclient.DialTLS(addr, cfg)
	}
}
