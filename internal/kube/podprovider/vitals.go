package podprovider

import (
	"context"
	"strings"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"

	"cocoonstack.io/cocoon/internal/guest"
	"cocoonstack.io/cocoon/internal/kube/convert"
	"cocoonstack.io/cocoon/internal/kube/podstatus"
	"cocoonstack.io/cocoon/internal/kube/probe"
	"cocoonstack.io/cocoon/internal/vm"
)

// This file determines the health of a pod's containers with the probes of the pod's spec.

// health is the health of one container in one run of it.
type health struct {
	run run
	podstatus.Health
}

// The kinds of probes, as Events and metrics name them.
const (
	kindStartup   = "Startup"
	kindLiveness  = "Liveness"
	kindReadiness = "Readiness"
)

const (
	probeTries = 3        // attempts when a probe cannot be made
	maxOutput  = 10 << 10 // bytes of a command's output that are kept
)

// watchContainer starts the probes of the container that x monitors, whose process began at began.
func (w *worker) watchContainer(v *guestMonitor, x *containerMonitor, began time.Time) {
	c := x.container
	if h := w.healthOf(c.Name); !h.Started {
		w.watchBy(v, x, kindStartup, c.StartupProbe, began)
		return
	}
	w.watchBy(v, x, kindLiveness, c.LivenessProbe, began)
	w.watchBy(v, x, kindReadiness, c.ReadinessProbe, began)
}

func (w *worker) watchBy(v *guestMonitor, x *containerMonitor, kind string, p *corev1.Probe, began time.Time) {
	if p == nil {
		return
	}
	// If the host's clock went back, a guest may seem to begin in the future.
	delay := time.Duration(p.InitialDelaySeconds) * time.Second
	delay = min(delay, time.Until(began.Add(delay)))
	first := kind == kindReadiness && delay <= 0 && v.expect() // its verdict is worth waiting for
	judge := &probe.Judge{Successes: int(p.SuccessThreshold), Failures: max(int(p.FailureThreshold), 1)}
	period := time.Duration(max(p.PeriodSeconds, 1)) * time.Second
	x.add(w.p.probes.Start(delay, func(ctx context.Context) (time.Duration, bool) {
		result, why := w.probeContainer(ctx, x.container, kind, p)
		if ctx.Err() != nil {
			return 0, false
		}
		verdict := judge.Take(result)
		more := w.applyVerdict(x, kind, p, verdict, why)
		if kind == kindStartup && verdict == probe.Success {
			w.watchContainer(v, x, began)
		}
		if first {
			first = false
			v.seen()
		}
		return period, more
	}))
}

// probeContainer makes one probe and returns what went wrong. A container that cannot be probed counts as neither healthy
// nor unhealthy.
func (w *worker) probeContainer(ctx context.Context, c *corev1.Container, kind string, p *corev1.Probe) (probe.Result, string) {
	target, ready := w.aim(c)
	if !ready {
		return probe.Unknown, ""
	}
	if p.Exec != nil {
		known := p.DeepCopy()
		known.Exec.Command = convert.ProbeCommand(c, known.Exec.Command)
		p = known
	}
	var result probe.Result
	var why string
	var err error
	for range probeTries {
		if result, why, err = target.Probe(ctx, p); err == nil || ctx.Err() != nil {
			break
		}
	}
	if ctx.Err() != nil {
		return probe.Unknown, ""
	}
	why = strings.TrimSpace(strings.ToValidUTF8(why, "�"))
	switch result {
	case probe.Unknown:
		w.event(corev1.EventTypeWarning, eventUnhealthy, "%s probe errored and resulted in unknown state: %v", kind, err)
	case probe.Warning:
		w.event(corev1.EventTypeWarning, eventProbeWarning, "%s probe warning: %s", kind, why)
	case probe.Failure:
		w.event(corev1.EventTypeWarning, eventUnhealthy, "%s probe failed: %s", kind, why)
	case probe.Success:
	}
	w.p.Metrics.probed(kind, result)
	return result, why
}

// applyVerdict applies a verdict to the container of x, and reports whether the probe continues.
func (w *worker) applyVerdict(x *containerMonitor, kind string, p *corev1.Probe, verdict probe.Result, why string) bool {
	if verdict == probe.Unknown {
		return true
	}
	ok := verdict == probe.Success
	w.mu.Lock()
	defer w.mu.Unlock()
	if !w.on(x) {
		return false
	}
	c := x.container
	h := w.health[c.Name]
	switch {
	case kind == kindReadiness:
		text := ""
		if !ok {
			text = "readiness probe failed: " + why
		}
		if h.Ready == ok && (h.Why == "") == (text == "") {
			return true // a new wording of the same is not worth a write
		}
		h.Ready, h.Why = ok, text
		w.health[c.Name] = h
		w.poke()
		return true
	case !ok:
		message := "Container " + c.Name + " failed " + strings.ToLower(kind) + " probe"
		if w.pod.Spec.RestartPolicy != corev1.RestartPolicyNever || convert.IsSidecar(c) {
			message += ", will be restarted"
		}
		w.requestKill(x, killRequest{message: message, grace: p.TerminationGracePeriodSeconds})
		return false
	case kind == kindStartup:
		h.Started = true
		w.health[c.Name] = h
		w.poke()
		return false
	}
	return true
}

// aim returns the target for probes of c; false when its guest cannot be probed now.
func (w *worker) aim(c *corev1.Container) (probe.Target, bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	several := podstatus.Up(w.rec) && len(w.rec.Containers) > 0
	if r := w.rec; !podstatus.Up(r) || several && (r.Container(c.Name) == nil || r.Container(c.Name).Status.State != vm.ContainerRunning) {
		return probe.Target{}, false
	}
	in := ""
	if several {
		in = c.Name
	}
	return probe.Target{Container: c, IP: w.address(), Exec: w.commander(string(w.rec.ID), in)}, true
}

// commander returns a function that runs commands in the guest, in the same way as the process of container runs ("" for
// the only one).
func (w *worker) commander(id, container string) probe.Exec {
	return func(ctx context.Context, command []string) (string, int, error) {
		var out output
		code, err := w.guests.Exec(ctx, id, guest.Exec{Container: container, Command: command}, guest.Streams{Stdout: &out, Stderr: &out})
		return out.String(), code, err
	}
}

// output keeps the beginning of both output streams of a command.
type output struct {
	mu   sync.Mutex
	text []byte
}

func (o *output) Write(p []byte) (int, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.text = append(o.text, p[:min(len(p), maxOutput-len(o.text))]...)
	return len(p), nil
}

func (o *output) String() string {
	o.mu.Lock()
	defer o.mu.Unlock()
	return string(o.text)
}

// healthOf returns the health of the named container.
func (w *worker) healthOf(name string) podstatus.Health {
	w.mu.Lock()
	defer w.mu.Unlock()
	if h, ok := w.health[name]; ok {
		return h.Health
	}
	return podstatus.Well
}
