package capsulewire

import (
	"bytes"
	"context"
	"crypto/ed25519"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"encoding/base64"
	"encoding/json"
	"maps"
	"math/big"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/golang-jwt/jwt/v5"

	"cocoonstack.io/cocoon/internal/errdefs"
)

const machine = "3d1f6f0e-2a43-4f0c-9d0b-6a55c2a3d001"

var now = time.Unix(1_790_000_000, 0)

func newKey(t testing.TB) (ed25519.PrivateKey, func(string) (ed25519.PublicKey, bool)) {
	t.Helper()
	public, private, err := ed25519.GenerateKey(rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	kid := Kid(public)
	return private, func(asked string) (ed25519.PublicKey, bool) { return public, asked == kid }
}

// The names of keys and certificates are those of the documented system.
func TestNames(t *testing.T) {
	if got := Kid(make(ed25519.PublicKey, 32)); got != "Zmh6rfhivXdsj8GLjp-OIAiXFIVu4jOzkCpZHQ1fKSU" {
		t.Errorf("kid %q", got)
	}
	if got := Fingerprint([]byte("abc")); got != "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad" || !IsFingerprint(got) {
		t.Errorf("fingerprint %q", got)
	}
	if got := FingerprintRows("000102030405060708090a"); got != "    00:01:02:03:04:05:06:07\n    08:09:0a" {
		t.Errorf("fingerprint in rows %q", got)
	}
	if IsFingerprint("BA") || IsFingerprint(strings.Repeat("A", 64)) {
		t.Error("another form is accepted")
	}
}

func TestTokenIsVerified(t *testing.T) {
	private, keys := newKey(t)
	token, err := Mint(private, machine, now)
	if err != nil {
		t.Fatal(err)
	}
	for _, at := range []time.Duration{-Leeway, 0, Life, Life + Leeway - time.Second} {
		c, err := Verify(token, machine, now.Add(at), keys)
		if err != nil {
			t.Errorf("after %v: %v", at, err)
		} else if c.Kid != Kid(private.Public().(ed25519.PublicKey)) || c.ID == "" || !c.Expires.Equal(now.Add(Life+Leeway)) {
			t.Errorf("after %v: %+v", at, c)
		}
	}
	other, err := Mint(private, machine, now)
	if err != nil || other == token {
		t.Errorf("two tokens are the same, or %v", err)
	}
	if _, err := Mint(private[:7], machine, now); err == nil {
		t.Error("a short key signs")
	}
}

// header and claims of a token are what the documented clients and servers write.
func TestTokenForm(t *testing.T) {
	private, _ := newKey(t)
	token, err := Mint(private, machine, now)
	if err != nil {
		t.Fatal(err)
	}
	kid := Kid(private.Public().(ed25519.PublicKey))
	var header, claims map[string]any
	for i, to := range []*map[string]any{&header, &claims} {
		b, err := base64.RawURLEncoding.DecodeString(strings.Split(token, ".")[i])
		if err != nil {
			t.Fatal(err)
		}
		if err := json.Unmarshal(b, to); err != nil {
			t.Fatal(err)
		}
	}
	if !maps.Equal(header, map[string]any{"alg": "EdDSA", "typ": "JWT", "kid": kid}) {
		t.Errorf("header %v", header)
	}
	if claims["jti"] == "" {
		t.Error("no jti")
	}
	delete(claims, "jti")
	if !maps.Equal(claims, map[string]any{"sub": kid, "aud": machine, "iat": float64(now.Unix()), "exp": float64(now.Unix() + 60)}) {
		t.Errorf("claims %v", claims)
	}
}

func TestTokenIsRefused(t *testing.T) {
	private, keys := newKey(t)
	stranger, _ := newKey(t)
	kid := Kid(private.Public().(ed25519.PublicKey))
	good := jwt.MapClaims{"sub": kid, "aud": machine, "iat": now.Unix(), "exp": now.Unix() + 60, "jti": "x"}
	forge := func(method jwt.SigningMethod, key any, header map[string]any, change jwt.MapClaims) string {
		claims := maps.Clone(good)
		for k, v := range change {
			if v == nil {
				delete(claims, k)
			} else {
				claims[k] = v
			}
		}
		tok := jwt.NewWithClaims(method, claims)
		tok.Header["kid"] = kid
		maps.Copy(tok.Header, header)
		s, err := tok.SignedString(key)
		if err != nil {
			t.Fatal(err)
		}
		return s
	}
	ed := func(change jwt.MapClaims) string { return forge(jwt.SigningMethodEdDSA, private, nil, change) }
	if _, err := Verify(ed(nil), machine, now, keys); err != nil {
		t.Fatalf("the token that the others differ from: %v", err)
	}
	for name, token := range map[string]string{
		"empty":                     "",
		"no token":                  "a.b.c",
		"long":                      strings.Repeat("a", maxToken+1),
		"expired":                   ed(jwt.MapClaims{"iat": now.Unix() - 400, "exp": now.Unix() - 301}),
		"of the future":             ed(jwt.MapClaims{"iat": now.Unix() + 301, "exp": now.Unix() + 361}),
		"long life":                 ed(jwt.MapClaims{"exp": now.Unix() + 601}),
		"long life before":          ed(jwt.MapClaims{"iat": now.Unix() - 3600}),
		"no iat":                    ed(jwt.MapClaims{"iat": nil}),
		"no exp":                    ed(jwt.MapClaims{"exp": nil}),
		"huge exp":                  ed(jwt.MapClaims{"exp": 1e300}),
		"huge iat":                  ed(jwt.MapClaims{"iat": 9.2e18}),
		"no jti":                    ed(jwt.MapClaims{"jti": nil}),
		"long jti":                  ed(jwt.MapClaims{"jti": strings.Repeat("x", maxID+1)}),
		"other machine":             ed(jwt.MapClaims{"aud": "other"}),
		"two machines":              ed(jwt.MapClaims{"aud": []string{machine, "other"}}),
		"no machine":                ed(jwt.MapClaims{"aud": nil}),
		"other subject":             ed(jwt.MapClaims{"sub": "other"}),
		"stranger's":                forge(jwt.SigningMethodEdDSA, stranger, nil, nil),
		"unknown kid":               forge(jwt.SigningMethodEdDSA, private, map[string]any{"kid": "other"}, nil),
		"kid is no string":          forge(jwt.SigningMethodEdDSA, private, map[string]any{"kid": 1}, nil),
		"critical":                  forge(jwt.SigningMethodEdDSA, private, map[string]any{"crit": []string{"x"}}, nil),
		"other type":                forge(jwt.SigningMethodEdDSA, private, map[string]any{"typ": "at+jwt"}, nil),
		"alg none":                  forge(jwt.SigningMethodNone, jwt.UnsafeAllowNoneSignatureType, nil, nil),
		"public key as HMAC secret": forge(jwt.SigningMethodHS256, []byte(private.Public().(ed25519.PublicKey)), nil, nil),
	} {
		if _, err := Verify(token, machine, now, keys); !errdefs.Is(err, errdefs.Unauthenticated) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if _, err := Verify(ed(jwt.MapClaims{"aud": ""}), "", now, keys); err == nil {
		t.Error("a server without an ID accepts tokens")
	}
}

// Whatever a signed token says, one that is accepted is of that key, for this machine and soon over; one that is not signed is refused.
func FuzzVerify(f *testing.F) {
	private := ed25519.NewKeyFromSeed(bytes.Repeat([]byte{7}, 32))
	public := private.Public().(ed25519.PublicKey)
	kid := Kid(public)
	keys := func(asked string) (ed25519.PublicKey, bool) { return public, asked == kid }
	sign := func(header, claims []byte) string {
		signed := base64.RawURLEncoding.EncodeToString(header) + "." + base64.RawURLEncoding.EncodeToString(claims)
		return signed + "." + base64.RawURLEncoding.EncodeToString(ed25519.Sign(private, []byte(signed)))
	}
	header := []byte(`{"alg":"EdDSA","typ":"JWT","kid":"` + kid + `"}`)
	claims := []byte(`{"sub":"` + kid + `","aud":"` + machine + `","iat":1790000000,"exp":1790000060,"jti":"x"}`)
	token := sign(header, claims)
	f.Add(header, claims, []byte(token))
	f.Add(header, []byte(`{"sub":"`+kid+`","aud":"`+machine+`","iat":-9.3e18,"exp":9.3e18,"jti":"x"}`), []byte("..."))
	f.Fuzz(func(t *testing.T, header, claims, raw []byte) {
		if _, err := Verify(string(raw), machine, now, keys); err == nil && string(raw) != token {
			t.Errorf("a token that nobody signed is accepted: %q", raw)
		}
		c, err := Verify(sign(header, claims), machine, now, keys)
		switch {
		case err != nil && !errdefs.Is(err, errdefs.Unauthenticated):
			t.Errorf("class %v: %v", errdefs.ClassOf(err), err)
		case err == nil && (c.Kid != kid || c.ID == "" || !c.Expires.After(now) || c.Expires.After(now.Add(maxLife+2*Leeway))):
			t.Errorf("%+v is accepted at %v", c, now)
		}
	})
}

func TestPinnedTLS(t *testing.T) {
	addr, want := serveTLS(t)
	got, err := PeerFingerprint(t.Context(), addr)
	if err != nil || got != want {
		t.Fatalf("fingerprint %q, %v; want %q", got, err, want)
	}
	colons := strings.ToUpper(want[:2] + ":" + want[2:])
	for pin, ok := range map[string]bool{want: true, colons: true, "": false, strings.Repeat("0", 64): false, want[:62]: false} {
		d := tls.Dialer{Config: PinnedTLS(pin)}
		conn, err := d.DialContext(t.Context(), "tcp", addr)
		if (err == nil) != ok {
			t.Errorf("pin %q: %v", pin, err)
		}
		if err == nil {
			conn.Close()
		} else if !errdefs.Is(err, errdefs.Unauthenticated) {
			t.Errorf("pin %q: class %v of %v", pin, errdefs.ClassOf(err), err)
		}
	}
}

func TestNobodyAnswers(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	l.Close()
	if _, err := PeerFingerprint(t.Context(), l.Addr().String()); !errdefs.IsUnavailable(err) {
		t.Errorf("got %v", err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := PeerFingerprint(ctx, l.Addr().String()); err == nil {
		t.Error("no error although the context has ended")
	}
}

func TestCredentials(t *testing.T) {
	private, keys := newKey(t)
	c := Credentials(private, machine)
	if !c.RequireTransportSecurity() {
		t.Error("tokens cross connections without TLS")
	}
	seen := map[string]bool{}
	for range 2 {
		md, err := c.GetRequestMetadata(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		token, ok := strings.CutPrefix(md["authorization"], "Bearer ")
		claims, err := Verify(token, machine, time.Now(), keys)
		if !ok || err != nil || seen[claims.ID] {
			t.Errorf("%v: %+v, %v", md, claims, err)
		}
		seen[claims.ID] = true
	}
}

// serveTLS accepts TLS connections until the test ends.
func serveTLS(t *testing.T) (addr, fingerprint string) {
	t.Helper()
	public, private, err := ed25519.GenerateKey(rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	der, err := x509.CreateCertificate(rand.Reader, &x509.Certificate{SerialNumber: big.NewInt(1)}, &x509.Certificate{SerialNumber: big.NewInt(1)}, public, private)
	if err != nil {
		t.Fatal(err)
	}
	l, err := tls.Listen("tcp", "127.0.0.1:0", &tls.Config{
		MinVersion: tls.VersionTLS13, Certificates: []tls.Certificate{{Certificate: [][]byte{der}, PrivateKey: private}}, NextProtos: []string{"h2"},
	})
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			_ = conn.(*tls.Conn).HandshakeContext(context.Background())
			conn.Close()
		}
	}()
	t.Cleanup(func() { l.Close(); <-done })
	return l.Addr().String(), Fingerprint(der)
}
