package aggregated

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strconv"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/types"
	v1 "kubevirt.io/api/core/v1"

	"cocoonstack.io/cocoon/internal/errdefs"
)

// drainTimeout is how long a connection to a guest stays after its client has left, so that the guest gets what was sent.
const drainTimeout = 3 * time.Second

// stream counts a stream and gives it a context that ends with the server. An upgraded connection has no context of its own.
// Errors: 429 if too many streams are open.
func (s *Server) stream(t target) (ctx context.Context, done func(), err error) {
	select {
	case s.tokens <- struct{}{}:
	default:
		return nil, nil, apierrors.NewTooManyRequests(fmt.Sprintf("%d consoles, screens and forwarded connections are open; close some", maxStreams), 1)
	}
	s.streams.Add(1)
	open := s.opts.Metrics.streams.WithLabelValues(t.Subresource)
	open.Inc()
	ctx, cancel := context.WithCancel(s.life)
	return ctx, func() { cancel(); open.Dec(); s.streams.Done(); <-s.tokens }, nil
}

// console connects a websocket to the serial console of an instance.
func (s *Server) console(w http.ResponseWriter, r *http.Request, t target) error {
	limited, cancel := context.WithTimeout(r.Context(), requestTimeout)
	defer cancel()
	vmi, err := s.instance(limited, t)
	if err != nil {
		return err
	}
	switch serial := vmi.Spec.Domain.Devices.AutoattachSerialConsole; {
	case serial != nil && !*serial:
		return apierrors.NewBadRequest("No serial consoles are present.")
	case vmi.Status.Phase == v1.Failed:
		return conflict(t, "VMI is in failed status")
	case !vmi.IsRunning():
		return apierrors.NewBadRequest("VMI is not running") // clients try again
	}
	if err := upgradable(r); err != nil {
		return err
	}
	pod, err := s.runningPod(limited, vmi)
	if err != nil {
		return err
	}
	if pod == nil {
		return apierrors.NewBadRequest("VMI is not running: it has no pod that runs")
	}
	ctx, done, err := s.stream(t)
	if err != nil {
		return err
	}
	defer done()
	return s.attach(ctx, w, r, "the console of pod "+pod.String(), func(ctx context.Context, in io.Reader, out io.Writer) error { //nolint:contextcheck // the request does not end a hijacked connection; the server does
		return s.guests.attach(ctx, *pod, in, out)
	})
}

// attach connects to what is called what, then upgrades the client's connection and copies both ways. connect reads its input only once it
// is connected.
func (s *Server) attach(ctx context.Context, w http.ResponseWriter, r *http.Request, what string, connect func(ctx context.Context, in io.Reader, out io.Writer) error) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	in, typed := io.Pipe()
	shown, out := io.Pipe()
	connected := make(chan struct{})
	ended := make(chan error, 1)
	go func() {
		err := connect(ctx, &firstRead{Reader: in, begun: sync.OnceFunc(func() { close(connected) })}, out)
		in.Close()
		out.Close() // the client gets what is left
		ended <- err
	}()
	defer func() { // whatever happens: nothing of it outlives the request
		cancel()
		typed.Close()
		shown.Close()
	}()
	limit := time.NewTimer(connectTimeout)
	defer limit.Stop()
	select {
	case err := <-ended:
		if err == nil {
			err = errdefs.Unavailablef("%s has ended", what)
		}
		return err
	case <-connected:
	case <-limit.C:
		return errdefs.Unavailablef("its node has not opened %s in %s", what, connectTimeout)
	case <-r.Context().Done():
		return r.Context().Err()
	}
	upgrade(ctx, w, r, func(k socket) error {
		var copies sync.WaitGroup
		copies.Go(func() {
			_, _ = io.Copy(typed, k.Conn)
			typed.Close()
			shown.CloseWithError(errLeft)
		})
		_, left := io.Copy(k.Conn, shown)
		if left != nil {
			cancel()
		}
		err := <-ended
		k.cutReads()
		copies.Wait()
		if left != nil {
			err = nil
		}
		return err
	})
	return nil
}

// errLeft is the end of output that nobody reads any more.
var errLeft = errors.New("the client has left")

// firstRead calls begun before the first read.
type firstRead struct {
	io.Reader
	begun func()
}

func (f *firstRead) Read(p []byte) (int, error) {
	f.begun()
	return f.Reader.Read(p)
}

