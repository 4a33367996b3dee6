package translate

import (
	"fmt"
	"log/slog"
	"net/url"
	"strings"
	"time"
)

// Profile says how an image is fetched: one transport profile of a mapping, as plain data. A nil *Profile means the
// system's defaults.
//
// It may hold secrets (a proxy's password, private keys), so it prints itself without them in every fmt verb and log.
// encoding/json sees them.
type Profile struct {
	Timeout      time.Duration // of the whole request, body included; 0: none
	MaxRedirects *int          // nil: the default, 9
	Proxy        string        // URL with credentials; "": the proxy of the environment
	TLS          *TLS          // nil: the certificates of the system
}

// TLS says how a server is verified and how the client identifies itself.
type TLS struct {
	Certificates []Certificate // authorities and client certificates, as in the mapping
	ServerName   string        // sent and verified instead of the URL's host; "": the URL's host
	Insecure     bool          // the server's certificate is not verified
}

// Certificate is a pair of PEM texts. If Key is empty, Cert holds the key too, or is an authority's certificate.
type Certificate struct{ Cert, Key string }

// String describes p in one phrase without its secrets.
func (p *Profile) String() string {
	if p == nil {
		return "system defaults"
	}
	var parts []string
	if p.Timeout > 0 {
		parts = append(parts, "timeout "+p.Timeout.String())
	}
	if p.MaxRedirects != nil {
		parts = append(parts, fmt.Sprintf("at most %d redirects", *p.MaxRedirects))
	}
	if p.Proxy != "" {
		parts = append(parts, "proxy "+printable(p.Proxy))
	}
	if p.TLS != nil {
		parts = append(parts, p.TLS.String())
	}
	if len(parts) == 0 {
		return "system defaults"
	}
	return strings.Join(parts, ", ")
}

// String describes t without certificates and keys.
func (t *TLS) String() string {
	if t == nil {
		return "system certificates"
	}
	parts := []string{fmt.Sprintf("%d own certificates", len(t.Certificates))}
	if len(t.Certificates) == 1 {
		parts[0] = "1 own certificate"
	}
	if t.ServerName != "" {
		parts = append(parts, "server name "+t.ServerName)
	}
	if t.Insecure {
		parts = append(parts, "server NOT verified")
	}
	return strings.Join(parts, ", ")
}

// String hides the PEM texts.
func (Certificate) String() string { return "[certificate]" }

// Format and LogValue hide the secrets for every verb and every log. JSON encoding does not: its caller wants them.
func (p Profile) Format(f fmt.State, _ rune) { _, _ = f.Write([]byte(p.String())) }

// LogValue implements slog.LogValuer.
func (p *Profile) LogValue() slog.Value { return slog.StringValue(p.String()) }

// Format implements fmt.Formatter.
func (t TLS) Format(f fmt.State, _ rune) { _, _ = f.Write([]byte(t.String())) }

// LogValue implements slog.LogValuer.
func (t *TLS) LogValue() slog.Value { return slog.StringValue(t.String()) }

// Format implements fmt.Formatter.
func (c Certificate) Format(f fmt.State, _ rune) { _, _ = f.Write([]byte(c.String())) }

// LogValue implements slog.LogValuer.
func (c Certificate) LogValue() slog.Value { return slog.StringValue(c.String()) }

// printable returns a URL that is safe to show: without user, password and query, which may hold secrets.
func printable(raw string) string {
	u, err := url.Parse(raw)
	if err != nil {
		return "(unreadable URL)" // the text itself may be the secret
	}
	u.User, u.Fragment, u.RawFragment = nil, "", ""
	if u.RawQuery != "" || u.ForceQuery {
		u.RawQuery, u.ForceQuery = "...", false
	}
	return u.String()
}
