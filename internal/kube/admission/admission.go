// Package admission serves the API server's admission webhooks. It refuses CocoonSets and CocoonHibernations that cannot work
// but that their schema allows, and VirtualMachines that no VM of ours can be. It completes and validates the pods of VMs. It prevents scale-downs and evictions from losing
// VMs that hold state.
//
// Every answer depends only on the request and on caches. The only write marks an evicted VM to hibernate. A dry run writes
// nothing.
package admission

import (
	"context"
	"net/http"

	"github.com/prometheus/client_golang/prometheus"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/webhook"
	ctrladmission "sigs.k8s.io/controller-runtime/pkg/webhook/admission"

	"cocoonstack.io/cocoon/internal/kube/controller"
	"cocoonstack.io/cocoon/internal/kube/machinebase"
)

// Paths of the webhooks; deploy/manager/webhook.yaml names them.
const (
	PathPod         = "/mutate"
	PathCheckPod    = "/validate-pod"
	PathScale       = "/validate"
	PathSet         = "/validate-cocoonset"
	PathHibernation = "/validate-cocoonhibernation"
	PathEviction    = "/validate-eviction"
	PathMachine     = "/validate-virtualmachine"
)

// Webhooks is the set of all admission webhooks. All fields are required except Registry.
type Webhooks struct {
	// Client reads pods, nodes, CocoonSets, VMPlacements and what VirtualMachines build on from a cache, and marks pods.
	Client client.Client
	// Live reads Deployments, StatefulSets and claims, which the manager does not cache.
	Live     client.Reader
	Registry controller.Registry // nil: no VM counts as saved in the registry
	// CloneDirs are the node directories from which pods may be cloned.
	CloneDirs []string
	Machines  bool // VirtualMachines are ours, not those of another KubeVirt
	Metrics   *Metrics
}

// Register registers the webhooks with s.
func (w *Webhooks) Register(s webhook.Server) {
	decoder := ctrladmission.NewDecoder(w.Client.Scheme())
	for path, h := range map[string]ctrladmission.Handler{
		PathPod:         &podCompleter{decoder, w.Client},
		PathCheckPod:    &podChecker{decoder, w.CloneDirs},
		PathScale:       &scaleGuard{decoder, w.Live},
		PathSet:         &setChecker{decoder, w.Client},
		PathHibernation: &hibernationChecker{decoder, w.Client},
		PathEviction:    &evictionGuard{w.Client, w.Registry, w.Machines},
		PathMachine:     &machineChecker{decoder, w.Machines, machinebase.Finder{Client: w.Client, Live: w.Live}},
	} {
		s.Register(path, &ctrladmission.Webhook{Handler: w.Metrics.counted(path[1:], h)})
	}
}

// Metrics counts the answers.
type Metrics struct{ answers *prometheus.CounterVec }

// NewMetrics registers the counters with r.
func NewMetrics(r prometheus.Registerer) *Metrics {
	m := &Metrics{prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "cocoon_webhook_admission_total", Help: "Answers to the API server: allowed, patched, denied or error, and the reason of a denial.",
	}, []string{"handler", "result", "reason"})}
	r.MustRegister(m.answers)
	return m
}

func (m *Metrics) counted(name string, h ctrladmission.Handler) ctrladmission.Handler {
	return ctrladmission.HandlerFunc(func(ctx context.Context, req ctrladmission.Request) ctrladmission.Response {
		resp := h.Handle(ctx, req)
		result, reason := "allowed", ""
		switch {
		case resp.Allowed && len(resp.Patches) > 0:
			result = "patched"
		case resp.Allowed:
		case resp.Result != nil && resp.Result.Code >= http.StatusInternalServerError:
			result = "error"
		default:
			result = "denied"
			if resp.Result != nil {
				reason = string(resp.Result.Reason)
			}
		}
		m.answers.WithLabelValues(name, result, reason).Inc()
		return resp
	})
}

// refuse answers like the API server's own validation: errs deny the request, and an empty list allows it.
func refuse(kind schema.GroupKind, name string, errs field.ErrorList) ctrladmission.Response {
	if len(errs) == 0 {
		return ctrladmission.Allowed("")
	}
	return deny(apierrors.NewInvalid(kind, name, errs))
}

// deny answers with the status of err.
func deny(err apierrors.APIStatus) ctrladmission.Response {
	status := err.Status()
	resp := ctrladmission.Denied("")
	resp.Result = &status
	return resp
}

// unreadable answers a request that cannot be decoded.
func unreadable(err error) ctrladmission.Response {
	return ctrladmission.Errored(http.StatusBadRequest, err)
}

// failed answers when a lookup or another internal step failed.
func failed(err error) ctrladmission.Response {
	return ctrladmission.Errored(http.StatusInternalServerError, err)
}

// fresh removes the errors that the stored object already has, so that users can still change its other fields.
func fresh(now, before field.ErrorList) field.ErrorList {
	had := map[string]bool{}
	for _, e := range before {
		had[e.Error()] = true
	}
	var errs field.ErrorList
	for _, e := range now {
		if !had[e.Error()] {
			errs = append(errs, e)
		}
	}
	return errs
}
