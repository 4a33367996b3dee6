package podhealth

import (
	"context"
	"strings"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"

	"cocoonstack.io/cocoon/api/contract"
	"cocoonstack.io/cocoon/internal/guest"
	"cocoonstack.io/cocoon/internal/kube/convert"
	"cocoonstack.io/cocoon/internal/kube/podstatus"
	"cocoonstack.io/cocoon/internal/kube/probe"
	"cocoonstack.io/cocoon/internal/probing"
	"cocoonstack.io/cocoon/internal/vm"
)

// This file determines the health of a pod's containers with the probes of the pod's spec.

// The reasons of Events. They are the kubelet's.
const (
	eventUnhealthy    = "Unhealthy"
	eventProbeWarning = "ProbeWarning"
	eventKilling      = "Killing"
	eventFailedKill   = "FailedKillPod"
	eventPostStart    = "FailedPostStartHook"
	eventPreStop      = "FailedPreStopHook"
)

// The kinds of probes, as Events and metrics name them.
const (
	kindStartup   = "Startup"
	kindLiveness  = "Liveness"
	kindReadiness = "Readiness"
)

const (
	probeTries = 3        // attempts when a probe cannot be made
	maxOutput  = 10 << 10 // maximum bytes of a command's output
)

// watchContainer starts the probes of the container that x monitors. began is the start of the container's process.
func (h *Health) watchContainer(v *guestMonitor, x *containerMonitor, began time.Time) {
	c := x.container
	if !h.of(c.Name).Started {
		h.watchBy(v, x, kindStartup, c.StartupProbe, began)
		return
	}
	h.watchBy(v, x, kindLiveness, c.LivenessProbe, began)
	h.watchBy(v, x, kindReadiness, c.ReadinessProbe, began)
}

func (h *Health) watchBy(v *guestMonitor, x *containerMonitor, kind string, p *corev1.Probe, began time.Time) {
	if p == nil {
		return
	}
	// began may be in the future, if the host's clock was set back.
	delay := time.Duration(p.InitialDelaySeconds) * time.Second
	delay = min(delay, time.Until(began.Add(delay)))
	first := kind == kindReadiness && delay <= 0 && v.expect() // Watch waits for its first verdict
	judge := &probing.Judge{Successes: int(p.SuccessThreshold), Failures: max(int(p.FailureThreshold), 1)}
	period := time.Duration(max(p.PeriodSeconds, 1)) * time.Second
	x.add(h.cfg.Scheduler.Start(delay, func(ctx context.Context) (time.Duration, bool) {
		result, why := h.probeContainer(ctx, x.container, kind, p)
		if ctx.Err() != nil {
			return 0, false
		}
		verdict := judge.Take(result)
		more := h.applyVerdict(x, kind, p, verdict, why)
		if kind == kindStartup && verdict == probing.Success {
			h.watchContainer(v, x, began)
		}
		if first {
			first = false
			v.seen()
		}
		return period, more
	}))
}

// probeContainer runs one probe and returns the result and its reason. The result is Unknown if the container cannot be
// probed.
func (h *Health) probeContainer(ctx context.Context, c *corev1.Container, kind string, p *corev1.Probe) (probing.Result, string) {
	target, ready := h.target(c)
	if !ready {
		return probing.Unknown, ""
	}
	if p.Exec != nil {
		known := p.DeepCopy()
		known.Exec.Command = convert.ProbeCommand(c, known.Exec.Command)
		p = known
	}
	var result probing.Result
	var why string
	var err error
	for range probeTries {
		if result, why, err = target.Probe(ctx, p); err == nil || ctx.Err() != nil {
			break
		}
	}
	if ctx.Err() != nil {
		return probing.Unknown, ""
	}
	why = strings.TrimSpace(strings.ToValidUTF8(why, "�"))
	switch result {
	case probing.Unknown:
		h.owner.Event(corev1.EventTypeWarning, eventUnhealthy, "%s probe errored and resulted in unknown state: %v", kind, err)
	case probing.Warning:
		h.owner.Event(corev1.EventTypeWarning, eventProbeWarning, "%s probe warning: %s", kind, why)
	case probing.Failure:
		h.owner.Event(corev1.EventTypeWarning, eventUnhealthy, "%s probe failed: %s", kind, why)
	case probing.Success:
	}
	h.cfg.Count(kind, result)
	return result, why
}

// applyVerdict applies a verdict to the health of x's container, and reports whether the probe continues.
func (h *Health) applyVerdict(x *containerMonitor, kind string, p *corev1.Probe, verdict probing.Result, why string) bool {
	if verdict == probing.Unknown {
		return true
	}
	ok, more := verdict == probing.Success, true
	on := h.update(x, func(s *podstatus.Health) (news bool) {
		switch {
		case kind == kindReadiness:
			text := ""
			if !ok {
				text = "readiness probe failed: " + why
			}
			news = s.Ready != ok || (s.Why == "") != (text == "") // another reason for the same state is not worth a write
			if news {
				s.Ready, s.Why = ok, text
			}
			return news
		case !ok:
			more = false
			message := "Container " + x.container.Name + " failed " + strings.ToLower(kind) + " probe"
			if x.restarts {
				message += ", will be restarted"
			}
			return h.requestKill(x, StopRequest{message: message, grace: p.TerminationGracePeriodSeconds})
		case kind == kindStartup:
			s.Started, more = true, false
			return true
		}
		return false
	})
	return on && more
}

// target returns the target of probes and hooks of c, or false if c does not run now.
func (h *Health) target(c *corev1.Container) (probe.Target, bool) {
	_, rec, ip := h.owner.Look()
	several := podstatus.Up(rec) && len(rec.Containers) > 0
	if !podstatus.Up(rec) || several && (rec.Container(c.Name) == nil || rec.Container(c.Name).Status.State != vm.ContainerRunning) {
		return probe.Target{}, false
	}
	in := ""
	if several {
		in = c.Name
	}
	return probe.Target{Container: c, IP: ip, Exec: h.commander(string(rec.ID), in)}, true
}

// commander returns a function that runs commands in the named container of the guest. "" is the only container of the VM.
func (h *Health) commander(id, container string) probe.Exec {
	return func(ctx context.Context, command []string) (string, int, error) {
		if len(command) == 1 && command[0] == contract.CommandPing {
			err := h.owner.Ping(ctx, id)
			if err == nil || ctx.Err() != nil {
				return "", 0, err
			}
			return err.Error(), 1, nil
		}
		var out output
		code, err := h.owner.Exec(ctx, id, guest.Exec{Container: container, Command: command}, guest.Streams{Stdout: &out, Stderr: &out})
		return out.String(), code, err
	}
}

// output keeps the first maxOutput bytes of stdout and stderr together.
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
