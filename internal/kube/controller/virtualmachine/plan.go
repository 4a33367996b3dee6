package virtualmachine

import (
	"context"
	"slices"
	"time"

	apiequality "k8s.io/apimachinery/pkg/api/equality"
	v1 "kubevirt.io/api/core/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/kube/kubevirt"
	"cocoonstack.io/cocoon/internal/kube/machinebase"
)

// plan is what the next instance of a machine will be.
type plan struct {
	template *v1.VirtualMachineInstanceTemplateSpec // nil: it is not known
	base     kubevirt.Base
	warnings []string      // about base
	refusal  string        // why there can be no instance; "": there can
	reason   string        // of the refusal
	captured bool          // the status was written because of new copies; nothing else is known
	again    time.Duration // until base is looked for again; 0: when something changes
}

// plan finds on what the machine builds, and makes the machine's own copies of it before anything uses them. They are in the status before there
// is an instance: whoever goes on after a crash finds the same.
func (r *Reconciler) plan(ctx context.Context, vm *v1.VirtualMachine) (p plan, err error) {
	if vm.DeletionTimestamp != nil {
		return plan{}, nil
	}
	finder := machinebase.Finder{Client: r.Client, Live: r.Live}
	found, err := finder.Find(ctx, vm)
	if err != nil {
		return plan{}, err
	}
	p.base = found.Base
	if vm.Spec.Template != nil && len(found.Missing) == 0 {
		whole, _, warnings := kubevirt.Unfold(vm, found.Base)
		p.template, p.warnings = whole.Spec.Template, warnings
	}
	if errs, _ := kubevirt.CheckMachine(vm, found.Base); len(errs) > 0 {
		p.refusal, p.reason = errs.ToAggregate().Error(), kubevirt.ReasonNotSupported
		return p, nil
	}
	if len(found.Missing) > 0 {
		m := found.Missing[0]
		p.refusal, p.reason = m.String(), m.Reason
		if m.Later {
			p.again = claimPause
		}
		return p, nil
	}
	instancetype, preference, err := finder.Capture(ctx, r.Client, vm, found)
	if errdefs.Is(err, errdefs.Conflict) {
		p.refusal, p.reason, p.again = err.Error(), ReasonOccupied, claimPause
		return p, nil
	}
	if err != nil {
		return plan{}, err
	}
	s := *vm.Status.DeepCopy()
	s.InstancetypeRef, s.PreferenceRef = instancetype, preference
	p.captured = !apiequality.Semantic.DeepEqual(s, vm.Status)
	return p, r.write(ctx, vm, s)
}

// waiting brings back the machines that name an object of the kind and have no copy of it.
func (r *Reconciler) waiting(kind string) handler.EventHandler {
	return handler.EnqueueRequestsFromMapFunc(func(ctx context.Context, o client.Object) (requests []reconcile.Request) {
		all := &v1.VirtualMachineList{}
		if err := r.Client.List(ctx, all, client.InNamespace(o.GetNamespace()), client.UnsafeDisableDeepCopy); err != nil {
			return nil // there is no API server behind it that could fail
		}
		for i := range all.Items {
			if vm := &all.Items[i]; awaits(vm, kind, o.GetName()) {
				requests = append(requests, reconcile.Request{NamespacedName: client.ObjectKeyFromObject(vm)})
			}
		}
		return requests
	})
}

// awaits reports whether vm has no copy of the object, and might build on it.
func awaits(vm *v1.VirtualMachine, kind, name string) bool {
	is := func(m v1.Matcher, status *v1.InstancetypeStatusRef, named string) bool {
		if status != nil && status.ControllerRevisionRef != nil && (m.GetInferFromVolume() != "" || status.Name == m.GetName() && status.Kind == named) {
			return false
		}
		return m.GetInferFromVolume() != "" || m.GetName() == name && named == kind
	}
	var of []bool
	if m := vm.Spec.Instancetype; m != nil {
		of = append(of, is(m, vm.Status.InstancetypeRef, kubevirt.InstancetypeKind(m.Kind)))
	}
	if m := vm.Spec.Preference; m != nil {
		of = append(of, is(m, vm.Status.PreferenceRef, kubevirt.PreferenceKind(m.Kind)))
	}
	return slices.Contains(of, true)
}
