// Package podvolumes reads the content of the volumes of pods, and keeps the volumes of running VMs up to date, and the logins of their guests.
//
// The content comes from ConfigMaps, Secrets, ClusterTrustBundles, the pod's own fields, service account tokens and signers of
// certificates. The package does not decide
// which files a volume contains (package convert does). It neither creates nor stops VMs, and it knows a pod only through its
// Owner.
package podvolumes

import (
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/guest"
	"cocoonstack.io/cocoon/internal/kube/convert"
	"cocoonstack.io/cocoon/internal/kube/pauses"
	"cocoonstack.io/cocoon/internal/vm"
)

const (
	settle    = 100 * time.Millisecond // changes within this time are sent to the guest together
	retryMost = time.Minute
)

// Spawn starts work in a goroutine. The function that it returns cancels the work's context.
type Spawn func(work func(context.Context)) context.CancelFunc

// Owner holds the functions that Volumes need from the part that runs the pod's VM. Volumes call them without holding a lock.
type Owner struct {
	// Pod returns the current pod.
	Pod func() *corev1.Pod
	// Update replaces the content of a VM's volume. Errors: NotFound if there is no such VM or volume.
	Update func(ctx context.Context, ref, volume string, files []vm.VolumeFile) error
	// Count counts the result of each Update, for a metric.
	Count func(error)
	// Complain reports a failure of Update. It is called once while the same failure repeats.
	Complain func(vm.ID, error)
	// SetLogins sets passwords and SSH keys in a guest.
	SetLogins func(ctx context.Context, ref string, l guest.Logins) error
	// LoginsSet reports the result of SetLogins, or why the logins could not be read.
	LoginsSet func(error)
}

// Volumes are the volumes of one pod and of its current VM.
type Volumes struct {
	from  source
	node  convert.Node
	owner Owner

	mu     sync.Mutex
	keeper *keeper        // nil: no VM is kept up to date
	renew  *renewer       // nil: no volumes of CSI drivers are renewed
	held   map[string]sum // checksums of the volumes of the VM that was launched last, until a keeper takes them
}

// source reads the content of the volumes of one pod.
type source struct {
	*Objects
	tokens       *tokens
	certificates *certificates
	renew        bool // see csi.Ask.Renew
}

// Token implements convert.Source.
func (s source) Token(ctx context.Context, pod *corev1.Pod, audience string, seconds int64) (string, error) {
	return s.tokens.Token(ctx, pod, audience, seconds)
}

// Certificate implements convert.Source.
func (s source) Certificate(ctx context.Context, pod *corev1.Pod, node convert.Node, volume string, index int, p *corev1.PodCertificateProjection) (key, chain []byte, err error) {
	return s.certificates.Certificate(ctx, pod, node, volume, index, p)
}

// renewal returns when the next token or certificate must be renewed. false: the volumes have none.
func (s source) renewal() (time.Time, bool) {
	first, ok := s.tokens.renewal()
	if at, also := s.certificates.renewal(); also && (!ok || at.Before(first)) {
		first, ok = at, true
	}
	return first, ok
}

// New returns the volumes of a pod on node. All pods of the node share o.
func New(o *Objects, node convert.Node, owner Owner) *Volumes {
	return &Volumes{node: node, owner: owner, from: source{
		Objects: o, tokens: &tokens{client: o.api.Client, all: map[tokenKey]token{}}, certificates: &certificates{client: o.api.Client, all: map[certificateKey]*certificate{}},
	}}
}

// Fill reads the content of volumes, which must be all volumes of pod. Errors: those of convert.Fill.
func (v *Volumes) Fill(ctx context.Context, pod *corev1.Pod, volumes []vm.Volume) error {
	return convert.Fill(ctx, pod, v.node, v.from, volumes)
}

// Launched records the content of the volumes of a new VM.
func (v *Volumes) Launched(volumes []vm.Volume) {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.held = map[string]sum{}
	for _, m := range volumes {
		v.held[m.Name] = sumOf(m.Files)
	}
}

