package netpolicy

import (
	"cmp"
	"context"
	"log/slog"
	"maps"
	"net/netip"
	"reflect"
	"slices"
	"sync"
	"time"

	"cocoonstack.io/cocoon/api/contract"
	"cocoonstack.io/cocoon/internal/kube/pauses"
	"cocoonstack.io/cocoon/internal/network"
	"cocoonstack.io/cocoon/internal/vm"
)

// guest is what the runtime says of a VM.
type guest struct {
	id        vm.ID
	uid       string // of the pod that it was made for, if this node made it
	made      bool   // a virtual node made it for a pod
	owner     vm.Owner
	offered   []string // namespaces whose pods may take it over
	addresses []netip.Addr
}

// guests are the VMs of the node, from the runtime's events. The zero value needs its node.
type guests struct {
	node string

	mu      sync.Mutex
	records map[vm.ID]guest
	contact int // how often they were listed
}

// follow keeps the guests current until ctx ends. After each interruption it lists them again: the runtime may have restarted.
func (g *guests) follow(ctx context.Context, r Runtime, changed func(), log *slog.Logger) {
	const first, most = 100 * time.Millisecond, 10 * time.Second
	retries := pauses.Growing(first, most, pauses.Many)
	for {
		all, err := r.List(ctx)
		if err == nil {
			g.replace(all)
			changed()
			retries = pauses.Growing(first, most, pauses.Many)
			err = r.Watch(ctx, -1, func(e vm.Event) error {
				if g.note(e) {
					changed()
				}
				return nil
			})
		}
		if ctx.Err() == nil && err != nil {
			log.Warn("VMs are not watched for network policies, trying again", "err", err)
		}
		if !pauses.Sleep(ctx, nil, retries.Step(), false) {
			return
		}
	}
}

func (g *guests) replace(all []vm.Record) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.records = map[vm.ID]guest{}
	for _, r := range all {
		g.records[r.ID] = g.of(r)
	}
	g.contact++
}

// note reports whether an event changes what policies depend on.
func (g *guests) note(e vm.Event) bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	old, there := g.records[e.Record.ID]
	if e.Type == vm.EventDeleted {
		delete(g.records, e.Record.ID)
		return there
	}
	now := g.of(e.Record)
	g.records[now.id] = now
	return !there || !reflect.DeepEqual(old, now)
}

func (g *guests) of(r vm.Record) guest {
	uid := r.Spec.Labels[contract.VMLabelPodUID]
	out := guest{id: r.ID, made: uid != "", owner: r.Owner, offered: r.Spec.Offered}
	if r.Spec.Labels[contract.VMLabelNode] == g.node {
		out.uid = uid
	}
	for _, n := range r.NICs[:min(len(r.NICs), 1)] { // a policy knows the addresses of the pod; further networks have their own rules
		for _, text := range []string{n.IP, n.IPv6} {
			if a, err := netip.ParseAddr(text); err == nil {
				out.addresses = append(out.addresses, a.Unmap().WithZone(""))
			}
		}
	}
	return out
}

// all returns the VMs in the order of their IDs, and how often they were listed; 0: never.
func (g *guests) all() ([]guest, int) {
	g.mu.Lock()
	defer g.mu.Unlock()
	return slices.SortedFunc(maps.Values(g.records), func(a, b guest) int { return cmp.Compare(a.id, b.id) }), g.contact
}

// open returns policies that allow everything.
func open(node string, records []guest) network.Policies {
	out := network.Policies{Node: node}
	for _, r := range records {
		if r.uid != "" {
			out.Guests = append(out.Guests, network.Guest{ID: r.id})
		}
	}
	return out
}
