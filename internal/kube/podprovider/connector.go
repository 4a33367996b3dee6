package podprovider

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"

	"cocoonstack.io/cocoon/api/contract"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/kube/convert"
	"cocoonstack.io/cocoon/internal/vm"
)

// connector gives the pod's running VM an interface on each network that an annotation of the pod names, and takes away those on other networks. The
// record of the VM says what the guest has. A pod without the annotation says nothing about them. It also sets the links of interfaces down and up.
type connector struct {
	base
	retries retryTasks // by network
	wrong   string     // the announced error in the annotation
}

// connectTask is an interface that the VM has to get, or to give back, or whose link is to be set.
type connectTask struct {
	want vm.NICSpec
	away bool
	link bool
}

// connectTasks returns what has to be done so that rec has the further interfaces in wants, and none beside them. It is pure. Interfaces on the
// network of the first one stay: no annotation names them.
func connectTasks(wants []vm.NICSpec, rec *vm.Record) (out []connectTask) {
	if len(rec.NICs) == 0 {
		return nil
	}
	for i, n := range rec.NICs {
		if i > 0 && n.Network != rec.NICs[0].Network && !slices.ContainsFunc(wants, func(w vm.NICSpec) bool { return w.Network == n.Network }) {
			out = append(out, connectTask{want: vm.NICSpec{Network: n.Network, MAC: n.MAC}, away: true})
		}
	}
	plugged := rec.Plugged()
	for _, w := range wants {
		has := func(n vm.NIC) bool { return n.Network == w.Network && n.MAC != rec.NICs[0].MAC }
		if !slices.ContainsFunc(plugged, has) {
			out = append(out, connectTask{want: w})
		}
	}
	return out
}

// linkTasks returns the links of rec that are not as they are asked for: links are those of wants, which are all interfaces that the VM is to have. It
// is pure. An interface that the guest is getting or giving back is left alone.
func linkTasks(links []string, wants []vm.NICSpec, rec *vm.Record) (out []connectTask) {
	for i, link := range links[:min(len(links), len(wants))] {
		for at, n := range rec.NICs {
			is := (i == 0) == (at == 0) && (i == 0 || n.Network == wants[i].Network) && !slices.Contains(rec.Moving, vm.PlaceOf(rec.NICs, at))
			if down := link == contract.LinkDown; is && link != "" && n.LinkDown != down {
				out = append(out, connectTask{want: vm.NICSpec{Network: n.Network, MAC: n.MAC, LinkDown: down}, link: true})
			}
		}
	}
	return out
}

func (p *connector) tasks(f facts) (out []connectTask) {
	_, asked := f.pod.Annotations[contract.KeyNetworks]
	links := convert.Links(f.pod)
	if !asked && links == nil {
		return nil
	}
	wrong := ""
	if errs := convert.CheckNetworks(f.pod); len(errs) > 0 {
		wrong = errs.ToAggregate().Error()
	}
	if wrong != p.wrong {
		if p.wrong = wrong; wrong != "" {
			p.event(corev1.EventTypeWarning, eventConnectFailed, "No network is attached or detached: %s", wrong)
		}
	}
	if wrong != "" {
		return nil
	}
	all := convert.NICs(f.pod)
	if asked {
		out = connectTasks(all[1:], f.rec)
	}
	return append(out, linkTasks(links, all, f.rec)...)
}

// due reports whether the worker has something to do for a network, and when.
func (p *connector) due(f facts) (some bool, left time.Duration) {
	var names []string
	for _, t := range p.tasks(f) {
		names = append(names, t.want.Network)
	}
	left = p.retries.left(names)
	p.network.settle(p.wrong, slices.Collect(maps.Keys(p.retries)))
	return len(names) > 0, left
}

// act does the first task that is due.
func (p *connector) act(ctx context.Context, rec *vm.Record) {
	for _, t := range p.tasks(p.look()) {
		if p.retries.of(t.want.Network).left() > 0 {
			continue
		}
		op, call := "connect", p.attach
		switch {
		case t.away:
			op, call = "disconnect", p.detach
		case t.link:
			op, call = "set link", p.setLink
		}
		err := call(ctx, rec, t.want)
		if ctx.Err() != nil {
			return
		}
		p.Metrics.done(op, err)
		if err != nil {
			p.failed(t, err)
		}
		p.publish(0)
		return
	}
}

func (p *connector) attach(ctx context.Context, rec *vm.Record, want vm.NICSpec) error {
	got, err := p.vms.AttachNIC(ctx, string(rec.ID), want)
	if err != nil {
		return err
	}
	p.network.done(want.Network)
	p.event(corev1.EventTypeNormal, eventConnected, "Attached VM %s to network %s", p.vmName, want.Network)
	p.take(got)
	return nil
}

func (p *connector) detach(ctx context.Context, rec *vm.Record, want vm.NICSpec) error {
	got, err := p.vms.DetachNIC(ctx, string(rec.ID), want.MAC)
	if err != nil && !errdefs.IsNotFound(err) {
		return err
	}
	p.network.done(want.Network)
	if err == nil {
		p.event(corev1.EventTypeNormal, eventDisconnected, "Detached VM %s from network %s", p.vmName, want.Network)
		p.take(got)
	}
	return nil
}

func (p *connector) setLink(ctx context.Context, rec *vm.Record, want vm.NICSpec) error {
	got, err := p.vms.SetLink(ctx, string(rec.ID), want.MAC, want.LinkDown)
	if err != nil {
		return err
	}
	p.network.done(want.Network)
	p.event(corev1.EventTypeNormal, eventLinkSet, "Set the link of VM %s on network %s %s", p.vmName, want.Network, linkText(want.LinkDown))
	p.take(got)
	return nil
}

func linkText(down bool) string {
	if down {
		return contract.LinkDown
	}
	return contract.LinkUp
}

// failed says why t is not done. It is tried again.
func (p *connector) failed(t connectTask, err error) {
	what, reason := "attached to", eventConnectFailed
	switch {
	case t.away:
		what, reason = "detached from", eventDisconnectFailed
	case t.link:
		what, reason = linkText(t.want.LinkDown)+" on", eventLinkFailed
	}
	text := fmt.Sprintf("VM %s is not %s network %s yet: %s", p.vmName, what, t.want.Network, err)
	p.network.fail(t.want.Network, text)
	if p.retries.of(t.want.Network).failed(err) {
		p.event(corev1.EventTypeWarning, reason, "%s", text)
		p.log.Warn("network not attached or detached", "op", fmt.Sprint("network ", t.want.Network), "err", err)
	}
}
