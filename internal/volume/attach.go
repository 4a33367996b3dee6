package volume

import (
	"fmt"
	"slices"
	"strings"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/vm"
)

// Admits decides whether the VM to may use v: one VM may write, or any number may read, or any number may share it. has reports that it
// uses v already, in the same way.
// Errors: FailedPrecondition.
func (v Volume) Admits(to vm.ID, as Mode) (has bool, err error) {
	if at := slices.IndexFunc(v.Attachments, func(a Attachment) bool { return a.VM == to }); at >= 0 {
		if was := v.Attachments[at].Mode; was != as {
			return false, errdefs.Preconditionf("that VM has it attached already, %s; detach it there first", was)
		}
		return true, nil
	}
	if next := append(slices.Clip(v.Attachments), Attachment{VM: to, Mode: as}); !Together(next) {
		return false, errdefs.Preconditionf("it is attached to %s, %s; detach it there first, or let each of these VMs share it", v.Users(), v.use())
	}
	return false, nil
}

// Together reports whether VMs may use one volume at the same time: if all of them share it, or all of them only read.
func Together(all []Attachment) bool {
	alone := func(a Attachment) bool { return !a.Shared }
	writes := func(a Attachment) bool { return !a.ReadOnly }
	return len(all) < 2 || !slices.ContainsFunc(all, alone) || !slices.ContainsFunc(all, writes)
}

// String is m in a message.
func (m Mode) String() string {
	how := "to read and write"
	if m.ReadOnly {
		how = "to read only"
	}
	if m.Shared {
		how += ", shared"
	}
	return how
}

// use is how the VMs that have v attached use it together.
func (v Volume) use() Mode {
	return Mode{ReadOnly: v.Writer() == "", Shared: !slices.ContainsFunc(v.Attachments, func(a Attachment) bool { return !a.Shared })}
}

// Copyable returns a FailedPrecondition error if several VMs may write to v: the bytes of one instant are then those of no file system.
func (v Volume) Copyable() error {
	if writers := v.Writers(); len(writers) > 1 {
		return errdefs.Preconditionf("%d VMs share it and may write to it (%s); detach it from all but one of them first", len(writers), v.Users())
	}
	return nil
}

// Writers returns the VMs that have v attached and may write.
func (v Volume) Writers() (out []vm.ID) {
	for _, a := range v.Attachments {
		if !a.ReadOnly {
			out = append(out, a.VM)
		}
	}
	return out
}

// Writer returns the VM that has v attached and may write, the first if they are several; "": there is none.
func (v Volume) Writer() vm.ID {
	if all := v.Writers(); len(all) > 0 {
		return all[0]
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
