package podprovider

import (
	"context"
	"strings"
	"sync"
	"time"

	"cocoonstack.io/cocoon/api/contract"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/image"
	"cocoonstack.io/cocoon/internal/snapshot"
	"cocoonstack.io/cocoon/internal/vm"
)

// Snapshots saves VMs, makes others go on from what was saved, and carries it to registries and back. The engine with the
// node API's catalog is one, the client of the node API another. Refs of registries are [http[s]://]HOST[:PORT]/REPOSITORY:TAG.
type Snapshots interface {
	// SaveSnapshot saves a running VM, which goes on, or the disks of a stopped one.
	SaveSnapshot(ctx context.Context, ref string, s vm.SaveSpec) (snapshot.Snapshot, error)
	// CloneWithImage makes a VM that goes on from a snapshot, whose image is fetched by its digest when it is not here.
	CloneWithImage(ctx context.Context, s vm.CloneSpec, auth []image.RegistryAuth) (vm.Record, error)
	// Hibernate saves a running VM under name and ends its process once all is durable.
	Hibernate(ctx context.Context, ref, name string) (vm.Record, error)
	// Wake goes on where Hibernate stopped.
	Wake(ctx context.Context, ref string) (vm.Record, error)
	GetSnapshot(ctx context.Context, ref string) (snapshot.Snapshot, error)
	ListSnapshots(ctx context.Context) ([]snapshot.Snapshot, error)
	RemoveSnapshot(ctx context.Context, ref string) error
	// PushSnapshot sends a snapshot to a registry and notes the digest that it has there.
	PushSnapshot(ctx context.Context, ref, to string, auth snapshot.Auth, progress func(snapshot.Progress)) (snapshot.Snapshot, error)
	// PullSnapshot fetches one from a registry, or with cocoon://HOST:PORT/NAME from another node.
	PullSnapshot(ctx context.Context, from, name string, auth snapshot.Auth, progress func(snapshot.Progress)) (snapshot.Snapshot, error)
	// TagDigest asks a registry which manifest ref is. NotFound.
	TagDigest(ctx context.Context, ref string, auth snapshot.Auth) (string, error)
	// DeleteTag removes a tag. Deleting what is gone is no error.
	DeleteTag(ctx context.Context, ref string, auth snapshot.Auth) error
	// CheckRegistry asks whether the registry of ref answers and takes the credentials.
	CheckRegistry(ctx context.Context, ref string, auth snapshot.Auth) error
}

// Registry is where snapshots outlive their node.
type Registry struct {
	URL  string        // [http[s]://]HOST[:PORT][/PREFIX]; "": none, and snapshots stay on the node
	Auth snapshot.Auth // secret
	// Public are the repositories, and with a / at the end the beginnings of repositories, that every namespace may clone from.
	Public []string
	// TrustOld has what earlier releases left in the registry, and that does not say whose it is, taken for what its name says.
	TrustOld bool
	Peers    []string // host:port of the node APIs of other nodes, asked before the registry for a VM that slept there
}

// remote reports whether there is a registry.
func (p *Provider) remote() bool { return p.cfg.Registry.URL != "" }

// at is a repository and tag in the node's registry.
func (p *Provider) at(repo, tag string) string {
	return strings.TrimRight(p.cfg.Registry.URL, "/") + "/" + repo + ":" + tag
}

// ref is where the snapshots of one of the tenant's VMs are in the node's registry, under a tag.
func (t tenant) ref(vmName, tag string) string {
	return t.p.at(contract.Repository(t.owner.Namespace, vmName), tag)
}

// The names of snapshots that the provider makes on its node.
func hibernateName(vmName string) string { return vmName + ":" + contract.HibernateSnapshotTag }
func importName(vmName string) string    { return vmName + "-hibernate-import" }
func forkName(vmName string) string      { return "fork-" + vmName }

// push sends the snapshot of that id or name to the registry and asks it whether it has it.
func (t tenant) push(ctx context.Context, snap, ref string) error {
	began := time.Now()
	sent, err := t.snaps.PushSnapshot(ctx, snap, ref, t.p.cfg.Registry.Auth, nil)
	if err == nil {
		err = t.has(ctx, ref, sent.Digest)
	}
	if ctx.Err() != nil {
		return ctx.Err()
	}
	t.p.Metrics.pushed(time.Since(began), err)
	return err
}

// has fails unless the registry's ref is the manifest with that digest.
func (t tenant) has(ctx context.Context, ref, digest string) error {
	got, err := t.snaps.TagDigest(ctx, ref, t.p.cfg.Registry.Auth)
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
	if strings.HasPrefix(from, peerScheme) {
		auth = snapshot.Auth{} // the registry's secrets are not for other nodes
	}
	got, err := t.snaps.PullSnapshot(ctx, from, name, auth, nil)
	if ctx.Err() != nil {
		return got, ctx.Err()
	}
	t.p.Metrics.pulled(time.Since(began), err)
	return got, err
}

const peerScheme = "cocoon://"

// findSnapshot looks for a snapshot on this node under any of its names: the newest one. NotFound.
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

// discard removes a snapshot of this node that is not needed any more. It is no harm when that fails.
func (t tenant) discard(ctx context.Context, ref string) {
	if err := t.snaps.RemoveSnapshot(ctx, ref); err != nil && !errdefs.IsNotFound(err) && ctx.Err() == nil {
		t.p.Log.Warn("snapshot not removed", "snapshot", ref, "err", err)
	}
}

// turns lets one at a time through for each name. The zero value is ready.
type turns struct {
	mu sync.Mutex
	at map[string]chan struct{} // closed when the turn is over
}

// take waits for the turn of name and returns how to give it back; nil when ctx has ended.
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
		if !wait(ctx, busy) {
			return nil
		}
	}
}

// retryTask is something that is tried again until it works: after 1 s, 2 s … 60 s.
type retryTask struct {
	tries int
	next  time.Time
	cause string
}

const (
	retryTaskFirst = time.Second
	retryTaskMost  = time.Minute
)

// left is how long the next try has to wait.
func (c *retryTask) left() time.Duration { return time.Until(c.next) }

// failed notes that it did not work, and reports whether that is news.
func (c *retryTask) failed(err error) (news bool) {
	c.tries++
	c.next = time.Now().Add(delay(retryTaskFirst, retryTaskMost, c.tries))
	news = c.cause != err.Error()
	c.cause = err.Error()
	return news
}
