package reconcile

import (
	"bytes"
	"cmp"
	"context"
	"fmt"
	"net"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"time"

	capsulev1 "cocoonstack.io/cocoon/api/capsule/v1"
	"cocoonstack.io/cocoon/internal/appliance/workload"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/guest"
	"cocoonstack.io/cocoon/internal/probing"
)

// health is what the probes of one running instance have found.
type health struct {
	instance string // id
	hash     string // of the probes
	tasks    []*probing.Task

	mu      sync.Mutex
	started bool // the startup probe has succeeded, or there is none
	ready   bool
	unwell  string
}

func (h *health) verdict() (ready bool, unwell string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.started && h.ready, h.unwell
}

// probe begins the probes of an instance that runs, and ends those of another one. Precondition: it is called by the worker only.
func (w *worker) probe(row workload.Row, i *Instance, d Driver) {
	runs := i != nil && i.State == Running
	hash := ""
	if runs {
		hash = probeHash(row.Workload)
	}
	if w.health != nil && runs && w.health.instance == i.ID && w.health.hash == hash {
		return
	}
	if w.health != nil {
		for _, t := range w.health.tasks {
			t.Stop()
		}
		w.health = nil
	}
	if hash == "" {
		return
	}
	startup, live, ready := row.Workload.GetStartupProbe(), row.Workload.GetLivenessProbe(), row.Workload.GetReadinessProbe()
	h := &health{instance: i.ID, hash: hash, started: startup == nil, ready: ready == nil}
	t := target{name: w.name, driver: d, guest: probing.Guest{IP: address(row.Workload, i)}}
	h.begin(w, startup, t, func(probing.Result) bool { return true }, func(ok bool, why string) {
		h.started = h.started || ok
		if !ok {
			h.unwell = "the startup probe failed: " + why
		}
	})
	h.begin(w, live, t, h.hasStarted, func(ok bool, why string) {
		if !ok {
			h.unwell = "the liveness probe failed: " + why
		}
	})
	h.begin(w, ready, t, h.hasStarted, func(ok bool, _ string) { h.ready = ok })
	w.health = h
}

func (h *health) hasStarted(probing.Result) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.started
}

// begin schedules a probe. counts says whether a result counts yet. found is called, with mu held, for each verdict.
func (h *health) begin(w *worker, p *capsulev1.Probe, t target, counts func(probing.Result) bool, found func(ok bool, why string)) {
	if p == nil {
		return
	}
	judge := probing.Judge{Successes: int(p.GetSuccessThreshold()), Failures: int(cmp.Or(p.GetFailureThreshold(), 3))}
	check := func(ctx context.Context) (time.Duration, bool) {
		result, why := t.probe(ctx, p)
		if ctx.Err() == nil && counts(result) {
			h.mu.Lock()
			if verdict := judge.Take(result); verdict != probing.Unknown {
				found(verdict == probing.Success, why)
			}
			h.mu.Unlock()
			w.poke()
		}
		return seconds(p.GetPeriodSeconds(), 10), true
	}
	h.tasks = append(h.tasks, w.r.probes.Start(seconds(p.GetInitialDelaySeconds(), 0), check))
}

func seconds(n, otherwise uint32) time.Duration {
	return time.Duration(cmp.Or(n, otherwise)) * time.Second
}

// probeHash names the probes of w; "": it has none.
func probeHash(w *capsulev1.Workload) string {
	if w.GetStartupProbe() == nil && w.GetLivenessProbe() == nil && w.GetReadinessProbe() == nil {
		return ""
	}
	return strings.Join([]string{w.GetStartupProbe().String(), w.GetLivenessProbe().String(), w.GetReadinessProbe().String()}, "\n")
}

// address returns where the ports of an instance are.
func address(w *capsulev1.Workload, i *Instance) string {
	if workload.Network(w) == capsulev1.NetworkMode_NETWORK_MODE_HOST {
		return "127.0.0.1"
	}
	return i.Address
}

// target is an instance that is probed.
type target struct {
	name   string
	driver Driver
	guest  probing.Guest
}

// probe runs p once. why is for a person.
func (t target) probe(ctx context.Context, p *capsulev1.Probe) (result probing.Result, why string) {
	ctx, cancel := context.WithTimeout(ctx, seconds(p.GetTimeoutSeconds(), 1))
	defer cancel()
	at := func(port uint32) string { return net.JoinHostPort(t.guest.IP, strconv.Itoa(int(port))) }
	switch a := p.GetAction().(type) {
	case *capsulev1.Probe_Exec:
		return t.exec(ctx, a.Exec.GetCommand())
	case *capsulev1.Probe_Tcp:
		return t.guest.TCP(ctx, at(a.Tcp.GetPort()))
	case *capsulev1.Probe_Http:
		url := cmp.Or(strings.ToLower(a.Http.GetScheme()), "http") + "://" + at(a.Http.GetPort()) + cmp.Or(a.Http.GetPath(), "/")
		req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
		if err != nil {
			return probing.Failure, err.Error()
		}
		req.Header.Set("User-Agent", "cocoon-probe")
		return t.guest.HTTP(req, false)
	}
	return probing.Unknown, ""
}

// maxOutput is the number of bytes of a probe's output that are kept.
const maxOutput = 1 << 10

func (t target) exec(ctx context.Context, command []string) (probing.Result, string) {
	var out capped
	code, err := t.driver.Exec(ctx, t.name, guest.Exec{Command: command}, guest.Streams{Stdout: &out, Stderr: &out})
	switch {
	case ctx.Err() != nil:
		return probing.Failure, "the command has not ended in time"
	case errdefs.IsNotFound(err) || errdefs.IsInvalid(err):
		return probing.Failure, err.Error()
	case err != nil:
		return probing.Unknown, err.Error()
	case code != 0:
		return probing.Failure, fmt.Sprintf("the command has ended with code %d: %s", code, strings.TrimSpace(out.String()))
	}
	return probing.Success, ""
}

// capped keeps the first bytes that are written to it. Two writers may use it at a time.
type capped struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (c *capped) Write(p []byte) (int, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.b.Write(p[:min(len(p), maxOutput-c.b.Len())])
	return len(p), nil
}

func (c *capped) String() string {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.b.String()
}
