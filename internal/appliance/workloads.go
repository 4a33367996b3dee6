package appliance

import (
	"context"
	"fmt"
	"slices"
	"strings"

	"google.golang.org/protobuf/proto"

	capsulev1 "cocoonstack.io/cocoon/api/capsule/v1"
	"cocoonstack.io/cocoon/internal/appliance/workload"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/vm"
)

// workloads implements WorkloadService.
type workloads struct {
	capsulev1.UnimplementedWorkloadServiceServer
	door *Door
}

// Apply implements capsulev1.WorkloadServiceServer.
func (s *workloads) Apply(ctx context.Context, req *capsulev1.WorkloadApplyRequest) (*capsulev1.WorkloadApplyResponse, error) {
	w := req.GetWorkload()
	if w == nil {
		return nil, errdefs.Invalidf("the request has no workload")
	}
	if err := workload.Validate(w); err != nil {
		return nil, err
	}
	if fields := workload.Reaches(w); len(fields) > 0 {
		if err := allow(callerOf(ctx), capsulev1.Role_ROLE_ADMIN, "workload "+w.GetName()+" with "+strings.Join(fields, ", ")); err != nil {
			return nil, err
		}
	}
	d, err := s.door.deps.Workloads.Driver(w)
	if err != nil {
		return nil, err
	}
	if err := d.Check(ctx, w); err != nil {
		return nil, err
	}
	var coming []string
	if req.GetDryRun() {
		coming = req.GetComingVolumes()
	}
	if err := s.volumesExist(ctx, w, coming); err != nil {
		return nil, err
	}
	a, err := s.door.deps.Desired.Apply(ctx, w, req.GetDryRun(), func(others []workload.Row) error {
		// Whoever may not reach into the machine may not change a workload that does either.
		for _, o := range others {
			if o.Name() == w.GetName() {
				if err := mayChange(ctx, o); err != nil {
					return err
				}
			}
		}
		if w.GetDesiredState() == capsulev1.DesiredState_DESIRED_STATE_STOPPED {
			return nil
		}
		if err := workload.Conflicts(w, others, s.door.reserved()); err != nil {
			return err
		}
		return s.door.taken(ctx, w)
	})
	if err != nil {
		return nil, err
	}
	return &capsulev1.WorkloadApplyResponse{Workload: shown(ctx, a.Row.Workload), Action: a.Action, Changes: a.Changes}, nil
}

// reserved are the ports of the machine that no workload can have, whether or not somebody listens there now.
func (d *Door) reserved() map[string]string {
	return map[string]string{
		port(d.cfg.Listen) + "/tcp": "the API of this machine",
		"53/tcp":                    "the names of workloads", "53/udp": "the names of workloads", // a workload there would get the questions of all others
		"67/udp": "DHCP of workloads", "68/udp": "DHCP of this machine", "5353/udp": "the announcement of this machine",
	}
}

// taken returns FailedPrecondition if a program of the machine listens on a port of w. What the ports of workloads lead to does not listen.
func (d *Door) taken(ctx context.Context, w *capsulev1.Workload) error {
	for _, p := range workload.PartsOf(w).GetPorts() {
		m := vm.PortMapping{Protocol: vm.Protocol(workload.Protocol(p)), HostPort: uint16(p.GetHostPort())} //nolint:gosec // validated
		if d.deps.Listens(ctx, m) {
			return errdefs.Preconditionf("workload %s: a program of this machine, or a workload with networkMode HOST, listens on port %d/%s; choose another port", w.GetName(), p.GetHostPort(), m.Protocol)
		}
	}
	return nil
}

// volumesExist returns FailedPrecondition if a volume of w does not exist, except for those that are coming, and PermissionDenied for one
// that the caller may not touch.
func (s *workloads) volumesExist(ctx context.Context, w *capsulev1.Workload, coming []string) error {
	for _, name := range workload.Volumes(w) {
		if err := s.door.mayTouch(ctx, name); err != nil {
			return err
		}
		if slices.Contains(coming, name) {
			continue
		}
		switch _, err := s.door.volume(ctx, name); {
		case errdefs.IsNotFound(err):
			return errdefs.Preconditionf("workload %s: there is no volume %q; create it first: capsulectl volume create %s", w.GetName(), name, name)
		case err != nil:
			return err
		}
	}
	return nil
}

// mayChange returns PermissionDenied for a workload that reaches into the machine, unless the caller owns the machine.
func mayChange(ctx context.Context, r workload.Row) error {
	if fields := workload.Reaches(r.Workload); len(fields) > 0 {
		return allow(callerOf(ctx), capsulev1.Role_ROLE_ADMIN, "workload "+r.Name()+", which has "+strings.Join(fields, ", ")+",")
	}
	return nil
}

// mayTouch returns PermissionDenied for a volume of a workload that reaches into the machine, unless the caller owns the machine: such a
// workload may run what is in it, and what is in it may be a secret of the machine. It need not exist.
func (d *Door) mayTouch(ctx context.Context, volume string) error {
	for _, r := range d.deps.Desired.List() {
		if uses(r, volume) {
			if err := mayChange(ctx, r); err != nil {
				return err
			}
		}
	}
	return nil
}

