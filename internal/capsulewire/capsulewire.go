// Package capsulewire is what the operator's program and the appliance agree on before the first call: names of keys and
// certificates, tokens, and the TLS connection that is pinned to one certificate.
//
// It keeps no keys and no list of who may do what; replayed tokens are the server's to refuse, by Claims.ID.
package capsulewire

import (
	"crypto/ed25519"
	"crypto/sha256"
	"encoding/base64"
	"encoding/hex"
	"regexp"
	"strings"
)

// Kid returns the name of a key: base64url(SHA-256 of the public key), without padding.
func Kid(key ed25519.PublicKey) string {
	sum := sha256.Sum256(key)
	return base64.RawURLEncoding.EncodeToString(sum[:])
}

// IsKid reports whether s has the form of a Kid.
func IsKid(s string) bool {
	sum, err := base64.RawURLEncoding.Strict().DecodeString(s)
	return err == nil && len(sum) == sha256.Size && len(s) == base64.RawURLEncoding.EncodedLen(sha256.Size)
}

// Fingerprint returns the SHA-256 of a certificate in DER, in lower-case hexadecimal.
func Fingerprint(der []byte) string {
	sum := sha256.Sum256(der)
	return hex.EncodeToString(sum[:])
}

// FingerprintRows writes a fingerprint for people who compare it: rows of eight bytes, indented.
func FingerprintRows(fingerprint string) string {
	var b strings.Builder
	for i := 0; i+2 <= len(fingerprint); i += 2 {
		switch i % 16 {
		case 0:
			if i > 0 {
				b.WriteByte('\n')
			}
			b.WriteString("    ")
		default:
			b.WriteByte(':')
		}
		b.WriteString(fingerprint[i : i+2])
	}
	return b.String()
}

var fingerprint = regexp.MustCompile(`^[0-9a-f]{64}$`)

// IsFingerprint reports whether s has the form of a Fingerprint.
func IsFingerprint(s string) bool { return fingerprint.MatchString(s) }
