package podprovider

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"net"
	"net/netip"
	"slices"
	"strconv"
	"sync/atomic"
	"time"

	corev1 "k8s.io/api/core/v1"

	"cocoonstack.io/cocoon/api/contract"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/guest"
	"cocoonstack.io/cocoon/internal/guest/console"
	"cocoonstack.io/cocoon/internal/kube/convert"
	"cocoonstack.io/cocoon/internal/kube/podstatus"
	"cocoonstack.io/cocoon/internal/reach"
	"cocoonstack.io/cocoon/internal/vm"
)

// door gives the kubelet's HTTP API access to the pods: exec, attach, logs and port-forward.
type door struct {
	pods    *index
	allowed []netip.Prefix   // networks to which ports of static pods may be forwarded
	serial  console.Consoles // of guests that boot their own system
}

// Exec runs a command in the pod's guest. Errors: NotFound (no such pod or container), FailedPrecondition (not running, or Windows without
// an agent).
func (d *door) Exec(ctx context.Context, namespace, pod, container string, e guest.Exec, s guest.Streams) (int, error) {
	st, rec, of, err := d.enter(namespace, pod, container, "exec")
	if err != nil {
		return 0, err
	}
	e.Container = of
	code, err := st.guests.Exec(ctx, string(rec.ID), e, s)
	if silent := errdefs.IsUnavailable(err) || errdefs.Is(err, errdefs.Unsupported); silent && rec.ImageType == vm.ImageDisk {
		if pod, rec, ip := st.podAndVM(); convert.Windows(pod) && rec != nil && !rec.AgentReady {
			return 0, windowsHelp(pod, ip)
		}
	}
	return code, err
}

// windowsHelp returns the error for exec in a Windows guest without an agent. The error says how to reach the guest instead.
func windowsHelp(pod *corev1.Pod, ip string) error {
	return errdefs.Preconditionf("the guest of pod %q is Windows and no qemu-guest-agent answers in it, so it does not support exec; log in by remote desktop (mstsc /v:%s), "+
		"or open a command prompt of SAC on its serial console (kubectl attach -it -n %s %s)", pod.Name, cmp.Or(ip, "ADDRESS"), pod.Namespace, pod.Name)
}

// Attach connects to the standard streams of a container. For a disk guest it connects to the serial console: with input from its
// last screen on, without input from the start of its log. Errors: as for Exec. Unsupported if the node cannot open consoles. Conflict if
// another program of the node uses the console.
func (d *door) Attach(ctx context.Context, namespace, pod, container string, a guest.Attach, s guest.Streams) error {
	st, rec, of, err := d.enter(namespace, pod, container, "attach")
	switch {
	case err != nil:
		return err
	case rec.ImageType != vm.ImageDisk:
		a.Container = of
		return st.guests.Attach(ctx, string(rec.ID), a, s)
	case s.Stdin != nil:
		open := func(ctx context.Context) (io.ReadWriteCloser, error) {
			keeper, ok := st.guests.(guest.ConsoleOpener)
			if !ok {
				return nil, errdefs.Unsupportedf("the node of pod %q opens no consoles; attach without -i", pod)
			}
			return keeper.Console(ctx, string(rec.ID))
		}
		return d.serial.Attach(ctx, rec.ID, console.Source{Open: open, Screen: func(ctx context.Context) []byte { return console.ScreenOf(ctx, st.guests, rec.ID) }}, s)
	}
	return st.guests.Logs(ctx, string(rec.ID), guest.LogOptions{Follow: true, Serial: true}, func(e guest.LogEntry) error {
		if s.Stdout == nil {
			return nil
		}
		_, err := s.Stdout.Write(e.Data)
		return err
	})
}

// Display connects to the screen of the pod's guest. Errors: as for Exec. Conflict with keep while somebody else is connected,
// Unsupported for a VM without graphics.
func (d *door) Display(ctx context.Context, namespace, pod, container string, keep bool) (io.ReadWriteCloser, error) {
	screens, id, err := d.screens(namespace, pod, container)
	if err != nil {
		return nil, err
	}
	return screens.Display(ctx, id, keep)
}

// Screenshot returns what the screen of the pod's guest shows, as a PNG. Errors: as for Display.
func (d *door) Screenshot(ctx context.Context, namespace, pod, container string, wake bool) ([]byte, error) {
	screens, id, err := d.screens(namespace, pod, container)
	if err != nil {
		return nil, err
	}
	return screens.Screenshot(ctx, id, wake)
}

// Describe returns what the pod's guest tells of itself. Errors: as for Exec. Unsupported for a guest whose agent does not tell it.
func (d *door) Describe(ctx context.Context, namespace, pod, container string) (guest.Description, error) {
	st, rec, _, err := d.enter(namespace, pod, container, "a description")
	if err != nil {
		return guest.Description{}, err
	}
	of, ok := st.guests.(guest.Describes)
	if !ok {
		return guest.Description{}, errdefs.Unsupportedf("the node of pod %q describes no guests", pod)
	}
	return of.Describe(ctx, string(rec.ID))
}

