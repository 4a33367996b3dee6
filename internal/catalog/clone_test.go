package catalog_test

import (
	"context"
	"testing"

	"cocoonstack.io/cocoon/internal/catalog"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/image"
	"cocoonstack.io/cocoon/internal/snapshot"
	"cocoonstack.io/cocoon/internal/testkit/diff"
	"cocoonstack.io/cocoon/internal/vm"
)

// engine records the last clone.
type engine struct{ cloned vm.CloneSpec }

func (e *engine) Clone(_ context.Context, spec vm.CloneSpec) (vm.Record, error) {
	e.cloned = spec
	return vm.Record{ID: "clone", Spec: vm.Spec{Name: spec.Name}}, nil
}

// origin is a store with one image, and a puller that finds others.
type origin struct {
	asked  []image.PullRequest
	pulled image.Image
	err    error
}

func (o *origin) Get(_ context.Context, ref string) (image.Image, error) {
	if ref != "sha256:here" {
		return image.Image{}, errdefs.NotFoundf("no image %s", ref)
	}
	return image.Image{ID: ref}, nil
}

func (o *origin) Pull(_ context.Context, r image.PullRequest, progress func(image.Progress)) (image.Image, error) {
	o.asked = append(o.asked, r)
	progress(image.Progress{})
	return o.pulled, o.err
}

func TestCloneFetchesTheVeryImage(t *testing.T) {
	auth := []image.RegistryAuth{{Registry: "r", Token: "t"}}
	for name, c := range map[string]struct {
		snap  snapshot.Snapshot
		spec  vm.CloneSpec
		comes image.Image
		err   error
		asks  string
		class errdefs.Class
		ok    bool
	}{
		"here":        {snap: snapshot.Snapshot{ImageDigest: "sha256:here", Image: "demo:1"}, ok: true},
		"by manifest": {snap: snapshot.Snapshot{ImageDigest: "sha256:a", Image: "reg:5000/demo:1", ImageManifest: "sha256:m"}, comes: image.Image{ID: "sha256:a"}, asks: "reg:5000/demo@sha256:m", ok: true},
		"of a container": {snap: snapshot.Snapshot{ImageDigest: "sha256:here", Image: "demo:1", Record: vm.Record{
			Spec:       vm.Spec{Containers: []vm.Container{{Name: "a", Image: "demo:1"}, {Name: "b", Image: "side:1"}}},
			Containers: []vm.ContainerRecord{{Name: "a", ImageDigest: "sha256:here"}, {Name: "b", ImageDigest: "sha256:b", ImageManifest: "sha256:m"}},
		}}, comes: image.Image{ID: "sha256:b"}, asks: "side@sha256:m", ok: true},
		"by content":  {snap: snapshot.Snapshot{ImageDigest: "sha256:a", Image: "host/disk.img", ImageType: vm.ImageDisk}, comes: image.Image{ID: "sha256:a"}, asks: "host/disk.img@sha256:a", ok: true},
		"by name":     {snap: snapshot.Snapshot{ImageDigest: "sha256:a", Image: "demo:1"}, comes: image.Image{ID: "sha256:a"}, asks: "demo:1", ok: true},
		"from folder": {spec: vm.CloneSpec{FromDir: "/srv/s"}, snap: snapshot.Snapshot{ImageDigest: "sha256:a", Image: "demo"}, comes: image.Image{ID: "sha256:a"}, asks: "demo", ok: true},
		"another":     {snap: snapshot.Snapshot{ImageDigest: "sha256:a", Image: "demo:1"}, comes: image.Image{ID: "sha256:b"}, asks: "demo:1", class: errdefs.NotFound},
		"gone":        {snap: snapshot.Snapshot{ImageDigest: "sha256:a", Image: "demo:1"}, err: errdefs.Unavailablef("no network"), asks: "demo:1", class: errdefs.Unavailable},
		"nameless":    {snap: snapshot.Snapshot{ImageDigest: "sha256:a", Image: "sha256:a"}, class: errdefs.NotFound},
	} {
		t.Run(name, func(t *testing.T) {
			sh, o, s := newStore(), &origin{pulled: c.comes, err: c.err}, &engine{}
			c.snap.ID, c.snap.Name = "id", "s"
			sh.all["s"] = c.snap
			room := &catalog.Snapshots{Cloner: s, Images: o, Puller: o, Store: sh}
			if c.spec.FromDir == "" {
				c.spec.Snapshot = "s"
			}
			c.spec.Name = "copy"
			r, err := room.CloneWithImage(t.Context(), c.spec, auth)
			if c.ok != (err == nil) || err != nil && (errdefs.ClassOf(err) != c.class || s.cloned.Name != "") || err == nil && r.Spec.Name != "copy" {
				t.Errorf("%+v, %v; cloned %+v", r, err, s.cloned)
			}
			if d := diff.Of(c.spec, s.cloned); err == nil && d != "" {
				t.Errorf("cloned %s", d)
			}
			var want []image.PullRequest
			if c.asks != "" {
				want = []image.PullRequest{{Name: c.asks, Policy: image.PullIfNotPresent, Auth: auth}}
			}
			if d := diff.Of(want, o.asked); d != "" {
				t.Errorf("asked for %s", d)
			}
			if sh.held != 0 {
				t.Errorf("%d snapshots are still held", sh.held)
			}
		})
	}
}

// strict is an origin whose images belong to the operator alone.
type strict struct{ *origin }

func (s strict) Get(ctx context.Context, ref string) (image.Image, error) {
	if !vm.Behalf(ctx).Operator() {
		return image.Image{}, errdefs.NotFoundf("no image %s", ref)
	}
	return s.origin.Get(ctx, ref)
}

// The image of a namespace's snapshot is requested with the pod's credentials, although it is here; a snapshot that
// the operator publishes includes the right to its image.
func TestASnapshotGivesNoRightToItsImage(t *testing.T) {
	for name, c := range map[string]struct {
		owner vm.Owner
		asked int
		ok    bool
	}{
		"of the namespace": {vm.Owner{Namespace: "prod"}, 1, false},
		"published":        {vm.Owner{}, 0, true},
	} {
		sh, o := newStore(), &origin{err: errdefs.Preconditionf("the registry refuses access")}
		sh.all["s"] = snapshot.Snapshot{ID: "id", Name: "s", Owner: c.owner, Published: []string{"prod"}, ImageDigest: "sha256:here", Image: "victim/app:1"}
		room := &catalog.Snapshots{Cloner: &engine{}, Images: strict{o}, Puller: o, Store: sh}
		_, err := room.CloneWithImage(vm.OnBehalf(t.Context(), vm.Owner{Namespace: "prod"}), vm.CloneSpec{Snapshot: "s", Name: "copy"}, nil)
		if (err == nil) != c.ok || err != nil && !errdefs.IsFailedPrecondition(err) || len(o.asked) != c.asked {
			t.Errorf("%s: %v, asked %d times", name, err, len(o.asked))
		}
	}
}
