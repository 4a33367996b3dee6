package qga

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/guest"
)

// SetLogins implements guest.LoginSetter. One user's failure does not keep the others from being set.
func (s *session) SetLogins(ctx context.Context, l guest.Logins) error {
	var errs []error
	for _, user := range slices.Sorted(maps.Keys(l.Passwords)) {
		args := map[string]any{"username": user, "password": []byte(l.Passwords[user]), "crypted": false} // JSON has bytes as base64
		if err := s.call(ctx, "guest-set-user-password", args, nil, answerLimit); err != nil {
			errs = append(errs, fmt.Errorf("set the password of user %q: %w", user, err))
		}
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
	}
	for _, user := range slices.Sorted(maps.Keys(l.Keys)) {
		if err := s.setKeys(ctx, user, l.Keys[user]); err != nil {
			errs = append(errs, fmt.Errorf("set the SSH keys of user %q: %w", user, err))
		}
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
	}
	return errors.Join(errs...)
}

// setKeys makes keys the only ones in authorized_keys of user. The agent replaces the file, and refuses an empty list.
func (s *session) setKeys(ctx context.Context, user string, keys []string) error {
	if len(keys) > 0 {
		return s.call(ctx, "guest-ssh-add-authorized-keys", map[string]any{"username": user, "keys": keys, "reset": true}, nil, answerLimit)
	}
	var has struct {
		Keys []string `json:"keys"`
	}
	err := s.call(ctx, "guest-ssh-get-authorized-keys", map[string]any{"username": user}, &has, answerLimit)
	if refused := new(refusal); errdefs.IsFailedPrecondition(err) && errors.As(err, &refused) {
		return nil // there is no such file
	}
	if err != nil || len(has.Keys) == 0 {
		return err
	}
	return s.call(ctx, "guest-ssh-remove-authorized-keys", map[string]any{"username": user, "keys": has.Keys}, nil, answerLimit)
}
