package chunked_test

import (
	"testing"

	"cocoonstack.io/cocoon/internal/errdefs"
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
