// Package uplink keeps an appliance on its network: links, addresses and name servers, as an operator has set them.
//
// A change is a trial with a deadline. Decide says, from what is stored and from the kernel's time alone, what holds; so a crash, at
// whatever step, leaves the last configuration that was confirmed. The daemon writes what is stored (Control), and process 1 does it
// (Manager). The package sets no clock and serves no API.
package uplink

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"

	capsulev1 "cocoonstack.io/cocoon/api/capsule/v1"
	"cocoonstack.io/cocoon/internal/atomicfile"
	"cocoonstack.io/cocoon/internal/errdefs"
)

// Files are where the configurations are. Each has one writer.
type Files struct {
	Keep string // folder that a restart of the machine leaves: the confirmed configuration
	Boot string // folder that a restart of the machine empties: the trial, and how things are
}

func (f Files) confirmed() string { return filepath.Join(f.Keep, "network.json") }
func (f Files) trial() string     { return filepath.Join(f.Boot, "trial.json") }
func (f Files) state() string     { return filepath.Join(f.Boot, "state.json") }

// Trial is a configuration that is tried from Begin until Deadline. Both are times since the start of the kernel, which no clock changes.
type Trial struct {
	Config   *capsulev1.NetworkConfig
	Before   *capsulev1.NetworkConfig // holds until Begin, so that whoever sets Config still gets the answer
	Begin    time.Duration
	Deadline time.Duration
}

// trialFile is the form of a Trial in its file.
type trialFile struct {
	Config   json.RawMessage `json:"config"`
	Before   json.RawMessage `json:"before"`
	Begin    int64           `json:"begin_boottime_ns"`
	Deadline int64           `json:"deadline_boottime_ns"`
}

// Decide returns the configuration that holds at a time since the start of the machine, and how long for; 0 for ever.
func Decide(confirmed *capsulev1.NetworkConfig, trial *Trial, now time.Duration) (*capsulev1.NetworkConfig, time.Duration) {
	switch {
	case trial == nil || now >= trial.Deadline:
		return confirmed, 0
	case now < trial.Begin:
		return trial.Before, trial.Begin - now
	}
	return trial.Config, trial.Deadline - now
}

// Confirmed reads the configuration that was confirmed last; the default one if there is none. Errors: DataLoss.
func (f Files) Confirmed() (*capsulev1.NetworkConfig, error) {
	data, err := os.ReadFile(f.confirmed())
	if errors.Is(err, fs.ErrNotExist) {
		return &capsulev1.NetworkConfig{}, nil
	}
	if err != nil {
		return nil, err
	}
	c := &capsulev1.NetworkConfig{}
	if err := decode(data, c); err != nil {
		return nil, errdefs.New(errdefs.DataLoss, "the configuration of the network is damaged: %w", err)
	}
	return c, nil
}

// Trial reads the last trial since the start of the machine, which may have ended; nil if there was none. Errors: DataLoss.
func (f Files) Trial() (*Trial, error) {
	data, err := os.ReadFile(f.trial())
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	var t trialFile
	c, before := &capsulev1.NetworkConfig{}, &capsulev1.NetworkConfig{}
	if err = json.Unmarshal(data, &t); err == nil {
		err = errors.Join(decode(t.Config, c), decode(t.Before, before))
	}
	if err != nil {
		return nil, errdefs.New(errdefs.DataLoss, "the trial of a configuration of the network is damaged: %w", err)
	}
	return &Trial{c, before, time.Duration(t.Begin), time.Duration(t.Deadline)}, nil
}

// State reads how things are; an empty state if nobody knows.
func (f Files) State() *capsulev1.NetworkState {
	s := &capsulev1.NetworkState{}
	if data, err := os.ReadFile(f.state()); err == nil {
		_ = protojson.UnmarshalOptions{DiscardUnknown: true}.Unmarshal(data, s)
	}
	return s
}

func (f Files) keep(c *capsulev1.NetworkConfig) error {
	data, err := protojson.Marshal(c)
	if err != nil {
		return err
	}
	if err := os.MkdirAll(f.Keep, 0o750); err != nil {
		return err
	}
	return atomicfile.WriteFile(f.confirmed(), data, 0o600)
}

func (f Files) try(t Trial) error {
	c, err := protojson.Marshal(t.Config)
	if err != nil {
		return err
	}
	before, err := protojson.Marshal(t.Before)
	if err != nil {
		return err
	}
	data, err := json.Marshal(trialFile{c, before, int64(t.Begin), int64(t.Deadline)})
	if err != nil {
		return err
	}
	if err := os.MkdirAll(f.Boot, 0o700); err != nil {
		return err
	}
	return atomicfile.WriteFile(f.trial(), data, 0o600)
}

func (f Files) endTrial() error {
	if err := os.Remove(f.trial()); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}

func (f Files) tell(s *capsulev1.NetworkState) error {
	data, err := protojson.Marshal(s)
	if err != nil {
		return err
	}
	if err := os.MkdirAll(f.Boot, 0o700); err != nil {
		return err
	}
	return atomicfile.WriteFile(f.state(), data, 0o600)
}

// decode reads a configuration. Fields that a newer system wrote are ignored, and what it says must be valid.
func decode(data []byte, c *capsulev1.NetworkConfig) error {
	if err := (protojson.UnmarshalOptions{DiscardUnknown: true}).Unmarshal(data, c); err != nil {
		return err
	}
	return Validate(c)
}

// Hash names a configuration.
func Hash(c *capsulev1.NetworkConfig) string {
	b, _ := proto.MarshalOptions{Deterministic: true}.Marshal(c) // a valid message has a wire form
	sum := sha256.Sum256(b)
	return hex.EncodeToString(sum[:8])
}
