package qemu

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/cenkalti/backoff/v5"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/hypervisor/qemu/qmp"
	"cocoonstack.io/cocoon/internal/vm"
)

// goOn makes a process that has only its memory load the device state, and then starts its CPUs.
func (l *launch) goOn(ctx context.Context, i *instance, c *qmp.Client) error {
	e := i.listen()
	defer i.deafen(e)
	if err := capabilities(ctx, c, map[string]bool{"events": true}); err != nil {
		return err
	}
	if l.Plan.Incoming.LinksDown {
		// On behalf of the guest QEMU announces the saved VM's addresses. Without carrier no host receives that, so it is done
		// once instead of five times. With zero rounds QEMU 7.2 crashes when the guest resets the NIC, because its announce
		// timer does not exist.
		if err := c.Execute(ctx, "migrate-set-parameters", props{"announce-rounds": 1}, nil); err != nil {
			return err
		}
	}
	if err := c.Execute(ctx, "migrate-incoming", props{"uri": fmt.Sprintf("fd:%d", l.cmd.state)}, nil); err != nil {
		return err
	}
	for {
		ev, err := e.next(ctx, c)
		if err != nil {
			return err
		}
		switch s := migrationStatus(ev); s {
		case "completed":
			if err := l.setLinks(ctx, c); err != nil {
				return err
			}
			if err := limitDisks(ctx, c, l.Plan.DiskRate); err != nil {
				return err
			}
			if err := cont(ctx, c); err != nil {
				return err
			}
			return l.tellGrown(ctx, c)
		case "failed":
			return errdefs.DataLossf("QEMU rejects the saved state %s", l.Plan.Incoming.State)
		}
	}
}

// setLinks gives the NICs their links before the guest's CPUs run.
func (l *launch) setLinks(ctx context.Context, c *qmp.Client) error {
	for n, nic := range l.Plan.NICs {
		down := nic.LinkDown || l.Plan.Incoming != nil && l.Plan.Incoming.LinksDown
		if !down && l.Plan.Incoming == nil { // it is up
			continue
		}
		if err := setLink(ctx, c, vm.PlaceOf(l.Plan.NICs, n), !down); err != nil {
			return err
		}
	}
	return nil
}

// migrationStatus returns the status in a MIGRATION event, "" for any other event.
func migrationStatus(ev qmp.Event) string {
	var data struct {
		Status string `json:"status"`
	}
	if ev.Name != "MIGRATION" || json.Unmarshal(ev.Data, &data) != nil {
		return ""
	}
	return data.Status
}

func capabilities(ctx context.Context, c *qmp.Client, caps map[string]bool) error {
	list := make([]props, 0, len(caps))
	for name, on := range caps {
		list = append(list, props{"capability": name, "state": on})
	}
	return c.Execute(ctx, "migrate-set-capabilities", props{"capabilities": list}, nil)
}

// migrating returns the status of the last migration: "none" before the first one.
func migrating(ctx context.Context, c *qmp.Client) (status, why string, err error) {
	var m struct {
		Status string `json:"status"`
		Error  string `json:"error-desc"`
	}
	if err := c.Execute(ctx, "query-migrate", nil, &m); err != nil {
		return "", "", err
	}
	if m.Status == "" {
		m.Status = "none"
	}
	return m.Status, m.Error, nil
}

func over(migration string) bool {
	return slices.Contains([]string{"none", "completed", "failed", "cancelled"}, migration)
}

// settle cancels a running migration and returns when none is running.
func (i *instance) settle(ctx context.Context, c *qmp.Client) error {
	e := i.listen()
	defer i.deafen(e)
	status, _, err := migrating(ctx, c)
	if err != nil || over(status) {
		return err
	}
	if err := c.Execute(ctx, "migrate_cancel", nil, nil); err != nil {
		return err
	}
	// A process of an older driver may not send the event, so query-migrate decides first.
	if status, _, err = migrating(ctx, c); err != nil || over(status) {
		return err
	}
	for {
		ev, err := e.next(ctx, c)
		if err != nil {
			return err
		}
		if s := migrationStatus(ev); s != "" && over(s) {
			return nil
		}
	}
}

// finalizing is the pause between attempts while QEMU cleans up a migration that it has already reported as over, or a dump that nobody reads.
const finalizing = time.Millisecond

// cont makes the guest run. It is no error if it runs already.
func cont(ctx context.Context, c *qmp.Client) error {
	last := false
	_, err := backoff.Retry(ctx, func() (runs bool, err error) {
		if err = c.Execute(ctx, "cont", nil, nil); !refused(err) || last {
			return true, backoff.Permanent(err)
		}
		now, serr := status(ctx, c)
		if serr != nil {
			return false, backoff.Permanent(errors.Join(err, serr))
		}
		last = now != "finish-migrate" && now != dumping // the migration or the dump may have ended between the two requests: retry once more
		return false, err
	}, backoff.WithBackOff(backoff.NewConstantBackOff(finalizing)), backoff.WithMaxElapsedTime(0))
	return err
}

// refused reports whether QEMU itself rejected the command, in contrast to a lost connection.
func refused(err error) bool {
	_, ok := errors.AsType[*qmp.Error](err)
	return ok
}
