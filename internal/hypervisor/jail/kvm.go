package jail

import (
	"fmt"
	"os"
	"regexp"
	"syscall"
)

// KVMDevice is the device of KVM.
const KVMDevice = "/dev/kvm"

// KVM shows whether this host can run guests under KVM.
type KVM struct {
	OpenErr error  // error of opening /dev/kvm; nil if it opens
	Flags   bool   // the CPU flags include vmx or svm
	Mode    uint32 // permission bits of /dev/kvm
	Group   uint32 // its group
}

var virtFlag = regexp.MustCompile(`(?m)^flags\s*:.*\b(vmx|svm)\b`)

// ReadKVM looks at this host.
func ReadKVM() KVM {
	var k KVM
	f, err := os.OpenFile(KVMDevice, os.O_RDWR, 0)
	k.OpenErr = err
	if err == nil {
		defer f.Close()
		if st, err := f.Stat(); err == nil {
			k.Mode = uint32(st.Mode().Perm())
			if sys, ok := st.Sys().(*syscall.Stat_t); ok {
				k.Group = sys.Gid
			}
		}
	}
	info, err := os.ReadFile("/proc/cpuinfo")
	k.Flags = err == nil && virtFlag.Match(info)
	return k
}

// Problem returns one clause that says why KVM cannot be used, or "".
func (k KVM) Problem() string {
	switch {
	case k.OpenErr != nil:
		return fmt.Sprintf("%s cannot be opened (%v)", KVMDevice, k.OpenErr)
	case !k.Flags:
		return KVMDevice + " can be opened, but the CPU has neither vmx nor svm, so guests would hang"
	}
	return ""
}

// Closed returns one clause that says why an unprivileged process cannot open the device, even with Groups; "" if it can.
func (k KVM) Closed() string {
	if k.Mode&0o006 != 0o006 && (k.Mode&0o060 != 0o060 || k.Group == 0) {
		return KVMDevice + " is closed to unprivileged processes (run `chgrp kvm /dev/kvm && chmod 660 /dev/kvm`)"
	}
	return ""
}

// Groups returns the groups that a process needs to open /dev/kvm.
func (k KVM) Groups() []uint32 {
	if k.Mode&0o006 == 0o006 {
		return nil
	}
	return []uint32{k.Group}
}
