package podprovider

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/wait"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/image"
	"cocoonstack.io/cocoon/internal/kube/convert"
	"cocoonstack.io/cocoon/internal/kube/podstatus"
	"cocoonstack.io/cocoon/internal/kube/podvolumes"
	"cocoonstack.io/cocoon/internal/vm"
)

// pullShown is how long the status shows ErrImagePull before it shows ImagePullBackOff.
const pullShown = 2 * time.Second

// pulls makes sure that the images of the pod are in the store.
type pulls struct {
	base
	fetched map[string]bool // images that are ready for the VM that is being created
	failed  failedPull
}

// failedPull says when a failed pull is retried.
type failedPull struct {
	asked string
	cause error
	tries wait.Backoff
	next  time.Time
	shown time.Time // when the status changes from ErrImagePull to ImagePullBackOff
}

// pull makes sure that the images of pod are in the store. If a pull fails, it returns false and when to retry.
func (p *pulls) pull(ctx context.Context, pod *corev1.Pod) (turn, bool) {
	for _, r := range convert.Pulls(pod) {
		if p.fetched[r.Name] {
			continue
		}
		if again, ok := p.pullOne(ctx, pod, r); !ok {
			return again, false
		}
		p.fetched[r.Name] = true
	}
	clear(p.fetched) // the next VM of this pod checks its images again
	return whenWoken, true
}

func (p *pulls) pullOne(ctx context.Context, pod *corev1.Pod, r image.PullRequest) (turn, bool) {
	if _, ok := vm.BootVolume(r.Name); ok { // there is no image
		p.images[r.Name] = pulled{name: r.Name, boots: true}
		return whenWoken, true
	}
	if p.failed.asked != r.Name { // the image of a pod may change
		p.failed = failedPull{asked: r.Name}
	}
	if left := time.Until(p.failed.next); left > 0 {
		return p.holdBack(left), false
	}
	if _, before := p.images[r.Name]; before && r.Policy != image.PullNever { // the image was checked for an earlier VM of this pod
		r.Policy, r.Force = image.PullIfNotPresent, false
	}
	img, local, err := p.fetch(ctx, pod, r)
	if ctx.Err() != nil {
		return atOnce, false
	}
	p.Metrics.done("pull", err)
	if err != nil {
		return p.pullFailed(ctx, r, err), false
	}
	p.failed = failedPull{asked: r.Name}
	if slices.Contains([]string{reasonErrPull, reasonPullBackOff, reasonImageMissing, reasonInvalidImage}, p.pause.Reason) {
		p.succeeded()
	}
	p.images[r.Name] = pulled{name: img.Name, id: img.ID, ref: imageRef(img), local: local, user: img.Config.User, boots: img.Type != vm.ImageOCI}
	return whenWoken, true
}

// fetch asks the runtime for the image. It sends the pod's credentials if the pull may use the network or must prove that the
// pod has access to the image.
func (p *pulls) fetch(ctx context.Context, pod *corev1.Pod, r image.PullRequest) (img image.Image, local bool, err error) {
	never := r
	never.Policy, never.Force = image.PullNever, false
	if r.Policy != image.PullAlways { // a public image that is in the store needs no credentials
		img, err := p.puller.Pull(ctx, never, nil)
		if !errdefs.IsNotFound(err) || r.Policy == image.PullNever && len(pod.Spec.ImagePullSecrets) == 0 {
			return img, false, err
		}
	}
	var lost []string
	if r.Auth, lost = convert.PullAuth(ctx, pod, podvolumes.Resolver{Client: p.Client}); len(lost) > 0 && ctx.Err() == nil {
		p.event(corev1.EventTypeWarning, eventLostSecrets,
			"Unable to retrieve some image pull secrets (%s); attempting to pull the image may not succeed.", strings.Join(lost, ", "))
	}
	began := time.Now()
	var once sync.Once
	network := false
	img, err = p.puller.Pull(ctx, r, func(image.Progress) { // called only when the network is used
		once.Do(func() {
			network = true
			p.event(corev1.EventTypeNormal, eventPulling, "Pulling image %q", r.Name)
		})
	})
	if errdefs.IsAlreadyExists(err) && r.Policy == image.PullAlways && !r.Force {
		// The image was imported and has no origin, so no registry can be asked. The imported image is used.
		img, err = p.puller.Pull(ctx, never, nil)
		return img, err == nil, err
	}
	if err == nil && network {
		took := time.Since(began).Round(time.Millisecond)
		p.event(corev1.EventTypeNormal, eventPulled, "Successfully pulled image %q in %s (%s including waiting). Image size: %d bytes.",
			r.Name, took, took, img.Size)
	}
	return img, false, err
}

// pullFailed shows the reason of a failed pull like the kubelet, and returns when to retry.
func (p *pulls) pullFailed(ctx context.Context, r image.PullRequest, err error) turn {
	switch {
	case errdefs.IsInvalid(err):
		return p.retry(ctx, reasonInvalidImage, err, p.cfg.BackoffBase, p.cfg.BackoffMax)
	case r.Policy == image.PullNever && errdefs.IsNotFound(err):
		return p.retry(ctx, reasonImageMissing, err, p.cfg.BackoffBase, p.cfg.BackoffMax)
	}
	b := &p.failed
	if b.cause == nil || b.cause.Error() != err.Error() {
		p.event(corev1.EventTypeWarning, eventFailed, "Failed to pull image %q: %s", r.Name, err)
		p.log.Warn("image not pulled", "image", r.Name, "err", err)
	}
	first, left := b.next.IsZero(), step(&b.tries, p.cfg.BackoffBase, p.cfg.BackoffMax)
	b.cause, b.next = err, time.Now().Add(left)
	if !first { // do not alternate between two reasons
		return p.holdBack(left)
	}
	b.shown = time.Now().Add(min(left, pullShown))
	p.pause = podstatus.Pause{Reason: reasonErrPull, Message: err.Error()}
	p.publish(0)
	return after(min(left, pullShown))
}

// holdBack shows that the pull is retried later, and returns when. left is the time until the retry.
func (p *pulls) holdBack(left time.Duration) turn {
	b := &p.failed
	if stands := time.Until(b.shown); stands > 0 { // the worker was woken before the status changes
		return after(min(left, stands))
	}
	if p.pause.Reason != reasonPullBackOff {
		p.event(corev1.EventTypeNormal, eventBackOff, "Back-off pulling image %q", b.asked)
	}
	p.pause = podstatus.Pause{Reason: reasonPullBackOff, Message: fmt.Sprintf("Back-off pulling image %q: %s: %s", b.asked, reasonErrPull, b.cause)}
	p.publish(0)
	return after(left)
}

// imageRef returns the imageID of img in a pod's status: repository and digest of a registry's manifest, or the ID of any
// other image.
func imageRef(img image.Image) string {
	if img.Digest == "" || strings.HasPrefix(img.Source, "http") { // the digest of an image from a web server is that of the file
		return img.ID
	}
	repo, _, _ := strings.Cut(img.Name, "@")
	if i := strings.LastIndexByte(repo, ':'); i > strings.LastIndexByte(repo, '/') {
		repo = repo[:i]
	}
	return repo + "@" + img.Digest
}
