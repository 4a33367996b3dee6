package capsulewire

import (
	"context"
	"crypto/ed25519"
	"crypto/rand"
	"crypto/subtle"
	"encoding/base64"
	"time"

	"github.com/golang-jwt/jwt/v5"
	"google.golang.org/grpc/credentials"

	"cocoonstack.io/cocoon/internal/errdefs"
)

const (
	// Life is how long a token is valid.
	Life = time.Minute
	// Leeway is how much the clocks of the two sides may differ.
	Leeway = 5 * time.Minute

	maxLife  = 10 * time.Minute // a token that would live longer is refused
	maxToken = 4096             // bytes
	maxID    = 256              // bytes of a token's ID
)

// Claims is what a verified token says.
type Claims struct {
	Kid string
	// ID is unique to the token; the server accepts it once.
	ID string
	// Expires is the last time at which Verify accepts the token, Leeway included. An ID is kept until then.
	Expires time.Time
}

// Mint makes a token for the appliance with the UUID audience, valid for Life from now.
func Mint(key ed25519.PrivateKey, audience string, now time.Time) (string, error) {
	if len(key) != ed25519.PrivateKeySize {
		return "", errdefs.Invalidf("make a token: the key is no Ed25519 private key")
	}
	var id [16]byte
	_, _ = rand.Read(id[:]) // never fails
	kid := Kid(ed25519.PublicKey(key[ed25519.PrivateKeySize-ed25519.PublicKeySize:]))
	// The audience is one string, as the documented system writes it.
	t := jwt.NewWithClaims(jwt.SigningMethodEdDSA, jwt.MapClaims{
		"sub": kid, "aud": audience, "iat": now.Unix(), "exp": now.Add(Life).Unix(), "jti": base64.RawURLEncoding.EncodeToString(id[:]),
	})
	t.Header["kid"] = kid
	signed, err := t.SignedString(key)
	if err != nil {
		return "", errdefs.New(errdefs.Internal, "sign a token: %w", err)
	}
	return signed, nil
}

// Verify checks a token of anybody. key returns the public key of a kid, false if it is not enrolled. All errors are
// Unauthenticated. They do not say which of several secrets was wrong.
func Verify(token, audience string, now time.Time, key func(kid string) (ed25519.PublicKey, bool)) (Claims, error) {
	if len(token) > maxToken {
		return Claims{}, errdefs.Unauthenticatedf("the token is longer than %d bytes", maxToken)
	}
	var kid string
	claims := &jwt.RegisteredClaims{}
	_, err := jwt.NewParser(
		jwt.WithValidMethods([]string{jwt.SigningMethodEdDSA.Alg()}), jwt.WithStrictDecoding(), jwt.WithTimeFunc(func() time.Time { return now }),
		jwt.WithLeeway(Leeway), jwt.WithExpirationRequired(), jwt.WithIssuedAt(), jwt.WithAudience(audience),
	).ParseWithClaims(token, claims, func(t *jwt.Token) (any, error) {
		if _, critical := t.Header["crit"]; critical || t.Header["typ"] != "JWT" {
			return nil, errdefs.Unauthenticatedf("it is of another type")
		}
		kid, _ = t.Header["kid"].(string)
		public, ok := key(kid)
		if !ok || len(public) != ed25519.PublicKeySize {
			return nil, errdefs.Unauthenticatedf("the key is not enrolled")
		}
		return public, nil
	})
	switch {
	case err != nil:
		return Claims{}, errdefs.New(errdefs.Unauthenticated, "the token is not valid here: %w", err)
	case subtle.ConstantTimeCompare([]byte(claims.Subject), []byte(kid)) != 1:
		return Claims{}, errdefs.Unauthenticatedf("the token is of another key than it says")
	case len(claims.Audience) != 1 || audience == "":
		return Claims{}, errdefs.Unauthenticatedf("the token is not for this machine alone")
	case claims.IssuedAt == nil || claims.ExpiresAt.Sub(claims.IssuedAt.Time) > maxLife:
		return Claims{}, errdefs.Unauthenticatedf("the token lives longer than %v", maxLife)
	case claims.ID == "" || len(claims.ID) > maxID:
		return Claims{}, errdefs.Unauthenticatedf("the token has no ID of 1 to %d bytes", maxID)
	}
	return Claims{Kid: kid, ID: claims.ID, Expires: claims.ExpiresAt.Add(Leeway)}, nil
}

// Credentials gives each call a token of its own for the appliance with the UUID audience. They need a TLS connection.
func Credentials(key ed25519.PrivateKey, audience string) credentials.PerRPCCredentials {
	return CredentialsAt(key, audience, time.Now)
}

// CredentialsAt is Credentials for an appliance whose clock shows now, which may be wrong.
func CredentialsAt(key ed25519.PrivateKey, audience string, now func() time.Time) credentials.PerRPCCredentials {
	return &minter{key: key, audience: audience, now: now}
}

// TimeHeader is in the trailer of a call that was refused because of its token: the time of the appliance, in seconds since the Unix epoch. A
// client that trusts the certificate may use that for its next token: nobody else takes it.
const TimeHeader = "capsule-time"

type minter struct {
	key      ed25519.PrivateKey
	audience string
	now      func() time.Time
}

func (m *minter) GetRequestMetadata(context.Context, ...string) (map[string]string, error) {
	token, err := Mint(m.key, m.audience, m.now())
	if err != nil {
		return nil, err
	}
	return map[string]string{"authorization": "Bearer " + token}, nil
}

func (*minter) RequireTransportSecurity() bool { return true }
