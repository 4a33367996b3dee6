package podprovider

import (
	"context"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"

	"cocoonstack.io/cocoon/internal/kube/convert"
	"cocoonstack.io/cocoon/internal/vm"
)

// This file is what happens around the process of a container: its hooks, and its end by the word of a probe or hook.

// leastGrace is what is left of the grace however long preStop took.
const leastGrace = 2 * time.Second

// sentence is that a container is to be killed, and then restarted if the pod's policy allows that.
type sentence struct {
	container string
	message   string // for the Killing Event
	grace     *int64 // seconds; nil: the pod's
	run       time.Time
	told      bool
}

// condemn passes a sentence on a container of the run that v watches; the first one counts. Preconditions: mu is held.
func (w *worker) condemn(v *vigil, s sentence) {
	if w.vigil != v || w.sentence != nil && w.sentence.run.Equal(v.run) {
		return
	}
	s.run = v.run
	w.sentence = &s
	w.poke()
}

// condemned is the sentence on a container of rec's run, nil when there is none.
func (w *worker) condemned(rec *vm.Record) *sentence {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.sentence == nil || !w.sentence.run.Equal(rec.StartedAt) {
		return nil
	}
	return w.sentence
}

// carryOut ends the process that s is passed on; what is restarted is seen to when it has ended.
func (w *worker) carryOut(ctx context.Context, pod *corev1.Pod, rec *vm.Record, s *sentence) time.Duration {
	if !s.told {
		s.told = true
		w.log.Info("container killed", "vm", rec.ID, "op", s.message)
		w.event(corev1.EventTypeNormal, eventKilling, "%s", s.message)
	}
	w.stopVigil()
	w.publish(0)
	grace := convert.Grace(pod)
	if s.grace != nil {
		grace = time.Duration(*s.grace) * time.Second
	}
	got, err := w.p.Runtime.Stop(ctx, string(rec.ID), w.preStop(ctx, pod, rec, grace))
	if ctx.Err() != nil {
		return time.Millisecond
	}
	if err != nil {
		return w.retry(ctx, reasonRunError, err, time.Second, 30*time.Second)
	}
	w.tries, w.killed = 0, rec.StartedAt
	w.take(got)
	return time.Millisecond
}

// postStart runs the hook of c that comes after its process began. Until it has ended well c is not running, and if it
// fails c is killed.
func (w *worker) postStart(ctx context.Context, v *vigil, c *corev1.Container) {
	began := time.Now()
	target, _ := w.aim(c)
	err := target.Hook(ctx, c.Lifecycle.PostStart)
	if ctx.Err() != nil {
		return
	}
	if err != nil {
		w.log.Warn("postStart hook failed", "op", c.Name, "err", err)
		w.event(corev1.EventTypeWarning, eventPostStart, "PostStartHook failed: %s", err)
		w.mu.Lock()
		w.condemn(v, sentence{container: c.Name, message: eventPostStart})
		w.mu.Unlock()
		return
	}
	w.mu.Lock()
	if w.vigil != v {
		w.mu.Unlock()
		return
	}
	h := w.health[c.Name]
	h.starting = false
	w.health[c.Name] = h
	w.mu.Unlock()
	w.settleHooks(v)
	w.watchContainer(v, c, began)
	w.poke()
}

// settleHooks remembers that the postStart hooks of a run are over: waking up or a new process of ours is no new start.
func (w *worker) settleHooks(v *vigil) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, h := range w.health {
		if h.starting {
			return
		}
	}
	w.hooked = v.run
}

// preStop runs the hooks that come before a stop, all at once and once per run, and returns what they left of grace.
// Nothing runs where nothing is stopped in order: without a grace, or in a guest that is not up.
func (w *worker) preStop(ctx context.Context, pod *corev1.Pod, rec *vm.Record, grace time.Duration) time.Duration {
	if grace <= 0 || !up(rec) || w.bowed.Equal(rec.StartedAt) {
		return grace
	}
	w.bowed = rec.StartedAt
	began := time.Now()
	limited, cancel := context.WithTimeout(ctx, grace)
	defer cancel()
	var hooks sync.WaitGroup
	ran := false
	for i := range pod.Spec.Containers {
		c := &pod.Spec.Containers[i]
		if c.Lifecycle == nil || c.Lifecycle.PreStop == nil {
			continue
		}
		ran = true
		hooks.Go(func() {
			target, _ := w.aim(c)
			err := target.Hook(limited, c.Lifecycle.PreStop)
			if err == nil || ctx.Err() != nil {
				return
			}
			w.log.Warn("preStop hook failed", "op", c.Name, "err", err)
			w.event(corev1.EventTypeWarning, eventPreStop, "PreStopHook failed: %s", err)
		})
	}
	hooks.Wait()
	if !ran {
		return grace
	}
	return max(grace-time.Since(began), leastGrace)
}
