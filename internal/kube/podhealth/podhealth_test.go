package podhealth

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"cocoonstack.io/cocoon/api/contract"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/guest"
	"cocoonstack.io/cocoon/internal/kube/podstatus"
	"cocoonstack.io/cocoon/internal/probing"
	"cocoonstack.io/cocoon/internal/testkit/netns"
	"cocoonstack.io/cocoon/internal/vm"
)

func TestMain(m *testing.M) { os.Exit(netns.Main(m)) }

// machine is the owner of a pod with one VM. It records the calls and Events.
type machine struct {
	*Health
	spawn Spawn

	mu     sync.Mutex // every function of the Owner takes it
	pod    *corev1.Pod
	rec    *vm.Record
	ip     string
	refuse error          // the result of probes of the address
	codes  map[string]int // exit codes of commands
	older  bool           // the guest's agent knows neither Kill nor Release
	pokes  int
	calls  []string
	events []string
}

func (m *machine) do(fn func()) {
	m.mu.Lock()
	defer m.mu.Unlock()
	fn()
}

func (m *machine) note(format string, args ...any) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.calls = append(m.calls, fmt.Sprintf(format, args...))
	if m.older {
		return errdefs.Unsupportedf("not known")
	}
	return nil
}

func (m *machine) Probe(_ context.Context, ip string, port int) error {
	_ = m.note("probe %s:%d", ip, port)
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.refuse
}

func (m *machine) owner() Owner {
	return Owner{
		Look: func() (*corev1.Pod, *vm.Record, string) {
			m.mu.Lock()
			defer m.mu.Unlock()
			return m.pod, m.rec, m.ip
		},
		Exec: func(_ context.Context, _ string, e guest.Exec, s guest.Streams) (int, error) {
			command := strings.Join(e.Command, " ")
			_ = m.note("exec %s", command)
			_, _ = s.Stdout.Write([]byte("said by " + command))
			m.mu.Lock()
			defer m.mu.Unlock()
			return m.codes[command], nil
		},
		Ping: func(context.Context, string) error {
			_ = m.note("ping")
			m.mu.Lock()
			defer m.mu.Unlock()
			if m.codes["ping"] != 0 {
				return errdefs.Unavailablef("no agent answers")
			}
			return nil
		},
		Kill: func(_ context.Context, _, container string, run int, grace time.Duration) error {
			return m.note("kill %s/%d %s", container, run, grace)
		},
		Release: func(_ context.Context, _, container string) error { return m.note("release %s", container) },
		Poke:    func() { m.do(func() { m.pokes++ }) },
		Event: func(kind, reason, format string, args ...any) {
			m.do(func() { m.events = append(m.events, kind+" "+reason+" "+fmt.Sprintf(format, args...)) })
		},
		Spawn: func(f func(context.Context)) context.CancelFunc { return m.spawn(f) },
		Log:   slog.New(slog.DiscardHandler),
	}
}

// called counts the calls and Events that contain text.
func (m *machine) called(text string) (n int) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, s := range slices.Concat(m.calls, m.events) {
		if strings.Contains(s, text) {
			n++
		}
	}
	return n
}

// bubble runs test with a machine and a fake clock. If the pod has several containers, the VM's record has each of them.
func bubble(t *testing.T, test func(t *testing.T, m *machine), containers ...corev1.Container) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		var work sync.WaitGroup
		m := &machine{ip: "10.0.0.7", codes: map[string]int{}, spawn: func(f func(context.Context)) context.CancelFunc {
			ctx, cancel := context.WithCancel(ctx)
			work.Go(func() { f(ctx) })
			return cancel
		}}
		m.pod = &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "web"}, Spec: corev1.PodSpec{
			Containers: containers, RestartPolicy: corev1.RestartPolicyAlways, TerminationGracePeriodSeconds: new(int64(30)),
		}}
		m.rec = &vm.Record{ID: "v", State: vm.StateRunning, AgentReady: true, StartedAt: time.Now()}
		if len(containers) > 1 {
			for _, c := range containers {
				m.rec.Containers = append(m.rec.Containers, vm.ContainerRecord{
					Name: c.Name, Status: vm.ContainerStatus{State: vm.ContainerRunning, StartedAt: time.Now()},
				})
			}
		}
		probes := probing.NewScheduler()
		work.Go(func() { _ = probes.Run(ctx) })
		m.Health = New(Config{Prober: m, Scheduler: probes, Measured: func(time.Duration) {}, Count: func(string, probing.Result) {}}, m.owner())
		defer work.Wait()
		defer cancel()
		test(t, m)
	})
}