// Keep keeps the volumes and the logins of rec, the VM of pod, up to date until Stop. Files in disk guests are never updated, and only disk guests
// have logins. It is called with each new state of rec.
func (v *Volumes) Keep(pod *corev1.Pod, rec *vm.Record, spawn Spawn) {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.keepPublished(rec, spawn)
	if v.keeper != nil && v.keeper.id == rec.ID {
		v.keeper.logins.answers(rec.AgentReady, v.keeper.poke)
		return
	}
	v.keeper.stop()
	v.keeper = nil
	names, refs := convert.Live(pod)
	if rec.ImageType == vm.ImageDisk {
		names, refs = nil, convert.LoginSecrets(pod)
	}
	if len(names)+len(refs) == 0 {
		return
	}
	k := &keeper{of: v, id: rec.ID, namespace: pod.Namespace, names: names, refs: refs, held: v.held, wake: make(chan struct{}, 1)}
	if rec.ImageType == vm.ImageDisk {
		k.logins = &logins{}
		k.logins.answers(rec.AgentReady, k.poke)
	}
	v.held, v.keeper = nil, k
	k.cancel = spawn(k.run)
}

// Poke updates the volumes if the pod's fields have changed.
func (v *Volumes) Poke() {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.keeper.poke()
}

// Stop ends the updates that Keep began.
func (v *Volumes) Stop() {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.keeper.stop()
	v.keeper = nil
	v.renew.stop()
	v.renew = nil
}

// sum is a checksum of the content of a volume.
type sum [sha256.Size]byte

func sumOf(files []vm.VolumeFile) sum {
	text, _ := json.Marshal(files) // cannot fail: files contain only bytes, strings and numbers
	return sha256.Sum256(text)
}

// keeper sends changes of ConfigMaps, Secrets and the pod's own fields to the volumes of its VM, and renews tokens and
// certificates that are about to expire. run is its goroutine. Other goroutines only poke and stop it.
type keeper struct {
	of        *Volumes
	id        vm.ID
	namespace string
	names     []string // names of the volumes
	refs      []convert.Object
	held      map[string]sum // checksum of the VM's content, by volume; no entry: not known
	logins    *logins        // of the guest; nil: none
	wake      chan struct{}
	cancel    context.CancelFunc
}

// poke makes k compare the content again, and stop ends k. Both do nothing if k is nil.
func (k *keeper) poke() {
	if k == nil {
		return
	}
	select {
	case k.wake <- struct{}{}:
	default:
	}
}

func (k *keeper) stop() {
	if k != nil {
		k.cancel()
	}
}

// run updates the volumes until ctx ends. It reports a failure once and retries. Meanwhile the VM keeps its old content.
func (k *keeper) run(ctx context.Context) {
	o := k.of.from.Objects
	o.follow(k, k.namespace, k.refs)
	defer o.unfollow(k, k.namespace, k.refs)
	if k.held == nil { // an earlier process of ours launched the VM
		k.held = map[string]sum{}
		k.poke()
	}
	next, retries, complaint := k.due(), pauses.Growing(time.Second, retryMost, pauses.Many), ""
	for pauses.Sleep(ctx, k.wake, next, next <= 0) && pauses.Sleep(ctx, nil, settle, false) {
		select {
		case <-k.wake: // this refresh also handles changes that arrived during settle
		default:
		}
		err, refused := k.refresh(ctx), k.setLogins(ctx)
		if err == nil && refused == nil {
			next, retries, complaint = k.due(), pauses.Growing(time.Second, retryMost, pauses.Many), ""
			continue
		}
		if err != nil && ctx.Err() == nil && complaint != err.Error() {
			complaint = err.Error()
			k.of.owner.Complain(k.id, err)
		}
		next = retries.Step()
	}
}

// due returns the delay until the next token or certificate must be renewed. 0: the volumes have none.
func (k *keeper) due() time.Duration {
	at, ok := k.of.from.renewal()
	if !ok {
		return 0
	}
	return max(time.Until(at), time.Millisecond)
}

// refresh sends every volume whose content has changed to the VM.
func (k *keeper) refresh(ctx context.Context) error {
	pod := k.of.owner.Pod()
	var errs []error
	for _, name := range k.names {
		files, err := convert.Files(ctx, pod, k.of.node, k.of.from, name)
		if err != nil {
			errs = append(errs, err)
			continue
		}
		now := sumOf(files)
		if old, ok := k.held[name]; ok && old == now {
			continue
		}
		err = k.of.owner.Update(ctx, string(k.id), name, files)
		if errdefs.IsNotFound(err) { // the VM is being removed, or was created without this volume
			err = nil
		}
		if ctx.Err() != nil {
			return ctx.Err()
		}
		k.of.owner.Count(err)
		if err != nil {
			errs = append(errs, err)
			continue
		}
		k.held[name] = now
	}
	return errors.Join(errs...)
}
