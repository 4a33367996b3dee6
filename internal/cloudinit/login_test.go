package cloudinit

import (
	"strings"
	"testing"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/vm"
)

const hash = "$6$saltstring$svn8UoSVapNtMuq1ukKS4tPQd8iKwSMHWjl/O817G3uBnIFNjnQJuesI68u4OTLiBFdcbYEdFCoEOfaS35inz1"

// The vectors are those of the specification and of "openssl passwd -6".
func TestSHA512Crypt(t *testing.T) {
	for _, c := range []struct{ password, salt, want string }{
		{"Hello world!", "saltstring", hash},
		{"cocoon", "abcdefghijklmnop", "$6$abcdefghijklmnop$Iq23tgqfZVWqmsASUn7rJlbh5zRnsm0f0R0YPrBIXIfhaYy6ERMcP0d673sz1FVijVsjp18oQQUqtkh4M3R0K."},
		{strings.Repeat("x", 130), "./", "$6$./$PC2G1FtuAQUFw.0gSFET7U.lbrCGeg7VbNoLqiWkhz15NkHdbdtLzFXokPI4SvN7vwBZ1f/m78GeE6wpY.XDh."},
	} {
		if got := sha512Crypt([]byte(c.password), []byte(c.salt)); got != c.want {
			t.Errorf("%s: %s, want %s", c.password, got, c.want)
		}
	}
	a, err := HashPassword("secret")
	b, _ := HashPassword("secret")
	if err != nil || a == b || !passwordHash.MatchString(a) {
		t.Errorf("%s, %s, %v", a, b, err)
	}
	for _, bad := range []string{"", "a\nb", "a\x00", strings.Repeat("x", maxPassword+1)} {
		if _, err := HashPassword(bad); !errdefs.IsInvalid(err) {
			t.Errorf("%q: %v", bad, err)
		}
	}
}

func TestUserThatMayLogIn(t *testing.T) {
	list := func(items ...any) []any { return items }
	type m = map[string]any
	joe := m{"name": "joe", "sudo": "ALL=(ALL) NOPASSWD:ALL", "shell": "/bin/bash"}
	open := m{"name": "joe", "sudo": "ALL=(ALL) NOPASSWD:ALL", "shell": "/bin/bash", "lock_passwd": false, "hashed_passwd": hash}
	withKey := m{"name": "joe", "sudo": "ALL=(ALL) NOPASSWD:ALL", "shell": "/bin/bash", "ssh_authorized_keys": list(key)}
	passwords := func(lines ...any) m { return m{"expire": false, "list": lines} }
	for name, tc := range map[string]struct {
		c    vm.CloudInit
		want m
	}{
		"a user":           {vm.CloudInit{User: "joe"}, m{"users": list("default", joe)}},
		"with a key":       {vm.CloudInit{User: "joe", SSHKeys: []string{key}}, m{"users": list("default", withKey)}},
		"with a password":  {vm.CloudInit{User: "joe", PasswordHash: hash}, m{"users": list("default", open), "chpasswd": passwords("joe:" + hash), "ssh_pwauth": true}},
		"root":             {vm.CloudInit{User: "root"}, m{"disable_root": false}},
		"a password alone": {vm.CloudInit{PasswordHash: hash}, m{"disable_root": false, "chpasswd": passwords("root:" + hash), "ssh_pwauth": true}},
		"the document lists users": {
			vm.CloudInit{User: "joe", UserData: "#cloud-config\nusers: [{name: ann}]\na: 1\n"},
			m{"users": list(joe, m{"name": "ann"}), "a": 1},
		},
		"the document has passwords": {
			vm.CloudInit{PasswordHash: hash, UserData: "#cloud-config\nssh_pwauth: false\nchpasswd:\n  expire: true\n  list: |\n    ann:x y\n    bob:y\n"},
			m{"disable_root": false, "ssh_pwauth": false, "chpasswd": m{"expire": true, "list": list("root:"+hash, "ann:x y", "bob:y")}},
		},
	} {
		s := build(t, guest(), tc.c)
		same(t, name, read(t, s.Files["user-data"]), tc.want)
	}
	s := build(t, guest(), vm.CloudInit{User: "joe", UserData: "#!/bin/sh\n"})
	same(t, "a script stays", string(s.Files["user-data"]), "#!/bin/sh\n")
	same(t, "beside a script", read(t, s.Files["vendor-data"]), m{"users": list("default", joe)})

	for name, c := range map[string]vm.CloudInit{
		"name with a colon": {User: "a:b"},
		"name is an option": {User: "-u"},
		"plain password":    {User: "joe", PasswordHash: "secret"},
		"another hash":      {User: "joe", PasswordHash: "$1$salt$" + strings.Repeat("a", 22)},
		"users by name":     {User: "joe", UserData: "#cloud-config\nusers: {ann: {}}\n"},
		"nothing to add to": {User: "joe", UserData: "#!/bin/sh\n", VendorData: "#!/bin/sh\n"},
	} {
		if err := Validate(c); !errdefs.IsInvalid(err) || strings.Contains(err.Error(), "secret") {
			t.Errorf("%s: %v", name, err)
		}
	}
}
