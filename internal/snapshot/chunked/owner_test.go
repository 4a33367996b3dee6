package chunked_test

import (
	"bytes"
	"io"
	"testing"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/ociclient"
	"cocoonstack.io/cocoon/internal/snapshot"
	"cocoonstack.io/cocoon/internal/snapshot/chunked"
	"cocoonstack.io/cocoon/internal/vm"
)

// A snapshot pushed by an earlier release records its owner only in its labels. After a pull it must never be visible
// to another namespace, not even for a moment: a client that polls would find that moment.
func TestPullOfAnEarlierRelease(t *testing.T) {
	from := newStore(t)
	h := from.save(t, guest{name: "db", seed: 1})
	if _, err := from.Update(t.Context(), "db", func(s *snapshot.Snapshot) { s.Labels = map[string]string{"namespace": "prod"} }); err != nil {
		t.Fatal(err)
	}
	h = from.hold(t, h.Snapshot().ID)
	ref := epoch(t, t.TempDir()) + "/vk-prod-db:hibernate"
	push(t, client(t, from, nil), h, ref)
	to := newStore(t)
	c := client(t, to, func(c *chunked.Config) {
		c.OwnerOf = func(labels map[string]string) vm.Owner { return vm.Owner{Namespace: labels["namespace"]} }
	})
	dev := vm.OnBehalf(t.Context(), vm.Owner{Namespace: "dev"})
	if _, err := c.Pull(dev, ref, "mine", token, nil); !errdefs.IsNotFound(err) {
		t.Errorf("on behalf of dev: %v", err)
	}
	empty(t, to)
	for _, who := range []string{"prod", ""} {
		got, err := c.Pull(vm.OnBehalf(t.Context(), vm.Owner{Namespace: who}), ref, "of-"+who+"-", token, nil)
		if err != nil || got.Owner.Namespace != "prod" {
			t.Errorf("on behalf of %q it is %+v, %v", who, got.Owner, err)
		}
	}
}

// TestPullIsPublishedToNobody: whoever pushes cannot publish what the operator pulls. The snapshot has no files of its own.
func TestPullIsPublishedToNobody(t *testing.T) {
	ref := serve(t, nil) + "/vm/theirs:v1"
	session, _ := pushing(t, ref)
	x := good()
	x.s.Live, x.s.Disks, x.s.Published, x.s.Kept = false, nil, []string{"*"}, true
	x.c.Files, x.m.Layers, x.m.MediaType = nil, x.m.Layers[:1], ociclient.MediaManifest
	_, config, record := x.encode(t)
	for to, data := range map[*ociclient.Descriptor][]byte{&x.m.Config: config, &x.m.Layers[0]: record} {
		to.Digest, to.Size = ociclient.Digest(data), int64(len(data))
		if err := session.PutBlob(t.Context(), to.Digest, to.Size, func() io.Reader { return bytes.NewReader(data) }); err != nil {
			t.Fatal(err)
		}
	}
	m, _, _ := x.encode(t)
	if _, err := session.PutManifest(t.Context(), "v1", ociclient.MediaManifest, m); err != nil {
		t.Fatal(err)
	}
	to := newStore(t)
	got, err := client(t, to, nil).Pull(t.Context(), ref, "", token, nil)
	if err != nil {
		t.Fatal(err)
	}
	if len(got.Published) > 0 || got.Kept {
		t.Errorf("it is %+v", got)
	}
	if _, err := to.Get(vm.OnBehalf(t.Context(), vm.Owner{Namespace: "other"}), got.ID); !errdefs.IsNotFound(err) {
		t.Errorf("another namespace finds it: %v", err)
	}
}
