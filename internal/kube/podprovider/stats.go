package podprovider

import (
	"context"

	"cocoonstack.io/cocoon/internal/guest"
	"cocoonstack.io/cocoon/internal/kube/stats"
	"cocoonstack.io/cocoon/internal/vm"
)

// Inside returns what each container of a VM with several uses; see stats.Config.
func (p *Provider) Inside(ctx context.Context, id vm.ID) ([]guest.ContainerStats, error) {
	s, err := p.node.vms.Stats(ctx, string(id))
	return s.Containers, err
}

// Tracked returns the VMs of the pods as the engine's events reported them; it sends no request.
func (p *Provider) Tracked() []stats.VM {
	all := p.index.all()
	out := make([]stats.VM, 0, len(all))
	for _, s := range all {
		f := s.look()
		pod, rec := f.pod, f.rec
		if rec == nil || f.lost || rec.ID == "" {
			continue
		}
		v := stats.VM{
			ID: rec.ID, Name: rec.Spec.Name, Namespace: pod.Namespace, Pod: pod.Name, UID: string(pod.UID),
			Backend: rec.Driver, StartedAt: rec.StartedAt,
		}
		if len(rec.Containers) == 0 && len(pod.Spec.Containers) > 0 {
			v.Containers = []string{pod.Spec.Containers[0].Name}
		}
		if rec.State == vm.StateRunning {
			v.PID = rec.PID
		}
		for _, c := range rec.Containers {
			v.Several = true
			if c.Status.State == vm.ContainerRunning {
				v.Containers = append(v.Containers, c.Name)
			}
		}
		for _, n := range rec.NICs {
			v.Taps = append(v.Taps, stats.Tap{Name: n.Tap, NetNS: n.NetNS})
		}
		for _, d := range rec.Disks {
			if d.Role == vm.RoleCOW {
				v.COW = d.Path
			}
		}
		out = append(out, v)
	}
	return out
}
