package podprovider

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"cocoonstack.io/cocoon/api/contract"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/image"
	"cocoonstack.io/cocoon/internal/kube/pauses"
	"cocoonstack.io/cocoon/internal/kube/podsnapshots"
	"cocoonstack.io/cocoon/internal/snapshot"
	"cocoonstack.io/cocoon/internal/vm"
)

// fakeSnapshots is an in-memory podsnapshots.Snapshots for the VMs of an engine. memory is the memory content of a guest, of
// which a snapshot keeps a copy.
type fakeSnapshots struct {
	*engine
	registry *registry
	peers    map[string]*fakeSnapshots // by host:port

	mu      sync.Mutex
	snaps   map[string]snapshot.Snapshot // by the name that is unique on the node
	content map[string]string            // of snapshots, by id
	kept    []string                     // NAMESPACE/NAME of all snapshots that ever existed on the node
	memory  map[vm.ID]string             // memory content of VMs
	saveAs  func() error
	wakeAs  func() error
	pullAs  func() error  // called before a pull transfers data
	takes   time.Duration // duration of a save
}

// registry is an in-memory OCI registry, which several fakeSnapshots may share.
type registry struct {
	mu    sync.Mutex
	down  error
	tags  map[string]string            // ref → digest
	blobs map[string]snapshot.Snapshot // by digest
	text  map[string]string            // by digest
	calls []string
}

const registryURL = "http://epoch.test"

func newRegistry() *registry {
	return &registry{tags: map[string]string{}, blobs: map[string]snapshot.Snapshot{}, text: map[string]string{}}
}

func newFakeSnapshots(e *engine, r *registry) *fakeSnapshots {
	s := &fakeSnapshots{engine: e, registry: r, snaps: map[string]snapshot.Snapshot{}, content: map[string]string{}, memory: map[vm.ID]string{}}
	e.removed = func(rec vm.Record) { // the snapshot of a hibernated VM goes with it, unless it was kept
		defer s.lock()()
		for key, x := range s.snaps {
			if rec.State == vm.StateHibernated && x.ID == rec.Snapshot && !x.Kept {
				delete(s.snaps, key)
			}
		}
	}
	return s
}

var _ podsnapshots.Snapshots = (*fakeSnapshots)(nil)

func (r *registry) enter(call string) (func(), error) {
	r.mu.Lock()
	r.calls = append(r.calls, call)
	if r.down != nil {
		defer r.mu.Unlock()
		return nil, r.down
	}
	return r.mu.Unlock, nil
}

func (r *registry) fall(err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.down = err
}

func (r *registry) called(call string) (n int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, c := range r.calls {
		if c == call {
			n++
		}
	}
	return n
}

// has returns the content of a tag, or "" if the tag does not exist.
func (r *registry) has(repo, tag string) string {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.text[r.tags[registryURL+"/"+repo+":"+tag]]
}

// fail sets the result of a save or a wake.
func (s *fakeSnapshots) fail(how *func() error, with func() error) {
	defer s.lock()()
	*how = with
}

func (s *fakeSnapshots) lock() func() { s.mu.Lock(); return s.mu.Unlock }

// knows sets and returns the memory content of a VM's guest.
func (s *fakeSnapshots) knows(name string, set ...string) string {
	rec, err := s.Inspect(context.Background(), name)
	if err != nil {
		return "no VM"
	}
	defer s.lock()()
	if len(set) > 0 {
		s.memory[rec.ID] = set[0]
	}
	return s.memory[rec.ID]
}

func (s *fakeSnapshots) names() string {
	defer s.lock()()
	var out []string
	for _, snap := range s.snaps {
		out = append(out, snap.Name)
	}
	return strings.Join(out, " ")
}

// put stores a snapshot under its name. Precondition: mu is held.
func (s *fakeSnapshots) put(snap snapshot.Snapshot, content string) (snapshot.Snapshot, error) {
	key := snap.Owner.Qualify(snap.Name)
	if _, taken := s.snaps[key]; taken {
		return snap, errdefs.Existsf("snapshot %s exists", snap.Name)
	}
	if snap.CreatedAt.IsZero() {
		snap.CreatedAt = time.Now()
	}
	snap.ID, snap.Hypervisor, snap.NICs = string(vm.NewID()), "fake", 1
	s.snaps[key], s.content[snap.ID], s.kept = snap, content, append(s.kept, key)
	return snap, nil
}

