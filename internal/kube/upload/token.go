package upload

import (
	"crypto/hmac"
	"crypto/sha256"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/types"

	"cocoonstack.io/cocoon/internal/errdefs"
)

// Life is how long a token is valid. An upload that has begun goes on after that, as with CDI.
const Life = 5 * time.Minute

// maxToken is the maximum length of a token in bytes.
const maxToken = 2 << 10

// Claim is the claim that a token is for.
type Claim struct {
	Namespace string    `json:"namespace"`
	Name      string    `json:"name"`
	UID       types.UID `json:"uid"`
}

// String returns NAMESPACE/NAME.
func (c Claim) String() string { return c.Namespace + "/" + c.Name }

// content is what a token says.
type content struct {
	Claim
	Until int64 `json:"until"` // Unix seconds
}

// purpose keeps a signature from being taken for one of something else that has the same key.
const purpose = "cocoon upload token 1\n"

func mac(key, text []byte) []byte {
	h := hmac.New(sha256.New, key)
	h.Write([]byte(purpose))
	h.Write(text)
	return h.Sum(nil)
}

// sign returns a token for a claim.
func sign(key []byte, of Claim, until time.Time) (string, error) {
	text, err := json.Marshal(content{of, until.Unix()})
	if err != nil {
		return "", fmt.Errorf("make a token: %w", err)
	}
	encode := base64.RawURLEncoding.Strict().EncodeToString
	return encode(text) + "." + encode(mac(key, text)), nil
}

// verify returns the claim of a token.
// Errors: FailedPrecondition. They do not contain the token.
func verify(key []byte, token string, now time.Time) (Claim, error) {
	body, signature, ok := strings.Cut(token, ".")
	if !ok || len(token) > maxToken || strings.ContainsAny(token, "\r\n") { // the decoder passes over the latter
		return Claim{}, errdefs.Preconditionf("the token is not one of this cluster; ask for another one")
	}
	decode := base64.RawURLEncoding.Strict().DecodeString
	text, err := decode(body)
	sum, sumErr := decode(signature)
	if err != nil || sumErr != nil || !hmac.Equal(sum, mac(key, text)) {
		return Claim{}, errdefs.Preconditionf("the token is not one of this cluster, or the certificate of the manager has changed since; ask for another one")
	}
	var c content
	if err := json.Unmarshal(text, &c); err != nil {
		return Claim{}, errdefs.Preconditionf("the token cannot be read; ask for another one")
	}
	if now.Unix() >= c.Until {
		return Claim{}, errdefs.Preconditionf("the token has expired; ask for another one")
	}
	return c.Claim, nil
}