// portForward connects a websocket to a TCP port of the guest.
func (s *Server) portForward(w http.ResponseWriter, r *http.Request, t target) error {
	limited, cancel := context.WithTimeout(r.Context(), requestTimeout)
	defer cancel()
	port, err := portOf(t)
	if err != nil {
		return err
	}
	vmi, err := s.forwardable(limited, t)
	if err != nil {
		return err
	}
	if err := upgradable(r); err != nil {
		return err
	}
	pod, err := s.runningPod(limited, vmi)
	if err != nil {
		return err
	}
	if pod == nil {
		return conflict(t, "VMI is not running: it has no pod that runs")
	}
	ctx, done, err := s.stream(t)
	if err != nil {
		return err
	}
	defer done()
	ctx, end := context.WithCancel(ctx)
	defer end()
	limit := time.AfterFunc(connectTimeout, end)
	detach := context.AfterFunc(r.Context(), end)
	c, err := s.guests.forward(ctx, *pod, port) //nolint:contextcheck // the request does not end a hijacked connection; the server does
	detach()                                    // the request may end with the upgrade, and its connection goes on
	if !limit.Stop() && err == nil {
		c.Close()
		err = context.DeadlineExceeded
	}
	if err != nil {
		return err
	}
	defer c.Close()
	upgrade(ctx, w, r, func(k socket) error { return pipe(end, k, c) }) //nolint:contextcheck // as above
	return nil
}

// pipe copies both ways until the guest has closed its side, or the client has left.
func pipe(end func(), k socket, c tunnel) error {
	var copies sync.WaitGroup
	copies.Go(func() {
		_, _ = io.Copy(c, k.Conn)
		_ = c.CloseWrite()
		// A websocket has no half-closed state: the client reads nothing any more. The guest may still read what was sent.
		time.AfterFunc(drainTimeout, end)
	})
	_, err := io.Copy(k.Conn, c)
	if err == nil {
		err = c.Result()
	}
	k.cutReads()
	copies.Wait()
	return err
}

// portOf returns the port of the path. Errors: 400, 404.
func portOf(t target) (uint16, error) {
	if len(t.rest) < 1 || len(t.rest) > 2 {
		return 0, apierrors.NewBadRequest("the path must end in portforward/PORT or portforward/PORT/PROTOCOL")
	}
	port, err := strconv.ParseUint(t.rest[0], 10, 16)
	if err != nil || port == 0 {
		return 0, apierrors.NewBadRequest(fmt.Sprintf("port %q must be a number from 1 to 65535", t.rest[0]))
	}
	if len(t.rest) == 2 && t.rest[1] != "tcp" {
		return 0, apierrors.NewBadRequest(fmt.Sprintf("protocol %q is not forwarded, only tcp: a pod's ports are reached over connections", t.rest[1]))
	}
	return uint16(port), nil
}

// forwardable returns the instance whose port is asked for. Errors: 404, 409.
func (s *Server) forwardable(ctx context.Context, t target) (*v1.VirtualMachineInstance, error) {
	var vmi *v1.VirtualMachineInstance
	var err error
	if t.Resource == machines {
		if _, vmi, err = s.pair(ctx, t); err == nil && vmi == nil {
			err = conflict(t, "VM is not running")
		}
	} else {
		vmi, err = s.instance(ctx, t)
	}
	if err != nil {
		return nil, err
	}
	for _, c := range vmi.Status.Conditions {
		if c.Type == v1.VirtualMachineInstancePaused && c.Status == corev1.ConditionTrue {
			return nil, conflict(t, "VMI is paused")
		}
	}
	if !vmi.IsRunning() {
		return nil, conflict(t, "VMI is not running")
	}
	return vmi, nil
}

// runningPod returns the pod that runs the instance, nil if there is none.
func (s *Server) runningPod(ctx context.Context, vmi *v1.VirtualMachineInstance) (*types.NamespacedName, error) {
	pods, err := s.podsOf(ctx, vmi)
	if err != nil {
		return nil, err
	}
	for _, pod := range pods {
		if pod.Status.Phase == corev1.PodRunning {
			return &types.NamespacedName{Namespace: pod.Namespace, Name: pod.Name}, nil
		}
	}
	return nil, nil //nolint:nilnil // a pod that is not there is no error
}
