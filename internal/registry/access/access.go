// Package access decides who may do what in a registry: tokens, their scopes, and the token file.
//
// It knows no HTTP. Errors and logs contain only the names of tokens, never the tokens.
package access

import (
	"bufio"
	"crypto/rand"
	"crypto/sha256"
	"crypto/subtle"
	"encoding/hex"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	"cocoonstack.io/cocoon/internal/errdefs"
)

// Action is what a client wants to do in a repository.
type Action string

// The actions; each includes those before it.
const (
	Pull   Action = "pull"
	Push   Action = "push"
	Delete Action = "delete"
)

var rank = map[Action]int{Pull: 1, Push: 2, Delete: 3}

// Scope allows actions in all repositories of a prefix.
type Scope struct {
	Action Action // the strongest one allowed
	Prefix string // "team" is the repository team and everything below team/; "": all repositories
}

func (s Scope) allows(a Action, repo string) bool {
	if rank[a] > rank[s.Action] {
		return false
	}
	rest, ok := strings.CutPrefix(repo, s.Prefix)
	return ok && (s.Prefix == "" || rest == "" || rest[0] == '/' || strings.HasSuffix(s.Prefix, "/"))
}

// Identity identifies the sender of a request.
type Identity struct {
	Name    string // of the token; "" if anonymous
	Scopes  []Scope
	Expires time.Time // zero: never
}

// Allows reports whether the identity may do a in a repository.
func (i Identity) Allows(a Action, repo string) bool {
	return slices.ContainsFunc(i.Scopes, func(s Scope) bool { return s.allows(a, repo) })
}

// Everything reports whether the identity may do anything in any repository.
func (i Identity) Everything() bool {
	return slices.Contains(i.Scopes, Scope{Action: Delete})
}

// Anonymous returns the identity of a client without a token, which may pull.
func Anonymous() Identity { return Identity{Scopes: []Scope{{Action: Pull}}} }

type entry struct {
	sum [sha256.Size]byte
	Identity
}

// Tokens is the set of accepted tokens. The zero value accepts none.
type Tokens struct{ entries []entry }

// Add accepts a token that may do everything.
func (t *Tokens) Add(name, secret string) {
	t.entries = append(t.entries, entry{sha256.Sum256([]byte(secret)), Identity{Name: name, Scopes: []Scope{{Action: Delete}}}})
}

// Errors of Check.
var (
	ErrUnknown = errdefs.New(errdefs.FailedPrecondition, "the token is not known here")
	ErrExpired = errdefs.New(errdefs.FailedPrecondition, "the token has expired")
)

// Check returns the identity of a token. It takes the same time for every secret: it compares all hashes.
func (t *Tokens) Check(secret string, now time.Time) (Identity, error) {
	sum := sha256.Sum256([]byte(secret))
	found := -1
	for i := range t.entries {
		found = subtle.ConstantTimeSelect(subtle.ConstantTimeCompare(sum[:], t.entries[i].sum[:]), i, found)
	}
	if found < 0 || secret == "" {
		return Identity{}, ErrUnknown
	}
	id := t.entries[found].Identity
	if !id.Expires.IsZero() && !now.Before(id.Expires) {
		return Identity{}, fmt.Errorf("token %s, until %s: %w; ask for a new one (epoch token new)", id.Name, id.Expires.Format(time.RFC3339), ErrExpired)
	}
	return id, nil
}

const (
	maxLine = 64 << 10
	hashed  = "sha256:"
)

