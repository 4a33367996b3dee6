package host

import (
	"hash/fnv"
	"sync"
)

// TapLock serialises changes of the taps of one network: one change at a time per tap, or one of the whole network. The zero
// value is ready. It is safe for concurrent use.
type TapLock struct {
	whole sync.RWMutex   // held for reading by changes of single taps
	taps  [64]sync.Mutex // index: a hash of the tap's name
}

// Tap waits until nothing else changes the tap or the network. The caller must call unlock.
func (l *TapLock) Tap(name string) (unlock func()) {
	h := fnv.New32a()
	_, _ = h.Write([]byte(name)) // never fails
	tap := &l.taps[h.Sum32()%uint32(len(l.taps))]
	l.whole.RLock()
	tap.Lock()
	return func() {
		tap.Unlock()
		l.whole.RUnlock()
	}
}

// Whole waits until nothing else changes the network. The caller must call unlock.
func (l *TapLock) Whole() (unlock func()) {
	l.whole.Lock()
	return l.whole.Unlock
}

// Read waits until nothing changes the whole network. Taps may change meanwhile. The caller must call unlock.
func (l *TapLock) Read() (unlock func()) {
	l.whole.RLock()
	return l.whole.RUnlock
}
