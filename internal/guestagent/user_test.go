package guestagent

import (
	"strings"
	"testing"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/testkit/diff"
)

const passwd = `root:x:0:0:root:/root:/bin/sh
# a comment:x:1:1:::
short:x:1
web:x:33:34:www:/srv/web:/bin/false
nohome:x:40:40:::
bad:x:many:1::/:
`

const group = `root:x:0:
web:x:34:
video:x:44:root,web
audio:x:29:web
`

func TestResolveUser(t *testing.T) {
	p, g := parseColon(strings.NewReader(passwd), 7), parseColon(strings.NewReader(group), 4)
	for spec, want := range map[string]user{
		"":          {home: "/root", groups: []uint32{44}, listed: []uint32{44}},
		"root":      {home: "/root", groups: []uint32{44}, listed: []uint32{44}},
		"web":       {uid: 33, gid: 34, home: "/srv/web", groups: []uint32{44, 29}, listed: []uint32{44, 29}},
		"33":        {uid: 33, gid: 34, home: "/srv/web", groups: []uint32{44, 29}, listed: []uint32{44, 29}},
		"web:video": {uid: 33, gid: 44, home: "/srv/web", listed: []uint32{44, 29}},
		"web:29":    {uid: 33, gid: 29, home: "/srv/web", listed: []uint32{44, 29}},
		"1000:1001": {uid: 1000, gid: 1001, home: "/"},
		"1000":      {uid: 1000, home: "/"},
		"nohome":    {uid: 40, gid: 40, home: "/"},
		":29":       {gid: 29, home: "/root", listed: []uint32{44}},
	} {
		got, err := resolveUser(spec, p, g)
		if d := diff.Of(want, got); err != nil || d != "" {
			t.Errorf("%q: %v, %s", spec, err, d)
		}
	}
	for _, spec := range []string{"nobody", "web:nogroup", "bad", "-1", "4294967295", "99999999999", "short"} {
		if u, err := resolveUser(spec, p, g); !errdefs.IsInvalid(err) {
			t.Errorf("%q: %+v, %v", spec, u, err)
		}
	}
	if u, err := lookupUser("0", "/no/such/passwd", "/no/such/group"); err != nil || u.home != "/root" {
		t.Errorf("an image without passwd: %+v, %v", u, err)
	}
}

func FuzzUser(f *testing.F) {
	f.Add(passwd, group, "web:video")
	f.Add("::::::", ":::", "")
	f.Add(strings.Repeat("x", maxUserLine+10)+"\nroot:x:0:0::/:\n", "", "root")
	f.Fuzz(func(t *testing.T, passwd, group, spec string) {
		u, err := resolveUser(spec, parseColon(strings.NewReader(passwd), 7), parseColon(strings.NewReader(group), 4))
		if err == nil && (u.home == "" || u.uid == 1<<32-1 || u.gid == 1<<32-1) {
			t.Errorf("%q gave %+v", spec, u)
		}
	})
}
