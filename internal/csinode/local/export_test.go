package local

import (
	"fmt"
	"time"

	"cocoonstack.io/cocoon/internal/csinode"
)

// Hurry makes pauses and time limits short.
func (n *Node) Hurry() {
	n.registry.pauses = pauses{
		call: 30 * time.Second, slow: 300 * time.Millisecond, first: time.Millisecond, longest: 20 * time.Millisecond, rescan: 50 * time.Millisecond,
	}
}

// Limit makes the time limit of changes d.
func (n *Node) Limit(d time.Duration) { n.limits.change = d }

// LimitRegister makes the time that Release waits for drivers d.
func (n *Node) LimitRegister(d time.Duration) { n.limits.register = d }

// OnStep calls f before each step of a publication.
func (n *Node) OnStep(f func(string)) { n.onStep = f }

// SetBoot changes the id of this boot.
func (n *Node) SetBoot(id string) { n.boot = id }

var (
	ParseRecord = parseRecord
	Highest     = highest
)

func (v version) String() string { return fmt.Sprintf("%d.%d.%d", v[0], v[1], v[2]) }

// RecordName returns the ids of a key and a volume.
func RecordName(k csinode.Key, driver, handle string) (key, volume string) {
	return keyID(k), volumeID(driver, handle)
}
