package hostmount

import (
	"testing"

	"cocoonstack.io/cocoon/internal/errdefs"
)

func TestParseMount(t *testing.T) {
	for text, want := range map[string]mountLine{
		`36 35 7:3 / /run/c\040d rw,nosuid,nodev master:1 - ext4 /dev/loop3 rw,errors=remount-ro`: {id: "36", parent: "35", device: "7:3", at: "/run/c d", kind: "ext4"},
		`36 35 7:3 /a /x\134y ro,noatime shared:9 master:1 - xfs /dev/loop3 ro`:                   {id: "36", parent: "35", group: "9", device: "7:3", at: `/x\y`, kind: "xfs", readOnly: true, superReadOnly: true},
		`36 35 0:3 / / rw - tmpfs none rw,size=1\04`:                                              {id: "36", parent: "35", device: "0:3", at: "/", kind: "tmpfs"},
	} {
		if got, ok := parseMount(text); !ok || got != want {
			t.Errorf("%s: %+v, %v", text, got, ok)
		}
	}
	for _, text := range []string{"", "36 35", "36 35 0:3 / / rw", "36 35 0:3 / - tmpfs none rw", "- - -"} {
		if got, ok := parseMount(text); ok {
			t.Errorf("%q: %+v", text, got)
		}
	}
}

// Any line is a mount or none, and a path never becomes longer.
func FuzzParseMount(f *testing.F) {
	f.Add(`36 35 7:3 / /run/c\040d rw,nosuid master:1 - ext4 /dev/loop3 rw`)
	f.Add(`\`)
	f.Fuzz(func(t *testing.T, line string) {
		if l, ok := parseMount(line); ok && len(l.at) > len(line) {
			t.Errorf("%q became %q", line, l.at)
		}
	})
}

func TestNew(t *testing.T) {
	for dir, ok := range map[string]bool{"/run/cocoon/volumes": true, "": false, "run": false, "/": false, "/run/": false, "/run/../x": false} {
		if _, err := New(Config{Dir: dir}); (err == nil) != ok || err != nil && !errdefs.IsInvalid(err) {
			t.Errorf("%q: %v", dir, err)
		}
	}
	if n := len(markOf("/run/cocoon/volumes/x")); n > 63 {
		t.Errorf("a mark has %d characters", n)
	}
}
