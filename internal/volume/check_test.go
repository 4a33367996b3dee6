package volume_test

import (
	"io"
	"strings"
	"testing"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/vm"
	"cocoonstack.io/cocoon/internal/volume"
)

func TestRoundSize(t *testing.T) {
	for size, want := range map[int64]int64{
		volume.MinSize: volume.MinSize, volume.MinSize + 1: volume.MinSize + volume.Block, volume.MaxSize: volume.MaxSize,
		volume.MaxSize - 1: volume.MaxSize, volume.MinSize - 1: 0, 0: 0, -1: 0, volume.MaxSize + 1: 0,
	} {
		got, err := volume.RoundSize(size)
		if got != want || errdefs.IsInvalid(err) != (want == 0) {
			t.Errorf("%d became %d, %v; want %d", size, got, err, want)
		}
	}
}

func TestValidateSpec(t *testing.T) {
	for _, s := range []volume.Spec{{Name: "a/b"}, {Labels: map[string]string{"": "x"}}, {Labels: map[string]string{"k": "\xff"}}} {
		if err := s.Validate(vm.Volumes); !errdefs.IsInvalid(err) {
			t.Errorf("%+v: %v", s, err)
		}
	}
	if err := (volume.Spec{Labels: map[string]string{"k": strings.Repeat("x", volume.MaxLabels-1)}}).Validate(vm.Volumes); err != nil {
		t.Error(err)
	}
	if err := (volume.Spec{Name: "-"}).Validate(vm.VolumeSnapshots); err == nil || !strings.HasPrefix(err.Error(), "volume snapshot name") {
		t.Errorf("the kind is not named: %v", err)
	}
}

// wrapped is a decorator without abilities of its own.
type wrapped struct{ volume.Store }

func (w wrapped) Unwrap() volume.Store { return w.Store }

type able struct {
	volume.Store
	volume.Cloner
}

func TestAsLooksThroughWrappers(t *testing.T) {
	if _, ok := volume.As[volume.Cloner](wrapped{wrapped{able{}}}); !ok {
		t.Error("the ability of the inner store is not found")
	}
	if _, ok := volume.As[io.Closer](wrapped{able{}}); ok {
		t.Error("an ability is found that no store has")
	}
}

func TestClonesShareNothing(t *testing.T) {
	v := volume.Volume{Labels: map[string]string{"k": "v"}, Attachments: []volume.Attachment{{VM: "a"}}}
	c := v.Clone()
	c.Labels["k"], c.Attachments[0].VM = "x", "x"
	s := volume.Snapshot{Labels: map[string]string{"k": "v"}}
	s.Clone().Labels["k"] = "x"
	if v.Labels["k"] != "v" || v.Attachments[0].VM != "a" || s.Labels["k"] != "v" {
		t.Errorf("changed with their copies: %+v, %+v", v, s)
	}
}
