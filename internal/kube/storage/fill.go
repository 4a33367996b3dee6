package storage

import (
	"context"
	"net/url"
	"strconv"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"

	"cocoonstack.io/cocoon/api/contract"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/image"
	store "cocoonstack.io/cocoon/internal/volume"
)

// Reasons of the Events of a claim whose volume gets the disk of an image.
const (
	eventFilling = "Filling"
	eventFilled  = "Filled"
)

// How many volumes are filled at a time: a server that sends slowly must not keep the provisioner from other claims.
const (
	fillsAll          = workers * 3 / 4
	fillsPerNamespace = 4
	tellEvery         = 30 * time.Second // progress of one phase, in Events
)

// fills counts the volumes that are being filled.
type fills struct {
	mu    sync.Mutex
	all   int
	count map[string]int // by namespace
}

// begin counts one more. Errors: Unavailable if there are too many.
func (f *fills) begin(namespace string) (end func(), err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	switch {
	case f.all >= fillsAll:
		return nil, errdefs.Unavailablef("the node fills %d other volumes from images; this one follows", f.all)
	case f.count[namespace] >= fillsPerNamespace:
		return nil, errdefs.Unavailablef("the node fills %d other volumes of namespace %s from images; this one follows", f.count[namespace], namespace)
	}
	if f.count == nil {
		f.count = map[string]int{}
	}
	f.all++
	f.count[namespace]++
	return func() {
		f.mu.Lock()
		defer f.mu.Unlock()
		f.all--
		if f.count[namespace]--; f.count[namespace] == 0 {
			delete(f.count, namespace)
		}
	}, nil
}

// fill makes a volume with the disk of an image; shown tells of it in Events. An earlier call may have made it: nothing is pulled then.
func (p *provisioner) fill(ctx context.Context, claim *corev1.PersistentVolumeClaim, spec store.Spec, from image.PullRequest, shown string) (store.Volume, error) {
	if v, err := p.Volumes.Get(ctx, spec.Name); err == nil {
		return v, errdefs.Existsf("the volume is there already")
	}
	end, err := p.fills.begin(claim.Namespace)
	if err != nil {
		return store.Volume{}, err
	}
	defer end()
	began := time.Now()
	p.Events.Eventf(claim, corev1.EventTypeNormal, eventFilling, "Filling the volume from %s", shown)
	v, err := p.Volumes.FromImage(ctx, spec, from, p.telling(claim, shown))
	if err == nil {
		p.Events.Eventf(claim, corev1.EventTypeNormal, eventFilled, "Filled the volume from %s in %s", shown, time.Since(began).Round(time.Millisecond))
	}
	return v, err
}

// show returns the name of an image without what could be secret in a URL.
func show(name string) string {
	u, err := url.Parse(name)
	if err != nil || u.Host == "" {
		return name
	}
	u.User, u.RawQuery, u.ForceQuery, u.Fragment = nil, "", false, ""
	return u.String()
}

// telling says in Events of the claim how far its filling is, when it takes long.
func (p *provisioner) telling(claim *corev1.PersistentVolumeClaim, name string) func(image.Progress) {
	last := time.Now()
	return func(g image.Progress) {
		if time.Since(last) < tellEvery {
			return
		}
		last = time.Now()
		if done, ok := percent(g); ok {
			p.Events.AnnotatedEventf(claim, map[string]string{contract.KeyVolumeProgress: strconv.Itoa(done)}, corev1.EventTypeNormal, eventFilling,
				"Filling the volume from %s: %s, %d of %d MiB", name, g.Phase, g.Done>>20, g.Total>>20)
			return
		}
		p.Events.Eventf(claim, corev1.EventTypeNormal, eventFilling, "Filling the volume from %s: %s, %d MiB", name, g.Phase, g.Done>>20)
	}
}

// percent returns how much of a filling is done: the image is half of it, the volume the other half. false: that is not known.
func percent(g image.Progress) (int, bool) {
	const half = 50
	if g.Total <= 0 {
		return 0, false
	}
	part := int(min(max(g.Done, 0), g.Total) / max(g.Total/half, 1))
	switch g.Phase {
	case image.PhaseDownload:
		return min(part, half), true
	case image.PhaseFill:
		return half + min(part, half), true
	}
	return 0, false
}
