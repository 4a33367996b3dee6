package vm

import (
	"testing"

	"cocoonstack.io/cocoon/internal/errdefs"
)

func TestDiskRate(t *testing.T) {
	for r, valid := range map[DiskRate]bool{
		{}:                         true,
		{Bytes: MinDiskBytes}:      true,
		{Bytes: MaxDiskBytes}:      true,
		{Ops: MinDiskOps}:          true,
		{Bytes: 1e8, Ops: 1e9}:     true,
		{Bytes: MinDiskBytes - 1}:  false,
		{Bytes: MaxDiskBytes + 1}:  false,
		{Bytes: -MinDiskBytes}:     false,
		{Ops: MinDiskOps - 1}:      false,
		{Ops: MaxDiskOps + 1}:      false,
		{Ops: -1}:                  false,
		{Bytes: 1, Ops: 100}:       false,
		{Bytes: 100 << 20, Ops: 1}: false,
	} {
		s := Spec{Name: "a", Image: "i", DiskRate: r}.Default()
		if err := s.Validate(); (err == nil) != valid || err != nil && !errdefs.IsInvalid(err) {
			t.Errorf("%+v: %v", r, err)
		}
	}
	below := DiskRate{Bytes: 1, Ops: 2}
	for r, want := range map[DiskRate]DiskRate{{}: below, {Bytes: 3}: {3, 2}, {Ops: 4}: {1, 4}, {3, 4}: {3, 4}} {
		if got := r.Over(below); got != want {
			t.Errorf("%+v: %+v, want %+v", r, got, want)
		}
	}
}
