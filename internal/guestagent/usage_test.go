package guestagent

import (
	"testing"

	guestv1 "cocoonstack.io/cocoon/api/guest/v1"
)

func TestParseStall(t *testing.T) {
	s := parseStall([]byte("some avg10=5.43 avg60=0.98 avg300=0.20 total=977561\nfull avg10=0.00 avg60=0.00 avg300=1.00 total=2\n"))
	for _, tt := range []struct {
		name string
		w    *guestv1.Waits
		want [4]float64
	}{
		{"some", s.GetSome(), [4]float64{5.43, 0.98, 0.20, 977561000}},
		{"full", s.GetFull(), [4]float64{0, 0, 1, 2000}},
	} {
		if got := [4]float64{tt.w.GetAvg10(), tt.w.GetAvg60(), tt.w.GetAvg300(), float64(tt.w.GetTotalNs())}; got != tt.want {
			t.Errorf("%s: %v, want %v", tt.name, got, tt.want)
		}
	}
	if s := parseStall([]byte("some avg10=x")); s.GetSome().GetAvg10() != 0 || s.GetFull() != nil { // older kernels have no line full for the CPU
		t.Errorf("got %v", s)
	}
}
