package tsc

import (
	"testing"
	"time"

	"cocoonstack.io/cocoon/internal/hypervisor/jail"
)

// TestTSC measures the frequency twice, over times of different length.
func TestTSC(t *testing.T) {
	kHz := New()()
	if kHz == 0 {
		t.Skip("the time stamp counter of this CPU stops or changes its speed")
	}
	first := read()
	time.Sleep(3 * baseline) //nolint:forbidigo // the time that passes is what is measured
	again := first.kHz(read())
	if off := again - kHz; off > kHz/1000 || off < -kHz/1000 {
		t.Errorf("%d kHz, then %d kHz", kHz, again)
	}
	if later := (reading{}).kHz(reading{}); later != 0 {
		t.Errorf("no time passed: %d kHz", later)
	}
}

func TestSteady(t *testing.T) {
	for name, tt := range map[string]struct {
		flags string
		want  bool
	}{
		"a machine":                          {"fpu tsc constant_tsc nonstop_tsc tsc_deadline_timer", true},
		"an old machine":                     {"fpu tsc", false},
		"a machine that stops in deep sleep": {"fpu tsc constant_tsc", false},
		"a virtual machine":                  {"fpu tsc constant_tsc hypervisor tsc_adjust", true},
		"an emulated virtual machine":        {"fpu tsc hypervisor", false},
		"a virtual machine that is told":     {"fpu tsc tsc_known_freq hypervisor", true},
		"another architecture":               {"", false},
	} {
		cpuinfo := "processor\t: 0\nvendor_id\t: GenuineIntel\nflags\t\t: " + tt.flags + "\nbugs\t\t: spectre_v1\n"
		if got := steady(jail.CPUFlags(cpuinfo)); got != tt.want {
			t.Errorf("%s: %t", name, got)
		}
	}
}
