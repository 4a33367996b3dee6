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
	"cocoonstack.io/cocoon/internal/probing"
)

const (
	maxBody    = 10 << 10          // bytes of the answer to a hook that are read
	agentProbe = "kube-probe/1.37" // the User-Agent of the kubelet release with the same behaviour; servers recognize probes by it
	agentHook  = "kube-lifecycle/1.37"
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
func (t Target) Probe(ctx context.Context, p *corev1.Probe) (probing.Result, string, error) {
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
	return probing.Unknown, "", errdefs.Invalidf("the probe has no action")
}

func (t Target) guest() probing.Guest { return probing.Guest{IP: t.IP} }

func (t Target) exec(ctx context.Context, command []string, limit time.Duration) (probing.Result, string, error) {
	output, code, err := t.Exec(ctx, command)
	switch {
	case err != nil && errors.Is(ctx.Err(), context.DeadlineExceeded):
		return probing.Failure, fmt.Sprintf("command timed out: %q timed out after %s", strings.Join(command, " "), limit), nil
	case err != nil:
		return probing.Unknown, "", err
	case code != 0:
		return probing.Failure, output, nil
	}
	return probing.Success, output, nil
}

func (t Target) tcp(ctx context.Context, a *corev1.TCPSocketAction) (probing.Result, string, error) {
	address, err := t.address(a.Host, a.Port)
	if err != nil {
		return probing.Unknown, "", err
	}
	result, why := t.guest().TCP(ctx, address)
	return result, why, nil
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

func (t Target) httpGet(ctx context.Context, a *corev1.HTTPGetAction) (probing.Result, string, error) {
	req, err := t.request(ctx, a, agentProbe)
	if err != nil {
		return probing.Unknown, "", err
	}
	http2 := a.Protocol != nil && *a.Protocol == corev1.HTTPProtocolHTTP2
	result, why := t.guest().HTTP(req, http2)
	return result, why, nil
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
	client := &http.Client{Transport: t.guest().Transport(false)}
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
func (t Target) grpc(ctx context.Context, a *corev1.GRPCAction, limit time.Duration) (probing.Result, string, error) {
	address, err := t.address("", intstr.FromInt32(a.Port))
	if err != nil {
		return probing.Unknown, "", err
	}
	security := insecure.NewCredentials()
	if a.Mode != nil && *a.Mode == corev1.GRPCProbeModeTLS {
		security = credentials.NewTLS(&tls.Config{InsecureSkipVerify: true}) //nolint:gosec // guests use self-signed certificates
	}
	conn, err := grpc.NewClient("passthrough:///"+address, grpc.WithTransportCredentials(security), grpc.WithUserAgent(agentProbe),
		grpc.WithContextDialer(func(ctx context.Context, addr string) (net.Conn, error) {
			return t.guest().Dial(ctx, "tcp", addr)
		}))
	if err != nil {
		return probing.Failure, fmt.Sprintf("error: failed to connect service at %q: %v", address, err), nil
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
		return probing.Failure, fmt.Sprintf("error: this server does not implement the grpc health protocol (grpc.health.v1.Health): %s", status.Convert(err).Message()), nil
	case codes.DeadlineExceeded:
		return probing.Failure, fmt.Sprintf("timeout: health rpc did not complete within %s", limit), nil
	default:
		return probing.Failure, fmt.Sprintf("error: health rpc probe failed: %v", err), nil
	}
	if resp.GetStatus() != grpc_health_v1.HealthCheckResponse_SERVING {
		return probing.Failure, fmt.Sprintf("service unhealthy (responded with %q)", resp.GetStatus().String()), nil
	}
	return probing.Success, "", nil
}
