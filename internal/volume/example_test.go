package volume_test

import (
	"context"
	"fmt"
	"os"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/vm"
	"cocoonstack.io/cocoon/internal/volume"
	"cocoonstack.io/cocoon/internal/volume/file"
)

// One VM writes to a volume. Only when it is detached can another VM have it, or can it be deleted.
func Example() {
	ctx := context.Background()
	dir, err := os.MkdirTemp("", "example")
	if err != nil {
		fmt.Println(err)
		return
	}
	defer os.RemoveAll(dir)
	concrete, err := file.New(ctx, file.Config{Dir: dir + "/store"})
	if err != nil {
		fmt.Println(err)
		return
	}
	defer concrete.Close()
	var store interface {
		volume.Store
		volume.Maker
	} = concrete
	v, err := store.Create(ctx, volume.Spec{Name: "db", Size: 1 << 30})
	fmt.Println(v.Name, v.Size, err)
	one, two := vm.NewID(), vm.NewID()
	_, disk, err := store.Attach(ctx, "db", one, volume.Mode{})
	fmt.Println(disk.Format, disk.ReadOnly, err)
	_, _, err = store.Attach(ctx, "db", two, volume.Mode{})
	fmt.Println(errdefs.ClassOf(err))
	fmt.Println(errdefs.ClassOf(store.Delete(ctx, "db")))
	fmt.Println(store.Detach(ctx, "db", one), store.Delete(ctx, "db"))
	// Output:
	// db 1073741824 <nil>
	// raw false <nil>
	// failed precondition
	// failed precondition
	// <nil> <nil>
}

// A store has abilities beyond Store. As finds them.
func ExampleAs() {
	ctx := context.Background()
	dir, err := os.MkdirTemp("", "example")
	if err != nil {
		fmt.Println(err)
		return
	}
	defer os.RemoveAll(dir)
	store, err := file.New(ctx, file.Config{Dir: dir + "/store"})
	if err != nil {
		fmt.Println(err)
		return
	}
	defer store.Close()
	if _, err := store.Create(ctx, volume.Spec{Name: "db", Size: volume.MinSize}); err != nil {
		fmt.Println(err)
		return
	}
	if shots, ok := volume.As[volume.Snapshotter](store); ok {
		x, err := shots.Snapshot(ctx, "db", volume.Spec{Name: "before-upgrade"})
		fmt.Println(x.Name, x.Source, err)
	}
	// Output:
	// before-upgrade db <nil>
}
