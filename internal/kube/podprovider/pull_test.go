package podprovider

import (
	"context"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"cocoonstack.io/cocoon/api/contract"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/image"
)

// origin is a puller with an empty store. It can pull one image.
type origin struct {
	takes time.Duration // duration of a transfer

	mu      sync.Mutex
	err     error // result of every transfer
	img     image.Image
	here    bool
	private bool                // the image in the store needs credentials
	used    []image.PullRequest // requests that used the network
}

func (o *origin) pull(ctx context.Context, r image.PullRequest, progress func(image.Progress)) (image.Image, error) {
	if img, done, err := o.begin(r); done {
		return img, err
	}
	progress(image.Progress{Phase: "resolving", Total: -1})
	progress(image.Progress{Phase: "downloading", Total: -1})
	select {
	case <-time.After(o.takes):
	case <-ctx.Done():
		return image.Image{}, ctx.Err()
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.err != nil {
		return image.Image{}, o.err
	}
	o.here = true
	return o.img, nil
}

// begin handles requests that need no network.
func (o *origin) begin(r image.PullRequest) (img image.Image, done bool, err error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	switch {
	case r.Policy != image.PullAlways && o.here && (!o.private || len(r.Auth) > 0):
		return o.img, true, nil
	case r.Policy == image.PullNever:
		return image.Image{}, true, errdefs.NotFoundf("image %s is not here", r.Name)
	}
	o.used = append(o.used, r)
	return image.Image{}, false, nil
}

// asked returns the requests that used the network.
func (o *origin) asked() []image.PullRequest {
	o.mu.Lock()
	defer o.mu.Unlock()
	return slices.Clone(o.used)
}

// set sets the result of the next transfer.
func (o *origin) set(here bool, img image.Image) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.here, o.err = here, nil
	if img.ID != "" {
		o.img = img
	}
}

// fail sets the result of every later transfer.
func (o *origin) fail(err error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.err = err
}

func pullPolicy(p corev1.PullPolicy) func(*corev1.Pod) {
	return func(pod *corev1.Pod) { pod.Spec.Containers[0].ImagePullPolicy = p }
}

func startPulling(t *testing.T, o *origin) *world {
	e := newEngine()
	e.pullAs = o.pull
	return start(t, e)
}

func TestAnImageIsPulledBeforeTheVMIsMade(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		o := &origin{takes: 20 * time.Second, img: image.Image{ID: "sha256:abc", Name: "cocoon/demo:latest", Digest: "sha256:def", Size: 42}}
		w := startPulling(t, o)
		defer w.stop()
		w.create(pod(pullPolicy(corev1.PullIfNotPresent)))
		expect(t, w.after(10*time.Second), "Pending waiting:ContainerCreating")
		if w.engine.count() != 0 {
			t.Error("the VM was created before its image was in the store")
		}
		p := w.after(11 * time.Second)
		expect(t, p, "Running running ready")
		c := p.Status.ContainerStatuses[0]
		if c.ImageID != "cocoon/demo@sha256:def" || c.Image != "cocoon/demo:latest" {
			t.Errorf("image %q, id %q", c.Image, c.ImageID)
		}
		events := w.told()
		for _, want := range []string{
			`Normal Pulling Pulling image "cocoon/demo:latest"`,
			`Normal Pulled Successfully pulled image "cocoon/demo:latest" in 20s (20s including waiting). Image size: 42 bytes.`,
			"Normal Started Created and started container c as VM vk-default-web from image cocoon/demo:latest",
		} {
			if !strings.Contains(events, want) {
				t.Errorf("no event %q in:\n%s", want, events)
			}
		}

		w.stop() // another process reports the same
		w.run(Config{})
		if err := w.p.CreatePod(t.Context(), p); err != nil {
			t.Fatal(err)
		}
		w.reach.refuse.Store(true)
		c = w.after(time.Minute).Status.ContainerStatuses[0]
		if c.ImageID != "cocoon/demo@sha256:def" || c.Image != "cocoon/demo:latest" || c.Ready {
			t.Errorf("after a restart: image %q, id %q, ready %v", c.Image, c.ImageID, c.Ready)
		}
	})
}

