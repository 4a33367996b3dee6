package qemu

import (
	"cmp"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/hypervisor/jail"
	"cocoonstack.io/cocoon/internal/vm"
)

// resolve chooses between KVM and TCG and gives the reason in one sentence. If want is KVM and it cannot work, the error is
// Unsupported.
func resolve(k jail.KVM, want vm.Accel) (vm.Accel, string, error) {
	problem := cmp.Or(k.Problem(), k.Closed())
	switch want {
	case vm.AccelTCG:
		return vm.AccelTCG, "emulation (tcg) was requested", nil
	case vm.AccelKVM:
		if problem != "" {
			return "", "", errdefs.Unsupportedf("this host cannot run VMs with kvm: %s; use accel auto or tcg", problem)
		}
		return vm.AccelKVM, "kvm was requested", nil
	case vm.AccelAuto, "":
		if problem != "" {
			return vm.AccelTCG, "emulation (tcg), because " + problem, nil
		}
		return vm.AccelKVM, jail.KVMDevice + " can be opened and the CPU supports it", nil
	}
	return "", "", errdefs.Invalidf("invalid accelerator %q; use auto, kvm or tcg", want)
}
