package engine

import (
	"context"
	"fmt"
	"io"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/hypervisor"
	"cocoonstack.io/cocoon/internal/vm"
)

// Display implements guest.Displays. A paused guest has its screen, too.
func (e *Engine) Display(ctx context.Context, ref string, keep bool) (io.ReadWriteCloser, error) {
	m, r, d, err := e.display(ctx, ref)
	if err != nil {
		return nil, err
	}
	conn, err := r.OpenDisplay(ctx, d, keep)
	if err != nil {
		return nil, fmt.Errorf("open the screen of vm %s: %w", m.name(), err)
	}
	return conn, nil
}

// Screenshot implements guest.Displays.
func (e *Engine) Screenshot(ctx context.Context, ref string, wake bool) ([]byte, error) {
	m, _, d, err := e.display(ctx, ref)
	if err != nil {
		return nil, err
	}
	png, err := d.Screenshot(ctx, wake)
	if err != nil {
		return nil, fmt.Errorf("look at the screen of vm %s: %w", m.name(), err)
	}
	return png, nil
}

// display returns a running VM with a screen.
func (n *node) display(ctx context.Context, ref string) (*machine, *run, hypervisor.Displayer, error) {
	m, r, err := n.running(ctx, ref)
	if err != nil {
		return nil, nil, nil, err
	}
	if !graphics(m.record()) {
		return nil, nil, nil, errdefs.Unsupportedf("vm %s has no graphics; use its console", m.name())
	}
	d, ok := hypervisor.As[hypervisor.Displayer](r.Inst)
	if !ok {
		return nil, nil, nil, errdefs.Unsupportedf("driver %s shows no screen of vm %s; use its console", m.record().Driver, m.name())
	}
	return m, r, d, nil
}

// graphics reports whether the VM of r has a screen. The kernel of a container image would show nothing on it.
func graphics(r vm.Record) bool { return r.Spec.Graphics && r.ImageType != vm.ImageOCI }
