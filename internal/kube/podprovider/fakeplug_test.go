package podprovider

import (
	"cmp"
	"context"
	"fmt"
	"slices"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/vm"
)

func (e *engine) Resize(ctx context.Context, ref string, to vm.Size) (vm.Record, error) {
	return e.plug(ctx, fmt.Sprintf("resize %d %d", to.CPUs, to.Memory>>20), ref, func(r *vm.Record) error {
		next, err := r.Spec.Grown(to)
		r.Spec = next
		return err
	})
}

func (e *engine) AttachVolume(ctx context.Context, ref string, use vm.VolumeUse, path string) (vm.Record, error) {
	return e.plug(ctx, "attach "+use.Ref+path, ref, func(r *vm.Record) error {
		if !slices.ContainsFunc(r.Attached, func(a vm.AttachedVolume) bool { return string(a.ID) == use.Ref }) {
			r.Attached = append(slices.Clip(r.Attached), vm.AttachedVolume{Volume: "pvc-" + use.Ref, ID: vm.ID(use.Ref), Serial: "serial-" + use.Ref})
		}
		if e.plugged != nil {
			e.plugged()
		}
		return nil
	})
}

func (e *engine) DumpMemory(ctx context.Context, ref, volume, file string) error {
	_, err := e.plug(ctx, "dump "+volume+" "+file, ref, func(*vm.Record) error {
		if volume == "none" {
			return errdefs.NotFoundf("no volume %s", volume)
		}
		return nil
	})
	return err
}

func (e *engine) DetachVolume(ctx context.Context, ref, volume string) (vm.Record, error) {
	return e.plug(ctx, "detach "+volume, ref, func(r *vm.Record) error {
		i := slices.IndexFunc(r.Attached, func(a vm.AttachedVolume) bool { return string(a.ID) == volume })
		if i < 0 {
			return errdefs.NotFoundf("it has no volume %s attached", volume)
		}
		r.Attached = slices.Delete(slices.Clone(r.Attached), i, i+1)
		return nil
	})
}

func (e *engine) AttachNIC(ctx context.Context, ref string, want vm.NICSpec) (vm.Record, error) {
	return e.plug(ctx, "attach network "+want.Network, ref, func(r *vm.Record) error {
		if want.Network == "none" {
			return errdefs.Invalidf("no network is called %q", want.Network)
		}
		if !slices.ContainsFunc(r.NICs[1:], func(n vm.NIC) bool { return n.Network == want.Network }) {
			r.NICs = append(slices.Clip(r.NICs), vm.NIC{Network: want.Network, MAC: cmp.Or(want.MAC, "02:00:00:00:00:"+want.Network), IP: "10.7.0.2", LinkDown: want.LinkDown})
		}
		return nil
	})
}

func (e *engine) DetachNIC(ctx context.Context, ref, nic string) (vm.Record, error) {
	return e.plug(ctx, "detach network "+nic, ref, func(r *vm.Record) error {
		i := slices.IndexFunc(r.NICs, func(n vm.NIC) bool { return n.MAC == nic })
		if i < 1 {
			return errdefs.NotFoundf("it has no interface %s", nic)
		}
		r.NICs = slices.Delete(slices.Clone(r.NICs), i, i+1)
		return nil
	})
}

func (e *engine) SetLink(ctx context.Context, ref, nic string, down bool) (vm.Record, error) {
	return e.plug(ctx, fmt.Sprintf("link %s down %v", nic, down), ref, func(r *vm.Record) error {
		i, err := r.Spec.NICBy(nic, r.NICs)
		if err == nil {
			*r = r.WithLink(i, down)
		}
		return err
	})
}

func (e *engine) plug(ctx context.Context, call, ref string, change func(*vm.Record) error) (vm.Record, error) {
	leave, err := e.enter(call)
	if err != nil {
		return vm.Record{}, err
	}
	defer leave()
	r := e.findFor(ctx, ref)
	if r == nil {
		return vm.Record{}, errdefs.NotFoundf("no VM %s", ref)
	}
	if e.plugAs != nil {
		return vm.Record{}, e.plugAs
	}
	if err := change(r); err != nil {
		return vm.Record{}, err
	}
	e.note(vm.EventModified, r)
	return *r, nil
}