// find returns a workload that the caller may use.
func (s *workloads) find(ctx context.Context, name string) (workload.Row, error) {
	r, err := s.door.deps.Desired.Get(name)
	if err != nil {
		return r, err
	}
	return r, mayChange(ctx, r)
}

// Get implements capsulev1.WorkloadServiceServer.
func (s *workloads) Get(ctx context.Context, req *capsulev1.WorkloadGetRequest) (*capsulev1.Workload, error) {
	r, err := s.door.deps.Desired.Get(req.GetName())
	if err != nil {
		return nil, err
	}
	return shown(ctx, r.Workload), nil
}

// List implements capsulev1.WorkloadServiceServer.
func (s *workloads) List(ctx context.Context, _ *capsulev1.WorkloadListRequest) (*capsulev1.WorkloadListResponse, error) {
	resp := &capsulev1.WorkloadListResponse{}
	for _, r := range s.door.deps.Desired.List() {
		resp.Workloads = append(resp.Workloads, shown(ctx, r.Workload))
	}
	return resp, nil
}

// shown returns w as the caller may see it: the values of variables may be secret, and those who only look do not see them.
func shown(ctx context.Context, w *capsulev1.Workload) *capsulev1.Workload {
	if callerOf(ctx).Role >= capsulev1.Role_ROLE_OPERATE {
		return w
	}
	w = proto.CloneOf(w)
	for _, env := range []map[string]string{w.GetContainer().GetEnv(), w.GetMicroVm().GetEnv()} {
		for name := range env {
			env[name] = "(hidden)"
		}
	}
	return w
}

// Delete implements capsulev1.WorkloadServiceServer.
func (s *workloads) Delete(ctx context.Context, req *capsulev1.WorkloadDeleteRequest) (*capsulev1.WorkloadDeleteResponse, error) {
	return &capsulev1.WorkloadDeleteResponse{}, s.want(ctx, req.GetName(), capsulev1.DesiredState_DESIRED_STATE_DELETING, false)
}

// Stop implements capsulev1.WorkloadServiceServer.
func (s *workloads) Stop(ctx context.Context, req *capsulev1.WorkloadStopRequest) (*capsulev1.WorkloadStopResponse, error) {
	return &capsulev1.WorkloadStopResponse{}, s.want(ctx, req.GetName(), capsulev1.DesiredState_DESIRED_STATE_STOPPED, false)
}

// Restart implements capsulev1.WorkloadServiceServer.
func (s *workloads) Restart(ctx context.Context, req *capsulev1.WorkloadRestartRequest) (*capsulev1.WorkloadRestartResponse, error) {
	return &capsulev1.WorkloadRestartResponse{}, s.run(ctx, req.GetName(), true)
}

// Start implements capsulev1.WorkloadServiceServer.
func (s *workloads) Start(ctx context.Context, req *capsulev1.WorkloadStartRequest) (*capsulev1.WorkloadStartResponse, error) {
	return &capsulev1.WorkloadStartResponse{}, s.run(ctx, req.GetName(), false)
}

// run makes a workload run, if it fits beside those that have begun to run since it was applied.
func (s *workloads) run(ctx context.Context, name string, anew bool) error {
	r, err := s.find(ctx, name)
	if err != nil {
		return err
	}
	for _, name := range workload.Volumes(r.Workload) {
		if err := s.door.mayTouch(ctx, name); err != nil {
			return err
		}
	}
	if err := workload.Conflicts(r.Workload, s.door.deps.Desired.List(), s.door.reserved()); err != nil {
		return err
	}
	if err := s.door.taken(ctx, r.Workload); err != nil {
		return err
	}
	return s.want(ctx, name, capsulev1.DesiredState_DESIRED_STATE_RUNNING, anew || r.Runs() && r.Done == r.Hash())
}

func (s *workloads) want(ctx context.Context, name string, state capsulev1.DesiredState, anew bool) error {
	if _, err := s.find(ctx, name); err != nil {
		return err
	}
	_, err := s.door.deps.Desired.Want(ctx, name, state, anew)
	return err
}

// Events implements capsulev1.WorkloadServiceServer.
func (s *workloads) Events(req *capsulev1.WorkloadEventsRequest, stream capsulev1.WorkloadService_EventsServer) error {
	after := req.GetAfter()
	for {
		found, changed := s.door.deps.Desired.Events(req.GetName(), after)
		for _, e := range found {
			if err := stream.Send(e); err != nil {
				return err
			}
			after = e.GetSequence()
		}
		if !req.GetFollow() {
			return nil
		}
		select {
		case <-changed:
		case <-stream.Context().Done():
			return stream.Context().Err()
		}
	}
}

// port returns the port of host:port.
func port(address string) string {
	return address[strings.LastIndexByte(address, ':')+1:]
}

// notRunning returns the error for a workload whose instance is not there.
func notRunning(r workload.Row, err error) error {
	if !errdefs.IsNotFound(err) {
		return err
	}
	st := r.Status()
	phase := strings.ToLower(strings.TrimPrefix(st.GetPhase().String(), "WORKLOAD_PHASE_"))
	return errdefs.Preconditionf("workload %s does not run: it is %s%s", r.Name(), phase, detail(st.GetMessage()))
}

func detail(message string) string {
	if message == "" {
		return ""
	}
	return fmt.Sprintf(" (%s)", message)
}
