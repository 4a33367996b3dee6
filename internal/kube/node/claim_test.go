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
		"another machine, alive":            {"other", 3 * time.Second, true, true},
		"another machine, dead":             {"other", time.Minute, false, false},
		"alive, our clock is an hour ahead": {"other", time.Hour, true, true},
		"alive, its clock is an hour ahead": {"other", -time.Hour, true, true},
		"dead, its clock was an hour ahead": {"other", -time.Hour, false, false},
		"no heartbeat":                      {"other", 0, false, false},
		"this machine, restarted":           {"mine", 3 * time.Second, true, false},
		"no machine id":                     {"", 3 * time.Second, true, false},
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
					t.Errorf("%s: this machine claimed the node although another machine serves it", name)
				default:
				}
			}()
			if err := n.Serve(t.Context(), client, slog.New(slog.DiscardHandler)); !errdefs.IsFailedPrecondition(err) || !strings.Contains(err.Error(), "another machine") {
				t.Errorf("%s: Serve returns %v, want FailedPrecondition that names the other machine", name, err)
			}
		})
	}
}
