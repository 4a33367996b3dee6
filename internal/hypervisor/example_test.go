package hypervisor_test

import (
	"context"
	"fmt"
	"os"

	"cocoonstack.io/cocoon/internal/hypervisor"
	"cocoonstack.io/cocoon/internal/hypervisor/fake"
	"cocoonstack.io/cocoon/internal/vm"
)

// A handle finds the process again after a restart of the daemon. Abilities are optional interfaces of the instance.
func Example() {
	ctx := context.Background()
	dir, err := os.MkdirTemp("", "example")
	if err != nil {
		fmt.Println(err)
		return
	}
	defer os.RemoveAll(dir)
	host, err := fake.NewHost("")
	if err != nil {
		fmt.Println(err)
		return
	}
	var driver hypervisor.Driver = fake.New(fake.Config{}, host)
	launched, err := driver.Launch(ctx, hypervisor.Plan{ID: vm.NewID(), Name: "web", CPUs: 1, Memory: 256 << 20, Dir: dir})
	if err != nil {
		fmt.Println(err)
		return
	}
	adopted, err := driver.Adopt(ctx, launched.Handle())
	if err != nil {
		fmt.Println(err)
		return
	}
	if p, ok := hypervisor.As[hypervisor.Pauser](adopted); ok {
		if err := p.Pause(ctx); err != nil {
			fmt.Println(err)
			return
		}
	}
	state, err := adopted.State(ctx)
	fmt.Println(state, err)
	fmt.Println(adopted.Kill(ctx))
	// Output:
	// paused <nil>
	// <nil>
}