func TestAnImageThatIsHereCostsNothing(t *testing.T) {
	for name, tc := range map[string]struct {
		policy corev1.PullPolicy
		event  string
	}{
		"if not present": {corev1.PullIfNotPresent, "from image"},
		"never":          {corev1.PullNever, "from image"},
		"always, but it was imported and has no origin": {corev1.PullAlways, "from local image"},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := start(t, newEngine()) // has every image as a local import
				defer w.stop()
				w.create(pod(pullPolicy(tc.policy), func(p *corev1.Pod) {
					if tc.policy != corev1.PullAlways {
						p.Spec.ImagePullSecrets = []corev1.LocalObjectReference{{Name: "not-read"}}
					}
				}))
				p := w.after(time.Second)
				expect(t, p, "Running running ready")
				if id := p.Status.ContainerStatuses[0].ImageID; id != "sha256:abc" {
					t.Errorf("image id %q", id)
				}
				if got := w.told(); strings.Count(got, "\n") != 0 || !strings.Contains(got, tc.event+" cocoon/demo:latest") {
					t.Errorf("events: %s", got)
				}
				for _, a := range w.client.Actions() {
					if a.GetResource().Resource == "secrets" {
						t.Error("a secret was read although the image needs no credentials")
					}
				}
			})
		})
	}
}

func TestPullSecrets(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		o := &origin{img: image.Image{ID: "sha256:abc", Name: "cocoon/demo:latest"}}
		w := startPulling(t, o)
		defer w.stop()
		_, err := w.client.CoreV1().Secrets("default").Create(t.Context(), &corev1.Secret{
			ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "creds"}, Type: corev1.SecretTypeDockerConfigJson,
			Data: map[string][]byte{corev1.DockerConfigJsonKey: []byte(`{"auths":{"r.example":{"username":"u","password":"hunter2"}}}`)},
		}, metav1.CreateOptions{})
		if err != nil {
			t.Fatal(err)
		}
		w.create(pod(pullPolicy(corev1.PullAlways), func(p *corev1.Pod) {
			p.Spec.ImagePullSecrets = []corev1.LocalObjectReference{{Name: "missing"}, {Name: "creds"}}
		}))
		expect(t, w.after(time.Second), "Running running ready")
		want := []image.RegistryAuth{{Registry: "r.example", Username: "u", Password: "hunter2"}}
		if len(o.asked()) != 1 || !slices.Equal(o.asked()[0].Auth, want) {
			t.Errorf("asked with %+v", o.asked())
		}
		events := w.told()
		if !strings.Contains(events, "Warning FailedToRetrieveImagePullSecret Unable to retrieve some image pull secrets (missing)") || strings.Contains(events, "hunter2") {
			t.Errorf("events: %s", events)
		}
	})
}

// A pod with policy Never may use an image of the store only if the image was pulled with the pod's credentials.
func TestPolicyNeverShowsThePodsSecrets(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		o := &origin{here: true, private: true, img: image.Image{ID: "sha256:abc", Name: "cocoon/demo:latest"}}
		w := startPulling(t, o)
		defer w.stop()
		w.create(pod(pullPolicy(corev1.PullNever), func(p *corev1.Pod) {
			p.Spec.ImagePullSecrets = []corev1.LocalObjectReference{{Name: "creds"}}
		}))
		expect(t, w.after(time.Second), "Pending waiting:ErrImageNeverPull")
		_, err := w.client.CoreV1().Secrets("default").Create(t.Context(), &corev1.Secret{
			ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "creds"}, Type: corev1.SecretTypeDockerConfigJson,
			Data: map[string][]byte{corev1.DockerConfigJsonKey: []byte(`{"auths":{"r.example":{"username":"u","password":"hunter2"}}}`)},
		}, metav1.CreateOptions{})
		if err != nil {
			t.Fatal(err)
		}
		expect(t, w.after(30*time.Second), "Running running ready")
		if len(o.asked()) != 0 {
			t.Errorf("the network was used: %+v", o.asked())
		}
	})
}

