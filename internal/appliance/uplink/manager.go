package uplink

import (
	"context"
	"log/slog"
	"sync"
	"time"

	"github.com/cenkalti/backoff/v5"
	"google.golang.org/protobuf/proto"

	capsulev1 "cocoonstack.io/cocoon/api/capsule/v1"
)

const (
	look       = 5 * time.Second // between two looks at what is stored, if nobody wakes the manager
	firstDelay = 500 * time.Millisecond
	longDelay  = 30 * time.Second
)

// User uses a configuration.
type User interface {
	// Use uses c until ctx ends, and calls tell with how things are, each time they change. It may return earlier with the reason, and is
	// called again then. It waits for what it started.
	Use(ctx context.Context, c *capsulev1.NetworkConfig, tell func(*capsulev1.NetworkState)) error
}

// Manager has the configuration used that holds.
type Manager struct {
	Files Files
	Age   func() time.Duration // of the machine, by its kernel
	User  User
	Log   *slog.Logger
	// Changed is told how things are, each time they change. It must not wait.
	Changed func(*capsulev1.NetworkState)

	mu    sync.Mutex
	state *capsulev1.NetworkState
	clock *capsulev1.NetworkClock
}

// Run runs until ctx ends. wake has it look at what is stored at once.
func (m *Manager) Run(ctx context.Context, wake <-chan struct{}) {
	var using *capsulev1.NetworkConfig
	stop := func() {}
	defer func() { stop() }()
	for ctx.Err() == nil {
		c, left := m.decide()
		if using == nil || !proto.Equal(using, c) {
			stop()
			using, stop = c, m.use(ctx, c)
		}
		wait := look
		if left > 0 {
			wait = min(wait, left)
		}
		select {
		case <-ctx.Done():
		case <-wake:
		case <-time.After(wait):
		}
	}
}

// decide returns the configuration that holds. What cannot be read is not used: there is always one by which operators may reach the
// machine.
func (m *Manager) decide() (*capsulev1.NetworkConfig, time.Duration) {
	confirmed, err := m.Files.Confirmed()
	if err != nil {
		m.Log.Error("the machine uses DHCP", "err", err)
		confirmed = &capsulev1.NetworkConfig{}
	}
	trial, err := m.Files.Trial()
	if err != nil {
		m.Log.Error("the trial of a configuration is not used", "err", err)
	}
	return Decide(confirmed, trial, m.Age())
}

// use begins to use c. stop ends that, and returns when it has ended.
func (m *Manager) use(ctx context.Context, c *capsulev1.NetworkConfig) (stop func()) {
	ctx, cancel := context.WithCancel(ctx)
	done := make(chan struct{})
	hash := Hash(c)
	m.Log.Info("the network is configured", "config", hash)
	tell := func(s *capsulev1.NetworkState) {
		s = proto.CloneOf(s)
		s.ConfigHash = hash
		m.tell(s)
	}
	go func() {
		defer close(done)
		delays := backoff.NewExponentialBackOff()
		delays.InitialInterval, delays.MaxInterval, delays.Multiplier, delays.RandomizationFactor = firstDelay, longDelay, 2, 0
		for {
			err := m.User.Use(ctx, c, func(s *capsulev1.NetworkState) {
				delays.Reset()
				tell(s)
			})
			if ctx.Err() != nil {
				return
			}
			delay := delays.NextBackOff()
			if err != nil {
				m.Log.Warn("the network is not as configured", "err", err, "again", delay)
				tell(&capsulev1.NetworkState{Error: err.Error()})
			}
			select {
			case <-ctx.Done():
				return
			case <-time.After(delay):
			}
		}
	}()
	return func() { cancel(); <-done }
}

// Clock notes how the clock is set.
func (m *Manager) Clock(c *capsulev1.NetworkClock) {
	m.mu.Lock()
	m.clock = c
	s := m.state
	m.mu.Unlock()
	if s != nil {
		m.note(s)
	}
}

func (m *Manager) tell(s *capsulev1.NetworkState) {
	m.mu.Lock()
	m.state = s
	m.mu.Unlock()
	m.note(s)
	m.Changed(s)
}

func (m *Manager) note(s *capsulev1.NetworkState) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.state != s {
		return // there is a newer one
	}
	s = proto.CloneOf(s)
	s.Clock = m.clock
	if err := m.Files.tell(s); err != nil {
		m.Log.Warn("nobody learns how the network is", "err", err)
	}
}
