package cocoon_test

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"fmt"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"time"

	"github.com/rogpeppe/go-internal/testscript"

	"cocoonstack.io/cocoon/internal/testkit/port"
)

// writePeers writes the configurations of two nodes, here.yaml and there.yaml. The first may fetch from the second,
// which serves at the PEER of the script.
func writePeers(e *testscript.Env, config string) error {
	addr, err := port.Free()
	if err != nil {
		return err
	}
	e.Setenv("PEER", addr)
	for _, who := range []string{"nodes", "strangers"} {
		if err := writeCertificate(e.WorkDir, who); err != nil {
			return err
		}
	}
	client := func(who string) string {
		return fmt.Sprintf("peer: {ca: %[1]s/nodes.pem, cert: %[1]s/%[2]s.pem, key: %[1]s/%[2]s-key.pem}\n", e.WorkDir, who)
	}
	server := fmt.Sprintf("listen: %[2]s\ntls: {cert: %[1]s/nodes.pem, key: %[1]s/nodes-key.pem, clientCA: %[1]s/nodes.pem}\n", e.WorkDir, addr)
	for name, text := range map[string]string{
		"here.yaml": config + client("nodes"), "stranger.yaml": config + client("strangers"), "half.yaml": config + "peer: {ca: x}\n",
		"there.yaml": fmt.Sprintf("stateDir: %[1]s/there/state\nrunDir: %[1]s/there/run\ngroup: nobody-has-this-group\ndriver: fake\n"+
			"guest: {kernel: %[1]s/kernel, initramfs: %[1]s/kernel}\nnetwork: {enabled: false}\n", e.WorkDir) + server,
	} {
		if err := os.WriteFile(filepath.Join(e.WorkDir, name), []byte(text), 0o600); err != nil {
			return err
		}
	}
	return nil
}

// writeCertificate writes a self-signed certificate for this host, and its key.
func writeCertificate(dir, who string) error {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return err
	}
	tmpl := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: who}, IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)},
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour), IsCA: true, BasicConstraintsValid: true,
		KeyUsage: x509.KeyUsageDigitalSignature | x509.KeyUsageCertSign,
	}
	der, err := x509.CreateCertificate(rand.Reader, tmpl, tmpl, key.Public(), key)
	if err != nil {
		return err
	}
	keyDER, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		return err
	}
	for name, b := range map[string]*pem.Block{".pem": {Type: "CERTIFICATE", Bytes: der}, "-key.pem": {Type: "PRIVATE KEY", Bytes: keyDER}} {
		if err := os.WriteFile(filepath.Join(dir, who+name), pem.EncodeToMemory(b), 0o600); err != nil {
			return err
		}
	}
	return nil
}
