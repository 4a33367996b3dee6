package appliance

import (
	"bytes"
	"io"
	"testing"

	"cocoonstack.io/cocoon/internal/errdefs"
)

func TestRoom(t *testing.T) {
	const mib, gib = 1 << 20, 1 << 30
	for _, c := range []struct{ size, free, want int64 }{
		{100 * gib, 50 * gib, 45 * gib / 2}, {100 * gib, 5 * gib, 0}, {gib, 300 * mib, 22 * mib}, {gib, 100 * mib, 0}, {0, 0, 0},
	} {
		if got := roomOf(c.size, c.free).left; got != c.want {
			t.Errorf("%d of %d free: %d, want %d", c.free, c.size, got, c.want)
		}
	}
	r := &room{left: 10}
	if err := r.admit(10); err != nil {
		t.Error(err)
	}
	if err := r.admit(11); !errdefs.Is(err, errdefs.ResourceExhausted) {
		t.Error(err)
	}
	// The size that was told may be wrong.
	var out bytes.Buffer
	if _, err := io.Copy(&out, io.TeeReader(bytes.NewReader(make([]byte, 11)), r)); !errdefs.Is(err, errdefs.ResourceExhausted) {
		t.Errorf("%d bytes are taken, %v", out.Len(), err)
	}
}
