package qemu

import (
	"fmt"
	"os"
	"regexp"
	"syscall"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/vm"
)

const kvmDevice = "/dev/kvm"

// kvmFacts show whether this host can run guests under KVM.
type kvmFacts struct {
	openErr error  // error of opening /dev/kvm; nil if it opens
	flags   bool   // the CPU flags include vmx or svm
	mode    uint32 // permission bits of /dev/kvm
	group   uint32 // its group
}

var virtFlag = regexp.MustCompile(`(?m)^flags\s*:.*\b(vmx|svm)\b`)

func readKVMFacts() kvmFacts {
	var k kvmFacts
	f, err := os.OpenFile(kvmDevice, os.O_RDWR, 0)
	k.openErr = err
	if err == nil {
		defer f.Close()
		if st, err := f.Stat(); err == nil {
			k.mode = uint32(st.Mode().Perm())
			if sys, ok := st.Sys().(*syscall.Stat_t); ok {
				k.group = sys.Gid
			}
		}
	}
	info, err := os.ReadFile("/proc/cpuinfo")
	k.flags = err == nil && virtFlag.Match(info)
	return k
}

// problem returns one clause that says why KVM cannot be used, or "".
func (k kvmFacts) problem() string {
	switch {
	case k.openErr != nil:
		return fmt.Sprintf("%s cannot be opened (%v)", kvmDevice, k.openErr)
	case !k.flags:
		return kvmDevice + " can be opened, but the CPU has neither vmx nor svm, so guests would hang"
	case k.mode&0o006 != 0o006 && (k.mode&0o060 != 0o060 || k.group == 0):
		return kvmDevice + " is closed to unprivileged processes (run `chgrp kvm /dev/kvm && chmod 660 /dev/kvm`)"
	}
	return ""
}

// groups returns the groups that a process needs to open /dev/kvm.
func (k kvmFacts) groups() []uint32 {
	if k.mode&0o006 == 0o006 {
		return nil
	}
	return []uint32{k.group}
}

// resolve chooses between KVM and TCG and gives the reason in one sentence. If want is KVM and it cannot work, the error is
// Unsupported.
func (k kvmFacts) resolve(want vm.Accel) (vm.Accel, string, error) {
	problem := k.problem()
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
		return vm.AccelKVM, kvmDevice + " can be opened and the CPU supports it", nil
	}
	return "", "", errdefs.Invalidf("invalid accelerator %q; use auto, kvm or tcg", want)
}
