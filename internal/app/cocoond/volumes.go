package cocoond

import (
	"context"
	"errors"
	"path/filepath"

	"cocoonstack.io/cocoon/internal/vm"
	"cocoonstack.io/cocoon/internal/volume/block"
	"cocoonstack.io/cocoon/internal/volume/file"
	"cocoonstack.io/cocoon/internal/volume/kinds"
	"cocoonstack.io/cocoon/internal/volume/lvm"
)

// volumes are the stores of volumes as one.
type volumes struct {
	*kinds.Store
	closers []func() error
	devices *block.Store
	thin    *lvm.Store // nil: there is no thin pool
}

// openVolumes opens the stores of volumes.
func (d *daemon) openVolumes(ctx context.Context) (_ *volumes, err error) {
	v := &volumes{}
	defer func() {
		if err != nil {
			err = errors.Join(err, v.close())
		}
	}()
	devices, err := d.cfg.devices()
	if err != nil {
		return nil, err
	}
	log, dir := d.log.With("component", "volume"), filepath.Join(d.cfg.StateDir, "volumes")
	files, err := file.New(ctx, file.Config{Dir: dir, Log: log})
	if err != nil {
		return nil, err
	}
	v.closers = append(v.closers, files.Close)
	makers := []kinds.Kind{{Name: file.Kind, Making: files}}
	if p := d.cfg.VolumePool; p.Name != "" {
		v.thin, err = lvm.New(ctx, lvm.Config{Dir: filepath.Join(dir, lvm.Kind), Pool: p.Name, Warn: p.Warn, Refuse: p.Refuse, Log: log})
		if err != nil {
			return nil, err
		}
		v.closers = append(v.closers, v.thin.Close)
		makers = append(makers, kinds.Kind{Name: lvm.Kind, Making: v.thin})
	}
	made := kinds.New(makers)
	taken := func(owner vm.Owner, name string) (bool, error) { return kinds.Has(ctx, made, owner, name) }
	blocks, err := block.New(ctx, block.Config{Dir: filepath.Join(dir, block.Kind), Devices: devices, Taken: taken, Log: log})
	if err != nil {
		return nil, err
	}
	v.closers = append(v.closers, blocks.Close)
	v.Store, v.devices = kinds.New(makers, blocks), blocks
	return v, nil
}

// run watches the thin pool until ctx ends.
func (v *volumes) run(ctx context.Context) error {
	if v.thin == nil {
		<-ctx.Done()
		return nil
	}
	return v.thin.Run(ctx)
}

func (v *volumes) close() error {
	var errs []error
	for i := len(v.closers) - 1; i >= 0; i-- {
		errs = append(errs, v.closers[i]())
	}
	return errors.Join(errs...)
}