// Parse reads a token file: one token per line. A line with one word is the token itself and may do everything; "NAME
// sha256:HEX [scope=ACTION:PREFIX]... [expires=TIME]" is a hashed one. '#' begins a comment.
func Parse(r io.Reader) (*Tokens, error) {
	t := &Tokens{}
	lines := bufio.NewScanner(r)
	lines.Buffer(nil, maxLine)
	n := 0
	for lines.Scan() {
		n++
		words := strings.Fields(lines.Text())
		for i, w := range words {
			if strings.HasPrefix(w, "#") {
				words = words[:i]
				break
			}
		}
		switch len(words) {
		case 0:
		case 1:
			if strings.HasPrefix(words[0], hashed) {
				return nil, errdefs.Invalidf("token file, line %d: a hash needs a name before it: NAME sha256:HEX", n)
			}
			t.Add(fmt.Sprintf("line-%d", n), words[0])
		default:
			e, err := parseHashed(words)
			if err != nil {
				return nil, errdefs.Invalidf("token file, line %d: %w", n, err)
			}
			t.entries = append(t.entries, e)
		}
	}
	if err := lines.Err(); err != nil {
		return nil, errdefs.Invalidf("token file, line %d: %w", n+1, err)
	}
	return t, nil
}

// parseHashed never shows the words in errors: they may contain a secret by mistake.
func parseHashed(words []string) (entry, error) {
	e := entry{Identity: Identity{Name: words[0]}}
	text, ok := strings.CutPrefix(words[1], hashed)
	sum, err := hex.DecodeString(text)
	if !ok || err != nil || len(sum) != len(e.sum) {
		return e, errdefs.Invalidf("the second word is not sha256: and 64 hex digits; epoch token new prints a right line")
	}
	copy(e.sum[:], sum)
	for _, w := range words[2:] {
		key, value, _ := strings.Cut(w, "=")
		switch key {
		case "scope":
			s, err := ParseScope(value)
			if err != nil {
				return e, err
			}
			e.Scopes = append(e.Scopes, s)
		case "expires":
			if e.Expires, err = time.Parse(time.RFC3339, value); err != nil {
				return e, errdefs.Invalidf("token %s: expires is not a time such as 2030-01-31T00:00:00Z", e.Name)
			}
		default:
			return e, errdefs.Invalidf("token %s: after the hash come only scope=ACTION:PREFIX and expires=TIME", e.Name)
		}
	}
	if len(e.Scopes) == 0 {
		e.Scopes = []Scope{{Action: Delete}}
	}
	return e, nil
}

// ParseScope reads "ACTION:PREFIX"; "ACTION" alone is valid for all repositories. Actions are pull, push (includes
// pull) and * (includes delete).
func ParseScope(text string) (Scope, error) {
	action, prefix, _ := strings.Cut(text, ":")
	s := Scope{Prefix: prefix}
	if prefix == "*" {
		s.Prefix = ""
	}
	switch action {
	case "pull", "push":
		s.Action = Action(action)
	case "*":
		s.Action = Delete
	default:
		return s, errdefs.Invalidf("scope %q is not pull, push or *, with :PREFIX or without", text)
	}
	if strings.ContainsAny(s.Prefix, " \t\r\n*#") {
		return s, errdefs.Invalidf("scope %q: the prefix is the beginning of a repository's name, without wildcards", text)
	}
	return s, nil
}

// String returns the scope in the format of ParseScope.
func (s Scope) String() string {
	a := string(s.Action)
	if s.Action == Delete {
		a = "*"
	}
	if s.Prefix == "" {
		return a
	}
	return a + ":" + s.Prefix
}

// New makes a token and its line for the file. The token itself is stored nowhere.
func New(name string, scopes []Scope, expires time.Time) (secret, line string, err error) {
	if name == "" || strings.ContainsAny(name, " \t\r\n#") {
		return "", "", errdefs.Invalidf("token name %q: one word without '#' is needed", name)
	}
	secret = strings.ToLower(rand.Text())
	sum := sha256.Sum256([]byte(secret))
	line = name + " " + hashed + hex.EncodeToString(sum[:])
	for _, s := range scopes {
		line += " scope=" + s.String()
	}
	if !expires.IsZero() {
		line += " expires=" + expires.UTC().Format(time.RFC3339)
	}
	return secret, line, nil
}