// ping asks the agent of the guest for something, whatever it answers.
func (s *podState) ping(ctx context.Context, ref string) error {
	describer, ok := s.guests.(guest.Describes)
	if !ok {
		return errdefs.Unsupportedf("this node does not ask agents of guests")
	}
	_, err := describer.Describe(ctx, ref)
	return err
}

// setLogins sets passwords and SSH keys in the guest.
func (s *podState) setLogins(ctx context.Context, ref string, l guest.Logins) error {
	of, ok := s.guests.(guest.LoginAccess)
	if !ok {
		return errdefs.Unsupportedf("this node sets no passwords and SSH keys in guests")
	}
	return of.SetLogins(ctx, ref, l)
}

// Freeze freezes the file systems of the pod's guest; see guest.Freezes. Errors: as for Describe.
func (d *door) Freeze(ctx context.Context, namespace, pod, container string, most time.Duration) error {
	of, id, err := d.freezes(namespace, pod, container)
	if err != nil {
		return err
	}
	return of.Freeze(ctx, id, most)
}

// Thaw ends a freeze.
func (d *door) Thaw(ctx context.Context, namespace, pod, container string) (held bool, err error) {
	of, id, err := d.freezes(namespace, pod, container)
	if err != nil {
		return false, err
	}
	return of.Thaw(ctx, id)
}

func (d *door) freezes(namespace, pod, container string) (guest.Freezes, string, error) {
	st, rec, _, err := d.enter(namespace, pod, container, "a freeze")
	if err != nil {
		return nil, "", err
	}
	of, ok := st.guests.(guest.Freezes)
	if !ok {
		return nil, "", errdefs.Unsupportedf("the node of pod %q freezes no guests", pod)
	}
	return of, string(rec.ID), nil
}

func (d *door) screens(namespace, pod, container string) (guest.Displays, string, error) {
	st, rec, _, err := d.enter(namespace, pod, container, "a screen")
	if err != nil {
		return nil, "", err
	}
	screens, err := displaysOf(st.guests)
	return screens, string(rec.ID), err
}

// enter returns the pod's state, the VM in which the container runs, and the name of the container in the VM. The name is ""
// if the container is alone in its VM.
func (d *door) enter(namespace, pod, container, verb string) (*podState, *vm.Record, string, error) {
	st, f, err := d.locate(namespace, pod, container)
	if err != nil {
		return nil, nil, "", err
	}
	rec := f.rec
	if st.static {
		return nil, nil, "", unserved(f.pod, verb)
	}
	if !podstatus.Up(rec) || len(rec.Containers) > 0 && rec.Container(container).Status.State != vm.ContainerRunning {
		return nil, nil, "", errdefs.Preconditionf("container %q in pod %q is not running", container, pod)
	}
	if len(rec.Containers) == 0 {
		container = ""
	}
	return st, rec, container, nil
}

// Logs streams the output of a container's process. Errors: as for Exec. FailedPrecondition while the pod has no VM yet.
func (d *door) Logs(ctx context.Context, namespace, pod, container string, o guest.LogOptions, fn func(guest.LogEntry) error) error {
	st, f, err := d.locate(namespace, pod, container)
	if err != nil {
		return err
	}
	rec := f.rec
	switch {
	case st.static:
		return unserved(f.pod, "log")
	case rec == nil || rec.StartedAt.IsZero() || len(rec.Containers) > 0 && rec.Container(container).Status.StartedAt.IsZero():
		return errdefs.Preconditionf("container %q in pod %q is waiting to start: %s", container, pod, f.whyWaiting())
	case o.Previous && restartsOf(rec, container) == 0:
		return errdefs.Preconditionf("previous terminated container %q in pod %q not found", container, pod)
	}
	if len(rec.Containers) > 0 {
		o.Container = container
	}
	o.Serial = rec.ImageType == vm.ImageDisk
	return st.guests.Logs(ctx, string(rec.ID), o, fn)
}