func (s *fakeSnapshots) SaveSnapshot(ctx context.Context, ref string, spec vm.SaveSpec) (snapshot.Snapshot, error) {
	leave, err := s.enter("save " + spec.Name)
	if err != nil {
		return snapshot.Snapshot{}, err
	}
	rec := s.findFor(ctx, ref)
	leave()
	if rec == nil {
		return snapshot.Snapshot{}, errdefs.NotFoundf("no VM %s", ref)
	}
	if !pauses.Sleep(ctx, nil, s.takes, false) {
		return snapshot.Snapshot{}, ctx.Err()
	}
	defer s.change(rec.ID, func(r *vm.Record) { r.SnapshotIDs = append(r.SnapshotIDs, "one") })
	defer s.lock()()
	if s.saveAs != nil {
		if err := s.saveAs(); err != nil {
			return snapshot.Snapshot{}, err
		}
	}
	if rec.State == vm.StateHibernated {
		return s.retain(*rec, spec)
	}
	return s.put(snapshot.Snapshot{Name: spec.Name, Owner: rec.Owner, Labels: spec.Labels, Source: snapshot.Source{VMID: rec.ID, VMName: rec.Spec.Name}}, s.memory[rec.ID])
}

// retain keeps the snapshot that rec is hibernated in. Precondition: mu is held.
func (s *fakeSnapshots) retain(rec vm.Record, spec vm.SaveSpec) (snapshot.Snapshot, error) {
	to := rec.Owner.Qualify(spec.Name)
	if other, taken := s.snaps[to]; taken && other.ID != rec.Snapshot {
		return other, errdefs.Existsf("snapshot %s exists", spec.Name)
	}
	for key, x := range s.snaps {
		if x.ID == rec.Snapshot {
			delete(s.snaps, key)
			x.Name, x.Labels, x.Kept = spec.Name, spec.Labels, true
			s.snaps[to] = x
			return x, nil
		}
	}
	return snapshot.Snapshot{}, errdefs.DataLossf("no snapshot %s", rec.Snapshot)
}

func (s *fakeSnapshots) CloneWithImage(ctx context.Context, c vm.CloneSpec, _ []image.RegistryAuth) (vm.Record, error) {
	leave, err := s.enter("clone " + c.Name)
	if err != nil {
		return vm.Record{}, err
	}
	defer leave()
	owner := ownerFor(ctx, c.Labels)
	if s.taken(owner, c.Name) {
		return vm.Record{}, errdefs.Existsf("VM name %s is taken", c.Name)
	}
	defer s.lock()()
	snap, content := snapshot.Snapshot{ID: "dir"}, "of "+c.FromDir
	if c.FromDir == "" {
		if snap, err = s.get(ctx, c.Snapshot); err != nil {
			return vm.Record{}, err
		}
		content = s.content[snap.ID]
	}
	s.nextIP++
	r := &vm.Record{
		ID: vm.NewID(), Owner: owner, Spec: vm.Spec{Name: c.Name, Labels: c.Labels, Image: "base"}.Default(), State: vm.StateRunning, Driver: "fake",
		ImageType: vm.ImageOCI, ImageDigest: "sha256:abc", StartedAt: time.Now(), Snapshot: snap.ID, Cloned: true, Resume: &vm.Resume{Clone: true, MACs: []string{"02:00:00:00:00:ff"}},
		NICs: []vm.NIC{{MAC: fmt.Sprintf("02:00:00:00:00:%02x", s.nextIP), IP: fmt.Sprintf("10.0.0.%d", s.nextIP), Prefix: 24}},
	}
	r.Containers = snap.Record.Clone().Containers
	s.recs[r.ID], s.memory[r.ID] = r, content
	s.note(vm.EventAdded, r)
	s.resumeSoon(r)
	return *r, nil
}

