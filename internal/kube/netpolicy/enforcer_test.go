package netpolicy

import (
	"context"
	"errors"
	"log/slog"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes/fake"
	clienttesting "k8s.io/client-go/testing"

	"cocoonstack.io/cocoon/api/contract"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/network"
	"cocoonstack.io/cocoon/internal/vm"
)

// machine is a runtime whose VMs the test makes.
type machine struct {
	mu     sync.Mutex
	vms    []vm.Record
	events chan vm.Event // closed when the runtime restarts
	refuse error
	sets   chan network.Policies
}

func newMachine() *machine {
	return &machine{events: make(chan vm.Event, 16), sets: make(chan network.Policies, 64)}
}

func (m *machine) List(context.Context) ([]vm.Record, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	return slices.Clone(m.vms), nil
}

func (m *machine) Watch(ctx context.Context, _ int64, fn func(vm.Event) error) error {
	m.mu.Lock()
	events := m.events
	m.mu.Unlock()
	for {
		select {
		case e, ok := <-events:
			if !ok {
				return errdefs.Unavailablef("the runtime restarts")
			}
			if err := fn(e); err != nil {
				return err
			}
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

func (m *machine) Police(_ context.Context, p network.Policies) error {
	m.mu.Lock()
	err := m.refuse
	m.mu.Unlock()
	if err == nil {
		m.sets <- p
	}
	return err
}

func (m *machine) restart() {
	m.mu.Lock()
	defer m.mu.Unlock()
	close(m.events)
	m.events = make(chan vm.Event, 16)
}

func (m *machine) fail(err error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.refuse = err
}

func (m *machine) make(id vm.ID, uid types.UID, ip string) {
	r := vm.Record{ID: id, NICs: []vm.NIC{{IP: ip}}}
	if uid == "" {
		r.Spec.Offered = []string{"prod"}
	} else {
		r.Spec.Labels = map[string]string{contract.VMLabelNode: "here", contract.VMLabelPodUID: string(uid)}
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	m.vms = append(m.vms, r)
	m.events <- vm.Event{Type: vm.EventAdded, Record: r}
}

// until returns the first policies that ok accepts.
func (m *machine) until(t *testing.T, what string, ok func(network.Policies) bool) network.Policies {
	t.Helper()
	deadline := time.After(time.Minute)
	for {
		select {
		case p := <-m.sets:
			if ok(p) {
				return p
			}
		case <-deadline:
			t.Fatalf("%s: never set", what)
		}
	}
}

func scheduled(name, node, ip string) *corev1.Pod {
	return &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: "prod", Name: name, UID: types.UID(name), Labels: map[string]string{"app": name}},
		Spec:       corev1.PodSpec{NodeName: node}, Status: corev1.PodStatus{Phase: corev1.PodRunning, PodIP: ip},
	}
}

func start(t *testing.T, m *machine, client *fake.Clientset, change func(*Config)) *Enforcer {
	t.Helper()
	cfg := Config{
		Node: "here", Client: client, Runtime: m, Log: slog.New(slog.NewTextHandler(t.Output(), nil)),
		Unpoliced: func(context.Context) (string, error) { return "", nil },
	}
	if change != nil {
		change(&cfg)
	}
	e, err := New(cfg, prometheus.NewRegistry())
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() {
		defer close(done)
		_ = e.Run(ctx)
	}()
	t.Cleanup(func() {
		cancel()
		<-done
	})
	return e
}

func guestsOf(p network.Policies) (out []vm.ID) {
	for _, g := range p.Guests {
		out = append(out, g.ID)
	}
	return out
}

func TestEnforcer(t *testing.T) {
	m := newMachine()
	client := fake.NewClientset(scheduled("web", "here", ""), scheduled("peer", "there", "10.2.0.1"), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "prod"}})
	e := start(t, m, client, nil)
	if err := e.Wait(t.Context()); err != nil {
		t.Fatal(err)
	}
	if on, err := e.Policed(); !on || err != nil {
		t.Fatalf("policed: %v, %v", on, err)
	}

	m.make("vm-web", "web", "10.1.0.1")
	m.until(t, "a new pod is opened", func(p network.Policies) bool {
		return slices.Equal(guestsOf(p), []vm.ID{"vm-web"}) && len(p.Ingress) == 0
	})

	policy := &networkingv1.NetworkPolicy{ObjectMeta: metav1.ObjectMeta{Namespace: "prod", Name: "p"}}
	policy.Spec.Ingress = []networkingv1.NetworkPolicyIngressRule{{From: []networkingv1.NetworkPolicyPeer{{PodSelector: &metav1.LabelSelector{}}}}}
	if _, err := client.NetworkingV1().NetworkPolicies("prod").Create(t.Context(), policy, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	p := m.until(t, "a policy", func(p network.Policies) bool { return len(p.Ingress) == 1 })
	if got := p.Ingress[0].Rules[0].Peers; len(got) != 2 || got[0].First.String() != "10.1.0.1" || got[1].First.String() != "10.2.0.1" {
		t.Errorf("peers %v: the address of a VM must be known before its pod's status has it", got)
	}

	m.restart()
	again := m.until(t, "after a restart of the runtime", func(network.Policies) bool { return true })
	if len(again.Ingress) != 1 || len(again.Guests) != 1 {
		t.Errorf("%+v", again)
	}

	m.fail(errors.New("no"))
	if err := client.CoreV1().Pods("prod").Delete(t.Context(), "peer", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	m.fail(nil)
	m.until(t, "after an error", func(p network.Policies) bool { return len(p.Ingress[0].Rules[0].Peers) == 1 })

	// A VM of the operator that a pod has taken over has no label; the pod's status names it.
	taken := scheduled("taken", "here", "10.1.0.7")
	taken.Status.ContainerStatuses = []corev1.ContainerStatus{{ContainerID: contract.ContainerIDScheme + "vm-own/main"}}
	if _, err := client.CoreV1().Pods("prod").Create(t.Context(), taken, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	m.make("vm-own", "", "10.1.0.7")
	m.make("vm-other", "", "10.1.0.8")
	m.until(t, "a VM that a pod has taken over", func(p network.Policies) bool { return slices.Equal(guestsOf(p), []vm.ID{"vm-own", "vm-web"}) })

	if err := client.CoreV1().Pods("prod").Delete(t.Context(), "web", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	m.until(t, "a pod is gone", func(p network.Policies) bool { return slices.Equal(guestsOf(p), []vm.ID{"vm-own"}) })
}

// The creator of a static pod chooses its address and the ID of its machine, and the node writes both into the status. That must make
// the pod neither a peer where a machine of somebody else is, nor the owner of a VM.
func TestEnforcerDoubtsStaticPods(t *testing.T) {
	m := newMachine()
	claims := func(name, node, id, ip string) *corev1.Pod {
		p := scheduled(name, node, ip)
		p.Namespace, p.Annotations = "evil", map[string]string{contract.KeyMode: string(contract.ModeStatic)}
		p.Status.PodIPs = []corev1.PodIP{{IP: ip}}
		p.Status.ContainerStatuses = []corev1.ContainerStatus{{ContainerID: contract.ContainerIDScheme + id}}
		return p
	}
	free := claims("free", "here", "vm-operator", "10.1.0.66") // not static, or no longer
	free.Annotations = nil
	victim := scheduled("victim", "here", "")
	victim.Status.ContainerStatuses = []corev1.ContainerStatus{{ContainerID: contract.ContainerIDScheme + "vm-offered/main"}}
	over := scheduled("over", "here", "")
	over.Status = corev1.PodStatus{Phase: corev1.PodFailed, ContainerStatuses: victim.Status.ContainerStatuses}
	policy := &networkingv1.NetworkPolicy{ObjectMeta: metav1.ObjectMeta{Namespace: "prod", Name: "p"}}
	policy.Spec.Ingress = []networkingv1.NetworkPolicyIngressRule{{From: []networkingv1.NetworkPolicyPeer{{NamespaceSelector: &metav1.LabelSelector{}}}}}
	client := fake.NewClientset(scheduled("web", "here", ""), victim, over, free, policy, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "evil"}},
		claims("twice", "here", "vm-web", "10.1.0.1"), claims("foreign", "here", "vm-there", "10.9.0.1"), claims("offered", "here", "vm-offered", "10.9.0.2"),
		claims("peer", "there", "x", "10.9.0.3"), claims("allowed", "there", "x", "192.0.2.7"), claims("near", "here", "x", "192.0.2.8"))
	m.make("vm-web", "web", "10.1.0.1")
	m.make("vm-there", "elsewhere", "10.1.0.2")
	m.make("vm-operator", "", "10.1.0.3")
	m.make("vm-offered", "", "10.1.0.4")
	m.vms[1].Spec.Labels[contract.VMLabelNode] = "there"
	m.vms[2].Spec.Offered = nil
	m.events = make(chan vm.Event, 16) // they are listed
	start(t, m, client, func(c *Config) { c.Static = []netip.Prefix{netip.MustParsePrefix("192.0.2.0/24")} })
	p := m.until(t, "the guests", func(p network.Policies) bool { return len(p.Ingress) > 0 })
	if err := p.Validate(); err != nil {
		t.Fatal(err)
	}
	if got := guestsOf(p); !slices.Equal(got, []vm.ID{"vm-offered", "vm-web"}) || len(p.Guests[0].Ingress) != 1 || len(p.Guests[1].Ingress) != 1 {
		t.Errorf("guests %+v", p.Guests)
	}
	want := []network.Range{}
	for _, ip := range []string{"192.0.2.7", "192.0.2.8"} {
		want = append(want, network.Range{First: netip.MustParseAddr(ip), Last: netip.MustParseAddr(ip)})
	}
	if got := p.Ingress[0].Rules; len(got) != 1 || !slices.Equal(got[0].Peers, network.Merge(want)) {
		t.Errorf("peers %+v", got)
	}
}

// With the setting off nothing of the cluster is read, and what was closed before is opened.
func TestEnforcerOff(t *testing.T) {
	m := newMachine()
	m.make("vm-web", "web", "10.1.0.1")
	client := fake.NewClientset()
	e := start(t, m, client, func(c *Config) { c.Off = true })
	if on, err := e.Policed(); on || err != nil || e.Wait(t.Context()) != nil {
		t.Errorf("policed: %v, %v", on, err)
	}
	m.until(t, "all open", func(p network.Policies) bool {
		return slices.Equal(guestsOf(p), []vm.ID{"vm-web"}) && p.Guests[0].Ingress == nil
	})
	if calls := client.Actions(); len(calls) > 0 {
		t.Errorf("%v", calls)
	}
}

// A network without policies: pods start, and nothing is read or set.
func TestEnforcerUnpoliced(t *testing.T) {
	m := newMachine()
	client := fake.NewClientset()
	e := start(t, m, client, func(c *Config) {
		c.Unpoliced = func(context.Context) (string, error) { return "the plugins do it", nil }
	})
	if err := e.Wait(t.Context()); err != nil {
		t.Fatal(err)
	}
	if on, err := e.Policed(); on || err != nil || len(client.Actions()) > 0 {
		t.Errorf("policed: %v, %v, %v", on, err, client.Actions())
	}
}

// Without the right to read policies no pod may start, until the right is granted.
func TestEnforcerForbidden(t *testing.T) {
	m := newMachine()
	client := fake.NewClientset()
	var granted atomic.Bool
	client.PrependReactor("list", "networkpolicies", func(clienttesting.Action) (bool, runtime.Object, error) {
		if granted.Load() {
			return false, nil, nil
		}
		return true, nil, apierrors.NewForbidden(schema.GroupResource{Group: "networking.k8s.io", Resource: "networkpolicies"}, "", errors.New("no"))
	})
	turns := make(chan struct{}, 16)
	e := start(t, m, client, func(c *Config) { c.Changed = func() { turns <- struct{}{} } })
	if err := e.Wait(t.Context()); err != nil {
		t.Fatal(err)
	}
	if on, err := e.Policed(); on || !errdefs.IsFailedPrecondition(err) {
		t.Fatalf("policed: %v, %v", on, err)
	}
	granted.Store(true)
	for range 2 { // the refusal, and what follows
		select {
		case <-turns:
		case <-time.After(time.Minute):
			t.Fatal("nothing changes")
		}
	}
	if on, err := e.Policed(); !on || err != nil {
		t.Errorf("policed: %v, %v", on, err)
	}
}

// A policy allows a pod by the address that the cluster knows, not by those of its further networks.
func TestAddressOfTheFirstInterface(t *testing.T) {
	r := vm.Record{ID: "a", NICs: []vm.NIC{{IP: "10.0.0.2", IPv6: "fd00::2"}, {IP: "198.51.100.7"}}}
	want := []netip.Addr{netip.MustParseAddr("10.0.0.2"), netip.MustParseAddr("fd00::2")}
	if got := (&guests{}).of(r).addresses; !slices.Equal(got, want) {
		t.Errorf("%v, want %v", got, want)
	}
}
