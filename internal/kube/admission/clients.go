package admission

import (
	"crypto/x509"
	"net/http"
	"slices"

	"sigs.k8s.io/controller-runtime/pkg/webhook"
)

// Clients says which callers may use the webhooks. In the TLS handshake, a caller must present a certificate that one of the
// authorities has signed. The server must request certificates (tls.RequestClientCert).
type Clients struct {
	// Authorities returns the verify options. It is called for each request. false: no client can be verified.
	Authorities func() (x509.VerifyOptions, bool)
	Names       []string // allowed common names; nil: every certificate of the authorities
}

// Guarded returns s with webhooks that answer only these clients. Precondition: c.Authorities is set.
func (c Clients) Guarded(s webhook.Server) webhook.Server { return guarded{s, c} }

type guarded struct {
	webhook.Server
	clients Clients
}

// Register implements webhook.Server.
func (g guarded) Register(path string, h http.Handler) {
	g.Server.Register(path, g.clients.guard(h))
}

// guard refuses other clients before it reads the body. The API server shows the status and the text to its user.
func (c Clients) guard(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.TLS == nil || len(r.TLS.PeerCertificates) == 0 {
			http.Error(w, "a client certificate is required; give the API server one in the kubeConfigFile of its AdmissionConfiguration", http.StatusUnauthorized)
			return
		}
		options, ok := c.Authorities()
		if !ok {
			http.Error(w, "the client certificate cannot be verified: no certificate authority is loaded", http.StatusUnauthorized)
			return
		}
		options.Intermediates = x509.NewCertPool()
		for _, more := range r.TLS.PeerCertificates[1:] {
			options.Intermediates.AddCert(more)
		}
		client := r.TLS.PeerCertificates[0]
		if _, err := client.Verify(options); err != nil {
			http.Error(w, "the client certificate is not valid: "+err.Error(), http.StatusUnauthorized)
			return
		}
		if len(c.Names) > 0 && !slices.Contains(c.Names, client.Subject.CommonName) {
			http.Error(w, "the common name of the client certificate is not allowed", http.StatusForbidden)
			return
		}
		next.ServeHTTP(w, r)
	})
}
