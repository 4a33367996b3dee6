package netpolicy

import (
	"context"
	"fmt"
	"log/slog"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes/fake"

	"cocoonstack.io/cocoon/api/contract"
	"cocoonstack.io/cocoon/internal/vm"
)

// BenchmarkOpen measures how long a new VM waits for its policies, from the runtime's event to the call that sets them, in a cluster
// of as many pods as the name says, a tenth of them on this node, with 50 policies.
func BenchmarkOpen(b *testing.B) {
	for _, pods := range []int{100, 1000} {
		b.Run(fmt.Sprint(pods), func(b *testing.B) { benchOpen(b, pods) })
	}
}

func benchOpen(b *testing.B, pods int) {
	b.Helper()
	m := newMachine()
	var objects []runtime.Object
	for i := range pods {
		node := "there"
		if i%10 == 0 {
			node = "here"
		}
		objects = append(objects, scheduled(fmt.Sprint("pod", i), node, fmt.Sprintf("10.2.%d.%d", i/250, i%250+1)))
	}
	for i := range 50 {
		p := &networkingv1.NetworkPolicy{ObjectMeta: metav1.ObjectMeta{Namespace: "prod", Name: fmt.Sprint("p", i)}}
		p.Spec.PodSelector = metav1.LabelSelector{MatchLabels: map[string]string{"app": fmt.Sprint("pod", 10*i)}}
		p.Spec.Ingress = []networkingv1.NetworkPolicyIngressRule{{From: []networkingv1.NetworkPolicyPeer{{PodSelector: &metav1.LabelSelector{}}}}}
		objects = append(objects, p)
	}
	e, err := New(Config{
		Node: "here", Client: fake.NewClientset(objects...), Runtime: m, Log: slog.New(slog.DiscardHandler),
		Unpoliced: func(context.Context) (string, error) { return "", nil },
	}, prometheus.NewRegistry())
	if err != nil {
		b.Fatal(err)
	}
	ctx, cancel := context.WithCancel(b.Context())
	defer cancel()
	go func() { _ = e.Run(ctx) }()
	if err := e.Wait(ctx); err != nil {
		b.Fatal(err)
	}
	<-m.sets
	var spent time.Duration
	rounds := 0
	for b.Loop() {
		uid := types.UID(fmt.Sprint("pod", 10*(rounds%(pods/10))))
		r := vm.Record{ID: vm.ID(fmt.Sprint("vm", rounds)), Spec: vm.Spec{Labels: map[string]string{contract.VMLabelNode: "here", contract.VMLabelPodUID: string(uid)}}}
		for len(m.sets) > 0 {
			<-m.sets
		}
		<-time.After(2 * debounce) // a node that is idle
		began := time.Now()
		m.events <- vm.Event{Type: vm.EventAdded, Record: r}
		<-m.sets
		spent += time.Since(began)
		rounds++
	}
	b.ReportMetric(float64(spent.Microseconds())/1000/float64(rounds), "ms/open")
}
