package probe

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"syscall"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/status"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/intstr"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/reach"
)

const (
	maxBody      = 10 << 10 // bytes of an answer that are read
	maxRedirects = 10
	agentProbe   = "kube-probe/1.37" // the User-Agent of the kubelet release with the same behaviour; servers recognize probes by it
	agentHook    = "kube-lifecycle/1.37"
)

// Exec runs a command in a container and returns its output and exit code.
type Exec func(ctx context.Context, command []string) (output string, code int, err error)

// Target is the container that is probed.
type Target struct {
	Container *corev1.Container
	IP        string // address of the guest; "" if not known
	Exec      Exec
}

// Probe runs p once and returns the result and its reason. If the probe cannot be run, the result is Unknown, and the error
// says why.
func (t Target) Probe(ctx context.Context, p *corev1.Probe) (Result, string, error) {
	limit := time.Duration(max(p.TimeoutSeconds, 1)) * time.Second
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	switch {
	case p.Exec != nil:
		return t.exec(ctx, p.Exec.Command, limit)
	case p.HTTPGet != nil:
		return t.httpGet(ctx, p.HTTPGet)
	case p.TCPSocket != nil:
		return t.tcp(ctx, p.TCPSocket)
	case p.GRPC != nil:
		return t.grpc(ctx, p.GRPC, limit)
	}
	return Unknown, "", errdefs.Invalidf("the probe has no action")
}

func (t Target) exec(ctx context.Context, command []string, limit time.Duration) (Result, string, error) {
	output, code, err := t.Exec(ctx, command)
	switch {
	case err != nil && errors.Is(ctx.Err(), context.DeadlineExceeded):
		return Failure, fmt.Sprintf("command timed out: %q timed out after %s", strings.Join(command, " "), limit), nil
	case err != nil:
		return Unknown, "", err
	case code != 0:
		return Failure, output, nil
	}
	return Success, output, nil
}

func (t Target) tcp(ctx context.Context, a *corev1.TCPSocketAction) (Result, string, error) {
	address, err := t.address(a.Host, a.Port)
	if err != nil {
		return Unknown, "", err
	}
	c, err := t.dial(ctx, "tcp", address)
	if err != nil {
		return Failure, err.Error(), nil //nolint:nilerr // a failed connection is a result of the probe
	}
	c.Close()
	return Success, "", nil
}

// address returns the address to which a probe connects: host, or the guest if host is "", with the port of that number or
// name.
func (t Target) address(host string, port intstr.IntOrString) (string, error) {
	if host == "" {
		host = t.IP
	}
	if host == "" {
		return "", errdefs.Unavailablef("the address of the guest is not known yet")
	}
	n, err := t.port(port)
	return net.JoinHostPort(host, strconv.Itoa(n)), err
}

func (t Target) port(port intstr.IntOrString) (int, error) {
	n := port.IntValue() // also parses a string of digits
	if port.Type == intstr.String {
		for _, p := range t.Container.Ports {
			if p.Name == port.StrVal {
				n = int(p.ContainerPort)
			}
		}
	}
	if n < 1 || n > 65535 {
		return 0, errdefs.Invalidf("container %q has no port %s", t.Container.Name, port.String())
	}
	return n, nil
}