// resumeSoon makes the agent set the guest's identity after the boot time. Precondition: the engine's mu is held.
func (s *fakeSnapshots) resumeSoon(r *vm.Record) {
	if s.boot < 0 {
		return // no agent answers
	}
	id := r.ID
	time.AfterFunc(s.boot, func() {
		s.change(id, func(r *vm.Record) { r.AgentReady, r.Resume = r.State == vm.StateRunning, nil })
	})
}

func (s *fakeSnapshots) Hibernate(ctx context.Context, ref, name string) (vm.Record, error) {
	snap, err := s.SaveSnapshot(ctx, ref, vm.SaveSpec{Name: name})
	if err != nil {
		return vm.Record{}, err
	}
	leave, err := s.enter("hibernate")
	if err != nil {
		return vm.Record{}, err
	}
	defer leave()
	r := s.findFor(ctx, ref)
	r.State, r.AgentReady, r.Snapshot, r.Reason = vm.StateHibernated, false, snap.ID, vm.ReasonHibernated
	s.note(vm.EventModified, r)
	return *r, nil
}

func (s *fakeSnapshots) Wake(ctx context.Context, ref string) (vm.Record, error) {
	leave, err := s.enter("wake")
	if err != nil {
		return vm.Record{}, err
	}
	defer leave()
	defer s.lock()()
	r := s.findFor(ctx, ref)
	switch {
	case r == nil:
		return vm.Record{}, errdefs.NotFoundf("no VM %s", ref)
	case r.State == vm.StateRunning:
		return *r, nil
	}
	if s.wakeAs != nil {
		if err := s.wakeAs(); err != nil {
			return vm.Record{}, err
		}
	}
	snap, err := s.get(ctx, r.Snapshot)
	if err != nil {
		return vm.Record{}, err
	}
	s.memory[r.ID] = s.content[snap.ID]
	delete(s.snaps, snap.Owner.Qualify(snap.Name))
	r.State, r.StartedAt, r.Snapshot, r.Resume = vm.StateRunning, time.Now(), "", &vm.Resume{}
	s.note(vm.EventModified, r)
	s.resumeSoon(r)
	return *r, nil
}

// get resolves a name or an ID, first among the owner's snapshots, then among those that the operator shares with the owner.
// Precondition: mu is held.
func (s *fakeSnapshots) get(ctx context.Context, ref string) (found snapshot.Snapshot, err error) {
	o := vm.Behalf(ctx)
	for _, snap := range s.snaps {
		if snap.Name != ref && snap.ID != ref {
			continue
		}
		if snap.Owner.Namespace == o.Namespace {
			return snap, nil
		}
		if o.Operator() || snap.Owner.Operator() && o.Invited(snap.Published) {
			found = snap
		}
	}
	if found.ID == "" {
		err = errdefs.NotFoundf("no snapshot %s", ref)
	}
	return found, err
}

// publish shares a snapshot of the operator.
func (s *fakeSnapshots) publish(name string, namespaces ...string) {
	defer s.lock()()
	snap := s.snaps[name]
	snap.Published = namespaces
	s.snaps[name] = snap
}

func (s *fakeSnapshots) ListSnapshots(context.Context) ([]snapshot.Snapshot, error) {
	defer s.lock()()
	return slices.Collect(maps.Values(s.snaps)), nil
}

func (s *fakeSnapshots) GetSnapshot(ctx context.Context, ref string) (snapshot.Snapshot, error) {
	defer s.lock()()
	return s.get(ctx, ref)
}

func (s *fakeSnapshots) RemoveSnapshot(ctx context.Context, ref string) error {
	recs, err := s.List(ctx)
	if err != nil {
		return err
	}
	defer s.lock()()
	snap, err := s.get(ctx, ref)
	if err == nil && !vm.Behalf(ctx).Reaches(snap.Owner) {
		return errdefs.NotFoundf("no snapshot %s", ref)
	}
	for _, r := range recs {
		if err == nil && r.State == vm.StateHibernated && r.Snapshot == snap.ID {
			return errdefs.Preconditionf("vm %s is hibernated in it", r.Spec.Name)
		}
	}
	delete(s.snaps, snap.Owner.Qualify(snap.Name))
	return err
}