func pass(d time.Duration) {
	time.Sleep(d) //nolint:forbidigo // the fake clock of synctest
	synctest.Wait()
}

func probeBy(command string) *corev1.Probe {
	return &corev1.Probe{
		ProbeHandler:   corev1.ProbeHandler{Exec: &corev1.ExecAction{Command: []string{command}}},
		TimeoutSeconds: 1, PeriodSeconds: 1, SuccessThreshold: 1, FailureThreshold: 3,
	}
}

func hook(command string) *corev1.LifecycleHandler {
	return &corev1.LifecycleHandler{Exec: &corev1.ExecAction{Command: []string{command}}}
}

func TestGuestIsNotReadyAfterThreeFailures(t *testing.T) {
	bubble(t, func(t *testing.T, m *machine) {
		m.Watch(t.Context(), m.pod, m.rec, false)
		if !m.Reach().Ready || !m.Watching() {
			t.Error("not ready after the first answer")
		}
		m.do(func() { m.refuse = errors.New("no answer") })
		if pass(11 * time.Second); !m.Reach().Ready {
			t.Error("not ready after two failures, want three")
		}
		if pass(5 * time.Second); m.Reach() != (podstatus.Reach{Why: "no answer"}) || m.called("Warning Unhealthy VM does not answer: no answer") != 1 {
			t.Errorf("%+v, events %q", m.Reach(), m.events)
		}
		pokes := m.pokes
		m.do(func() { m.refuse = errors.New("another wording") })
		if pass(time.Minute); m.pokes != pokes {
			t.Error("another reason for the same state pokes the owner")
		}
		m.Stop()
		probes := m.called("probe")
		if pass(time.Minute); m.Watching() || m.called("probe") != probes {
			t.Error("a probe ran after Stop")
		}
	}, corev1.Container{Name: "c"})
}

// A probe by the agent of the guest runs no program, and fails if no agent answers.
func TestProbeByTheAgent(t *testing.T) {
	bubble(t, func(t *testing.T, m *machine) {
		m.Watch(t.Context(), m.pod, m.rec, false)
		if pass(5 * time.Second); m.StopRequested(m.rec) != nil || m.called("ping") < 5 || m.called("exec") != 0 {
			t.Errorf("request %+v, calls %q", m.StopRequested(m.rec), m.events)
		}
		m.do(func() { m.codes["ping"] = 1 })
		if pass(5 * time.Second); m.StopRequested(m.rec) == nil {
			t.Error("the agent does not answer, and the VM goes on")
		}
	}, corev1.Container{Name: "c", LivenessProbe: probeBy(contract.CommandPing)})
}

// A request to stop the VM belongs to one run of the VM, and is reported once.
func TestFailedLivenessProbeRequestsStop(t *testing.T) {
	bubble(t, func(t *testing.T, m *machine) {
		m.codes["alive"] = 1
		m.Watch(t.Context(), m.pod, m.rec, false)
		if m.StopRequested(m.rec) != nil {
			t.Error("one failure of the liveness probe requests a stop")
		}
		pass(3 * time.Second)
		s := m.StopRequested(m.rec)
		if s == nil || s.Grace(m.pod) != 7*time.Second {
			t.Fatalf("request %+v", s)
		}
		m.Report(m.rec, s)
		m.Report(m.rec, s)
		m.Stop()
		if m.called("Normal Killing Container c failed liveness probe, will be restarted") != 1 || m.StopRequested(m.rec) != s {
			t.Errorf("events %q", m.events)
		}
		next := *m.rec
		next.StartedAt = time.Now()
		if m.StopRequested(&next) != nil {
			t.Error("the request also counts for the next run")
		}
	}, corev1.Container{Name: "c", LivenessProbe: func() *corev1.Probe {
		p := probeBy("alive")
		p.TerminationGracePeriodSeconds = new(int64(7))
		return p
	}()})
}

