package containers

import (
	"context"
	"os"
	"path/filepath"
	"testing"

	"cocoonstack.io/cocoon/internal/network"
	"cocoonstack.io/cocoon/internal/vm"
)

// bare is a network with nothing to sweep.
type bare struct{ Network }

func (bare) Remember(context.Context, []network.Held) error { return nil }

func (bare) Sweep(context.Context, []string, func(vm.ID) bool) ([]string, []network.Stray, error) {
	return nil, nil, nil
}

// What a daemon left that was killed while it wrote the interface of a container goes when the next one begins; interfaces stay.
func TestUnfinishedInterface(t *testing.T) {
	dir := t.TempDir()
	d := &Driver{deps: Deps{Network: bare{}, Known: func() []string { return nil }}, nics: nics{dir}}
	if err := d.Begin(t.Context()); err != nil {
		t.Fatal(err)
	}
	id := ID("web")
	if err := d.nics.put(id, nicFile{Name: "web", NIC: vm.NIC{IP: "10.88.0.2"}}); err != nil {
		t.Fatal(err)
	}
	for _, of := range []vm.ID{id, ID("gone")} {
		if err := os.WriteFile(filepath.Join(dir, "."+filepath.Base(d.nics.path(of))+".tmp-123"), []byte("{"), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if err := d.Begin(t.Context()); err != nil {
		t.Fatal(err)
	}
	if files, err := os.ReadDir(dir); err != nil || len(files) != 1 || d.nics.address(id) != "10.88.0.2" {
		t.Errorf("there are %v, %v; the address is %q", files, err, d.nics.address(id))
	}
}
