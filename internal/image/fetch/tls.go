package fetch

import (
	"bytes"
	"crypto"
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"fmt"
	"slices"
	"time"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/image/translate"
)

// tlsConfig converts t for the standard library. Authorities are added to those of the system. It skips what it cannot
// read in a PEM text and logs only its place.
func (c *Client) tlsConfig(t *translate.TLS) (*tls.Config, error) {
	cfg := &tls.Config{MinVersion: tls.VersionTLS12}
	if t == nil {
		return cfg, nil
	}
	cfg.ServerName, cfg.InsecureSkipVerify = t.ServerName, t.Insecure
	for i, pair := range t.Certificates {
		certs, keys := c.readPEM(pair, i)
		for _, cert := range certs {
			if !cert.IsCA {
				continue
			}
			if cfg.RootCAs == nil {
				cfg.RootCAs = systemPool()
			}
			cfg.RootCAs.AddCert(cert)
		}
		if len(keys) == 0 {
			continue
		}
		chains := chainsOf(certs, keys[0])
		if len(chains) == 0 && !onlyAuthorities(certs) {
			return nil, errdefs.Invalidf("the key of certificate %d of the transport matches none of its certificates", i+1)
		}
		for _, chain := range chains {
			if chain.Leaf.NotAfter.Before(time.Now()) {
				c.opts.Log.Warn("client certificate has expired", "op", fmt.Sprintf("read certificate %d", i+1), "err", "it was valid until "+chain.Leaf.NotAfter.Format(time.RFC3339))
			}
		}
		cfg.Certificates = append(cfg.Certificates, chains...)
	}
	return cfg, nil
}

func systemPool() *x509.CertPool {
	pool, err := x509.SystemCertPool()
	if err != nil { // the host has no authorities: use only ours
		return x509.NewCertPool()
	}
	return pool
}

func onlyAuthorities(certs []*x509.Certificate) bool {
	return !slices.ContainsFunc(certs, func(c *x509.Certificate) bool { return !c.IsCA })
}

// readPEM reads the certificates of a pair, and its private keys: the keys from Key come first.
func (c *Client) readPEM(pair translate.Certificate, index int) (certs []*x509.Certificate, keys []crypto.Signer) {
	skip := func(field string, block int, why string) {
		c.opts.Log.Warn("part of a certificate ignored",
			"op", fmt.Sprintf("read block %d in %s of certificate %d", block, field, index+1), "err", why)
	}
	for _, f := range []struct{ name, text string }{{"key", pair.Key}, {"cert", pair.Cert}} {
		rest, n := []byte(f.text), 0
		for {
			var block *pem.Block
			if block, rest = pem.Decode(rest); block == nil {
				break
			}
			n++
			switch block.Type {
			case "CERTIFICATE":
				cert, err := x509.ParseCertificate(block.Bytes)
				if err != nil {
					skip(f.name, n, "the certificate cannot be read")
					continue
				}
				if f.name == "cert" {
					certs = append(certs, cert)
				}
			case "PRIVATE KEY", "RSA PRIVATE KEY", "EC PRIVATE KEY":
				key, ok := parseKey(block)
				if !ok {
					skip(f.name, n, "the private key cannot be read")
					continue
				}
				keys = append(keys, key)
			case "EC PARAMETERS": // openssl writes them before a key that repeats them
			case "ENCRYPTED PRIVATE KEY":
				skip(f.name, n, "the private key is encrypted")
			default:
				skip(f.name, n, "it is neither a certificate nor a private key")
			}
		}
		if len(bytes.TrimSpace(rest)) > 0 {
			skip(f.name, n+1, "it is not PEM")
		}
	}
	return certs, keys
}

// parseKey reads PKCS #1, PKCS #8 and SEC 1 keys, whatever the type of the block.
func parseKey(block *pem.Block) (crypto.Signer, bool) {
	if x509.IsEncryptedPEMBlock(block) { //nolint:staticcheck // recognised to be refused, not used
		return nil, false
	}
	if key, err := x509.ParsePKCS8PrivateKey(block.Bytes); err == nil {
		signer, ok := key.(crypto.Signer)
		return signer, ok
	}
	if key, err := x509.ParsePKCS1PrivateKey(block.Bytes); err == nil {
		return key, true
	}
	if key, err := x509.ParseECPrivateKey(block.Bytes); err == nil {
		return key, true
	}
	return nil, false
}

// chainsOf returns a client certificate for each of certs that matches key, with the chain from it to an authority.
// Servers that know only the authority can then verify it.
func chainsOf(certs []*x509.Certificate, key crypto.Signer) []tls.Certificate {
	public, ok := key.Public().(interface{ Equal(crypto.PublicKey) bool })
	if !ok {
		return nil
	}
	var chains []tls.Certificate
	for _, leaf := range certs {
		if !public.Equal(leaf.PublicKey) {
			continue
		}
		chain := tls.Certificate{PrivateKey: key, Leaf: leaf, Certificate: [][]byte{leaf.Raw}}
		for cert := leaf; len(chain.Certificate) <= len(certs); {
			if cert = issuer(cert, certs); cert == nil {
				break
			}
			chain.Certificate = append(chain.Certificate, cert.Raw)
		}
		chains = append(chains, chain)
	}
	return chains
}

// issuer finds the signer of cert. A self-signed authority is not part of a chain: the server must know it anyway.
func issuer(cert *x509.Certificate, among []*x509.Certificate) *x509.Certificate {
	for _, c := range among {
		if c.IsCA && !bytes.Equal(c.RawSubject, c.RawIssuer) && bytes.Equal(cert.RawIssuer, c.RawSubject) && cert.CheckSignatureFrom(c) == nil {
			return c
		}
	}
	return nil
}
