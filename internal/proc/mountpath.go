package proc

import "strings"

var mountPath = strings.NewReplacer(`\040`, " ", `\011`, "\t", `\012`, "\n", `\134`, `\`)

// MountPath decodes a path of a list of mounts, such as /proc/self/mountinfo: the kernel writes blanks and backslashes there as octal numbers
// (proc(5)).
func MountPath(s string) string { return mountPath.Replace(s) }
