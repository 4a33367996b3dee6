package aggregated

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strconv"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/portforward"
	"k8s.io/client-go/tools/remotecommand"
	"k8s.io/client-go/transport/spdy"
	"k8s.io/streaming/pkg/httpstream"

	"cocoonstack.io/cocoon/api/contract"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/guest"
)

// guests connects to the guests of pods.
type guests interface {
	// attach connects in and out to the console of the guest until ctx or the console ends. It reads in only once it is
	// connected.
	attach(ctx context.Context, pod types.NamespacedName, in io.Reader, out io.Writer) error
	// display does the same with the screen of the guest. For a picture of it, in is nil. An error before the first byte has the status of
	// the node's answer.
	display(ctx context.Context, pod types.NamespacedName, how contract.Display, in io.Reader, out io.Writer) error
	// describe returns what the guest tells of itself. An error has the status of the node's answer.
	describe(ctx context.Context, pod types.NamespacedName) (guest.Description, error)
	// freeze freezes the file systems of the guest, at most for a time; thaw ends that, and reports whether it lasted until now. An error has the
	// status of the node's answer.
	freeze(ctx context.Context, pod types.NamespacedName, most time.Duration) error
	thaw(ctx context.Context, pod types.NamespacedName) (held bool, err error)
	// forward connects to a TCP port of the guest. ctx ends the connection. The caller closes it.
	forward(ctx context.Context, pod types.NamespacedName, port uint16) (tunnel, error)
}

// tunnel is a connection to a port of a guest. After the guest has closed its side, Read returns io.EOF.
type tunnel interface {
	io.ReadWriteCloser
	CloseWrite() error
	// Result waits for the report of the node and returns its error. Precondition: Read has returned an error.
	Result() error
}

// container is the name of the only container in the pod of a VirtualMachineInstance.
const container = "compute"

// podStreams reaches guests through the API server, which connects to the kubelet API of the node. It tries a websocket first. If the API
// server has no websockets for this, it uses SPDY.
type podStreams struct {
	config *rest.Config
}

func (p podStreams) url(pod types.NamespacedName, subresource string, options *corev1.PodAttachOptions) (*url.URL, error) {
	kube, err := kubernetes.NewForConfig(p.config)
	if err != nil {
		return nil, fmt.Errorf("create client for pod %s: %w", pod, err)
	}
	req := kube.CoreV1().RESTClient().Get().Resource("pods").Namespace(pod.Namespace).Name(pod.Name).SubResource(subresource)
	if options != nil {
		req = req.VersionedParams(options, scheme.ParameterCodec)
	}
	return req.URL(), nil
}

func (p podStreams) attach(ctx context.Context, pod types.NamespacedName, in io.Reader, out io.Writer) error {
	at, err := p.url(pod, "attach", &corev1.PodAttachOptions{Container: container, Stdin: true, Stdout: true, TTY: true})
	if err != nil {
		return err
	}
	ws, err := remotecommand.NewWebSocketExecutor(p.config, http.MethodGet, at.String())
	if err != nil {
		return fmt.Errorf("attach to pod %s: %w", pod, err)
	}
	old, err := remotecommand.NewSPDYExecutor(p.config, http.MethodPost, at)
	if err != nil {
		return fmt.Errorf("attach to pod %s: %w", pod, err)
	}
	either, err := remotecommand.NewFallbackExecutor(ws, old, noWebSockets)
	if err != nil {
		return fmt.Errorf("attach to pod %s: %w", pod, err)
	}
	if err := either.StreamWithContext(ctx, remotecommand.StreamOptions{Stdin: in, Stdout: out, Tty: true}); err != nil {
		return fmt.Errorf("attach to pod %s: %w", pod, cause(err))
	}
	return nil
}

func (p podStreams) display(ctx context.Context, pod types.NamespacedName, how contract.Display, in io.Reader, out io.Writer) error {
	if err := p.ask(ctx, pod, contract.HeaderDisplay, string(how), in, out); err != nil {
		return fmt.Errorf("open the screen of pod %s: %w", pod, err)
	}
	return nil
}

// maxDescription is the limit of the answer of a guest in bytes.
const maxDescription = 4 << 20

