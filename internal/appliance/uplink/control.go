package uplink

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"sync"
	"time"

	"google.golang.org/protobuf/proto"

	capsulev1 "cocoonstack.io/cocoon/api/capsule/v1"
	"cocoonstack.io/cocoon/internal/errdefs"
)

// How long an operator has to confirm.
const (
	DefaultWithin = 90 * time.Second
	minWithin     = 10 * time.Second
	maxWithin     = time.Hour

	answerTime = time.Second // for the answer to whoever sets a configuration to arrive, before the old one goes
)

// Control changes the configuration. It is the only writer of trials and confirmed configurations. Safe for concurrent use.
type Control struct {
	Files   Files
	Age     func() time.Duration    // of the machine, by its kernel
	Wake    func() error            // has the manager look
	Machine func() (Machine, error) // what a configuration has to fit to

	mu sync.Mutex
}

// Get describes the uplink.
func (c *Control) Get(context.Context) (*capsulev1.NetworkGetResponse, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	confirmed, err := c.Files.Confirmed()
	if err != nil {
		return nil, err
	}
	trial, err := c.Files.Trial()
	if err != nil {
		return nil, err
	}
	m, err := c.Machine()
	if err != nil {
		return nil, err
	}
	out := &capsulev1.NetworkGetResponse{Confirmed: confirmed, State: c.Files.State(), Links: m.Links}
	if k := out.GetState().GetClock(); k != nil {
		k.AskedSecondsAgo = max(int64(c.Age()/time.Second)-k.GetAskedSecondsAgo(), 0) // it was counted from the start of the machine
	}
	switch left := c.left(trial); {
	case trial == nil || proto.Equal(trial.Config, confirmed): // a confirmation that was cut off, or the end of a trial
	case left > 0:
		out.Trial, out.TrialSecondsLeft = trial.Config, seconds(left)
	default:
		out.TrialEnded = "nobody confirmed it in time, so the machine went back to what was confirmed before"
	}
	return out, nil
}

func (c *Control) left(t *Trial) time.Duration {
	if t == nil {
		return 0
	}
	return max(t.Deadline-c.Age(), 0)
}

func seconds(d time.Duration) uint32 { return uint32((d + time.Second - 1) / time.Second) } //nolint:gosec // at most maxWithin

// Set begins a trial of a configuration, in place of another one. What was confirmed last needs no trial: it ends one.
// If dry, nothing changes. Errors: InvalidArgument, FailedPrecondition.
func (c *Control) Set(_ context.Context, config *capsulev1.NetworkConfig, within time.Duration, dry bool) (*capsulev1.NetworkSetResponse, error) {
	if within == 0 {
		within = DefaultWithin
	}
	if within < minWithin || within > maxWithin {
		return nil, errdefs.Invalidf("an operator needs %s to %s to confirm, and not %s", minWithin, maxWithin, within)
	}
	if err := Validate(config); err != nil {
		return nil, err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	m, err := c.Machine()
	if err == nil {
		err = Check(config, m)
	}
	if err != nil {
		return nil, err
	}
	confirmed, err := c.Files.Confirmed()
	if err != nil && !errdefs.Is(err, errdefs.DataLoss) { // one that is damaged can be replaced
		return nil, err
	}
	same := err == nil && proto.Equal(confirmed, config)
	switch {
	case dry:
		return &capsulev1.NetworkSetResponse{Trial: !same, SecondsLeft: seconds(within)}, nil
	case same:
		within = answerTime // then what is confirmed holds
	}
	old, err := c.Files.Trial()
	if err != nil && !errdefs.Is(err, errdefs.DataLoss) {
		return nil, err
	}
	now := c.Age()
	holds, _ := Decide(confirmed, old, now)
	if holds == nil { // what was confirmed is damaged
		holds = &capsulev1.NetworkConfig{}
	}
	if err := c.Files.try(Trial{Config: config, Before: holds, Begin: now + answerTime, Deadline: now + within}); err != nil {
		return nil, fmt.Errorf("store the configuration of the network: %w", err)
	}
	if same {
		return &capsulev1.NetworkSetResponse{}, c.Wake()
	}
	return &capsulev1.NetworkSetResponse{Trial: true, SecondsLeft: seconds(within)}, c.Wake()
}

// Confirm ends the trial: what it tries is kept. at is the address of the machine by which the caller came.
// Errors: FailedPrecondition if there is no trial, if it has ended, or for a caller who came another way; Unavailable as long as the
// configuration is not in use.
func (c *Control) Confirm(_ context.Context, at netip.Addr) (*capsulev1.NetworkConfirmResponse, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	t, err := c.Files.Trial()
	if err != nil {
		return nil, err
	}
	s := c.Files.State()
	switch {
	case t == nil:
		return nil, errdefs.Preconditionf("no configuration of the network is on trial")
	case c.left(t) == 0:
		return nil, errdefs.Preconditionf("it is too late: the machine has gone back to the configuration of its network that was confirmed before; set it again")
	case s.GetConfigHash() != Hash(t.Config) || s.GetError() != "":
		return nil, errdefs.Unavailablef("the new configuration of the network is not in use yet (%s); try again", s.GetError())
	case !slices.ContainsFunc(s.GetAddresses(), func(a string) bool {
		p, err := netip.ParsePrefix(a)
		return err == nil && p.Addr() == at.Unmap().WithZone("")
	}):
		return nil, errdefs.Preconditionf("this connection came to %s, which is no address of the uplink, so it proves nothing; connect to one of %v", at, s.GetAddresses())
	}
	if err := c.Files.keep(t.Config); err != nil {
		return nil, fmt.Errorf("store the configuration of the network: %w", err)
	}
	// From here on it is confirmed, whatever dies: a trial of what is confirmed changes nothing.
	if err := c.Files.endTrial(); err != nil {
		return nil, fmt.Errorf("end the trial of a configuration of the network: %w", err)
	}
	return &capsulev1.NetworkConfirmResponse{Confirmed: t.Config}, c.Wake()
}
