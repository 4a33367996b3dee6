package snapshot_test

import (
	"context"
	"fmt"
	"os"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/snapshot"
	"cocoonstack.io/cocoon/internal/snapshot/local"
	"cocoonstack.io/cocoon/internal/vm"
)

// A snapshot becomes visible at Commit, and only to its owner.
func Example() {
	dir, err := os.MkdirTemp("", "example")
	if err != nil {
		fmt.Println(err)
		return
	}
	defer os.RemoveAll(dir)
	concrete, err := local.New(local.Config{Dir: dir + "/snapshots"})
	if err != nil {
		fmt.Println(err)
		return
	}
	var store snapshot.Store = concrete
	prod := vm.OnBehalf(context.Background(), vm.Owner{Namespace: "prod"})
	draft, err := store.Create(prod, "db")
	if err != nil {
		fmt.Println(err)
		return
	}
	if _, err := draft.Commit(prod, snapshot.Snapshot{Source: snapshot.Source{VMName: "db"}}); err != nil {
		fmt.Println(err)
		return
	}
	x, err := store.Get(prod, "db")
	fmt.Println(x.Name, x.Owner.Namespace, err)
	dev := vm.OnBehalf(context.Background(), vm.Owner{Namespace: "dev"})
	_, err = store.Get(dev, x.ID)
	fmt.Println(errdefs.ClassOf(err))
	// Output:
	// db prod <nil>
	// not found
}
