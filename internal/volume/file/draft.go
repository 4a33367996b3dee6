package file

import (
	"context"
	"errors"
	"os"
	"path/filepath"

	"cocoonstack.io/cocoon/internal/atomicfile"
	"cocoonstack.io/cocoon/internal/vm"
	"cocoonstack.io/cocoon/internal/volume/record"
)

// create makes an object: its name is taken first, its folder gets its files under another name, and one rename makes it visible when
// all is durable. If fill fails, nothing is left. name may be "".
func (x *folders[R]) create(ctx context.Context, owner vm.Owner, name string, fill func(id vm.ID, name string, data *os.File) (R, error)) (R, error) {
	var none R
	if err := ctx.Err(); err != nil {
		return none, err
	}
	id, name, err := x.Reserve(owner, name)
	if err != nil {
		return none, err
	}
	rec, err := x.draft(id, func(data *os.File) (R, error) { return fill(id, name, data) })
	if err == nil {
		err = x.publish(id)
	}
	if err != nil {
		x.Free(owner, name)
		return none, err
	}
	x.Put(id, rec, false)
	return rec.Clone(), nil
}

func (x *folders[R]) draftDir(id vm.ID) string { return filepath.Join(x.dir, draftPrefix+string(id)) }

// draft writes the files of an object durably.
func (x *folders[R]) draft(id vm.ID, fill func(data *os.File) (R, error)) (rec R, err error) {
	dir := x.draftDir(id)
	if err := os.Mkdir(dir, 0o700); err != nil {
		return rec, err
	}
	defer func() {
		if err != nil {
			_ = os.RemoveAll(dir)
		}
	}()
	data, err := os.OpenFile(filepath.Join(dir, dataFile), os.O_CREATE|os.O_EXCL|os.O_RDWR, 0o600)
	if err != nil {
		return rec, err
	}
	rec, err = fill(data)
	if err == nil {
		err = data.Sync()
	}
	if err := errors.Join(err, data.Close()); err != nil {
		return rec, err
	}
	return rec, record.Write(filepath.Join(dir, x.file), rec) // syncs the folder too
}

// publish makes a draft visible to the next New. If it fails, the draft is removed.
func (x *folders[R]) publish(id vm.ID) error {
	err := os.Rename(x.draftDir(id), x.path(id))
	if err == nil {
		if err = atomicfile.SyncDir(x.dir); err == nil {
			return nil
		}
		_ = os.Rename(x.path(id), x.draftDir(id)) // what may not be durable must not come back
	}
	_ = os.RemoveAll(x.draftDir(id))
	return err
}
