package jail

import (
	"hash/fnv"
	"sync"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/vm"
)

// The range of user ids that VMs have if nobody configures another. It is above every range that distributions and systemd assign.
const (
	DefaultUIDBase  = 0x70000000
	DefaultUIDCount = 0x0fffffff
)

// Users are the user ids of VM processes: each VM has its own, which is also its group id. Drivers may share them. They are safe
// for concurrent use.
type Users struct {
	base, count uint32

	mu   sync.Mutex
	used map[uint32]bool
}

// NewUsers returns the count users from base on.
func NewUsers(base, count uint32) (*Users, error) {
	if base+count < base || base < 1000 {
		return nil, errdefs.Invalidf("invalid range of user ids (first %d, count %d); the first must be at least 1000", base, count)
	}
	return &Users{base: base, count: count, used: map[uint32]bool{}}, nil
}

// Take assigns a user id to VM id. It depends only on the id, unless another instance in use has the same one.
func (u *Users) Take(id vm.ID) (uint32, error) {
	h := fnv.New32a()
	_, _ = h.Write([]byte(id))
	first := h.Sum32() % u.count
	u.mu.Lock()
	defer u.mu.Unlock()
	for i := range u.count {
		uid := u.base + (first+i)%u.count
		if !u.used[uid] {
			u.used[uid] = true
			return uid, nil
		}
	}
	return 0, errdefs.Exhaustedf("all %d user ids for VMs are in use; configure a larger range", u.count)
}

// Hold notes that an adopted instance has uid.
func (u *Users) Hold(uid uint32) {
	u.mu.Lock()
	defer u.mu.Unlock()
	u.used[uid] = true
}

// Drop ends Take or Hold.
func (u *Users) Drop(uid uint32) {
	u.mu.Lock()
	defer u.mu.Unlock()
	delete(u.used, uid)
}

// Owns reports whether uid is one of ours.
func (u *Users) Owns(uid uint32) bool { return uid >= u.base && uid-u.base < u.count }

// Block returns the first id of the block of size ids, all of the range, in which the helpers of the VM that has uid run.
// Errors: FailedPrecondition if the range has no such block.
func (u *Users) Block(uid, size uint32) (uint32, error) {
	blocks := u.count / size
	if blocks == 0 {
		return 0, errdefs.Preconditionf("a shared folder needs %d user ids, and the configured range has %d; configure a larger range", size, u.count)
	}
	return u.base + (uid-u.base)/size%blocks*size, nil
}
