package guest

import (
	"context"
	"maps"
	"slices"
	"strings"

	"cocoonstack.io/cocoon/internal/errdefs"
)

// Logins says how users log in to a guest that boots itself. The users exist in the guest.
type Logins struct {
	Passwords map[string]string   // by user
	Keys      map[string][]string // lines of authorized_keys, by user: the user has these keys and no others
}

// Limits of Logins.
const (
	maxLogins      = 64
	maxUserName    = 64
	maxPassword    = 512
	maxKeys        = 256       // of a user
	maxKeyLine     = 16 << 10  // bytes
	maxKeysOfLogin = 256 << 10 // bytes of all keys of a user
)

// Validate checks what does not depend on the guest. No error quotes a password or a key. Errors: InvalidArgument.
func (l Logins) Validate() error {
	if len(l.Passwords) > maxLogins || len(l.Keys) > maxLogins {
		return errdefs.Invalidf("more than %d users are given", maxLogins)
	}
	for _, user := range slices.Sorted(maps.Keys(l.Passwords)) {
		if err := ValidUser(user); err != nil {
			return err
		}
		if p := l.Passwords[user]; p == "" || len(p) > maxPassword || strings.ContainsFunc(p, control) {
			return errdefs.Invalidf("the password of user %q must have 1 to %d bytes and no control characters", user, maxPassword)
		}
	}
	for _, user := range slices.Sorted(maps.Keys(l.Keys)) {
		if err := ValidUser(user); err != nil {
			return err
		}
		keys, size := l.Keys[user], 0
		for i, key := range keys {
			size += len(key)
			if key == "" || len(key) > maxKeyLine || strings.ContainsFunc(key, control) {
				return errdefs.Invalidf("SSH key %d of user %q is not a line of authorized_keys", i+1, user)
			}
		}
		if len(keys) > maxKeys || size > maxKeysOfLogin {
			return errdefs.Invalidf("user %q has more than %d SSH keys, or more than %d KiB of them", user, maxKeys, maxKeysOfLogin>>10)
		}
	}
	return nil
}

// ValidUser checks the name of a user of a guest. Errors: InvalidArgument.
func ValidUser(name string) error {
	if name == "" || len(name) > maxUserName || strings.ContainsFunc(name, control) || strings.ContainsAny(name, ":/") {
		return errdefs.Invalidf("%q is not the name of a user: it must have 1 to %d bytes, no control characters, ':' or '/'", name, maxUserName)
	}
	return nil
}

func control(r rune) bool { return r < ' ' || r == 0x7f }

// LoginSetter is the ability of an Agent that is not ours to say how users log in.
type LoginSetter interface {
	// SetLogins sets passwords and SSH keys. It is idempotent; if it fails, it may have set some.
	// Errors: FailedPrecondition if the guest refuses, such as for a user that it does not have; Unsupported if its agent cannot.
	SetLogins(ctx context.Context, l Logins) error
}

// LoginAccess is the ability of an Access to say how users log in to guests; ref is as for Access.
type LoginAccess interface {
	// SetLogins sets passwords and SSH keys in a guest; see LoginSetter. Errors: as for Access and LoginSetter; InvalidArgument.
	SetLogins(ctx context.Context, ref string, l Logins) error
}
