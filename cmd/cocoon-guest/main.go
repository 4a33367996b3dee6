// Command cocoon-guest is the agent inside a VM, and the init of VMs made from container images.
package main

import (
	"context"
	"fmt"
	"os"

	"cocoonstack.io/cocoon/internal/app/cocoonguest"
)

func main() {
	if err := cocoonguest.Run(context.Background(), os.Stderr); err != nil {
		fmt.Fprintln(os.Stderr, "cocoon-guest:", err)
		os.Exit(1)
	}
}
