package journal_test

import (
	"context"
	"fmt"
	"os"
	"time"

	"cocoonstack.io/cocoon/internal/journal"
	"cocoonstack.io/cocoon/internal/journal/sqlite"
	"cocoonstack.io/cocoon/internal/vm"
)

// An intent is written before an operation acts. After a crash it tells which step the operation had reached.
func Example() {
	ctx := context.Background()
	dir, err := os.MkdirTemp("", "example")
	if err != nil {
		fmt.Println(err)
		return
	}
	defer os.RemoveAll(dir)
	concrete, err := sqlite.Open(ctx, sqlite.Config{Path: dir + "/journal.db"})
	if err != nil {
		fmt.Println(err)
		return
	}
	var j journal.Journal = concrete
	defer j.Close()
	r := vm.Record{ID: vm.NewID(), Spec: vm.Spec{Name: "web"}, State: vm.StateCreating}
	if r, err = j.Begin(ctx, journal.Intent{ID: r.ID, Op: "create", Step: "disks", Began: time.Now()}, r); err != nil {
		fmt.Println(err)
		return
	}
	_, unfinished, err := j.Load(ctx) // what a starting daemon would find
	fmt.Println(unfinished[0].Op, unfinished[0].Step, err)
	r.State = vm.StateCreated
	if _, err := j.Settle(ctx, r); err != nil {
		fmt.Println(err)
		return
	}
	fmt.Println(j.Sync(ctx)) // from here it survives a power cut
	// Output:
	// create disks <nil>
	// <nil>
}
