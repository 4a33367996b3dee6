package netpolicy

import (
	"log/slog"

	"github.com/prometheus/client_golang/prometheus"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/record"
)

const eventOverBudget = "NetworkPolicyOverBudget"

// complaints tell operators and the owners of policies which policies are closed because they are over a budget. Only one goroutine
// may use it.
type complaints struct {
	log    *slog.Logger
	events record.EventRecorder // nil: none are sent
	closed prometheus.Gauge
	told   map[types.UID]string // why, by policy
}

// tell reports what is closed now and was not before, or for another reason: each namespace once in the log, and a few of its
// policies by an Event.
func (c *complaints) tell(all []refusal) {
	const mostEvents = 10 // of one namespace, because it may have thousands
	c.closed.Set(float64(len(all)))
	told := make(map[types.UID]string, len(all))
	fresh := map[string][]refusal{}
	var order []string
	for _, r := range all {
		told[r.policy.UID] = r.why
		if c.told[r.policy.UID] == r.why {
			continue
		}
		ns := r.policy.Namespace
		if fresh[ns] == nil {
			order = append(order, ns)
		}
		fresh[ns] = append(fresh[ns], r)
	}
	c.told = told
	for _, ns := range order {
		first := fresh[ns][0]
		c.log.Warn("network policies are over budget, so they allow nothing to the pods that they select", "namespace", ns, "count", len(fresh[ns]), "policy", first.policy.Name, "err", first.why)
		if c.events == nil {
			continue
		}
		for _, r := range fresh[ns][:min(len(fresh[ns]), mostEvents)] {
			c.events.Eventf(r.policy, corev1.EventTypeWarning, eventOverBudget, "The policy allows nothing to the pods of this node that it selects, because %s", r.why)
		}
	}
}
