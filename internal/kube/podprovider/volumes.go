package podprovider

import (
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"time"

	corev1 "k8s.io/api/core/v1"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/kube/convert"
	"cocoonstack.io/cocoon/internal/vm"
)

const (
	volumeSettle = 100 * time.Millisecond // changes that come together are sent to the guest together
	volumeRetry  = time.Second            // first pause after a failure
	volumeMost   = time.Minute
)

// source is where the volumes of one pod are read from.
type source struct {
	*objects
	*tokens
}

// resolve reads what the VM of pod is created from; it reads the volumes in parallel with all else. reason is for what is
// missing: a pod whose volumes are missing is shown as being created, as with the kubelet.
func (w *worker) resolve(ctx context.Context, pod *corev1.Pod) (spec vm.Spec, reason string, err error) {
	filled := make(chan error, 1)
	volumes := convert.Spec(pod, w.p.cfg.Node, nil).Volumes
	go func() { filled <- convert.Fill(ctx, pod, w.p.cfg.Node, w.source(), volumes) }()
	spec, err = w.wanted(ctx, pod)
	missing := <-filled
	switch {
	case missing != nil:
		return vm.Spec{}, reasonCreating, missing
	case err != nil:
		return vm.Spec{}, reasonConfigError, err
	}
	spec.Volumes = volumes
	return spec, "", nil
}

func (w *worker) source() source { return source{w.p.objects, w.tokens} }

// launch creates the VM and remembers what its volumes contain.
func (w *worker) launch(ctx context.Context, spec vm.Spec) (vm.Record, error) {
	rec, err := w.vms.Launch(ctx, spec)
	if err == nil {
		w.fresh = map[string]sum{}
		for _, v := range spec.Volumes {
			w.fresh[v.Name] = sumOf(v.Files)
		}
	}
	return rec, err
}

// keepVolumes makes sure that the volumes of rec have a keeper. Guests from disk images got their volumes once and for
// all.
func (w *worker) keepVolumes(pod *corev1.Pod, rec *vm.Record) {
	if w.keeper != nil && w.keeper.id == rec.ID {
		return
	}
	w.stopKeeper()
	names, refs := convert.Live(pod)
	if len(names) == 0 || rec.ImageType == vm.ImageDisk {
		return
	}
	k := &keeper{w: w, id: rec.ID, namespace: pod.Namespace, names: names, refs: refs, held: w.fresh, wake: make(chan struct{}, 1)}
	w.fresh = nil
	w.mu.Lock()
	w.keeper = k
	w.mu.Unlock()
	k.cancel = w.background(k.run)
}

func (w *worker) stopKeeper() {
	w.mu.Lock()
	k := w.keeper
	w.keeper = nil
	w.mu.Unlock()
	if k != nil {
		k.cancel()
	}
}

// emptyVolumes returns the names of rec's volumes that start empty.
func emptyVolumes(rec *vm.Record) (names []string) {
	for _, v := range rec.Spec.Volumes {
		if v.Kind == vm.VolumeEmpty {
			names = append(names, v.Name)
		}
	}
	return names
}

// sum is a checksum of the content of a volume.
type sum [sha256.Size]byte

func sumOf(files []vm.VolumeFile) sum {
	text, _ := json.Marshal(files) // bytes, strings and numbers: it cannot fail
	return sha256.Sum256(text)
}

// keeper sends changes in the sources of a pod's volumes to its VM: ConfigMaps, Secrets, the pod's own fields, and tokens
// that are about to expire.
type keeper struct {
	w         *worker
	id        vm.ID
	namespace string
	names     []string // of volumes
	refs      []convert.Object
	held      map[string]sum // what the VM has, by volume; no entry: not known
	wake      chan struct{}
	cancel    context.CancelFunc
	complaint string // the last failure that was reported
}

func (k *keeper) poke() {
	select {
	case k.wake <- struct{}{}:
	default:
	}
}

// run works until ctx ends.
func (k *keeper) run(ctx context.Context) {
	o := k.w.p.objects
	o.follow(k, k.namespace, k.refs)
	defer o.unfollow(k, k.namespace, k.refs)
	if k.held == nil { // an earlier process made the VM
		k.held = map[string]sum{}
		k.poke()
	}
	next, pauses := k.due(), growing(volumeRetry, volumeMost, 0)
	for sleep(ctx, k.wake, next, next <= 0) && sleep(ctx, nil, volumeSettle, false) {
		select {
		case <-k.wake: // handle what arrived meanwhile now
		default:
		}
		if err := k.refresh(ctx); err != nil {
			k.complain(ctx, err)
			next = pauses.Step()
			continue
		}
		k.complaint = ""
		next, pauses = k.due(), growing(volumeRetry, volumeMost, 0)
	}
}

// due returns how long to wait for the next token; 0: there is no token to wait for.
func (k *keeper) due() time.Duration {
	at, ok := k.w.tokens.renewal()
	if !ok {
		return 0
	}
	return max(time.Until(at), time.Millisecond)
}

// refresh sends every volume whose content has changed to the VM.
func (k *keeper) refresh(ctx context.Context) error {
	pod, _, _ := k.w.look()
	var errs []error
	for _, name := range k.names {
		files, err := convert.Files(ctx, pod, k.w.p.cfg.Node, k.w.source(), name)
		if err != nil {
			errs = append(errs, err)
			continue
		}
		now := sumOf(files)
		if old, ok := k.held[name]; ok && old == now {
			continue
		}
		err = k.w.vms.UpdateVolume(ctx, string(k.id), name, files)
		if errdefs.IsNotFound(err) { // the VM is being removed, or was created without this volume
			err = nil
		}
		if ctx.Err() != nil {
			return ctx.Err()
		}
		k.w.p.Metrics.done("volume", err)
		if err != nil {
			errs = append(errs, err)
			continue
		}
		k.held[name] = now
	}
	return errors.Join(errs...)
}

// complain reports a failure once. The VM keeps what it has.
func (k *keeper) complain(ctx context.Context, err error) {
	if ctx.Err() != nil || k.complaint == err.Error() {
		return
	}
	k.complaint = err.Error()
	k.w.log.Warn("volumes of vm not brought up to date", "vm", k.id, "err", err)
	k.w.event(corev1.EventTypeWarning, eventFailedMount, "%s", err)
}
