package node

import (
	"log/slog"
	"strings"
	"testing"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes/fake"

	"cocoonstack.io/cocoon/internal/errdefs"
)

func TestTwoMachinesWithOneName(t *testing.T) {
	now := time.Now()
	for name, c := range map[string]struct {
		machine string
		beat    time.Duration // since the last heartbeat; 0: none ever
		refused bool
	}{
		"another machine that lives": {"other", 3 * time.Second, true},
		"another machine that died":  {"other", time.Minute, false},
		"one without heartbeat":      {"other", 0, false},
		"this machine, restarted":    {"mine", 3 * time.Second, false},
		"one that says nothing":      {"", 3 * time.Second, false},
	} {
		there := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "n"}, Status: corev1.NodeStatus{NodeInfo: corev1.NodeSystemInfo{MachineID: c.machine}}}
		client := fake.NewClientset(there)
		if c.beat > 0 {
			lease := &coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{Name: "n", Namespace: corev1.NamespaceNodeLease}}
			lease.Spec.RenewTime = &metav1.MicroTime{Time: now.Add(-c.beat)}
			if err := client.Tracker().Add(lease); err != nil {
				t.Fatal(err)
			}
		}
		n, err := New(Config{Name: "n", Root: t.TempDir(), Healthy: func() error { return nil }})
		if err != nil {
			t.Fatal(err)
		}
		n.node.Status.NodeInfo.MachineID = "mine"
		err = n.claim(t.Context(), client, now)
		if errdefs.IsFailedPrecondition(err) != c.refused || !c.refused && err != nil {
			t.Errorf("%s: %v", name, err)
		}
		if !c.refused {
			continue
		}
		defer func() {
			select {
			case <-n.Claimed():
				t.Errorf("%s: the pods of the other machine are taken up", name)
			default:
			}
		}()
		if err := n.Serve(t.Context(), client, slog.New(slog.DiscardHandler)); !errdefs.IsFailedPrecondition(err) || !strings.Contains(err.Error(), "another machine") {
			t.Errorf("%s: the node is served: %v", name, err)
		}
	}
}
