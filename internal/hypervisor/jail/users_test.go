package jail

import (
	"testing"

	"cocoonstack.io/cocoon/internal/errdefs"
)

func testUsers(t *testing.T, base, count uint32) *Users {
	t.Helper()
	u, err := NewUsers(base, count)
	if err != nil {
		t.Fatal(err)
	}
	return u
}

func TestTakeUser(t *testing.T) {
	u := testUsers(t, 5000, 2)
	a, errA := u.Take("vm")
	b, errB := u.Take("vm")
	if errA != nil || errB != nil || a == b || !u.Owns(a) || !u.Owns(b) {
		t.Errorf("Take = %d, %v and %d, %v", a, errA, b, errB)
	}
	if _, err := u.Take("other"); !errdefs.Is(err, errdefs.ResourceExhausted) {
		t.Errorf("a third: %v", err)
	}
	u.Drop(a)
	if c, err := u.Take("vm"); err != nil || c != a {
		t.Errorf("again: %d, %v; want %d", c, err, a)
	}
	u.Drop(a)
	u.Hold(a)
	if _, err := u.Take("vm"); !errdefs.Is(err, errdefs.ResourceExhausted) {
		t.Errorf("one that is held: %v", err)
	}
	for _, r := range [][2]uint32{{5, 10}, {1 << 31, 1<<31 + 1}} {
		if _, err := NewUsers(r[0], r[1]); !errdefs.IsInvalid(err) {
			t.Errorf("NewUsers(%v): %v", r, err)
		}
	}
}

func TestBlockOfUsers(t *testing.T) {
	const block = 1 << 16
	for _, c := range []struct{ base, count, uid, want uint32 }{
		{0x70000000, 0x0fffffff, 0x70000005, 0x70000000},
		{0x70000000, 0x0fffffff, 0x70012345, 0x70010000},
		{0x70000000, 0x0fffffff, 0x7ffffffe, 0x70000000}, // the last block is not whole
		{100_000, block, 100_000 + block - 1, 100_000},
	} {
		u := testUsers(t, c.base, c.count)
		if got, err := u.Block(c.uid, block); err != nil || got != c.want || !u.Owns(got) || !u.Owns(got+block-1) {
			t.Errorf("%+v: %d, %v", c, got, err)
		}
	}
	if _, err := testUsers(t, 100_000, 1000).Block(100_001, block); !errdefs.IsFailedPrecondition(err) {
		t.Errorf("a small range: %v", err)
	}
}
