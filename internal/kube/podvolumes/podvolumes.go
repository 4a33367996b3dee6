// Package podvolumes reads what the volumes of pods contain and keeps the volumes of running VMs up to date.
//
// The content comes from ConfigMaps, Secrets, the pod's own fields and service account tokens. The package does not decide
// what a volume contains (package convert does). It neither creates nor ends VMs, and it knows pods only through their
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
	"cocoonstack.io/cocoon/internal/kube/convert"
	"cocoonstack.io/cocoon/internal/kube/pauses"
	"cocoonstack.io/cocoon/internal/vm"
)

const (
	settle    = 100 * time.Millisecond // changes that come together are sent to the guest together
	retryMost = time.Minute
)

// Spawn starts work in a goroutine. The function that it returns cancels the work's context.
type Spawn func(work func(context.Context)) context.CancelFunc

// Owner is what Volumes need from the one that runs the pod's VM. The functions are called without a lock held.
type Owner struct {
	// Pod returns the pod as it is now.
	Pod func() *corev1.Pod
	// Update replaces the content of a VM's volume. Errors: NotFound if there is no such VM or volume.
	Update func(ctx context.Context, ref, volume string, files []vm.VolumeFile) error
	// Count gets the result of each Update.
	Count func(error)
	// Complain reports a failure. While the same failure goes on, it is reported once.
	Complain func(vm.ID, error)
}

// Volumes are the volumes of one pod and of the VM that it has at the time.
type Volumes struct {
	from  source
	node  convert.Node
	owner Owner

	mu     sync.Mutex
	keeper *keeper        // nil: no VM is kept up to date
	held   map[string]sum // what the VM that was launched last has, until a keeper takes it
}

// source is where the volumes of one pod are read from.
type source struct {
	*Objects
	*tokens
}

// New returns the volumes of a pod on node. Objects are shared by all pods of the node.
func New(o *Objects, node convert.Node, owner Owner) *Volumes {
	return &Volumes{from: source{o, &tokens{client: o.api.Client, all: map[tokenKey]token{}}}, node: node, owner: owner}
}

// Fill reads the content of volumes, which are all volumes of pod. Errors as of convert.Fill.
func (v *Volumes) Fill(ctx context.Context, pod *corev1.Pod, volumes []vm.Volume) error {
	return convert.Fill(ctx, pod, v.node, v.from, volumes)
}

// Launched records what the volumes of a new VM contain.
func (v *Volumes) Launched(volumes []vm.Volume) {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.held = map[string]sum{}
	for _, m := range volumes {
		v.held[m.Name] = sumOf(m.Files)
	}
}

// Keep makes sure that the volumes of rec, the VM of pod, are kept up to date until Stop. Guests from disk images got their
// volumes once and for all.
func (v *Volumes) Keep(pod *corev1.Pod, rec *vm.Record, spawn Spawn) {
	v.mu.Lock()
	defer v.mu.Unlock()
	if v.keeper != nil && v.keeper.id == rec.ID {
		return
	}
	v.keeper.stop()
	v.keeper = nil
	names, refs := convert.Live(pod)
	if len(names) == 0 || rec.ImageType == vm.ImageDisk {
		return
	}
	k := &keeper{of: v, id: rec.ID, namespace: pod.Namespace, names: names, refs: refs, held: v.held, wake: make(chan struct{}, 1)}
	v.held, v.keeper = nil, k
	k.cancel = spawn(k.run)
}

// Poke tells that the pod's fields may have changed.
func (v *Volumes) Poke() {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.keeper.poke()
}

// Stop ends what Keep began.
func (v *Volumes) Stop() {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.keeper.stop()
	v.keeper = nil
}

// sum is a checksum of the content of a volume.
type sum [sha256.Size]byte

func sumOf(files []vm.VolumeFile) sum {
	text, _ := json.Marshal(files) // bytes, strings and numbers: it cannot fail
	return sha256.Sum256(text)
}

// keeper sends changes in the sources of a pod's volumes to its VM: ConfigMaps, Secrets, the pod's own fields, and tokens
// that are about to expire. run is its goroutine; others only poke and stop it.
type keeper struct {
	of        *Volumes
	id        vm.ID
	namespace string
	names     []string // of volumes
	refs      []convert.Object
	held      map[string]sum // what the VM has, by volume; no entry: not known
	wake      chan struct{}
	cancel    context.CancelFunc
}

// poke makes k look at the sources again; stop ends it. Both do nothing when there is no keeper.
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

// run works until ctx ends. A failure is reported once. The VM keeps what it has.
func (k *keeper) run(ctx context.Context) {
	o := k.of.from.Objects
	o.follow(k, k.namespace, k.refs)
	defer o.unfollow(k, k.namespace, k.refs)
	if k.held == nil { // an earlier process made the VM
		k.held = map[string]sum{}
		k.poke()
	}
	next, retries, complaint := k.due(), pauses.Growing(time.Second, retryMost, pauses.Many), ""
	for pauses.Sleep(ctx, k.wake, next, next <= 0) && pauses.Sleep(ctx, nil, settle, false) {
		select {
		case <-k.wake: // handle what arrived meanwhile now
		default:
		}
		err := k.refresh(ctx)
		if err == nil {
			next, retries, complaint = k.due(), pauses.Growing(time.Second, retryMost, pauses.Many), ""
			continue
		}
		if ctx.Err() == nil && complaint != err.Error() {
			complaint = err.Error()
			k.of.owner.Complain(k.id, err)
		}
		next = retries.Step()
	}
}

// due returns how long to wait for the next token; 0: there is no token to wait for.
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