func (p podStreams) describe(ctx context.Context, pod types.NamespacedName) (d guest.Description, err error) {
	if err := p.askGuest(ctx, pod, contract.GuestDescription, &d); err != nil {
		return d, fmt.Errorf("ask the guest of pod %s what it is: %w", pod, err)
	}
	return d, nil
}

func (p podStreams) freeze(ctx context.Context, pod types.NamespacedName, most time.Duration) error {
	if err := p.askGuest(ctx, pod, contract.GuestFreeze(most), &struct{}{}); err != nil {
		return fmt.Errorf("freeze the file systems of the guest of pod %s: %w", pod, err)
	}
	return nil
}

func (p podStreams) thaw(ctx context.Context, pod types.NamespacedName) (held bool, err error) {
	var answer contract.GuestThawed
	if err := p.askGuest(ctx, pod, contract.GuestThaw, &answer); err != nil {
		return false, fmt.Errorf("thaw the file systems of the guest of pod %s: %w", pod, err)
	}
	return answer.Held, nil
}

// askGuest asks the node of pod what contract.HeaderGuest says.
func (p podStreams) askGuest(ctx context.Context, pod types.NamespacedName, what string, answer any) error {
	text := &limited{most: maxDescription}
	if err := p.ask(ctx, pod, contract.HeaderGuest, what, nil, text); err != nil {
		return err
	}
	if err := json.Unmarshal(text.Bytes(), answer); err != nil {
		return errdefs.Unavailablef("its node sent no whole answer: %w", err)
	}
	return nil
}

// limited is a buffer that refuses more than most bytes.
type limited struct {
	bytes.Buffer
	most int
}

func (l *limited) Write(b []byte) (int, error) {
	if l.Len()+len(b) > l.most {
		return 0, fmt.Errorf("the answer is larger than %d bytes", l.most)
	}
	return l.Buffer.Write(b)
}

// ask attaches to pod with a header in the request, which only SPDY carries to the node: a websocket is translated by the API server.
func (p podStreams) ask(ctx context.Context, pod types.NamespacedName, header, value string, in io.Reader, out io.Writer) error {
	at, err := p.url(pod, "attach", &corev1.PodAttachOptions{Container: container, Stdin: in != nil, Stdout: true})
	if err != nil {
		return err
	}
	var refused error
	asking := rest.CopyConfig(p.config)
	asking.Wrap(func(rt http.RoundTripper) http.RoundTripper {
		return roundTripper(func(r *http.Request) (*http.Response, error) {
			r = r.Clone(r.Context())
			r.Header.Set(header, value)
			resp, err := rt.RoundTrip(r)
			if err == nil && resp.StatusCode != http.StatusSwitchingProtocols {
				refused = refusal(resp) // SPDY's client returns only its text
				return nil, refused
			}
			return resp, err
		})
	})
	to, err := remotecommand.NewSPDYExecutor(asking, http.MethodPost, at)
	if err != nil {
		return err
	}
	err = to.StreamWithContext(ctx, remotecommand.StreamOptions{Stdin: in, Stdout: out})
	if refused != nil {
		return refused
	}
	return err
}

// maxRefusal is the limit of an error in bytes.
const maxRefusal = 64 << 10

// refusal returns the error in an answer that does not upgrade the connection.
func refusal(resp *http.Response) error {
	defer resp.Body.Close()
	text, err := io.ReadAll(io.LimitReader(resp.Body, maxRefusal))
	if err != nil {
		return errdefs.Unavailablef("read the answer of the API server: %w", err)
	}
	status := &apierrors.StatusError{}
	if err := json.Unmarshal(text, &status.ErrStatus); err != nil || status.ErrStatus.Code == 0 {
		return errdefs.Unavailablef("the API server answered with status %d: %.200s", resp.StatusCode, text)
	}
	return status
}

// noWebSockets reports whether the API server cannot upgrade to a websocket. An error with a status of the API is another failure.
func noWebSockets(err error) bool {
	var status apierrors.APIStatus
	return !errors.As(cause(err), &status) && (httpstream.IsUpgradeFailure(err) || httpstream.IsHTTPSProxyError(err))
}

// cause returns the reason of a failed upgrade.
func cause(err error) error {
	if failed, ok := errors.AsType[*httpstream.UpgradeFailureError](err); ok && failed.Cause != nil {
		return failed.Cause
	}
	return err
}

