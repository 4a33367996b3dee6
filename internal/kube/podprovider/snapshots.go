package podprovider

import (
	"context"
	"strings"
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/util/wait"

	"cocoonstack.io/cocoon/api/contract"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/image"
	"cocoonstack.io/cocoon/internal/snapshot"
	"cocoonstack.io/cocoon/internal/vm"
)

// Snapshots saves VMs, creates VMs that resume from a saved state, and transfers snapshots to and from registries. The
// engine with its node's catalog is one implementation, the node API client is another. Registry refs are
// [http[s]://]HOST[:PORT]/REPOSITORY:TAG. Only the wiring has all of it; see operator and tenant.
type Snapshots interface {
	lister
	shelf
	states
	snapshotRegistry
}

// lister is about all snapshots of the node.
type lister interface {
	ListSnapshots(ctx context.Context) ([]snapshot.Snapshot, error)
}

type shelf interface {
	GetSnapshot(ctx context.Context, ref string) (snapshot.Snapshot, error)
	RemoveSnapshot(ctx context.Context, ref string) error
}

type states interface {
	// SaveSnapshot saves a running VM, which keeps running, or the disks of a stopped one.
	SaveSnapshot(ctx context.Context, ref string, s vm.SaveSpec) (snapshot.Snapshot, error)
	// CloneWithImage creates a VM that resumes from a snapshot. The snapshot's image is fetched by its digest when it is
	// not here.
	CloneWithImage(ctx context.Context, s vm.CloneSpec, auth []image.RegistryAuth) (vm.Record, error)
	// Hibernate saves a running VM under name and ends its process once everything is durable.
	Hibernate(ctx context.Context, ref, name string) (vm.Record, error)
	// Wake resumes the VM where Hibernate stopped it.
	Wake(ctx context.Context, ref string) (vm.Record, error)
}

type snapshotRegistry interface {
	// PushSnapshot sends a snapshot to a registry and records its digest there.
	PushSnapshot(ctx context.Context, ref, to string, auth snapshot.Auth, progress func(snapshot.Progress)) (snapshot.Snapshot, error)
	// PullSnapshot fetches a snapshot from a registry or, with cocoon://HOST:PORT/NAME, from another node.
	PullSnapshot(ctx context.Context, from, name string, auth snapshot.Auth, progress func(snapshot.Progress)) (snapshot.Snapshot, error)
	// TagDigest asks a registry for the digest of ref's manifest. Errors: NotFound.
	TagDigest(ctx context.Context, ref string, auth snapshot.Auth) (string, error)
	// DeleteTag removes a tag. It is no error if the tag does not exist.
	DeleteTag(ctx context.Context, ref string, auth snapshot.Auth) error
	// CheckRegistry checks whether the registry of ref answers and accepts the credentials.
	CheckRegistry(ctx context.Context, ref string, auth snapshot.Auth) error
}

// Registry says where snapshots are stored so that they outlive their node.
type Registry struct {
	URL  string        // [http[s]://]HOST[:PORT][/PREFIX]; "": no registry, and snapshots stay on the node
	Auth snapshot.Auth // secret
	// Public lists the repositories from which every namespace may clone. An entry with a / at the end is a prefix of
	// repositories.
	Public []string
	// TrustOld makes the node trust the name of a snapshot that an earlier release left in the registry and that does not
	// say whose it is.
	TrustOld bool
	Peers    []string // host:port of other nodes' APIs, asked before the registry for a VM that hibernated there
}

// remote reports whether the node has a registry.
func (p *Provider) remote() bool { return p.cfg.Registry.URL != "" }

// at returns the ref of a repository and tag in the node's registry.
func (p *Provider) at(repo, tag string) string {
	return strings.TrimRight(p.cfg.Registry.URL, "/") + "/" + repo + ":" + tag
}

// ref returns where the node's registry has the snapshots of one of the tenant's VMs, under a tag.
func (t tenant) ref(vmName, tag string) string {
	return t.p.at(contract.Repository(t.owner.Namespace, vmName), tag)
}

// The names of snapshots that the provider makes on its node.
func hibernateName(vmName string) string { return vmName + ":" + contract.HibernateSnapshotTag }
func importName(vmName string) string    { return vmName + "-hibernate-import" }
func forkName(vmName string) string      { return "fork-" + vmName }

