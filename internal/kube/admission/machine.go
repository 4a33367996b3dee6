package admission

import (
	"context"
	"errors"

	admissionv1 "k8s.io/api/admission/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/validation/field"
	v1 "kubevirt.io/api/core/v1"
	poolv1 "kubevirt.io/api/pool/v1beta1"
	"kubevirt.io/containerized-data-importer-api/pkg/apis/core/v1beta1"
	ctrladmission "sigs.k8s.io/controller-runtime/pkg/webhook/admission"

	"cocoonstack.io/cocoon/internal/kube/kubevirt"
	"cocoonstack.io/cocoon/internal/kube/machinebase"
)

// machineChecker refuses VirtualMachines, VirtualMachineInstances, VirtualMachineInstanceReplicaSets, VirtualMachinePools and DataVolumes that ask for what no VM or volume of ours can be, and warns
// of fields that have no effect. Their controllers refuse the same. In a cluster with another KubeVirt it lets all of them through: they are not ours.
type machineChecker struct {
	decoder ctrladmission.Decoder
	ours    bool
	bases   machinebase.Finder
}

// Handle implements admission.Handler.
func (c *machineChecker) Handle(ctx context.Context, req ctrladmission.Request) ctrladmission.Response {
	if !c.ours {
		return ctrladmission.Allowed("")
	}
	errs, warnings, err := c.check(ctx, req.Kind.Kind, req.Namespace, req.Object)
	if err == nil && req.Operation == admissionv1.Update {
		var before field.ErrorList
		before, _, err = c.check(ctx, req.Kind.Kind, req.Namespace, req.OldObject)
		errs = fresh(errs, before)
		if err == nil && req.Kind.Kind == v1.VirtualMachineInstanceGroupVersionKind.Kind {
			var more field.ErrorList
			more, err = c.change(req.OldObject, req.Object)
			errs = append(errs, more...)
		}
	}
	if lookup := (*lookupError)(nil); errors.As(err, &lookup) {
		return failed(err)
	}
	if err != nil {
		return unreadable(err)
	}
	kind := v1.GroupVersion.WithKind(req.Kind.Kind)
	switch kind.Kind {
	case kubevirt.DataVolumeKind.Kind:
		kind = kubevirt.DataVolumeKind
	case kubevirt.PoolKind.Kind:
		kind = kubevirt.PoolKind
	}
	return refuse(kind.GroupKind(), req.Name, errs).WithWarnings(warnings...)
}

// lookupError is a failure to read what a machine builds on.
type lookupError struct{ error }

func (c *machineChecker) check(ctx context.Context, kind, namespace string, raw runtime.RawExtension) (field.ErrorList, []string, error) {
	switch kind {
	case v1.VirtualMachineGroupVersionKind.Kind:
		vm := &v1.VirtualMachine{}
		if err := c.decoder.DecodeRaw(raw, vm); err != nil {
			return nil, nil, err
		}
		vm.Namespace = namespace
		return c.machine(ctx, vm)
	case v1.VirtualMachineInstanceReplicaSetGroupVersionKind.Kind:
		set := &v1.VirtualMachineInstanceReplicaSet{}
		if err := c.decoder.DecodeRaw(raw, set); err != nil {
			return nil, nil, err
		}
		errs, warnings := kubevirt.CheckReplicaSet(set)
		return errs, warnings, nil
	case kubevirt.PoolKind.Kind:
		pool := &poolv1.VirtualMachinePool{}
		if err := c.decoder.DecodeRaw(raw, pool); err != nil {
			return nil, nil, err
		}
		pool.Namespace = namespace
		return c.pool(ctx, pool)
	case kubevirt.DataVolumeKind.Kind:
		dv := &v1beta1.DataVolume{}
		if err := c.decoder.DecodeRaw(raw, dv); err != nil {
			return nil, nil, err
		}
		return kubevirt.CheckDataVolume(&dv.Spec, namespace, field.NewPath("spec")), nil, nil
	}
	vmi := &v1.VirtualMachineInstance{}
	if err := c.decoder.DecodeRaw(raw, vmi); err != nil {
		return nil, nil, err
	}
	errs, warnings := kubevirt.CheckInstance(vmi)
	return errs, warnings, nil
}

// change checks what changes of an instance.
func (c *machineChecker) change(from, to runtime.RawExtension) (field.ErrorList, error) {
	was, now := &v1.VirtualMachineInstance{}, &v1.VirtualMachineInstance{}
	if err := errors.Join(c.decoder.DecodeRaw(from, was), c.decoder.DecodeRaw(to, now)); err != nil {
		return nil, err
	}
	return kubevirt.CheckChange(was, now), nil
}

// pool checks a pool, and its template as a machine.
func (c *machineChecker) pool(ctx context.Context, pool *poolv1.VirtualMachinePool) (field.ErrorList, []string, error) {
	errs := kubevirt.CheckPool(pool)
	if pool.Spec.VirtualMachineTemplate == nil {
		return errs, nil, nil
	}
	more, warnings, err := c.machine(ctx, kubevirt.PoolTemplate(pool))
	more, warnings = kubevirt.InPool(more, warnings)
	return append(errs, more...), warnings, err
}

// machine checks a machine with what it builds on. What may still be created is no error, as in KubeVirt: objects that are applied together
// may arrive in any order.
func (c *machineChecker) machine(ctx context.Context, vm *v1.VirtualMachine) (field.ErrorList, []string, error) {
	found, err := c.bases.Find(ctx, vm)
	if err != nil {
		return nil, nil, &lookupError{err}
	}
	errs, warnings := kubevirt.CheckMachine(vm, found.Base)
	for _, m := range found.Missing {
		if m.Later {
			warnings = append(warnings, m.String()+"; until then the machine does not start")
		} else {
			errs = append(errs, &field.Error{Type: field.ErrorTypeInvalid, Field: m.At.String(), BadValue: field.OmitValueType{}, Detail: m.Message})
		}
	}
	return errs, warnings, nil
}
