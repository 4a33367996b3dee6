package upload

import (
	"strings"
	"testing"
	"time"

	"cocoonstack.io/cocoon/internal/errdefs"
)

var (
	now = time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	key = []byte("a key of 32 bytes, or as many as")
)

func TestToken(t *testing.T) {
	of := Claim{Namespace: "team", Name: "disk", UID: "1-2-3"}
	token, err := sign(key, of, now.Add(Life))
	if err != nil {
		t.Fatal(err)
	}
	if got, err := verify(key, token, now.Add(Life-time.Second)); err != nil || got != of {
		t.Errorf("%+v, %v", got, err)
	}
	body, signature, _ := strings.Cut(token, ".")
	other, err := sign(key, Claim{Namespace: "dev", Name: "disk", UID: "1-2-3"}, now.Add(Life))
	if err != nil {
		t.Fatal(err)
	}
	theirs, _, _ := strings.Cut(other, ".")
	for name, c := range map[string]struct {
		key   []byte
		token string
		at    time.Time
	}{
		"expired":                   {key, token, now.Add(Life)},
		"of another key":            {[]byte("another"), token, now},
		"without a signature":       {key, body, now},
		"with an empty one":         {key, body + ".", now},
		"with that of another":      {key, theirs + "." + signature, now},
		"with bits that do not fit": {key, token[:len(token)-1] + "!", now},
		"none":                      {key, "", now},
		"too long":                  {key, strings.Repeat("a", maxToken) + "." + signature, now},
	} {
		_, err := verify(c.key, c.token, c.at)
		if !errdefs.IsFailedPrecondition(err) || c.token != "" && strings.Contains(err.Error(), c.token) {
			t.Errorf("a token %s: %v", name, err)
		}
	}
}

func FuzzToken(f *testing.F) {
	good, err := sign(key, Claim{Namespace: "team", Name: "disk", UID: "1-2-3"}, now.Add(Life))
	if err != nil {
		f.Fatal(err)
	}
	for _, seed := range []string{good, good + "=", "e30.", ".", "", "e30.e30", strings.ToUpper(good)} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, token string) {
		c, err := verify(key, token, now)
		if err == nil && token != good {
			t.Errorf("%q is a token of %+v", token, c)
		}
	})
}