func TestAFailedPullBacksOff(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		o := &origin{err: errdefs.Unavailablef("r.example answers 500"), img: image.Image{ID: "sha256:abc", Name: "cocoon/demo:latest"}}
		w := startPulling(t, o)
		defer w.stop()
		w.create(pod(pullPolicy(corev1.PullIfNotPresent)))
		p := w.after(time.Second)
		expect(t, p, "Pending waiting:ErrImagePull")
		if m := p.Status.ContainerStatuses[0].State.Waiting.Message; m != "r.example answers 500" {
			t.Errorf("message %q", m)
		}
		p = w.after(2 * time.Second)
		expect(t, p, "Pending waiting:ImagePullBackOff")
		if m := p.Status.ContainerStatuses[0].State.Waiting.Message; !strings.Contains(m, "r.example answers 500") {
			t.Errorf("message %q", m)
		}
		w.p.index.find("default", "web").poke() // a wake-up does not shorten the back-off
		w.after(6 * time.Second)
		if len(o.asked()) != 1 {
			t.Errorf("%d tries within 9 s", len(o.asked()))
		}
		w.after(2 * time.Second)  // 10 s
		w.after(20 * time.Second) // 30 s
		w.after(40 * time.Second) // 70 s
		if len(o.asked()) != 4 {
			t.Errorf("%d tries within 71 s, want 4", len(o.asked()))
		}
		events := w.told()
		for _, once := range []string{`Warning Failed Failed to pull image "cocoon/demo:latest": r.example answers 500`, `Normal BackOff Back-off pulling image`} {
			if strings.Count(events, once) != 1 {
				t.Errorf("not once %q:\n%s", once, events)
			}
		}
		if n := w.writes(); n != 2 {
			t.Errorf("%d writes, want one for each of the two reasons", n)
		}
		o.set(false, image.Image{})
		expect(t, w.after(80*time.Second), "Running running ready")
	})
}

func TestWhatCannotBePulled(t *testing.T) {
	for want, tc := range map[string]struct {
		policy corev1.PullPolicy
		err    error
	}{
		"Pending waiting:ErrImageNeverPull": {policy: corev1.PullNever},
		"Pending waiting:InvalidImageName":  {corev1.PullAlways, errdefs.Invalidf("the image name holds a space")},
	} {
		synctest.Test(t, func(t *testing.T) {
			o := &origin{err: tc.err}
			w := startPulling(t, o)
			defer w.stop()
			w.create(pod(pullPolicy(tc.policy)))
			expect(t, w.after(time.Second), want)
			o.set(true, image.Image{ID: "sha256:abc", Name: "cocoon/demo:latest"})
			expect(t, w.after(10*time.Second), "Running running ready")
		})
	}
}

func TestForcePullWinsOverThePolicy(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		o := &origin{here: true, img: image.Image{ID: "sha256:abc", Name: "cocoon/demo:latest"}}
		w := startPulling(t, o)
		defer w.stop()
		w.create(pod(pullPolicy(corev1.PullNever), func(p *corev1.Pod) { p.Annotations = map[string]string{contract.KeyForcePull: "true"} }))
		expect(t, w.after(time.Second), "Running running ready")
		if len(o.asked()) != 1 || !o.asked()[0].Force || o.asked()[0].Policy != image.PullAlways {
			t.Errorf("asked %+v", o.asked())
		}
		w.engine.vanish() // the pod fails, and its image is not pulled again
		w.after(time.Minute)
		if len(o.asked()) != 1 {
			t.Errorf("asked %d times", len(o.asked()))
		}
	})
}

func TestDeletingAPodEndsItsPull(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := startPulling(t, &origin{takes: 24 * time.Hour})
		defer w.stop()
		p := pod(pullPolicy(corev1.PullIfNotPresent))
		w.create(p)
		w.after(time.Minute)
		p.DeletionTimestamp, p.DeletionGracePeriodSeconds = new(metav1.Now()), new(int64(30))
		if err := w.p.DeletePod(t.Context(), p); err != nil {
			t.Fatal(err)
		}
		expect(t, w.after(time.Second), "gone")
	})
}
