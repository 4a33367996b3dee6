package fetch

import (
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/json"
	"net"
	"net/http"
	"net/url"
	"strings"
	"time"

	"golang.org/x/net/http/httpproxy"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/image/translate"
)

// maxTransports limits the cache: profiles change with the files that hold them.
const maxTransports = 64

// transport returns the transport for p. Profiles with equal settings share it and its connections.
func (c *Client) transport(p *translate.Profile) (*http.Transport, error) {
	p = cmp.Or(p, &translate.Profile{})
	text, err := json.Marshal(struct {
		Proxy string
		TLS   *translate.TLS
	}{p.Proxy, p.TLS})
	if err != nil {
		return nil, errdefs.Invalidf("the transport profile cannot be used: %w", err)
	}
	key := sha256.Sum256(text)
	c.mu.Lock()
	defer c.mu.Unlock()
	if t := c.transports[key]; t != nil {
		return t, nil
	}
	t, err := c.newTransport(p)
	if err != nil {
		return nil, err
	}
	if len(c.transports) >= maxTransports {
		for _, old := range c.transports {
			old.CloseIdleConnections()
		}
		clear(c.transports)
	}
	c.transports[key] = t
	return t, nil
}

func (c *Client) newTransport(p *translate.Profile) (*http.Transport, error) {
	tlsConfig, err := c.tlsConfig(p.TLS)
	if err != nil {
		return nil, err
	}
	proxy, err := proxyOf(p.Proxy)
	if err != nil {
		return nil, err
	}
	dialer := &net.Dialer{Timeout: c.opts.Dial, KeepAlive: 30 * time.Second}
	t := &http.Transport{
		Proxy:                 proxy,
		DialContext:           dialer.DialContext,
		TLSClientConfig:       tlsConfig,
		TLSHandshakeTimeout:   c.opts.Handshake,
		ResponseHeaderTimeout: c.opts.Stall,
		IdleConnTimeout:       time.Minute,
		MaxIdleConnsPerHost:   4,
		DisableCompression:    true,     // digests and ranges refer to the file
		ReadBufferSize:        64 << 10, // larger reads bypass it
		// HTTP/2 stays off: it does not help one long stream, and a lost connection must affect only one fetch.
		MaxResponseHeaderBytes: 1 << 18,
		OnProxyConnectResponse: proxyAnswer,
	}
	if c.opts.Reach != nil {
		c.opts.Reach.Guard(t, dialer)
	}
	return t, nil
}

// proxyOf returns the profile's proxy for every URL, or the proxy of the environment.
func proxyOf(raw string) (func(*http.Request) (*url.URL, error), error) {
	if raw == "" {
		ask := httpproxy.FromEnvironment().ProxyFunc()
		return func(r *http.Request) (*url.URL, error) {
			u, err := ask(r.URL)
			if err != nil { // the error quotes the variable, which may hold a password
				return nil, errdefs.Preconditionf("the proxy for %s in the environment is not a URL", r.URL.Scheme)
			}
			return u, nil
		}, nil
	}
	if !strings.Contains(raw, "://") {
		raw = "http://" + raw
	}
	u, err := url.Parse(raw)
	if err != nil || u.Hostname() == "" {
		return nil, errdefs.Invalidf("the proxy of the transport is not a URL")
	}
	switch u.Scheme {
	case "http", "https", "socks5", "socks5h":
		return http.ProxyURL(u), nil
	}
	return nil, errdefs.Invalidf("the proxy of the transport has the invalid scheme %q; use http, https or socks5", u.Scheme)
}

// proxyAnswer classifies a proxy's refusal to connect.
func proxyAnswer(_ context.Context, _ *url.URL, req *http.Request, res *http.Response) error {
	switch code := res.StatusCode; {
	case code/100 == 2:
		return nil
	case code == http.StatusProxyAuthRequired || code == http.StatusForbidden || code == http.StatusUnauthorized:
		return errdefs.Preconditionf("the proxy refuses the connection to %s (%s)", req.URL.Host, status(res))
	default:
		return errdefs.Unavailablef("the proxy cannot connect to %s (%s)", req.URL.Host, status(res))
	}
}