func (s *fakeSnapshots) PushSnapshot(ctx context.Context, ref, to string, _ snapshot.Auth, _ func(snapshot.Progress)) (snapshot.Snapshot, error) {
	leave, err := s.registry.enter("push " + to)
	if err != nil {
		return snapshot.Snapshot{}, err
	}
	defer leave()
	defer s.lock()()
	snap, err := s.get(ctx, ref)
	if err != nil {
		return snap, err
	}
	snap.Digest = "sha256:" + snap.ID
	s.snaps[snap.Owner.Qualify(snap.Name)] = snap
	s.registry.tags[to], s.registry.blobs[snap.Digest], s.registry.text[snap.Digest] = snap.Digest, snap, s.content[snap.ID]
	return snap, nil
}

// PullSnapshotEarly is PullSnapshot: nothing arrives here later.
func (s *fakeSnapshots) PullSnapshotEarly(ctx context.Context, from, name string, auth snapshot.Auth, progress func(snapshot.Progress)) (snapshot.Snapshot, error) {
	return s.PullSnapshot(ctx, from, name, auth, progress)
}

func (s *fakeSnapshots) PullSnapshot(ctx context.Context, from, name string, _ snapshot.Auth, _ func(snapshot.Progress)) (snapshot.Snapshot, error) {
	if rest, ok := strings.CutPrefix(from, snapshot.PeerScheme); ok {
		host, theirs, _ := strings.Cut(rest, "/")
		peer := s.peers[host]
		if peer == nil {
			return snapshot.Snapshot{}, errdefs.Unavailablef("%s does not answer", host)
		}
		snap, err := peer.GetSnapshot(ctx, theirs)
		if err != nil {
			return snap, err
		}
		defer s.lock()()
		return s.keep(ctx, snap, name, peer.content[snap.ID])
	}
	leave, err := s.registry.enter("pull " + from)
	if err != nil {
		return snapshot.Snapshot{}, err
	}
	defer leave()
	digest, ok := s.registry.tags[from]
	if _, pinned, is := strings.Cut(from, "@"); is {
		digest = pinned
		_, ok = s.registry.text[digest]
	}
	if !ok {
		return snapshot.Snapshot{}, errdefs.NotFoundf("the registry has no %s", from)
	}
	snap := s.registry.blobs[digest]
	snap.Digest = digest
	defer s.lock()()
	if s.pullAs != nil {
		if err := s.pullAs(); err != nil {
			return snapshot.Snapshot{}, err
		}
	}
	return s.keep(ctx, snap, name, s.registry.text[digest])
}

// keep stores a snapshot that was pulled. A snapshot of another owner is NotFound. A snapshot without an owner gets the
// caller's owner.
func (s *fakeSnapshots) keep(ctx context.Context, snap snapshot.Snapshot, name, content string) (snapshot.Snapshot, error) {
	if snap.Owner.Operator() { // from a release without owners
		snap.Owner.Namespace = snap.Labels[contract.VMLabelPodNamespace]
	}
	snap, err := snap.Heir(vm.Behalf(ctx))
	if err != nil {
		return snap, err
	}
	snap.Name = name
	return s.put(snap, content)
}

func (s *fakeSnapshots) TagDigest(_ context.Context, ref string, _ snapshot.Auth) (string, error) {
	leave, err := s.registry.enter("ask " + ref)
	if err != nil {
		return "", err
	}
	defer leave()
	if digest, ok := s.registry.tags[ref]; ok {
		return digest, nil
	}
	return "", errdefs.NotFoundf("the registry has no %s", ref)
}

func (s *fakeSnapshots) DeleteTag(_ context.Context, ref string, _ snapshot.Auth) error {
	leave, err := s.registry.enter("delete " + ref)
	if err != nil {
		return err
	}
	defer leave()
	delete(s.registry.tags, ref)
	return nil
}

func (s *fakeSnapshots) CheckRegistry(_ context.Context, ref string, _ snapshot.Auth) error {
	leave, err := s.registry.enter("check " + ref)
	if err != nil {
		return err
	}
	leave()
	return nil
}
