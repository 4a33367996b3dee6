package testguest

import (
	"sync"

	"cocoonstack.io/cocoon/internal/hypervisor/tsc"
)

// ClockArgs are the arguments of an emulated kernel for its clock, as the QEMU driver gives them. They begin with a space, unless there are none.
var ClockArgs = sync.OnceValue(func() string { return tsc.Args(tsc.New()()) })
