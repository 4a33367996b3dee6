package guest

import (
	"context"
	"io"
	"time"

	"cocoonstack.io/cocoon/internal/vm"
)

// Access is the way into the guests of a node, on behalf of the owner in ctx. ref is an ID, a name or a unique prefix of an ID.
// The engine and the clients of the node API implement it. Errors of all methods: NotFound (VM), Unavailable.
type Access interface {
	// Exec runs a command in a guest; see Agent.
	Exec(ctx context.Context, ref string, e Exec, s Streams) (int, error)

	// Attach connects to the standard streams of the guest's process; see Attacher.
	Attach(ctx context.Context, ref string, a Attach, s Streams) error

	// Forward connects to a TCP port from inside the guest; see Forwarder.
	Forward(ctx context.Context, ref string, port int, s Streams) error

	// Logs streams the output of the guest's process.
	Logs(ctx context.Context, ref string, o LogOptions, fn func(LogEntry) error) error
}

// ConsoleOpener is the ability of an Access to connect to the serial consoles of guests; ref is as for Access.
type ConsoleOpener interface {
	// Console connects to the serial console of a running guest. The caller closes it. ctx limits only the connecting.
	// Errors: as for Access. Conflict when somebody else uses the console, Unsupported for a hypervisor that has none.
	Console(ctx context.Context, ref string) (io.ReadWriteCloser, error)
}

// Displays is the ability of an Access to show the screens of guests; ref is as for Access. Errors of both methods: as for Access,
// FailedPrecondition for a VM that does not run, Unsupported for one without graphics.
type Displays interface {
	// Display connects to screen, keyboard and mouse of a guest, with RFB (RFC 6143) and without a password. The VM is the server. The
	// caller closes it. ctx limits only the connecting. A VM has one such connection: a new one ends the one before. With keep, it is
	// refused instead, with Conflict.
	Display(ctx context.Context, ref string, keep bool) (io.ReadWriteCloser, error)
	// Screenshot returns what the screen shows, as a PNG. With wake the mouse moves before, so that the guest switches its screen on.
	Screenshot(ctx context.Context, ref string, wake bool) ([]byte, error)
}

// Describes is the ability of an Access to describe guests; ref is as for Access.
type Describes interface {
	// Describe returns what the guest tells of itself; see Describer. Errors: as for Access, Unsupported when its guest has no agent that can.
	Describe(ctx context.Context, ref string) (Description, error)
}

// Freezes is the ability of an Access to freeze the file systems of guests; ref and errors are as for Access.
type Freezes interface {
	// Freeze freezes the file systems of the guest until Thaw, and at most for a time, after which the node thaws them. Freezing a guest again
	// only changes that time.
	// Errors: InvalidArgument for a time that is too long, Unsupported when its guest has no agent that can.
	Freeze(ctx context.Context, ref string, most time.Duration) error
	// Thaw ends a freeze. It reports whether the file systems were frozen all the time until now. Without a freeze it does nothing.
	Thaw(ctx context.Context, ref string) (held bool, err error)
}

// Containers is what can be done with the containers in the guests of a node; ref and errors are as for Access.
type Containers interface {
	// UpdateVolume replaces the content of a file volume, also in the running guest.
	UpdateVolume(ctx context.Context, ref, volume string, files []vm.VolumeFile) error

	// KillContainer ends one run of one container in a guest that has several; see ContainerKeeper.
	KillContainer(ctx context.Context, ref, container string, run int, grace time.Duration) error

	// ReleaseContainer allows the containers that wait for this one to start.
	ReleaseContainer(ctx context.Context, ref, container string) error

	// AddContainer starts one more container, of kind ephemeral, in a running guest, or only prepares it if it is Manual. It returns
	// when the guest has got it, or will get it with its next session; the record says how it goes on. A container that was added
	// before is no error.
	AddContainer(ctx context.Context, ref string, c vm.Container) (vm.Record, error)

	// StartContainer starts a container that was added and is Manual. It returns when its guest has started it, and the record says
	// so; the container may have ended meanwhile. A container that runs is no error.
	// Errors: NotFound (VM, container), FailedPrecondition when the VM does not run, the container has ended, or it cannot be
	// started; then the record says why.
	StartContainer(ctx context.Context, ref, container string) (vm.Record, error)

	// RemoveContainer removes a container that was added, with its files, disks and logs. It kills a container that runs. The VM
	// need not run. A container that the VM does not have is no error.
	// Errors: NotFound (VM), InvalidArgument for a container that was not added, Unavailable when the guest does not release it;
	// then the VM has it still, and it is removed again.
	RemoveContainer(ctx context.Context, ref, container string) error

	// ResizeContainers changes what containers of a running guest may use, by name: all of them or none. They have the new values
	// when it returns, and keep them when they or the VM start again. Idempotent.
	// Errors: InvalidArgument, NotFound (VM, container), FailedPrecondition when the VM does not run or a memory limit is below
	// what its container uses, Unsupported for a guest that cannot do it.
	ResizeContainers(ctx context.Context, ref string, want map[string]vm.Resources) (vm.Record, error)
}