func (t Target) httpGet(ctx context.Context, a *corev1.HTTPGetAction) (Result, string, error) {
	req, err := t.request(ctx, a, agentProbe)
	if err != nil {
		return Unknown, "", err
	}
	http2 := a.Protocol != nil && *a.Protocol == corev1.HTTPProtocolHTTP2
	client := &http.Client{Transport: t.transport(http2), CheckRedirect: stayHere}
	resp, err := client.Do(req)
	if err != nil {
		return Failure, err.Error(), nil
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(io.LimitReader(resp.Body, maxBody))
	switch {
	case err != nil:
		return Failure, err.Error(), nil
	case resp.StatusCode < http.StatusOK || resp.StatusCode >= http.StatusBadRequest:
		return Failure, fmt.Sprintf("HTTP probe failed with statuscode: %d", resp.StatusCode), nil // the body may be secret
	case resp.StatusCode >= http.StatusMultipleChoices:
		return Warning, "Probe terminated redirects, Response body: " + string(body), nil
	}
	return Success, string(body), nil
}

// request returns the GET request that a describes. A User-Agent or Accept header in a replaces the default.
func (t Target) request(ctx context.Context, a *corev1.HTTPGetAction, agent string) (*http.Request, error) {
	address, err := t.address(a.Host, a.Port)
	if err != nil {
		return nil, err
	}
	u, err := url.Parse(a.Path)
	if err != nil {
		u = &url.URL{Path: a.Path}
	}
	u.Scheme, u.Host = "http", address
	if a.Scheme != "" {
		u.Scheme = strings.ToLower(string(a.Scheme))
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, u.String(), nil)
	if err != nil {
		return nil, errdefs.Invalidf("make request: %w", err)
	}
	for _, h := range a.HTTPHeaders {
		req.Header.Add(h.Name, h.Value)
	}
	if _, ok := req.Header["User-Agent"]; !ok {
		req.Header.Set("User-Agent", agent)
	}
	if _, ok := req.Header["Accept"]; !ok {
		req.Header.Set("Accept", "*/*")
	} else if req.Header.Get("Accept") == "" {
		req.Header.Del("Accept")
	}
	req.Host = req.Header.Get("Host")
	return req, nil
}

// stayHere follows redirects only on the same host, because the node may reach hosts that a pod cannot.
func stayHere(req *http.Request, via []*http.Request) error {
	switch {
	case req.URL.Hostname() != via[0].URL.Hostname():
		return http.ErrUseLastResponse
	case len(via) >= maxRedirects:
		return errors.New("stopped after 10 redirects")
	}
	return nil
}

// transport opens a new connection for each probe, without a proxy. It does not verify certificates, because guests use
// self-signed ones.
func (t Target) transport(clear2 bool) *http.Transport {
	tr := &http.Transport{
		DisableKeepAlives: true, DisableCompression: true, DialContext: t.dial,
		TLSClientConfig: &tls.Config{InsecureSkipVerify: true}, //nolint:gosec // see above
	}
	if clear2 {
		tr.Protocols = new(http.Protocols)
		tr.Protocols.SetUnencryptedHTTP2(true)
	}
	return tr
}

// dial connects to the guest, or to another host that a probe or a redirect names. It refuses hosts that pods must not reach,
// because the node may reach more than a pod. Connections have a short linger time. Otherwise connections in TIME_WAIT of
// thousands of probes would use up the host's ports.
func (t Target) dial(ctx context.Context, network, address string) (net.Conn, error) {
	host, _, err := net.SplitHostPort(address)
	elsewhere := err != nil || host != t.IP
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

// Hook runs h, a lifecycle hook, until ctx ends.
func (t Target) Hook(ctx context.Context, h *corev1.LifecycleHandler) error {
	switch {
	case h.Exec != nil:
		_, code, err := t.Exec(ctx, h.Exec.Command)
		if err == nil && code != 0 {
			err = errdefs.Preconditionf("the command exited with %d", code) // without the output, which may be secret
		}
		return err
	case h.HTTPGet != nil:
		return t.call(ctx, h.HTTPGet)
	case h.Sleep != nil:
		timer := time.NewTimer(time.Duration(h.Sleep.Seconds) * time.Second)
		defer timer.Stop()
		select {
		case <-timer.C:
			return nil
		case <-ctx.Done():
			return fmt.Errorf("sleep: %w", ctx.Err())
		}
	}
	return errdefs.Unsupportedf("invalid handler: a hook must be exec, httpGet or sleep")
}

// call sends the request of a hook. Any answer counts as success.
func (t Target) call(ctx context.Context, a *corev1.HTTPGetAction) error {
	req, err := t.request(ctx, a, agentHook)
	if err != nil {
		return err
	}
	client := &http.Client{Transport: t.transport(false)}
	resp, err := client.Do(req)
	if errors.Is(err, http.ErrSchemeMismatch) { // the hook requests HTTPS, but the server speaks HTTP
		req.URL.Scheme = "http"
		req.Header.Del("Authorization")
		resp, err = client.Do(req)
	}
	if err != nil {
		return errdefs.Unavailablef("call hook: %w", err)
	}
	_, _ = io.CopyN(io.Discard, resp.Body, maxBody) // read the body, so that the server can finish its answer
	resp.Body.Close()
	return nil
}

// grpc calls the standard health service.
func (t Target) grpc(ctx context.Context, a *corev1.GRPCAction, limit time.Duration) (Result, string, error) {
	address, err := t.address("", intstr.FromInt32(a.Port))
	if err != nil {
		return Unknown, "", err
	}
	security := insecure.NewCredentials()
	if a.Mode != nil && *a.Mode == corev1.GRPCProbeModeTLS {
		security = credentials.NewTLS(&tls.Config{InsecureSkipVerify: true}) //nolint:gosec // guests use self-signed certificates
	}
	conn, err := grpc.NewClient("passthrough:///"+address, grpc.WithTransportCredentials(security), grpc.WithUserAgent(agentProbe),
		grpc.WithContextDialer(func(ctx context.Context, addr string) (net.Conn, error) {
			return t.dial(ctx, "tcp", addr)
		}))
	if err != nil {
		return Failure, fmt.Sprintf("error: failed to connect service at %q: %v", address, err), nil
	}
	defer conn.Close()
	service := ""
	if a.Service != nil {
		service = *a.Service
	}
	resp, err := grpc_health_v1.NewHealthClient(conn).Check(ctx, &grpc_health_v1.HealthCheckRequest{Service: service})
	switch status.Code(err) {
	case codes.OK:
	case codes.Unimplemented:
		return Failure, fmt.Sprintf("error: this server does not implement the grpc health protocol (grpc.health.v1.Health): %s", status.Convert(err).Message()), nil
	case codes.DeadlineExceeded:
		return Failure, fmt.Sprintf("timeout: health rpc did not complete within %s", limit), nil
	default:
		return Failure, fmt.Sprintf("error: health rpc probe failed: %v", err), nil
	}
	if resp.GetStatus() != grpc_health_v1.HealthCheckResponse_SERVING {
		return Failure, fmt.Sprintf("service unhealthy (responded with %q)", resp.GetStatus().String()), nil
	}
	return Success, "", nil
}