// If the liveness probe of one of several containers fails, only that container is killed. With an older agent the VM is
// stopped.
func TestFailedContainerIsKilledAlone(t *testing.T) {
	for _, older := range []bool{false, true} {
		bubble(t, func(t *testing.T, m *machine) {
			m.older, m.codes["alive"] = older, 1
			m.Watch(t.Context(), m.pod, m.rec, false)
			pass(3 * time.Second)
			m.Watch(t.Context(), m.pod, m.rec, false)
			if pass(0); m.called("exec end") != 1 || m.called("kill c/1 30s") != 1 || m.called("Killing") != 1 {
				t.Errorf("calls %q, events %q", m.calls, m.events)
			}
			s := m.StopRequested(m.rec)
			if (s != nil) != older || m.Shown(m.pod, m.rec)["c"].Ready || !m.Shown(m.pod, m.rec)["d"].Ready {
				t.Errorf("older %v: request %+v, shown %+v", older, s, m.Shown(m.pod, m.rec))
			}
			if older {
				if m.Report(m.rec, s); m.called("Killing") != 1 {
					t.Errorf("events %q", m.events)
				}
			}
			if m.PreStop(t.Context(), m.pod, m.rec, 30*time.Second) != 30*time.Second {
				t.Error("the preStop hook of a run ran twice")
			}
		}, corev1.Container{Name: "c", LivenessProbe: probeBy("alive"), Lifecycle: &corev1.Lifecycle{PreStop: hook("end")}}, corev1.Container{Name: "d"})
	}
}

// No hook runs while the guest is not up. A postStart hook runs when the guest is up again.
func TestHooksOfAGuestThatIsNotUp(t *testing.T) {
	bubble(t, func(t *testing.T, m *machine) {
		before := m.rec
		m.do(func() { m.rec = &vm.Record{ID: "v", State: vm.StateStopped, StartedAt: before.StartedAt} })
		m.Watch(t.Context(), m.pod, before, false)
		left := m.PreStop(t.Context(), m.pod, before, 30*time.Second)
		if pass(0); left != 30*time.Second || m.called("exec") != 0 || len(m.events) != 0 || m.StopRequested(before) != nil {
			t.Errorf("%s left, calls %q, events %q", left, m.calls, m.events)
		}
		m.do(func() { m.rec = before })
		if pass(time.Second); m.called("exec begin") != 1 || m.Shown(m.pod, before)["c"].Starting {
			t.Errorf("calls %q", m.calls)
		}
	}, corev1.Container{Name: "c", Lifecycle: &corev1.Lifecycle{PostStart: hook("begin"), PreStop: hook("end")}})
}

// There is no deadlock if the owner holds its lock, which all its functions take, when it calls Watching, Reach, Shown and
// StopRequested.
func TestTheOwnersLockComesFirst(t *testing.T) {
	bubble(t, func(t *testing.T, m *machine) {
		m.codes["alive"] = 1
		m.do(func() { m.refuse = errors.New("no answer") })
		m.Watch(t.Context(), m.pod, m.rec, true)
		for range 2000 {
			m.do(func() {
				m.Watching()
				m.Reach()
				m.Shown(m.pod, m.rec)
				m.StopRequested(m.rec)
			})
			pass(10 * time.Millisecond)
			m.Watch(t.Context(), m.pod, m.rec, false)
		}
		if m.Reach().Ready || m.called("kill c/1 30s") != 1 {
			t.Errorf("%+v, calls %q", m.Reach(), m.calls)
		}
	}, corev1.Container{Name: "c", LivenessProbe: probeBy("alive"), ReadinessProbe: probeBy("ready")}, corev1.Container{Name: "d"})
}

// The readiness of a static pod does not reveal which ports of the node are open.
func TestStaticProbesDoNotReachTheNode(t *testing.T) {
	netns.Require(t)
	netns.Own(t)
	for ip, want := range map[string]bool{"10.77.0.3": true, "10.77.0.1": false, "127.0.0.1": false, "::1": false} {
		m := &machine{ip: ip, pod: &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Annotations: map[string]string{contract.KeyProbePort: "7777"}}}}
		h := New(Config{Prober: m, Static: true, Measured: func(time.Duration) {}}, m.owner())
		err := h.probeOnce(t.Context(), time.Minute)
		if (err == nil) != want || (len(m.calls) > 0) != want {
			t.Errorf("%s: %v, calls %q", ip, err, m.calls)
		}
	}
}

func TestOutputIsLimited(t *testing.T) {
	var o output
	for range 3 {
		if n, err := o.Write(make([]byte, maxOutput/2+1)); n != maxOutput/2+1 || err != nil {
			t.Fatal(n, err)
		}
	}
	if len(o.String()) != maxOutput || slices.Contains([]byte(o.String()), 'x') {
		t.Errorf("%d bytes", len(o.String()))
	}
}