const forwardProtocol = portforward.PortForwardProtocolV1Name

func (p podStreams) forward(ctx context.Context, pod types.NamespacedName, port uint16) (tunnel, error) {
	at, err := p.url(pod, "portforward", nil)
	if err != nil {
		return nil, err
	}
	bound := rest.CopyConfig(p.config)
	bound.Wrap(func(rt http.RoundTripper) http.RoundTripper { // the dialers know no context
		return roundTripper(func(r *http.Request) (*http.Response, error) { return rt.RoundTrip(r.WithContext(ctx)) })
	})
	ws, err := portforward.NewSPDYOverWebsocketDialerForStreaming(at, bound)
	if err != nil {
		return nil, fmt.Errorf("forward port %d of pod %s: %w", port, pod, err)
	}
	transport, upgrader, err := spdy.RoundTripperFor(bound)
	if err != nil {
		return nil, fmt.Errorf("forward port %d of pod %s: %w", port, pod, err)
	}
	old := spdy.NewDialerForStreaming(upgrader, &http.Client{Transport: transport}, http.MethodPost, at)
	conn, err := dial(ctx, portforward.NewFallbackDialerForStreaming(ws, old, noWebSockets))
	if err != nil {
		return nil, fmt.Errorf("forward port %d of pod %s: %w", port, pod, cause(err))
	}
	t, err := openTunnel(ctx, conn, port)
	if err != nil {
		_ = conn.Close()
		return nil, fmt.Errorf("forward port %d of pod %s: %w", port, pod, err)
	}
	return t, nil
}

type roundTripper func(*http.Request) (*http.Response, error)

func (f roundTripper) RoundTrip(r *http.Request) (*http.Response, error) { return f(r) }

// dial connects until ctx ends. A connection that comes later is closed.
func dial(ctx context.Context, d httpstream.Dialer) (httpstream.Connection, error) {
	type result struct {
		conn httpstream.Connection
		err  error
	}
	dialed := make(chan result)
	go func() { // ends with the dialer's own timeouts, at the latest
		conn, _, err := d.Dial(forwardProtocol)
		select {
		case dialed <- result{conn, err}:
		case <-ctx.Done():
			if err == nil {
				_ = conn.Close()
			}
		}
	}()
	select {
	case r := <-dialed:
		return r.conn, r.err
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

// forwarded is a tunnel of two streams of one connection.
type forwarded struct {
	httpstream.Stream // with the data
	conn              httpstream.Connection
	stop              func() bool
	report            chan error // of the node
}

// reportTimeout limits how long a node may take to report how a connection ended.
const reportTimeout = 5 * time.Second

func openTunnel(ctx context.Context, conn httpstream.Connection, port uint16) (*forwarded, error) {
	headers := http.Header{}
	headers.Set(corev1.PortHeader, strconv.Itoa(int(port)))
	headers.Set(corev1.PortForwardRequestIDHeader, "0")
	headers.Set(corev1.StreamType, corev1.StreamTypeError)
	failures, err := conn.CreateStream(headers)
	if err != nil {
		return nil, err
	}
	_ = failures.Close() // nothing is written to it
	headers.Set(corev1.StreamType, corev1.StreamTypeData)
	data, err := conn.CreateStream(headers)
	if err != nil {
		return nil, err
	}
	t := &forwarded{Stream: data, conn: conn, report: make(chan error, 1)}
	t.stop = context.AfterFunc(ctx, func() { _ = conn.Close() })
	go func() { // ends with the connection
		text, err := io.ReadAll(io.LimitReader(failures, 4<<10))
		if len(text) > 0 {
			err = errdefs.Unavailablef("%s", text)
		}
		t.report <- err
	}()
	return t, nil
}

// CloseWrite implements tunnel.
func (t *forwarded) CloseWrite() error { return t.Stream.Close() }

// Result implements tunnel.
func (t *forwarded) Result() error {
	limit := time.NewTimer(reportTimeout)
	defer limit.Stop()
	select {
	case err := <-t.report:
		return err
	case <-limit.C:
		return nil
	}
}

// Close implements tunnel.
func (t *forwarded) Close() error {
	t.stop()
	return t.conn.Close()
}
