package workload

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	capsulev1 "cocoonstack.io/cocoon/api/capsule/v1"
	"cocoonstack.io/cocoon/internal/errdefs"
)

// Conflicts returns a FailedPrecondition error if w cannot run beside the others, which are those that shall run and, for dependsOn,
// all. reserved are ports of the machine itself, such as 50000/tcp, by what has them.
func Conflicts(w *capsulev1.Workload, others []Row, reserved map[string]string) error {
	var found []error
	for _, p := range PartsOf(w).GetPorts() {
		if by, ok := reserved[hostPort(p)]; ok {
			found = append(found, fmt.Errorf("port %s is that of %s", hostPort(p), by))
		}
	}
	for _, o := range others {
		if o.Name() != w.GetName() && o.Runs() {
			found = append(found, clash(w, o.Workload)...)
		}
	}
	if circle := circle(w, others); circle != nil {
		found = append(found, fmt.Errorf("workloads would wait for each other: %s", strings.Join(circle, ", ")))
	}
	if len(found) > 0 {
		return errdefs.New(errdefs.FailedPrecondition, "workload %s: %w", w.GetName(), errors.Join(found...))
	}
	return nil
}

// clash returns what w and o cannot both have.
func clash(w, o *capsulev1.Workload) (found []error) {
	for _, p := range PartsOf(w).GetPorts() {
		for _, q := range PartsOf(o).GetPorts() {
			if hostPort(p) == hostPort(q) {
				found = append(found, fmt.Errorf("port %s is that of workload %s", hostPort(p), o.GetName()))
			}
		}
	}
	for _, m := range PartsOf(w).GetMounts() {
		for _, n := range PartsOf(o).GetMounts() {
			if m.GetVolumeName() == n.GetVolumeName() && (!m.GetReadOnly() || !n.GetReadOnly()) {
				found = append(found, fmt.Errorf("volume %s is in use by workload %s; stop or delete that first, or mount it in both with readOnly", m.GetVolumeName(), o.GetName()))
			}
		}
	}
	return found
}

// circle returns workloads that would wait for each other if w existed, in their order; nil if there are none.
func circle(w *capsulev1.Workload, others []Row) []string {
	waits := map[string][]string{}
	for _, o := range others {
		waits[o.Name()] = o.Workload.GetDependsOn()
	}
	waits[w.GetName()] = w.GetDependsOn()
	seen := map[string]bool{}
	var visit func(name string, path []string) []string
	visit = func(name string, path []string) []string {
		if name == w.GetName() && len(path) > 0 {
			return append(slices.Clip(path), name)
		}
		if seen[name] {
			return nil
		}
		seen[name] = true
		for _, next := range waits[name] {
			if found := visit(next, append(slices.Clip(path), name)); found != nil {
				return found
			}
		}
		return nil
	}
	return visit(w.GetName(), nil)
}
