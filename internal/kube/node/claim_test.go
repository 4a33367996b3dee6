package node

import (
	"log/slog"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	vknode "github.com/virtual-kubelet/virtual-kubelet/node"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes/fake"

	"cocoonstack.io/cocoon/internal/errdefs"
)

func TestTwoMachinesWithOneName(t *testing.T) {
	for name, c := range map[string]struct {
		machine string
		beat    time.Duration // since the last heartbeat; 0: never
		lives   bool          // the heartbeat continues
		refused bool
	}{
		"another machine that lives":              {"other", 3 * time.Second, true, true},
		"another machine that died":               {"other", time.Minute, false, false},
		"one that lives, our clock an hour on":    {"other", time.Hour, true, true},
		"one that lives, its clock an hour on":    {"other", -time.Hour, true, true},
		"one that died, its clock was an hour on": {"other", -time.Hour, false, false},
		"one without heartbeat":                   {"other", 0, false, false},
		"this machine, restarted":                 {"mine", 3 * time.Second, true, false},
		"one that says nothing":                   {"", 3 * time.Second, true, false},
	} {
		synctest.Test(t, func(t *testing.T) {
			now := time.Now()
			there := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "n"}, Status: corev1.NodeStatus{NodeInfo: corev1.NodeSystemInfo{MachineID: c.machine}}}
			client := fake.NewClientset(there)
			if c.beat != 0 {
				lease := &coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{Name: "n", Namespace: corev1.NamespaceNodeLease}}
				lease.Spec.RenewTime = &metav1.MicroTime{Time: now.Add(-c.beat)}
				if err := client.Tracker().Add(lease); err != nil {
					t.Fatal(err)
				}
				if c.lives {
					beating := time.AfterFunc(vknode.DefaultPingInterval, func() {
						lease.Spec.RenewTime = &metav1.MicroTime{Time: lease.Spec.RenewTime.Add(vknode.DefaultPingInterval)}
						if err := client.Tracker().Update(coordinationv1.SchemeGroupVersion.WithResource("leases"), lease, lease.Namespace); err != nil {
							t.Error(err)
						}
					})
					defer beating.Stop()
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
			if !c.refused || c.beat != 3*time.Second {
				return
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
		})
	}
}
