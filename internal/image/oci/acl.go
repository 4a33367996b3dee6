package oci

import "encoding/binary"

// ext4Xattr converts the value of an extended attribute from the form of system calls to the form that ext4 stores: POSIX
// ACLs have their own form on disk. An ACL that cannot be read is left out.
func ext4Xattr(name, value string) (string, bool) {
	if name != "system.posix_acl_access" && name != "system.posix_acl_default" {
		return value, true
	}
	const (
		headerLen, entryLen  = 4, 8
		callVersion, version = 2, 1
		tagUser, tagGroup    = 0x02, 0x08
	)
	b := []byte(value)
	if len(b) < headerLen || (len(b)-headerLen)%entryLen != 0 || binary.LittleEndian.Uint32(b) != callVersion {
		return "", false
	}
	out := binary.LittleEndian.AppendUint32(nil, version)
	for b = b[headerLen:]; len(b) > 0; b = b[entryLen:] {
		keep := entryLen / 2 // tag and permission
		if tag := binary.LittleEndian.Uint16(b); tag == tagUser || tag == tagGroup {
			keep = entryLen // and the id
		}
		out = append(out, b[:keep]...)
	}
	return string(out), true
}