// push sends the snapshot with that ID or name to the registry, and then verifies that the registry has it.
func (t tenant) push(ctx context.Context, snap, ref string) error {
	began := time.Now()
	sent, err := t.registry.PushSnapshot(ctx, snap, ref, t.p.cfg.Registry.Auth, nil)
	if err == nil {
		err = t.has(ctx, ref, sent.Digest)
	}
	if ctx.Err() != nil {
		return ctx.Err()
	}
	t.p.Metrics.pushed(time.Since(began), err)
	return err
}

// has fails unless ref in the registry is the manifest with that digest.
func (t tenant) has(ctx context.Context, ref, digest string) error {
	got, err := t.registry.TagDigest(ctx, ref, t.p.cfg.Registry.Auth)
	switch {
	case err != nil:
		return err
	case digest == "" || got != digest:
		return errdefs.DataLossf("the registry says that %s is %s, and %s was pushed", ref, got, digest)
	}
	return nil
}

// pullSnapshot fetches a snapshot under a local name.
func (t tenant) pullSnapshot(ctx context.Context, from, name string) (snapshot.Snapshot, error) {
	began := time.Now()
	auth := t.p.cfg.Registry.Auth
	if strings.HasPrefix(from, snapshot.PeerScheme) {
		auth = snapshot.Auth{} // the registry's secrets are not for other nodes
	}
	got, err := t.registry.PullSnapshot(ctx, from, name, auth, nil)
	if ctx.Err() != nil {
		return got, ctx.Err()
	}
	t.p.Metrics.pulled(time.Since(began), err)
	return got, err
}

// findSnapshot returns the newest snapshot on this node that has one of the names. Errors: NotFound.
func (t tenant) findSnapshot(ctx context.Context, names ...string) (snapshot.Snapshot, error) {
	var best snapshot.Snapshot
	for _, name := range names {
		got, err := t.snaps.GetSnapshot(ctx, name)
		switch {
		case errdefs.IsNotFound(err):
		case err != nil:
			return got, err
		case got.Name != name: // the name is a prefix of some id
		case best.ID == "" || got.CreatedAt.After(best.CreatedAt):
			best = got
		}
	}
	if best.ID == "" {
		return best, errdefs.NotFoundf("no snapshot on this node is called %s", strings.Join(names, " or "))
	}
	return best, nil
}

// discard removes a snapshot of this node that is no longer needed. A failure does no harm.
func (t tenant) discard(ctx context.Context, ref string) {
	if err := t.snaps.RemoveSnapshot(ctx, ref); err != nil && !errdefs.IsNotFound(err) && ctx.Err() == nil {
		t.p.Log.Warn("snapshot not removed", "snapshot", ref, "err", err)
	}
}

// turns lets one caller at a time through for each name. The zero value is ready.
type turns struct {
	mu sync.Mutex
	at map[string]chan struct{} // closed when the turn is over
}

// take waits for the turn of name and returns the function that gives it back; nil when ctx has ended.
func (t *turns) take(ctx context.Context, name string) (give func()) {
	for {
		t.mu.Lock()
		busy := t.at[name]
		if busy == nil {
			if t.at == nil {
				t.at = map[string]chan struct{}{}
			}
			mine := make(chan struct{})
			t.at[name] = mine
			t.mu.Unlock()
			return func() {
				t.mu.Lock()
				delete(t.at, name)
				t.mu.Unlock()
				close(mine)
			}
		}
		t.mu.Unlock()
		if !await(ctx, busy) {
			return nil
		}
	}
}

// retryTask is something that is retried until it works: after 1 s, 2 s … 60 s.
type retryTask struct {
	tries wait.Backoff
	next  time.Time
	cause string
}

const (
	retryTaskFirst = time.Second
	retryTaskMost  = time.Minute
)

// left returns how long to wait before the next attempt.
func (c *retryTask) left() time.Duration { return time.Until(c.next) }

// failed records a failed attempt, and reports whether its cause is new.
func (c *retryTask) failed(err error) (news bool) {
	c.next = time.Now().Add(step(&c.tries, retryTaskFirst, retryTaskMost))
	news = c.cause != err.Error()
	c.cause = err.Error()
	return news
}
