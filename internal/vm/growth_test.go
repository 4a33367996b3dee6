package vm

import (
	"testing"

	"cocoonstack.io/cocoon/internal/errdefs"
)

func growing() Spec {
	return Spec{
		Name: "web", Hostname: "web", Image: "cloud", CPUs: 4, Memory: 1 << 30, Storage: MinStorage, Accel: AccelAuto,
		Hardware: &Hardware{Topology: Topology{2, 1, 2}, Growth: Growth{Sockets: 4, Memory: 2 << 30}},
	}
}

func TestGrown(t *testing.T) {
	s := growing()
	if err := s.Validate(); err != nil {
		t.Fatal(err)
	}
	same, err := s.Grown(s.Size())
	if err != nil || same.Hardware != s.Hardware {
		t.Errorf("the same size: %+v, %v", same, err)
	}
	next, err := s.Grown(Size{8, 1<<30 + 64<<20})
	if err != nil || next.Hardware.Topology != (Topology{4, 1, 2}) || next.Hardware.Growth != (Growth{4, 2 << 30, 64 << 20}) || next.Size() != (Size{8, 1<<30 + 64<<20}) {
		t.Errorf("grown: %+v %+v, %v", next, next.Hardware, err)
	}
	if s.Hardware.Topology.Sockets != 2 || s.Hardware.Growth.Plugged != 0 {
		t.Errorf("the old one is %+v", s.Hardware)
	}
	if err := next.Validate(); err != nil {
		t.Error(err)
	}
	if booted := next.Booted(); booted.Hardware.Growth.Plugged != 0 || booted.Size() != next.Size() || next.Hardware.Growth.Plugged == 0 {
		t.Errorf("booted: %+v", booted.Hardware)
	}
	if back := next.SizedAs(s); back.Size() != s.Size() || back.Hardware.Topology != s.Hardware.Topology || back.Hardware.Growth != s.Hardware.Growth || next.Size() == s.Size() {
		t.Errorf("as it was: %+v", back.Hardware)
	}
	fixed := growing()
	fixed.Hardware.Growth = Growth{}
	for what, tt := range map[string]struct {
		of Spec
		to Size
	}{
		"fewer CPUs":        {s, Size{2, 1 << 30}},
		"less memory":       {s, Size{4, 1 << 29}},
		"too many CPUs":     {s, Size{10, 1 << 30}},
		"too much memory":   {s, Size{4, 3 << 30}},
		"half a socket":     {s, Size{5, 1 << 30}},
		"half a step":       {s, Size{4, 1<<30 + 1<<20}},
		"no maximum":        {fixed, Size{6, 1 << 30}},
		"no maximum memory": {fixed, Size{4, 2 << 30}},
		"no hardware":       {Spec{CPUs: 1, Memory: 1 << 30}, Size{2, 1 << 30}},
	} {
		if _, err := tt.of.Grown(tt.to); !errdefs.Is(err, errdefs.FailedPrecondition) {
			t.Errorf("%s: %v", what, err)
		}
	}
}

func TestGrowthRefused(t *testing.T) {
	for what, spoil := range map[string]func(*Spec){
		"no topology":      func(s *Spec) { s.Hardware.Topology = Topology{} },
		"fewer sockets":    func(s *Spec) { s.Hardware.Growth.Sockets = 1 },
		"too many sockets": func(s *Spec) { s.Hardware.Growth.Sockets = 128 },
		"less memory":      func(s *Spec) { s.Hardware.Growth.Memory = 1 << 29 },
		"half a step":      func(s *Spec) { s.Hardware.Growth.Memory++ },
		"endless memory":   func(s *Spec) { s.Hardware.Growth.Memory = MaxMemory * 2 },
		"huge pages":       func(s *Spec) { s.Hardware.HugePages = HugePages2M },
		"plugged":          func(s *Spec) { s.Hardware.Growth.Plugged = -MemoryStep },
		"all plugged":      func(s *Spec) { s.Hardware.Growth.Plugged = 2 << 30 },
	} {
		s := growing()
		spoil(&s)
		if err := s.Validate(); !errdefs.IsInvalid(err) {
			t.Errorf("%s: %v", what, err)
		}
	}
	if n := (Topology{1, 3, 1}).Room(); n != 63 { // 4 numbers for each socket
		t.Errorf("room for %d sockets", n)
	}
}
