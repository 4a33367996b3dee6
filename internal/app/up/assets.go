package up

import (
	"cocoonstack.io/cocoon/internal/app/assets"
	"cocoonstack.io/cocoon/internal/errdefs"
)

// Assets are the files that an instance needs.
type Assets struct {
	ControlPlane string // cocoon-up, which also is kubectl
	Daemon       string // cocoond
	Epoch        string
	Manager      string
	Kernel       string
	Initramfs    string
	DemoImage    string
}

// FindAssets returns the files of this installation. Callers check where needed that they exist.
func FindAssets() Assets {
	return Assets{
		ControlPlane: assets.Path("cocoon-up"),
		Daemon:       assets.Path("cocoond"),
		Epoch:        assets.Path("epoch"),
		Manager:      assets.Path("cocoon-manager"),
		Kernel:       assets.Path("guest/vmlinux"),
		Initramfs:    assets.Path("guest/initramfs"),
		DemoImage:    assets.Path("demo.tar"),
	}
}

// check returns a FailedPrecondition error that names the first missing file.
func (a Assets) check() error {
	for _, p := range []string{a.ControlPlane, a.Daemon, a.Epoch, a.Manager, a.Kernel, a.Initramfs, a.DemoImage} {
		if !assets.Exists(p) {
			return errdefs.Preconditionf("%s is missing; run `make build` to create it", p)
		}
	}
	return nil
}
