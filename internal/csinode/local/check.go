package local

import (
	"cmp"
	"regexp"
	"strings"
	"unicode/utf8"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"

	"cocoonstack.io/cocoon/internal/csinode"
	"cocoonstack.io/cocoon/internal/errdefs"
)

const (
	maxName       = 253      // bytes of a namespace, a holder or a name
	maxHandle     = 2048     // bytes; the specification says 256, and drivers exceed it
	maxMountFlags = 4 << 10  // bytes of all together, as in the specification
	maxMap        = 64 << 10 // bytes of all keys and values together
)

// driverNames are the names that the specification allows.
var driverNames = regexp.MustCompile(`^[a-zA-Z0-9]([a-zA-Z0-9.-]{0,61}[a-zA-Z0-9])?$`)

func checkDriverName(name string) error {
	if !driverNames.MatchString(name) || strings.Contains(name, "..") {
		return errdefs.Invalidf("%.100q is not the name of a CSI driver: at most 63 letters, digits, dashes and single dots, with a letter or digit at both ends", name)
	}
	return nil
}

func checkText(what, text string, limit int) error {
	if text == "" || len(text) > limit || !utf8.ValidString(text) || strings.IndexByte(text, 0) >= 0 {
		return errdefs.Invalidf("%s %.100q is empty, longer than %d bytes, or not text", what, text, limit)
	}
	return nil
}

// validate checks what can be checked without a driver. Errors: InvalidArgument.
func validate(r *csinode.Request) error {
	if err := validateKey(r.Key); err != nil {
		return err
	}
	if err := checkDriverName(r.Driver); err != nil {
		return err
	}
	if !r.Ephemeral || r.Handle != "" {
		if err := checkText("the handle", r.Handle, maxHandle); err != nil {
			return err
		}
	}
	if v, ok := csi.VolumeCapability_AccessMode_Mode_value[r.Mode]; !ok || v == 0 {
		return errdefs.Invalidf("%.100q is not an access mode of CSI, such as SINGLE_NODE_WRITER", r.Mode)
	}
	switch r.Access {
	case csinode.AsFolder:
	case csinode.AsDevice:
		if r.FSType != "" || len(r.MountFlags) > 0 || r.Group != "" {
			return errdefs.Invalidf("a device has no file system type, mount options or group; leave them out")
		}
	default:
		return errdefs.Invalidf("%.100q is neither %q nor %q", r.Access, csinode.AsFolder, csinode.AsDevice)
	}
	return validateDetails(r)
}

func validateDetails(r *csinode.Request) error {
	for what, text := range map[string]string{"the file system type": r.FSType, "the group": r.Group} {
		if text != "" {
			if err := checkText(what, text, 128); err != nil {
				return err
			}
		}
	}
	flags := 0
	for _, f := range r.MountFlags {
		if flags += len(f); flags > maxMountFlags || !utf8.ValidString(f) { // not in the message: a flag may be confidential
			return errdefs.Invalidf("the mount options are longer than %d bytes, or not text", maxMountFlags)
		}
	}
	for what, m := range map[string]map[string]string{
		"the attributes": r.Attributes, "the attachment": r.Attachment, "the secrets of staging": r.Secrets.Stage, "the secrets of publishing": r.Secrets.Publish, "the secret attributes": r.Secrets.Context,
	} {
		size := 0
		for k, v := range m {
			if size += len(k) + len(v); size > maxMap || !utf8.ValidString(k) || !utf8.ValidString(v) {
				return errdefs.Invalidf("%s are longer than %d bytes, or not text", what, maxMap)
			}
		}
	}
	return nil
}

func validateKey(k csinode.Key) error {
	if err := checkText("the namespace", cmp.Or(k.Owner.Namespace, "-"), maxName); err != nil {
		return err
	}
	if err := checkText("the holder", k.Holder, maxName); err != nil {
		return err
	}
	return checkText("the name of the volume", k.Name, maxName)
}

// same returns an error if r asks for another publication than the one that rec has. Errors: FailedPrecondition.
func same(r *csinode.Request, rec record) error {
	var differs string
	switch {
	case r.Driver != rec.Driver:
		differs = "driver"
	case r.Handle != rec.Handle:
		differs = "handle"
	case r.Access != rec.Access:
		differs = "kind of access"
	case r.Mode != rec.Mode:
		differs = "access mode"
	case r.ReadOnly != rec.ReadOnly:
		differs = "read-only setting"
	case r.Ephemeral != rec.Ephemeral:
		differs = "life time"
	default:
		return nil
	}
	return errdefs.Preconditionf("it is, or may be, published with another %s; unpublish it first", differs)
}

// admit returns an error if the other publications of the volume exclude r. The driver judges the rest.
// Errors: FailedPrecondition, DataLoss.
func admit(r *csinode.Request, others []entry) error {
	for _, o := range others {
		who := "another holder"
		if r.Owner.Reaches(o.rec.Key.Owner) {
			who = o.rec.Key.String()
		}
		switch {
		case o.bad != nil:
			if singleWriter(r.Mode) {
				return errdefs.DataLossf("another holder may have it, which may have no other in the mode %s: %w", r.Mode, o.bad)
			}
		case o.rec.Access != r.Access:
			return errdefs.Preconditionf("%s has it on this node as a %s; a volume is a folder or a device for all its holders", who, o.rec.Access)
		case singleWriter(r.Mode) || singleWriter(o.rec.Mode):
			return errdefs.Preconditionf("%s has it on this node, and the mode SINGLE_NODE_SINGLE_WRITER allows one holder; unpublish that one first", who)
		case r.Ephemeral || o.rec.Ephemeral:
			return errdefs.Preconditionf("%s has it on this node, and an ephemeral volume has one holder", who)
		}
	}
	return nil
}

func singleWriter(mode string) bool {
	return mode == csi.VolumeCapability_AccessMode_SINGLE_NODE_SINGLE_WRITER.String()
}

// checkPublished returns an error unless path is what access promises. It asks no file server. Errors: FailedPrecondition.
func checkPublished(path string, access csinode.Access) error {
	var st unix.Statx_t
	err := unix.Statx(unix.AT_FDCWD, path, unix.AT_SYMLINK_NOFOLLOW|unix.AT_NO_AUTOMOUNT|unix.AT_STATX_DONT_SYNC, unix.STATX_TYPE, &st)
	if err != nil {
		return errdefs.Preconditionf("the driver says that the volume is published, but %s cannot be found: %w", path, err)
	}
	want, is := uint16(unix.S_IFDIR), st.Mode&unix.S_IFMT
	if access == csinode.AsDevice {
		want = unix.S_IFBLK
	}
	if is != want {
		return errdefs.Preconditionf("the driver published %s at %s instead of a %s; its volumes cannot be used here", typeName(is), path, access)
	}
	return nil
}

func typeName(format uint16) string {
	switch format {
	case unix.S_IFDIR:
		return "a folder"
	case unix.S_IFBLK:
		return "a block device"
	case unix.S_IFLNK:
		return "a symbolic link"
	case unix.S_IFREG:
		return "a regular file"
	}
	return "a file of another type"
}
