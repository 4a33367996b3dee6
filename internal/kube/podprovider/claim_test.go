package podprovider

import (
	"context"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"

	"cocoonstack.io/cocoon/api/contract"
	"cocoonstack.io/cocoon/internal/errdefs"
)

// registrar answers claims with the error that a test sets, and records whether a VM was created before the claim.
type registrar struct {
	e      *engine
	mu     sync.Mutex
	answer error
	asked  int
	early  bool
	lost   bool   // the claim does not exist any more; Hold creates another
	orphan bool   // the owner is gone: the garbage collector deletes claims
	holder string // "": the node
}

func (r *registrar) Hold(ctx context.Context, _ *corev1.Pod) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.asked++
	if _, err := r.e.Inspect(ctx, vmName); err == nil {
		r.early = true
	}
	if r.answer == nil {
		r.lost = r.orphan
	}
	return r.answer
}

func (r *registrar) Holder(context.Context, string, string) (node string, found bool, err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.holder != "" {
		return r.holder, true, r.answer
	}
	return "node-1", !r.lost, r.answer
}

// lose deletes the claim, as the garbage collector does when the owner is gone.
func (r *registrar) lose() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.lost, r.orphan = true, true
}

// never makes the claim one that was never created, of an owner that exists.
func (r *registrar) never() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.lost = true
}

// move makes another node the holder of the claim.
func (r *registrar) move(node string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.holder = node
}

func (r *registrar) say(answer error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.answer = answer
}

func (r *registrar) seen() (asked int, early bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.asked, r.early
}

func stay(how string) func(*corev1.Pod) {
	return func(p *corev1.Pod) {
		if p.Annotations == nil {
			p.Annotations = map[string]string{}
		}
		p.Annotations[contract.KeySticky] = how
	}
}

// A VM that must stay on its node is not created before the node has claimed it.
func TestClaimComesBeforeTheVM(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e := newEngine()
		r := &registrar{e: e, answer: errdefs.Unavailablef("the API server is unavailable")}
		w := &world{t: t, engine: e, claims: r}
		w.begin(Config{})
		defer func() { w.stop() }()
		w.create(pod(stay("wait")))
		p := w.after(3 * time.Second)
		expect(t, p, "Pending waiting:"+reasonUnclaimed)
		r.say(errdefs.Preconditionf("the state of VM web is on node other"))
		p = w.after(30 * time.Second)
		expect(t, p, "Pending waiting:"+reasonElsewhere)
		if _, err := e.Inspect(t.Context(), vmName); !errdefs.IsNotFound(err) || !strings.Contains(w.told(), "on node other") {
			t.Errorf("the VM was created although its state is on another node: %v", err)
		}
		r.say(nil)
		p = w.after(40 * time.Second)
		expect(t, p, "Running running ready")
		asked, early := r.seen()
		if early {
			t.Error("the VM was created before the claim")
		}
		// Neither this process nor the next one claims the node again for a VM that exists.
		w.pass(time.Minute)
		w.stop()
		w.run(Config{})
		w.pass(time.Minute)
		if again, _ := r.seen(); again != asked {
			t.Errorf("claimed %d times more", again-asked)
		}
	})
}

func TestClaimIsRefused(t *testing.T) {
	for name, c := range map[string]struct {
		change func(*corev1.Pod)
		claims bool
	}{
		"nonsense":                      {stay("yes"), true},
		"invalid name of an object":     {func(p *corev1.Pod) { stay("wait")(p); p.Annotations[contract.KeyName] = "My_VM" }, true},
		"the node cannot create claims": {stay("never"), false},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				e := newEngine()
				w := &world{t: t, engine: e}
				if c.claims {
					w.claims = &registrar{e: e}
				}
				w.begin(Config{})
				defer w.stop()
				w.create(pod(c.change))
				if p := w.after(time.Second); p.Status.Phase != corev1.PodPending || p.Status.Reason != reasonNotSupported {
					t.Errorf("%s %s", p.Status.Phase, p.Status.Reason)
				}
			})
		})
	}
}
