package podprovider

import (
	"context"
	"strings"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"

	"cocoonstack.io/cocoon/internal/guest"
	"cocoonstack.io/cocoon/internal/kube/convert"
	"cocoonstack.io/cocoon/internal/kube/probe"
	"cocoonstack.io/cocoon/internal/vm"
)

// This file is how the containers of a pod do, as the probes of its spec find out.

// health is what hooks and probes say of one container in its present run.
type health struct {
	run      run
	starting bool   // its postStart hook has not ended well yet
	started  bool   // its startup probe has succeeded, or it has none
	ready    bool   // so its readiness probe
	why      string // it is not
}

// well is the health of a container that nobody asked to be watched.
var well = health{started: true, ready: true}

// The kinds of probes, in the words of Events and metrics.
const (
	kindStartup   = "Startup"
	kindLiveness  = "Liveness"
	kindReadiness = "Readiness"
)

const (
	probeTries = 3        // of a probe that cannot be made
	maxOutput  = 10 << 10 // bytes of a command's output that are kept
)

// watchContainer begins the probes of the container that x is over, whose process began then.
func (w *worker) watchContainer(v *guestMonitor, x *containerMonitor, began time.Time) {
	c := x.container
	if h := w.healthOf(c.Name); !h.started {
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
	// A host whose clock went back has guests that will have begun tomorrow.
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

// probeContainer makes one probe and tells what went wrong with it. What cannot be probed is neither well nor ill.
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

// applyVerdict notes what a verdict means for the container of x, and reports whether the probe goes on.
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
		if h.ready == ok && (h.why == "") == (text == "") {
			return true // a new wording of the same is not worth a write
		}
		h.ready, h.why = ok, text
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
		h.started = true
		w.health[c.Name] = h
		w.poke()
		return false
	}
	return true
}

// aim is what is needed to probe c, false when its guest is not there to be probed.
func (w *worker) aim(c *corev1.Container) (probe.Target, bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	several := up(w.rec) && len(w.rec.Containers) > 0
	if r := w.rec; !up(r) || several && (r.Container(c.Name) == nil || r.Container(c.Name).Status.State != vm.ContainerRunning) {
		return probe.Target{}, false
	}
	in := ""
	if several {
		in = c.Name
	}
	return probe.Target{Container: c, IP: w.address(), Exec: w.commander(string(w.rec.ID), in)}, true
}

// commander runs commands in the guest as the process of container, "" for the only one, runs.
func (w *worker) commander(id, container string) probe.Exec {
	return func(ctx context.Context, command []string) (string, int, error) {
		var out output
		code, err := w.vms.Exec(ctx, id, guest.Exec{Container: container, Command: command}, guest.Streams{Stdout: &out, Stderr: &out})
		return out.String(), code, err
	}
}

// output keeps the beginning of what both streams of a command say.
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

// healthOf is how the container of that name does.
func (w *worker) healthOf(name string) health {
	w.mu.Lock()
	defer w.mu.Unlock()
	if h, ok := w.health[name]; ok {
		return h
	}
	return well
}
