package fetch

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"slices"
	"time"

	"cocoonstack.io/cocoon/internal/errdefs"
)

// defaultRedirects is the maximum number of redirects when a profile does not set it.
const defaultRedirects = 9

// failure is the error of one exchange, and whether a retry may help.
type failure struct {
	err   error         // classified, one sentence
	retry bool          // the same request may succeed later
	after time.Duration // the server asked to wait this long; 0: it did not
}

// exchange requests l, follows redirects, and returns the final response, whatever its status, and its location.
func (s *session) exchange(ctx context.Context, l location, header http.Header) (*http.Response, location, *failure) {
	limit := defaultRedirects
	if s.profile != nil && s.profile.MaxRedirects != nil {
		limit = *s.profile.MaxRedirects
	}
	first, seen := l, []string{}
	known := l.who // credentials are sent only to their origin, and not sent again after it was left
	for {
		res, err := s.roundTrip(ctx, l, known, header)
		if err != nil {
			return nil, l, networkFailure(ctx, l, err)
		}
		if !redirects(res.StatusCode) {
			return res, l, nil
		}
		discard(res)
		next, err := l.follow(res.Header.Get("Location"))
		if err != nil {
			return nil, l, &failure{err: err}
		}
		seen = append(seen, l.url.String())
		switch {
		case slices.Contains(seen, next.url.String()) && len(seen) >= limit+1:
			return nil, l, &failure{err: errdefs.Preconditionf("fetch %s: the redirects form a loop through %s", first, next)}
		case len(seen) > limit:
			return nil, l, &failure{err: errdefs.Preconditionf("fetch %s: it redirects more than %d times, the limit set by maxRedirects", first, limit)}
		case next.who != nil: // the redirect itself has credentials
			known = next.who
		case !next.sameOrigin(l):
			known = nil
		}
		l = next
	}
}

func redirects(status int) bool {
	return slices.Contains([]int{http.StatusMovedPermanently, http.StatusFound, http.StatusSeeOther, http.StatusTemporaryRedirect, http.StatusPermanentRedirect}, status)
}

func (s *session) roundTrip(ctx context.Context, l location, who *url.Userinfo, header http.Header) (*http.Response, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, l.url.String(), nil)
	if err != nil {
		return nil, errdefs.Invalidf("the URL %s cannot be requested", l)
	}
	req.Header = header.Clone()
	req.Header.Set("User-Agent", s.c.opts.UserAgent)
	req.Header.Set("Accept", "*/*")
	req.Header.Set("Accept-Encoding", "identity") // digests and ranges refer to the file
	if who != nil {
		password, _ := who.Password()
		req.SetBasicAuth(who.Username(), password)
	}
	return s.transport.RoundTrip(req)
}

// discard drops a response. It reads only a little of it, so that the connection can be reused.
func discard(res *http.Response) {
	_, _ = io.CopyN(io.Discard, res.Body, 4<<10)
	res.Body.Close()
}

// networkFailure classifies an error of the transport. Errors of the system name addresses, never URLs.
func networkFailure(ctx context.Context, l location, err error) *failure {
	if ended := contextError(ctx, l); ended != nil {
		return &failure{err: ended}
	}
	host := l.url.Hostname()
	var (
		verify   *tls.CertificateVerificationError
		unknown  x509.UnknownAuthorityError
		hostname x509.HostnameError
		invalid  x509.CertificateInvalidError
		remote   *net.OpError
		dns      *net.DNSError
	)
	refuse := func(format string, args ...any) *failure {
		return &failure{err: errdefs.Preconditionf("fetch %s: "+format, append([]any{l}, args...)...)}
	}
	switch {
	case errdefs.ClassOf(err) != errdefs.Internal && !errors.Is(err, context.DeadlineExceeded):
		return &failure{err: fmt.Errorf("fetch %s: %w", l, err), retry: errdefs.IsUnavailable(err)}
	case errors.As(err, &invalid) && invalid.Reason == x509.Expired:
		if now := time.Now(); now.Before(invalid.Cert.NotBefore) {
			return refuse("the certificate of %s is not valid before %s; check this machine's clock", host, invalid.Cert.NotBefore.Format(time.RFC3339))
		}
		return refuse("the certificate of %s expired on %s; renew it on that server", host, invalid.Cert.NotAfter.Format(time.RFC3339))
	case errors.As(err, &unknown):
		return refuse("the certificate of %s is not signed by an authority known here; add its CA to tls.certificates of the transport", host)
	case errors.As(err, &hostname):
		return refuse("the certificate of %s is for another name; set tls.serverName of the transport if that is right", host)
	case errors.As(err, &verify):
		return refuse("the certificate of %s cannot be verified: %w", host, verify.Err)
	case errors.As(err, &remote) && remote.Op == "remote error":
		return refuse("%s refuses the TLS connection (%w); it may want another client certificate", host, remote.Err)
	case errors.As(err, &dns) && dns.IsNotFound:
		return &failure{err: errdefs.Unavailablef("fetch %s: no address is known for %s", l, dns.Name)}
	}
	return &failure{err: errdefs.Unavailablef("fetch %s: %w", l, err), retry: true}
}

// contextError says why ctx ended, nil if it has not ended.
func contextError(ctx context.Context, l location) error {
	switch {
	case ctx.Err() == nil:
		return nil
	case errors.Is(context.Cause(ctx), errTimeout):
		return errdefs.Unavailablef("fetch %s: it took longer than the timeout of its transport allows", l)
	}
	return fmt.Errorf("fetch %s: %w", l, ctx.Err())
}

// statusFailure classifies a response with an unexpected status.
func statusFailure(res *http.Response, l location) *failure {
	f := &failure{}
	switch code := res.StatusCode; {
	case code == http.StatusNotFound || code == http.StatusGone:
		f.err = errdefs.NotFoundf("fetch %s: there is no such file (%s)", l, status(res))
	case code == http.StatusUnauthorized || code == http.StatusForbidden || code == http.StatusProxyAuthRequired:
		f.err = errdefs.Preconditionf("fetch %s: access is denied (%s); check the user and password of its URL and its client certificate", l, status(res))
	case code == http.StatusRequestTimeout || code == http.StatusTooEarly || code == http.StatusTooManyRequests,
		code >= 500 && code != http.StatusNotImplemented && code != http.StatusHTTPVersionNotSupported:
		f.err = errdefs.Unavailablef("fetch %s: the server answers %s; try again later", l, status(res))
		f.retry, f.after = true, retryAfter(res.Header.Get("Retry-After"), time.Now())
	default:
		f.err = errdefs.Preconditionf("fetch %s: the server answers %s instead of the file", l, status(res))
	}
	return f
}

// status is a status line in our words: the server's own text is not quoted.
func status(res *http.Response) string {
	if text := http.StatusText(res.StatusCode); text != "" {
		return fmt.Sprintf("%d %s", res.StatusCode, text)
	}
	return fmt.Sprintf("status %d", res.StatusCode)
}
