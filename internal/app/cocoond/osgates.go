package cocoond

import (
	"context"
	"net"
	"slices"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/status"

	capsulev1 "cocoonstack.io/cocoon/api/capsule/v1"
	"cocoonstack.io/cocoon/internal/appliance/desired"
	"cocoonstack.io/cocoon/internal/appliance/reconcile"
	"cocoonstack.io/cocoon/internal/appliance/update"
	"cocoonstack.io/cocoon/internal/appliance/workload"
	"cocoonstack.io/cocoon/internal/capsulewire"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/journal"
)

// gates are what must hold before a system on trial is kept.
type gates struct {
	listen      string // address of the API
	bridge      string // of the workloads
	stateDir    string
	fingerprint string // of the machine's certificate
	boot        string // id of this boot

	docs       journal.Documents
	desired    *desired.Store
	containers reconcile.Driver // nil: the machine runs none
}

// all returns them. The one of the workloads is the updater's own: it knows which ran before.
func (g gates) all() []update.Gate {
	return []update.Gate{{Name: "state", Check: g.state}, {Name: "containerd", Check: g.containerd}, {Name: "uplink", Check: g.uplink}, {Name: "API", Check: g.api}}
}

// state wants the volume for the state to be mounted, and the databases to take a change.
func (g gates) state(ctx context.Context) error {
	own, err := ownFileSystem(g.stateDir)
	if err != nil {
		return err
	}
	if !own {
		return errdefs.DataLossf("the volume for the state is not mounted")
	}
	probe := journal.Change{Table: journal.OSState, Name: "gate", Data: []byte(`{}`)}
	if err := g.docs.Write(ctx, probe); err != nil {
		return err
	}
	probe.Data = nil
	return g.docs.Write(ctx, probe)
}

// containerd wants it to answer.
func (g gates) containerd(ctx context.Context) error {
	if g.containers == nil {
		return nil
	}
	_, err := g.containers.List(ctx)
	return err
}

// uplink wants an address that others can reach.
func (g gates) uplink(context.Context) error {
	_, err := g.address()
	return err
}

// address returns an address of this machine on another link than that of the workloads.
func (g gates) address() (net.IP, error) {
	links, err := net.Interfaces()
	if err != nil {
		return nil, err
	}
	for _, l := range links {
		if l.Name == g.bridge || l.Flags&net.FlagLoopback != 0 || l.Flags&net.FlagUp == 0 {
			continue
		}
		addresses, err := l.Addrs()
		if err != nil {
			continue // the link has gone
		}
		for _, a := range addresses {
			if n, ok := a.(*net.IPNet); ok && n.IP.IsGlobalUnicast() {
				return n.IP, nil
			}
		}
	}
	return nil, errdefs.Unavailablef("no link has an address")
}

// api wants the API to answer at that address, with the machine's own certificate. A call without a token is refused, which is an answer.
func (g gates) api(ctx context.Context) error {
	ip, err := g.address()
	if err != nil {
		return err
	}
	_, port, err := net.SplitHostPort(g.listen)
	if err != nil {
		return err
	}
	c, err := grpc.NewClient("passthrough:///"+net.JoinHostPort(ip.String(), port), grpc.WithTransportCredentials(credentials.NewTLS(capsulewire.PinnedTLS(g.fingerprint))))
	if err != nil {
		return err
	}
	defer c.Close()
	_, err = capsulev1.NewCapsuleServiceClient(c).GetInfo(ctx, &capsulev1.GetInfoRequest{})
	if status.Code(err) == codes.Unauthenticated {
		return nil
	}
	return errdefs.Unavailablef("%s does not answer as it should: %w", ip, err)
}

// running returns the workloads that run, and are ready if they say when they are.
func (g gates) running() (names []string) {
	for _, r := range g.desired.List() {
		if g.runs(r) {
			names = append(names, r.Name())
		}
	}
	return names
}

func (g gates) runs(r workload.Row) bool { return r.Boot == g.boot && r.Status().GetReady() }

// missing returns those of ran that shall run, and do not. A workload that has ended well since is as it shall be.
func (g gates) missing(ran []string) (names []string) {
	for _, r := range g.desired.List() {
		ended := r.Done != "" && r.Done == r.Hash() && r.Status().ExitCode != nil && r.Status().GetExitCode() == 0
		if slices.Contains(ran, r.Name()) && r.Runs() && !ended && !g.runs(r) {
			names = append(names, r.Name())
		}
	}
	return names
}
