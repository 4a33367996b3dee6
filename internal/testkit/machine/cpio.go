package machine

import (
	"bytes"
	"fmt"
	"maps"
	"slices"
)

// cpio returns an archive of programs, which the kernel unpacks after the one before it (newc).
func cpio(files map[string][]byte) []byte {
	var out bytes.Buffer
	pad := func() { out.Write(make([]byte, (4-out.Len()%4)%4)) }
	add := func(name string, mode int, data []byte) {
		fmt.Fprintf(&out, "070701%08x%08x%08x%08x%08x%08x%08x%08x%08x%08x%08x%08x%08x", 0, mode, 0, 0, 1, 0, len(data), 0, 0, 0, 0, len(name)+1, 0)
		out.WriteString(name + "\x00")
		pad()
		out.Write(data)
		pad()
	}
	made := map[string]bool{}
	for _, name := range slices.Sorted(maps.Keys(files)) {
		for at := range name {
			if dir := name[:at]; name[at] == '/' && !made[dir] {
				add(dir, 0o40755, nil)
				made[dir] = true
			}
		}
		add(name, 0o100755, files[name])
	}
	add("TRAILER!!!", 0, nil)
	return out.Bytes()
}
