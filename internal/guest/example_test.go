package guest_test

import (
	"context"
	"fmt"
	"time"

	"cocoonstack.io/cocoon/internal/guest"
)

// windows is an agent that cannot freeze file systems.
type windows struct{ guest.Agent }

// linux is an agent that can.
type linux struct{ guest.Agent }

func (linux) Freeze(context.Context) (int, error) { return 1, nil }
func (linux) Thaw(context.Context) (int, error)   { return 1, nil }

// Abilities beyond the contract are optional interfaces of the agent.
func ExampleFreezer() {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	for _, agent := range []guest.Agent{linux{}, windows{}} {
		freezer, ok := agent.(guest.Freezer)
		if !ok {
			fmt.Println("saved without quiescing")
			continue
		}
		n, err := freezer.Freeze(ctx)
		fmt.Println("frozen file systems:", n, err)
	}
	// Output:
	// frozen file systems: 1 <nil>
	// saved without quiescing
}
