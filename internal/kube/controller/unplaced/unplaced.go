// Package unplaced tells a pod that waits for a node for VMs because no such node has enough CPUs left, which setting raises their
// number. The scheduler's own Event says only "Insufficient cpu", although the host may be idle.
//
// It changes no pod and no node, and does not decide where pods go.
package unplaced

import (
	"context"
	"fmt"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/client-go/tools/events"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/builder"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/event"
	"sigs.k8s.io/controller-runtime/pkg/predicate"

	"cocoonstack.io/cocoon/api/contract"
)

// Reason is the reason of the Event.
const Reason = "TooFewCPUs"

// Reconciler writes the Events. All fields are required.
type Reconciler struct {
	Reader client.Reader
	Events events.EventRecorder
}

// Setup adds the reconciler to m.
func (r *Reconciler) Setup(m ctrl.Manager) error {
	refused := predicate.Funcs{
		CreateFunc: func(e event.CreateEvent) bool { _, waits := refusal(e.Object); return waits },
		UpdateFunc: func(e event.UpdateEvent) bool {
			before, waited := refusal(e.ObjectOld)
			now, waits := refusal(e.ObjectNew)
			return waits && (!waited || now != before)
		},
		DeleteFunc: func(event.DeleteEvent) bool { return false },
	}
	return ctrl.NewControllerManagedBy(m).Named("unplaced").For(&corev1.Pod{}, builder.WithPredicates(refused)).Complete(r)
}

// refusal returns what the scheduler says of a pod with a VM that it could not place. waits is false for any other object.
func refusal(o client.Object) (says string, waits bool) {
	pod, ok := o.(*corev1.Pod)
	if !ok || pod.Spec.NodeName != "" || pod.DeletionTimestamp != nil || !wantsVM(pod) {
		return "", false
	}
	for _, c := range pod.Status.Conditions {
		if c.Type == corev1.PodScheduled {
			return c.Message, c.Status == corev1.ConditionFalse && c.Reason == corev1.PodReasonUnschedulable
		}
	}
	return "", false
}

// wantsVM reports whether the pod tolerates the taint of nodes for VMs by name. A pod that tolerates everything may be meant for
// others.
func wantsVM(pod *corev1.Pod) bool {
	for _, t := range pod.Spec.Tolerations {
		if t.Key == contract.TaintKey && (t.Operator == corev1.TolerationOpExists || t.Value == contract.TaintValue) {
			return true
		}
	}
	return false
}

// Reconcile writes the Event of one pod.
func (r *Reconciler) Reconcile(ctx context.Context, req ctrl.Request) (ctrl.Result, error) {
	pod := &corev1.Pod{}
	if err := r.Reader.Get(ctx, req.NamespacedName, pod); err != nil {
		return ctrl.Result{}, client.IgnoreNotFound(err)
	}
	if _, waits := refusal(pod); !waits {
		return ctrl.Result{}, nil
	}
	var nodes corev1.NodeList
	var pods corev1.PodList
	if err := r.Reader.List(ctx, &nodes); err != nil {
		return ctrl.Result{}, fmt.Errorf("list nodes: %w", err)
	}
	if err := r.Reader.List(ctx, &pods, client.UnsafeDisableDeepCopy); err != nil {
		return ctrl.Result{}, fmt.Errorf("list pods: %w", err)
	}
	if why := lack(pod, nodes.Items, pods.Items); why != "" {
		r.Events.Eventf(pod, nil, corev1.EventTypeWarning, Reason, "Schedule", "%s", why)
	}
	return ctrl.Result{}, nil
}

// lack says that none of the nodes for VMs on which pod may run has its CPUs left. It is empty if one has, or there is none.
func lack(pod *corev1.Pod, nodes []corev1.Node, pods []corev1.Pod) string {
	used := map[string]int64{}
	for i := range pods {
		if p := &pods[i]; p.Status.Phase != corev1.PodSucceeded && p.Status.Phase != corev1.PodFailed {
			used[p.Spec.NodeName] += milliCPUs(p)
		}
	}
	wants := milliCPUs(pod)
	var best *corev1.Node
	var most int64
	for i := range nodes {
		n := &nodes[i]
		if n.Spec.Unschedulable || !runsVMs(n) || !labels.SelectorFromSet(pod.Spec.NodeSelector).Matches(labels.Set(n.Labels)) {
			continue
		}
		if free := n.Status.Allocatable.Cpu().MilliValue() - used[n.Name]; best == nil || free > most {
			best, most = n, free
		}
	}
	if best == nil || most >= wants {
		return ""
	}
	return fmt.Sprintf("It requests %s CPUs, and no node for VMs has so many left: most has %s, %s of %s. If the host is idle, raise VK_CPU_OVERCOMMIT of the node "+
		"(cpuOvercommit, cocoon up --cpu-overcommit), the virtual CPUs that pods may request for each CPU of the host", cpus(wants), best.Name, cpus(max(most, 0)), best.Status.Allocatable.Cpu())
}

func runsVMs(n *corev1.Node) bool {
	for _, t := range n.Spec.Taints {
		if t.Key == contract.TaintKey && t.Value == contract.TaintValue {
			return true
		}
	}
	return false
}

// cpus writes thousandths of a CPU: 2, 0.5.
func cpus(milli int64) string { return fmt.Sprint(float64(milli) / 1000) }

// milliCPUs returns the CPUs that the scheduler reserves for pod, in thousandths: those of the pod itself if it names them, else
// those of its containers. Init containers run one after the other, beside the sidecars that started before them.
func milliCPUs(pod *corev1.Pod) int64 {
	var sidecars, initial, sum int64
	of := func(c *corev1.Container) int64 { return c.Resources.Requests.Cpu().MilliValue() }
	for i := range pod.Spec.InitContainers {
		c := &pod.Spec.InitContainers[i]
		if c.RestartPolicy != nil && *c.RestartPolicy == corev1.ContainerRestartPolicyAlways {
			sidecars += of(c)
			initial = max(initial, sidecars)
		} else {
			initial = max(initial, sidecars+of(c))
		}
	}
	for i := range pod.Spec.Containers {
		sum += of(&pod.Spec.Containers[i])
	}
	sum = max(sum+sidecars, initial)
	if r := pod.Spec.Resources; r != nil {
		if own, ok := r.Requests[corev1.ResourceCPU]; ok {
			sum = own.MilliValue()
		}
	}
	return sum + pod.Spec.Overhead.Cpu().MilliValue()
}
