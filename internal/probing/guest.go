package probing

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"syscall"

	"cocoonstack.io/cocoon/internal/reach"
)

const (
	maxBody      = 10 << 10 // bytes of an answer that are read
	maxRedirects = 10
)

// Guest is the guest or container that is probed over the network.
type Guest struct {
	IP string // its address; "" if not known
}

// TCP connects to address, host:port.
func (g Guest) TCP(ctx context.Context, address string) (Result, string) {
	c, err := g.Dial(ctx, "tcp", address)
	if err != nil {
		return Failure, err.Error()
	}
	c.Close()
	return Success, ""
}

// HTTP sends a request. It succeeds with a status from 200 to 299, and with a warning from 300 to 399. clear2 is for HTTP/2 without TLS.
func (g Guest) HTTP(req *http.Request, clear2 bool) (Result, string) {
	client := &http.Client{Transport: g.Transport(clear2), CheckRedirect: stayHere}
	resp, err := client.Do(req)
	if err != nil {
		return Failure, err.Error()
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(io.LimitReader(resp.Body, maxBody))
	switch {
	case err != nil:
		return Failure, err.Error()
	case resp.StatusCode < http.StatusOK || resp.StatusCode >= http.StatusBadRequest:
		return Failure, fmt.Sprintf("HTTP probe failed with statuscode: %d", resp.StatusCode) // the body may be secret
	case resp.StatusCode >= http.StatusMultipleChoices:
		return Warning, "Probe terminated redirects, Response body: " + string(body)
	}
	return Success, string(body)
}

// stayHere follows redirects only on the same host, because the node may reach hosts that a guest cannot.
func stayHere(req *http.Request, via []*http.Request) error {
	switch {
	case req.URL.Hostname() != via[0].URL.Hostname():
		return http.ErrUseLastResponse
	case len(via) >= maxRedirects:
		return errors.New("stopped after 10 redirects")
	}
	return nil
}

// Transport opens a new connection for each request, without a proxy. It does not verify certificates, because guests use
// self-signed ones.
func (g Guest) Transport(clear2 bool) *http.Transport {
	tr := &http.Transport{
		DisableKeepAlives: true, DisableCompression: true, DialContext: g.Dial,
		TLSClientConfig: &tls.Config{InsecureSkipVerify: true}, //nolint:gosec // see above
	}
	if clear2 {
		tr.Protocols = new(http.Protocols)
		tr.Protocols.SetUnencryptedHTTP2(true)
	}
	return tr
}

// Dial connects to the guest, or to another host that a probe or a redirect names. It refuses hosts that guests must not reach,
// because the node may reach more than a guest. Connections have a short linger time. Otherwise connections in TIME_WAIT of
// thousands of probes would use up the host's ports.
func (g Guest) Dial(ctx context.Context, network, address string) (net.Conn, error) {
	host, _, err := net.SplitHostPort(address)
	elsewhere := err != nil || host != g.IP
	d := net.Dialer{Control: func(network, address string, c syscall.RawConn) error {
		if elsewhere {
			if err := reach.Fence(network, address, c); err != nil {
				return err
			}
		}
		var err error
		if cerr := c.Control(func(fd uintptr) {
			err = syscall.SetsockoptLinger(int(fd), syscall.SOL_SOCKET, syscall.SO_LINGER, &syscall.Linger{Onoff: 1, Linger: 1})
		}); cerr != nil {
			return cerr
		}
		return err
	}}
	return d.DialContext(ctx, network, address)
}
