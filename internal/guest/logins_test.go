package guest_test

import (
	"strings"
	"testing"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/guest"
)

func TestLogins(t *testing.T) {
	password := func(user, p string) guest.Logins { return guest.Logins{Passwords: map[string]string{user: p}} }
	keys := func(user string, lines ...string) guest.Logins {
		return guest.Logins{Keys: map[string][]string{user: lines}}
	}
	many := guest.Logins{Passwords: map[string]string{}}
	for i := range 65 {
		many.Passwords[strings.Repeat("u", i%60+1)+string(rune('a'+i/60))] = "p"
	}
	for name, c := range map[string]struct {
		of   guest.Logins
		want string // "": valid
	}{
		"nothing":                    {},
		"a password":                 {password("root", "secret word"), ""},
		"a user of Windows":          {password("Jörg Ø", "secret"), ""},
		"keys":                       {keys("debian", "ssh-ed25519 AAAA one", "ssh-ed25519 BBBB two"), ""},
		"no keys":                    {keys("debian"), ""},
		"no password":                {password("root", ""), "password of user"},
		"another user's":             {password("debian", "secret\nroot:secret"), "password of user"},
		"another user in the name":   {password("a:b\nroot", "secret"), "is not the name of a user"},
		"a path":                     {keys("../root", "ssh-ed25519 AAAA"), "is not the name of a user"},
		"nobody":                     {keys("", "ssh-ed25519 AAAA"), "is not the name of a user"},
		"two lines":                  {keys("debian", "ssh-ed25519 AAAA\nssh-ed25519 BBBB"), "SSH key 1 of user"},
		"an empty line":              {keys("debian", "ssh-ed25519 AAAA", ""), "SSH key 2 of user"},
		"a long line":                {keys("debian", strings.Repeat("x", 16<<10+1)), "SSH key 1 of user"},
		"many keys":                  {keys("debian", strings.Split(strings.Repeat("x ", 257), " ")[:257]...), "more than 256"},
		"many users":                 {many, "more than 64 users"},
		"a password that is a disk":  {password("root", strings.Repeat("x", 513)), "password of user"},
		"a name that is a paragraph": {password(strings.Repeat("x", 65), "secret"), "is not the name of a user"},
	} {
		err := c.of.Validate()
		switch {
		case c.want == "" && err != nil:
			t.Errorf("%s: %v", name, err)
		case c.want != "" && (!errdefs.IsInvalid(err) || !strings.Contains(err.Error(), c.want)):
			t.Errorf("%s: %v; want %s", name, err, c.want)
		case err != nil && strings.Contains(err.Error(), "secret"):
			t.Errorf("%s: the error quotes the password: %v", name, err)
		}
	}
}
