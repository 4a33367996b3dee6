package session

import (
	"context"
	"errors"

	"cocoonstack.io/cocoon/internal/guest"
	"cocoonstack.io/cocoon/internal/vm"
)

// waits records why the guest waits for a volume, if err says that, and returns err.
func (l *Link) waits(ctx context.Context, err error) error {
	w, ok := errors.AsType[guest.Waiting](err)
	was := l.vm.Record()
	if !ok || was.Reason != "" && was.Reason != vm.ReasonFailedMount || was.Reason != "" && was.Message == w.Error() {
		return err
	}
	l.cfg.Log.Warn("guest of vm waits for a volume", "vm", l.proc.ID, "err", w)
	_, failed := l.vm.Update(ctx, func(r *vm.Record) {
		if r.State == vm.StateRunning && (r.Reason == "" || r.Reason == vm.ReasonFailedMount) {
			r.Reason, r.Message = vm.ReasonFailedMount, w.Error()
		}
	})
	if failed != nil { // the next try tells again
		l.cfg.Log.Debug("guest that waits for a volume not recorded", "vm", l.proc.ID, "err", failed)
	}
	return err
}
