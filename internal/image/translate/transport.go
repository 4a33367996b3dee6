package translate

import (
	"errors"
	"fmt"
	"maps"
	"math"
	"net/url"
	"slices"
	"time"
)

// profileOrError is a transport profile of one mapping, or the reason why it cannot be used.
type profileOrError struct {
	profile *Profile
	err     error
}

// readTransports reads the profiles of a mapping. A broken profile is a problem of the mapping and of every rule that uses
// it.
func (m *mapping) readTransports(doc object) map[string]profileOrError {
	all, err := doc.object("transports")
	if err != nil {
		m.problem("", "%v", err)
	}
	out := map[string]profileOrError{}
	for _, name := range slices.Sorted(maps.Keys(all)) {
		p, err := readProfile(all, name)
		if err != nil {
			m.problem("", "transport %.60q: %v", name, err)
		}
		out[name] = profileOrError{p, err}
	}
	return out
}

func readProfile(all object, name string) (*Profile, error) {
	o, ok := all[name].(map[string]any)
	if !ok && all[name] != nil {
		return nil, errors.New("it must be a mapping")
	}
	doc := object(o)
	if keys := doc.unknown("timeout", "maxRedirects", "proxy", "tls"); len(keys) > 0 {
		return nil, fmt.Errorf("the key %.60q is unknown; use timeout, maxRedirects, proxy and tls", keys[0])
	}
	p := &Profile{}
	timeout, err := doc.number("timeout")
	if err != nil {
		return nil, fmt.Errorf("%w, of milliseconds", err)
	}
	if timeout != nil && *timeout > 0 { // zero and negative values mean no limit
		p.Timeout = time.Duration(min(*timeout, math.MaxInt64/int64(time.Millisecond))) * time.Millisecond
	}
	redirects, err := doc.number("maxRedirects")
	if err != nil {
		return nil, err
	}
	if redirects != nil {
		if *redirects < 0 || *redirects > math.MaxInt32 {
			return nil, errors.New("maxRedirects must be 0 or more")
		}
		n := int(*redirects)
		p.MaxRedirects = &n
	}
	if p.Proxy, err = doc.text("proxy"); err != nil {
		return nil, err
	}
	if err := checkProxy(p.Proxy); err != nil {
		return nil, err
	}
	p.TLS, err = readTLS(doc)
	return p, err
}

// checkProxy returns what is wrong with a proxy's URL without quoting it: it may hold a password.
func checkProxy(proxy string) error {
	if proxy == "" {
		return nil
	}
	u, err := url.Parse(proxy)
	if err != nil || u.Hostname() == "" || !slices.Contains([]string{"http", "https", "socks5"}, u.Scheme) {
		return errors.New("proxy must be a URL like http://HOST:PORT")
	}
	return nil
}

func readTLS(doc object) (*TLS, error) {
	o, err := doc.object("tls")
	if o == nil || err != nil {
		return nil, err
	}
	if keys := o.unknown("certificates", "serverName", "insecure"); len(keys) > 0 {
		return nil, fmt.Errorf("the key %.60q is unknown under tls; use certificates, serverName and insecure", keys[0])
	}
	t := &TLS{}
	if t.ServerName, err = o.text("serverName"); err != nil {
		return nil, err
	}
	if t.Insecure, err = o.flag("insecure"); err != nil {
		return nil, err
	}
	list, err := o.list("certificates")
	if err != nil {
		return nil, err
	}
	for i, raw := range list {
		pair, ok := raw.(map[string]any)
		if !ok {
			return nil, fmt.Errorf("certificate %d must be a mapping of cert and key", i+1)
		}
		c, err := readCertificate(pair)
		if err != nil {
			return nil, fmt.Errorf("certificate %d: %w", i+1, err)
		}
		t.Certificates = append(t.Certificates, c)
	}
	return t, nil
}

func readCertificate(o object) (c Certificate, err error) {
	if keys := o.unknown("cert", "key"); len(keys) > 0 {
		return c, fmt.Errorf("the key %.60q is unknown; use cert and key", keys[0])
	}
	if c.Cert, err = o.text("cert"); err != nil {
		return c, err
	}
	if c.Key, err = o.text("key"); err != nil {
		return c, err
	}
	if c.Cert == "" {
		return c, errors.New("it has no cert")
	}
	return c, nil
}
