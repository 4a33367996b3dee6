package aggregated

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/util/validation/field"
	v1 "kubevirt.io/api/core/v1"

	"cocoonstack.io/cocoon/internal/kube/kubevirt"
	"cocoonstack.io/cocoon/internal/kube/machinebase"
)

// expandVMSpec is the only resource of the group that is no part of an object.
const expandVMSpec = "expand-vm-spec"

// expandMachine answers with a VirtualMachine that has its instancetype and its preference in its template.
func (s *Server) expandMachine(w http.ResponseWriter, r *http.Request, t target) error {
	vm, err := s.machine(r.Context(), t)
	if err != nil {
		return err
	}
	whole, problem, err := s.expand(r.Context(), vm)
	if problem != nil {
		return conflict(t, "%w", problem)
	}
	return answer(w, whole, err)
}

// expandGiven is expandMachine for the VirtualMachine in the body, which does not exist.
func (s *Server) expandGiven(w http.ResponseWriter, r *http.Request, t target) error {
	vm := &v1.VirtualMachine{}
	if err := decode(w, r, vm); err != nil {
		return err
	}
	switch {
	case vm.Spec.Template == nil:
		return apierrors.NewBadRequest("Object is not a valid VirtualMachine: " + field.Required(field.NewPath("spec", "template"), "").Error())
	case vm.Namespace != "" && vm.Namespace != t.Namespace:
		return apierrors.NewBadRequest(fmt.Sprintf("VM namespace must be empty or %s", t.Namespace))
	}
	vm.Namespace = t.Namespace
	whole, problem, err := s.expand(r.Context(), vm)
	if problem != nil {
		return apierrors.NewBadRequest(problem.Error())
	}
	return answer(w, whole, err)
}

// expand returns vm with what it builds on. problem says why it cannot be.
func (s *Server) expand(ctx context.Context, vm *v1.VirtualMachine) (whole *v1.VirtualMachine, problem, err error) {
	found, err := machinebase.Finder{Client: s.opts.Client, Live: s.opts.Client}.Find(ctx, vm)
	if err != nil || vm.Spec.Template == nil {
		return vm, nil, err
	}
	whole, errs, _ := kubevirt.Unfold(vm, found.Base)
	var all []error
	for _, e := range errs {
		all = append(all, e)
	}
	for _, m := range found.Missing {
		all = append(all, errors.New(m.String()))
	}
	whole.SetGroupVersionKind(v1.VirtualMachineGroupVersionKind)
	return whole, errors.Join(all...), nil
}

func answer(w http.ResponseWriter, body any, err error) error {
	if err != nil {
		return err
	}
	w.Header().Set("Content-Type", "application/json")
	return json.NewEncoder(w).Encode(body)
}
