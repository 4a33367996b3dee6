package qemu

import (
	"fmt"
	"os"
	"path/filepath"

	"cocoonstack.io/cocoon/internal/atomicfile"
	"cocoonstack.io/cocoon/internal/errdefs"
)

// varsFile is the file of the variables of UEFI: in Plan.FirmwareDir if they are kept, else in Plan.Dir.
const varsFile = "efivars.fd"

// Firmware of UEFI with its template of variables, as distributions name them. Those for Secure Boot have Microsoft's keys.
var (
	plainOVMF = [][2]string{
		{"OVMF_CODE_4M.fd", "OVMF_VARS_4M.fd"}, {"OVMF_CODE.4m.fd", "OVMF_VARS.4m.fd"}, {"OVMF_CODE.fd", "OVMF_VARS.fd"},
	}
	secureOVMF = [][2]string{
		{"OVMF_CODE_4M.secboot.fd", "OVMF_VARS_4M.ms.fd"}, {"OVMF_CODE.secboot.fd", "OVMF_VARS.ms.fd"}, {"OVMF_CODE.secboot.fd", "OVMF_VARS.secboot.fd"},
	}
)

// ovmf finds the UEFI firmware and its matching variable store; "" if this host does not have them.
func (d *Driver) ovmf(secure bool) (code, vars string) {
	for _, pair := range map[bool][][2]string{false: plainOVMF, true: secureOVMF}[secure] {
		if code, vars = d.firmware(pair[0]), d.firmware(pair[1]); code != "" && vars != "" {
			return code, vars
		}
	}
	return "", ""
}

// uefi returns the firmware of a UEFI guest and its own file of variables. A guest that boots gets new variables unless they are kept. For one
// that resumes, QEMU writes the variables that it was saved with.
func (l *launch) uefi() (code, vars string, err error) {
	code, template := l.d.ovmf(l.Plan.UEFI.SecureBoot)
	if code == "" {
		return "", "", nil // build reports what is missing
	}
	dir := l.Plan.Dir
	if l.Plan.UEFI.Persistent {
		if dir, err = l.firmwareDir(); err != nil {
			return "", "", err
		}
	}
	vars = filepath.Join(dir, varsFile)
	data, err := os.ReadFile(template)
	if err != nil {
		return "", "", fmt.Errorf("copy EFI variables: %w", err)
	}
	if st, err := os.Stat(vars); err == nil && l.Plan.UEFI.Persistent {
		if st.Size() != int64(len(data)) {
			return "", "", errdefs.Preconditionf("the variables of UEFI in %s have %d bytes, and the firmware %s needs %d; install the firmware that wrote them, or remove the file to begin with new variables",
				vars, st.Size(), code, len(data))
		}
		return code, vars, nil
	}
	// A crash leaves no partial store.
	if err := atomicfile.WriteFile(vars, data, 0o600); err != nil {
		return "", "", fmt.Errorf("copy EFI variables: %w", err)
	}
	return code, vars, nil
}

// firmwareDir makes the folder for what the firmware keeps. QEMU must pass through it.
func (l *launch) firmwareDir() (string, error) {
	dir := l.Plan.FirmwareDir
	if err := os.MkdirAll(dir, 0o711); err != nil {
		return "", fmt.Errorf("make the folder of the firmware: %w", err)
	}
	if err := os.Chmod(dir, 0o711); err != nil { // whoever has made it
		return "", fmt.Errorf("make the folder of the firmware: %w", err)
	}
	return dir, nil
}