// Forward copies data between stream and a TCP port of the pod's guest until the guest closes its side. It connects from
// inside the guest, so that programs on the guest's loopback can be reached, as in any pod. If the guest has no agent, or an
// older agent without this ability, Forward connects to the guest's address.
//
// Errors: NotFound. FailedPrecondition while the pod has no address, and for static pods whose machine is in no network that
// the operator allows. Unavailable if the connection fails.
func (d *door) Forward(ctx context.Context, namespace, pod string, port int, stream io.ReadWriter) error {
	st := d.pods.find(namespace, pod)
	if st == nil {
		return errdefs.NotFoundf("pod %q not found on this node", pod)
	}
	if rec := st.look().rec; !st.static && podstatus.Up(rec) && rec.ImageType == vm.ImageOCI && rec.AgentReady {
		in := &readRecorder{Reader: stream}
		err := st.guests.Forward(ctx, string(rec.ID), port, guest.Streams{Stdin: in, Stdout: stream})
		if !errdefs.Is(err, errdefs.Unsupported) || in.read.Load() { // input that was already read cannot be sent again
			return err
		}
	}
	_, _, ip := st.podAndVM()
	if ip == "" {
		return errdefs.Preconditionf("pod %q has no address yet", pod)
	}
	var dialer net.Dialer
	if st.static {
		if err := d.forwardable(pod, ip); err != nil {
			return err
		}
		dialer.Control = reach.Fence
	}
	dial, cancel := context.WithTimeout(ctx, dialLimit)
	defer cancel()
	c, err := dialer.DialContext(dial, "tcp", net.JoinHostPort(ip, strconv.Itoa(port)))
	if err != nil {
		return errdefs.Unavailablef("connect to port %d of pod %q: %w; the program in the guest must listen on the guest's address, not only on loopback", port, pod, err)
	}
	return reach.Join(ctx, c, stream)
}

// readRecorder is a reader that records whether data was read from it.
type readRecorder struct {
	io.Reader
	read atomic.Bool
}

func (n *readRecorder) Read(p []byte) (int, error) {
	n.read.Store(true)
	return n.Reader.Read(p)
}

// dialLimit is the timeout for a connection to the guest's address.
const dialLimit = 10 * time.Second

func (d *door) locate(namespace, pod, container string) (*podState, facts, error) {
	st := d.pods.find(namespace, pod)
	if st == nil {
		return nil, facts{}, errdefs.NotFoundf("pod %q not found on this node", pod)
	}
	f := st.look()
	rec := f.rec
	if slices.ContainsFunc(f.pod.Spec.EphemeralContainers, func(c corev1.EphemeralContainer) bool { return c.Name == container }) {
		switch {
		case !podstatus.TakesEphemeral(f.pod, rec):
			return nil, facts{}, errdefs.Preconditionf("container %q in pod %q does not run: %s", container, pod, podstatus.NoEphemeral)
		case podstatus.EphemeralOf(rec, container) == nil:
			return nil, facts{}, errdefs.Preconditionf("container %q in pod %q is waiting to start: %s", container, pod, f.whyEphemeral(container))
		}
		return st, f, nil
	}
	if !hasContainer(f.pod, container) || rec != nil && len(rec.Containers) > 0 && rec.Container(container) == nil {
		return nil, facts{}, errdefs.NotFoundf("container %q not found in pod %q", container, pod)
	}
	return st, f, nil
}

func hasContainer(pod *corev1.Pod, name string) bool {
	all := slices.Concat(pod.Spec.InitContainers, pod.Spec.Containers)
	return slices.ContainsFunc(all, func(c corev1.Container) bool { return c.Name == name })
}

// restartsOf returns how often a container was restarted.
func restartsOf(rec *vm.Record, container string) int {
	if c := rec.Container(container); c != nil {
		return c.Status.Restarts
	}
	return rec.Restarts
}

// forwardable returns an error if ports of a static pod's machine may not be forwarded. The creator of the pod chooses the
// address, and the node can reach more networks than a pod. So the operator lists the allowed networks.
func (d *door) forwardable(pod, ip string) error {
	addr, err := netip.ParseAddr(ip)
	if err != nil {
		return errdefs.Preconditionf("the machine of pod %q has the address %q, which is not an IP address", pod, ip)
	}
	if err := reach.Forbidden(addr); err != nil {
		return err
	}
	if slices.ContainsFunc(d.allowed, func(n netip.Prefix) bool { return n.Contains(addr.Unmap()) }) {
		return nil
	}
	return errdefs.Preconditionf("pod %q represents a machine that this node does not run, and ports of %s are not forwarded; "+
		"the node's operator allows networks in VK_STATIC_FORWARD_NETWORKS", pod, ip)
}

// unserved returns the error for exec and logs of a static pod. The error says how to reach the machine instead.
func unserved(pod *corev1.Pod, what string) error {
	there := runtimeOf(pod)
	ask, _ := contract.ParseVMSpec(pod.Annotations)
	at := there.IP
	how := contract.ResolveConnType(ask, there)
	if how == contract.ConnVNC && there.VNCPort != 0 {
		at = fmt.Sprintf("%s, port %d", at, there.VNCPort)
	}
	return errdefs.Preconditionf("pod %q represents a machine that this node does not run, so it does not support %s; reach it by %s at %s", pod.Name, what, how, at)
}
