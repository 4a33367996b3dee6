package translate

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"net/url"
	"regexp"
	"strings"
)

// parseHTTP reads an http or https URL of an image. Its errors quote only the offending character: the URL, or a part of
// it, may be secret.
func parseHTTP(raw string) (*url.URL, error) {
	if c, bad := firstBad(raw, urlChar); bad {
		return nil, fmt.Errorf("its URL has %s, which must be written as %%XX", c)
	}
	u, err := url.Parse(raw)
	if err != nil || u.Opaque != "" {
		return nil, errors.New("its URL cannot be read; check the host, the port and every '%'")
	}
	u.Scheme = strings.ToLower(u.Scheme)
	switch {
	case u.Scheme != "http" && u.Scheme != "https":
		return nil, fmt.Errorf("its URL has the unknown scheme %q; use http, https or oci", u.Scheme)
	case u.Hostname() == "":
		return nil, errors.New("its URL has no host")
	case !urlHostRE.MatchString(u.Host) || !strings.HasPrefix(u.Host, "[") && !portOK(u.Host):
		return nil, errors.New("its URL has an invalid host or port")
	case u.Fragment != "" || strings.Contains(raw, "#"):
		return nil, errors.New("its URL has a '#', and what follows that is never sent to a server")
	}
	for p := range strings.SplitSeq(u.Path, "/") {
		if p == "." || p == ".." {
			return nil, fmt.Errorf("its URL has the part %q", p)
		}
		if c, bad := firstBad(p, func(r rune) bool { return r >= ' ' && r != 0x7f && r != '\\' && r != 0xFFFD }); bad {
			return nil, fmt.Errorf("its URL has %s, escaped", c)
		}
	}
	u.Host = strings.ToLower(u.Host)
	return u, nil
}

var urlHostRE = regexp.MustCompile(`^([A-Za-z0-9_]([A-Za-z0-9_.-]*[A-Za-z0-9_])?\.?|\[[0-9A-Fa-f:.]+\])(:[0-9]{1,5})?$`)

func urlChar(r rune) bool {
	return r > ' ' && r < 0x7f && !strings.ContainsRune("\"\\<>^`{|}", r)
}

// urlKey is the store's key for the image of an explicit URL. If the same name without scheme would mean this URL, it is
// that name's key. Any other URL gets a key with a hash of the whole URL except the credentials.
func (t *Translator) urlKey(u *url.URL) string {
	plain := u.Host + u.EscapedPath()
	if u.Scheme == t.protocol && u.RawQuery == "" && !u.ForceQuery && plainKey(plain) {
		return plain
	}
	bare := *u
	bare.User = nil
	sum := sha256.Sum256([]byte(bare.String()))
	var parts []string
	for p := range strings.SplitSeq(plain, "/") {
		if p = strings.TrimLeft(unsafeRE.ReplaceAllString(p, "_"), ".-"); p != "" {
			parts = append(parts, p)
		}
	}
	safe := strings.Join(parts, "/")
	if len(safe) > 150 {
		safe = strings.TrimRight(safe[:150], "/")
	}
	return safe + "-" + hex.EncodeToString(sum[:8])
}

var unsafeRE = regexp.MustCompile(`[^A-Za-z0-9._-]+`)

// plainKey reports whether s is also a valid plain name.
func plainKey(s string) bool {
	n, err := Name{}.parsePlain(s, s)
	return err == nil && n.Tag == "" && n.Digest == "" && len(s) <= maxKey
}
