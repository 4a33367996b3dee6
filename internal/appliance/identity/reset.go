package identity

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"time"

	"cocoonstack.io/cocoon/internal/journal"
)

// ResetAge is the greatest age of a file that resets the keys. An older one may have been forgotten.
const ResetAge = 5 * time.Minute

// reset removes all keys if somebody asks for it by the file of cfg.Reset. The file goes after the keys, so that a crash between both
// asks again.
func (k *Keeper) reset(ctx context.Context) error {
	if k.cfg.Reset == "" {
		return nil
	}
	fi, err := os.Lstat(k.cfg.Reset)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil
	case err != nil:
		return fmt.Errorf("look for %s: %w", k.cfg.Reset, err)
	}
	if age := k.cfg.Now().Sub(fi.ModTime()); !fi.Mode().IsRegular() || age > ResetAge || age < -ResetAge {
		k.cfg.Log.Warn("the file does not reset the keys: it is too old, of the future, or no regular file", "path", k.cfg.Reset, "age", age.Round(time.Second))
		return nil
	}
	var changes []journal.Change
	for kid := range k.keys {
		changes = append(changes, journal.Change{Table: journal.Keys, Name: kid})
	}
	if err := k.cfg.Documents.Write(ctx, changes...); err != nil {
		return err
	}
	k.cfg.Log.Warn("all keys are removed, and the machine can be adopted", "path", k.cfg.Reset, "keys", len(k.keys))
	k.keys, k.opened = map[string]Key{}, k.cfg.Age()
	if err := os.Remove(k.cfg.Reset); err != nil {
		return fmt.Errorf("remove %s, which has reset the keys: %w", k.cfg.Reset, err)
	}
	return nil
}
