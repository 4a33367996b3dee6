package volume

import (
	"fmt"
	"slices"
	"strings"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/vm"
)

// Admits decides whether the VM to may use v: one VM may write, or any number may read. has reports that it uses v already, in the
// same way.
// Errors: FailedPrecondition.
func (v Volume) Admits(to vm.ID, readOnly bool) (has bool, err error) {
	if at := slices.IndexFunc(v.Attachments, func(a Attachment) bool { return a.VM == to }); at >= 0 {
		if v.Attachments[at].ReadOnly != readOnly {
			return false, errdefs.Preconditionf("that VM has it attached already, %s", how(!readOnly))
		}
		return true, nil
	}
	if written := v.Writer() != ""; len(v.Attachments) > 0 && (!readOnly || written) {
		return false, errdefs.Preconditionf("it is attached to %s, %s; detach it there first", v.Users(), how(!written))
	}
	return false, nil
}

func how(readOnly bool) string {
	if readOnly {
		return "to read only"
	}
	return "to read and write"
}

// Writer returns the VM that has v attached and may write; "": there is none.
func (v Volume) Writer() vm.ID {
	for _, a := range v.Attachments {
		if !a.ReadOnly {
			return a.VM
		}
	}
	return ""
}

// Users names the VMs that v is attached to, for messages.
func (v Volume) Users() string {
	const most = 3
	var ids []string
	for _, a := range v.Attachments[:min(most, len(v.Attachments))] {
		ids = append(ids, "VM "+string(a.VM))
	}
	if more := len(v.Attachments) - most; more > 0 {
		return fmt.Sprintf("%s and %d more", strings.Join(ids, ", "), more)
	}
	return strings.Join(ids, ", ")
}

// AttachedTo reports whether the VM id uses v.
func (v Volume) AttachedTo(id vm.ID) bool {
	return slices.ContainsFunc(v.Attachments, func(a Attachment) bool { return a.VM == id })
}

// serialPart is how many characters of an id are in a serial: a serial has at most 20 bytes.
const serialPart = 16

// Serial returns the serial by which a guest finds the disk of the volume id.
func Serial(id vm.ID) string { return "vol-" + string(id[:min(len(id), serialPart)]) }
