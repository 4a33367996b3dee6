package admission

import (
	"context"

	admissionv1 "k8s.io/api/admission/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/validation/field"
	v1 "kubevirt.io/api/core/v1"
	ctrladmission "sigs.k8s.io/controller-runtime/pkg/webhook/admission"

	"cocoonstack.io/cocoon/internal/kube/kubevirt"
)

// machineChecker refuses VirtualMachines and VirtualMachineInstances that ask for what no VM of ours can be, and warns of fields that
// have no effect. Their controllers refuse the same. In a cluster with another KubeVirt it lets all of them through: they are not ours.
type machineChecker struct {
	decoder ctrladmission.Decoder
	ours    bool
}

// Handle implements admission.Handler.
func (c *machineChecker) Handle(_ context.Context, req ctrladmission.Request) ctrladmission.Response {
	if !c.ours {
		return ctrladmission.Allowed("")
	}
	errs, warnings, err := c.check(req.Kind.Kind, req.Object)
	if err == nil && req.Operation == admissionv1.Update {
		var before field.ErrorList
		before, _, err = c.check(req.Kind.Kind, req.OldObject)
		errs = fresh(errs, before)
	}
	if err != nil {
		return unreadable(err)
	}
	return refuse(v1.GroupVersion.WithKind(req.Kind.Kind).GroupKind(), req.Name, errs).WithWarnings(warnings...)
}

func (c *machineChecker) check(kind string, raw runtime.RawExtension) (field.ErrorList, []string, error) {
	if kind == v1.VirtualMachineGroupVersionKind.Kind {
		vm := &v1.VirtualMachine{}
		if err := c.decoder.DecodeRaw(raw, vm); err != nil {
			return nil, nil, err
		}
		errs, warnings := kubevirt.CheckMachine(vm)
		return errs, warnings, nil
	}
	vmi := &v1.VirtualMachineInstance{}
	if err := c.decoder.DecodeRaw(raw, vmi); err != nil {
		return nil, nil, err
	}
	errs, warnings := kubevirt.CheckInstance(vmi)
	return errs, warnings, nil
}
