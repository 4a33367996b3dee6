package cocoond

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"

	"cocoonstack.io/cocoon/internal/appliance"
	"cocoonstack.io/cocoon/internal/appliance/bootctl"
	"cocoonstack.io/cocoon/internal/appliance/machine"
	"cocoonstack.io/cocoon/internal/appliance/statecopy"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/journal/sqlite"
)

// tryAgain is how long a daemon that cannot start says so, before it ends and process 1 starts it again.
const tryAgain = time.Minute

// updateDir is the folder with what updates keep between two systems.
func (d *daemon) updateDir() string { return filepath.Join(d.cfg.StateDir, "update") }

// stateCopies keep the databases as they were before an update.
func (d *daemon) stateCopies() *statecopy.Store {
	return &statecopy.Store{Dir: d.updateDir(), Log: d.log.With("component", "update"), Databases: []statecopy.Database{
		{Path: filepath.Join(d.cfg.StateDir, applianceState), Copy: sqlite.Copy, Replace: sqlite.Replace, Newer: sqlite.NewerDocuments},
		{Path: d.journalPath(), Copy: sqlite.Copy, Replace: sqlite.Replace, Newer: sqlite.NewerJournal},
	}}
}

// settleState decides, before the databases are opened, what a system of two slots may do with them. One on trial upgrades nothing. One that is not takes the copies
// from before an update if it cannot read what the newer one has left. The caller calls opened once it has opened the journal.
func (d *daemon) settleState(ctx context.Context) (opened func() error, err error) {
	opened = func() error { return nil }
	if d.cfg.Appliance.Listen == "" {
		return opened, nil
	}
	boot, _, err := booted()
	if err != nil || boot.Slot == bootctl.None {
		return opened, err
	}
	if boot.Trial {
		d.cfg.frozen = true
		return opened, nil
	}
	copies := d.stateCopies()
	restored, err := copies.Restore(ctx)
	if err == nil && restored {
		d.cfg.olderJournal = true // it is older than its mark, until it has been opened
		opened = copies.Settle
	}
	return opened, err
}

// stateIsKept refuses state in memory on Cocoon's own system. A machine whose disk cannot be read would be one without keys otherwise, which anybody adopts.
// Errors: DataLoss.
func (d *daemon) stateIsKept() error {
	if machine.Slot() == "" {
		return nil
	}
	own, err := ownFileSystem(d.cfg.StateDir)
	if err == nil && !own {
		err = errdefs.DataLossf("the volume for the state is not mounted at %s; look at the console for the reason", d.cfg.StateDir)
	}
	return err
}

// ownFileSystem reports whether dir is on another file system than the root.
func ownFileSystem(dir string) (bool, error) {
	var root, own unix.Stat_t
	if err := errors.Join(unix.Stat("/", &root), unix.Stat(dir, &own)); err != nil {
		return false, &os.PathError{Op: "stat", Path: dir, Err: err}
	}
	return root.Dev != own.Dev, nil
}

// answerFailure says, at the address of the appliance, why the daemon cannot start. On another system than Cocoon's own whoever started it sees that.
func (d *daemon) answerFailure(ctx context.Context, why error) error {
	if d.cfg.Appliance.Listen == "" || machine.Slot() == "" || ctx.Err() != nil {
		return why
	}
	ctx, stop := context.WithTimeout(ctx, tryAgain)
	defer stop()
	return errors.Join(why, appliance.Unreadable(ctx, d.cfg.Appliance.Listen, why, screen(d.log), d.log))
}
