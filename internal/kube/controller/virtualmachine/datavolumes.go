package virtualmachine

import (
	"context"
	"fmt"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	v1 "kubevirt.io/api/core/v1"
	"kubevirt.io/containerized-data-importer-api/pkg/apis/core/v1beta1"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"cocoonstack.io/cocoon/internal/kube/kubevirt"
)

// data is what is known of the DataVolumes of a machine: those of its templates, and those that its volumes name.
type data struct {
	occupied string // why a template cannot have its DataVolume; "": it has, or will have
	failed   bool   // one cannot be made, or the last attempt has failed
	making   bool   // one is not complete yet
	unbound  bool   // one is made on the node of the first pod that uses it
}

// holds reports whether the machine does not start yet. One whose volume waits for its first pod starts: the pod is its own.
func (d data) holds() bool { return d.failed || d.making }

// add takes one DataVolume into account.
func (d *data) add(dv *v1beta1.DataVolume) {
	switch dv.Status.Phase {
	case v1beta1.Succeeded:
	case v1beta1.WaitForFirstConsumer, v1beta1.PendingPopulation:
		d.unbound = true
	case v1beta1.Failed, v1beta1.Unknown:
		d.failed = true
	default:
		d.making = true
		for _, c := range dv.Status.Conditions {
			if c.Type == v1beta1.DataVolumeRunning && c.Status == corev1.ConditionFalse && c.Reason == "Error" {
				d.failed = true
			}
		}
	}
}

// dataVolumes makes the DataVolumes of the machine's templates, unless make is false, and looks at those that its next instance has. A
// template that changes later changes no DataVolume.
func (r *Reconciler) dataVolumes(ctx context.Context, vm *v1.VirtualMachine, make bool) (d data, err error) {
	mine := map[string]bool{}
	for i := range vm.Spec.DataVolumeTemplates {
		t := &vm.Spec.DataVolumeTemplates[i]
		mine[t.Name] = true
		dv, err := r.dataVolume(ctx, vm.Namespace, t.Name)
		if err != nil {
			return d, err
		}
		if dv == nil && make {
			dv, err = r.makeDataVolume(ctx, vm, t)
		}
		switch {
		case err != nil:
			return d, err
		case dv == nil:
		case !metav1.IsControlledBy(dv, vm):
			d.occupied = fmt.Sprintf("spec.dataVolumeTemplates[%d]: the DataVolume %s exists and is not of this machine; delete it, or give the template another name", i, t.Name)
		default:
			d.add(dv)
		}
	}
	if vm.Spec.Template == nil {
		return d, nil
	}
	for _, v := range vm.Spec.Template.Spec.Volumes {
		if v.DataVolume == nil || mine[v.DataVolume.Name] {
			continue
		}
		if dv, err := r.dataVolume(ctx, vm.Namespace, v.DataVolume.Name); err != nil {
			return d, err
		} else if dv != nil { // else its claim may be there; the instance waits for that
			d.add(dv)
		}
	}
	return d, nil
}

// dataVolume returns a DataVolume, nil if there is none. The cache may not have heard of one that was just created.
func (r *Reconciler) dataVolume(ctx context.Context, namespace, name string) (*v1beta1.DataVolume, error) {
	for _, from := range []client.Reader{r.Client, r.Live} {
		dv := &v1beta1.DataVolume{}
		err := from.Get(ctx, client.ObjectKey{Namespace: namespace, Name: name}, dv)
		if err == nil {
			return dv, nil
		}
		if client.IgnoreNotFound(err) != nil {
			return nil, fmt.Errorf("read DataVolume %s: %w", name, err)
		}
	}
	return nil, nil
}

func (r *Reconciler) makeDataVolume(ctx context.Context, vm *v1.VirtualMachine, t *v1.DataVolumeTemplateSpec) (*v1beta1.DataVolume, error) {
	dv := kubevirt.DataVolume(vm, t)
	err := r.Client.Create(ctx, dv)
	switch {
	case err == nil:
		r.Events.Eventf(vm, dv, corev1.EventTypeNormal, ReasonStarted, "CreateDataVolume", "created the DataVolume %s", dv.Name)
		return dv, nil
	case apierrors.IsForbidden(err) || apierrors.IsInvalid(err):
		r.Events.Eventf(vm, nil, corev1.EventTypeWarning, ReasonRefused, "CreateDataVolume", "the API server refuses the DataVolume %s: %s", dv.Name, err.Error())
	}
	return nil, fmt.Errorf("create DataVolume %s of VirtualMachine %s: %w", dv.Name, vm.Name, err)
}

// having brings back the machines whose volumes name a DataVolume.
func (r *Reconciler) having() handler.EventHandler {
	return handler.EnqueueRequestsFromMapFunc(func(ctx context.Context, o client.Object) (requests []reconcile.Request) {
		all := &v1.VirtualMachineList{}
		if err := r.Client.List(ctx, all, client.InNamespace(o.GetNamespace()), client.UnsafeDisableDeepCopy); err != nil {
			return nil // there is no API server behind it that could fail
		}
		for i := range all.Items {
			if t := all.Items[i].Spec.Template; t != nil && kubevirt.HasDataVolume(&t.Spec, o.GetName()) {
				requests = append(requests, reconcile.Request{NamespacedName: client.ObjectKeyFromObject(&all.Items[i])})
			}
		}
		return requests
	})
}
