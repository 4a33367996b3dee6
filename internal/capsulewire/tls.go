package capsulewire

import (
	"context"
	"crypto/subtle"
	"crypto/tls"
	"net"
	"strings"

	"cocoonstack.io/cocoon/internal/errdefs"
)

// PinnedTLS returns the configuration of a client that accepts one certificate only, whose Fingerprint it gives. The form in
// which people write it, with colons or in upper case, is accepted too. A fingerprint of another form matches no certificate.
func PinnedTLS(fingerprint string) *tls.Config {
	want := strings.ToLower(strings.ReplaceAll(strings.TrimSpace(fingerprint), ":", ""))
	c := anyTLS()
	c.VerifyConnection = func(s tls.ConnectionState) error {
		if len(s.PeerCertificates) == 0 {
			return errdefs.Unauthenticatedf("the server has no certificate")
		}
		got := Fingerprint(s.PeerCertificates[0].Raw)
		if !IsFingerprint(want) || subtle.ConstantTimeCompare([]byte(got), []byte(want)) != 1 {
			return errdefs.Unauthenticatedf("the server's certificate is %s, not %s", got, want)
		}
		return nil
	}
	return c
}

// PeerFingerprint returns the Fingerprint of the certificate that the server at addr (host:port) shows. Nobody has checked it:
// a person compares it with what the machine itself displays.
func PeerFingerprint(ctx context.Context, addr string) (string, error) {
	d := tls.Dialer{Config: anyTLS()}
	conn, err := d.DialContext(ctx, "tcp", addr)
	if err != nil {
		return "", errdefs.New(errdefs.Unavailable, "connect to %s: %w", addr, err)
	}
	defer conn.Close()
	return peerFingerprint(conn)
}

func peerFingerprint(conn net.Conn) (string, error) {
	t, ok := conn.(*tls.Conn)
	if !ok || len(t.ConnectionState().PeerCertificates) == 0 {
		return "", errdefs.Unavailablef("the server at %s shows no certificate", conn.RemoteAddr())
	}
	return Fingerprint(t.ConnectionState().PeerCertificates[0].Raw), nil
}

// anyTLS verifies nothing. Whoever uses it compares the certificate itself.
func anyTLS() *tls.Config {
	return &tls.Config{
		MinVersion: tls.VersionTLS13, InsecureSkipVerify: true, NextProtos: []string{"h2"}, //nolint:gosec // the certificate is self-signed, and pinned
	}
}
