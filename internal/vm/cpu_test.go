package vm

import (
	"slices"
	"testing"
	"time"

	"cocoonstack.io/cocoon/internal/errdefs"
)

func TestCPU(t *testing.T) {
	for what, c := range map[string]CPU{
		"nothing": {}, "model": {Model: "Skylake-Server-noTSX-IBRS"}, "features": {Features: []CPUFeature{{Name: "sse4.1"}, {Name: "lahf_lm", Policy: FeatureDisable}}},
		"hyperv": {HyperV: HyperV{Features: []string{"relaxed", "stimer-direct"}, Spinlocks: 8191, VendorID: "a cocoon"}},
	} {
		if err := c.Validate(); err != nil {
			t.Errorf("%s: %v", what, err)
		}
	}
	for what, c := range map[string]CPU{
		"an option in the model":  {Model: "host,enforce=on"},
		"an option in a feature":  {Features: []CPUFeature{{Name: "avx2=on,x"}}},
		"a policy":                {Features: []CPUFeature{{Name: "avx2", Policy: "forbid"}}},
		"a feature twice":         {Features: []CPUFeature{{Name: "avx2"}, {Name: "avx2", Policy: FeatureDisable}}},
		"many features":           {Features: make([]CPUFeature, maxCPUFeatures+1)},
		"unknown Hyper-V":         {HyperV: HyperV{Features: []string{"passthrough"}}},
		"few spinlocks":           {HyperV: HyperV{Spinlocks: 1}},
		"a long vendor":           {HyperV: HyperV{VendorID: "1234567890123"}},
		"an option in the vendor": {HyperV: HyperV{VendorID: "a,kvm=off"}},
	} {
		if err := c.Validate(); !errdefs.IsInvalid(err) {
			t.Errorf("%s: %v", what, err)
		}
	}
	if all := (HyperV{Features: []string{"stimer-direct"}}).All(); !slices.Equal(all, []string{"stimer", "stimer-direct", "synic", "time", "vpindex"}) {
		t.Errorf("%q", all)
	}
}

func TestClock(t *testing.T) {
	summer := time.Date(2026, 7, 1, 0, 0, 0, 0, time.UTC)
	for what, c := range map[string]struct {
		clock Clock
		east  int
	}{"UTC": {Clock{}, 0}, "an offset": {Clock{Offset: -3600}, -3600}, "a zone": {Clock{Timezone: "Europe/Berlin"}, 7200}, "a zone of one word": {Clock{Timezone: "UTC"}, 0}} {
		if east, err := c.clock.East(summer); east != c.east || err != nil || c.clock.Validate() != nil {
			t.Errorf("%s: %d, %v", what, east, err)
		}
	}
	for what, c := range map[string]Clock{"both": {Timezone: "Europe/Berlin", Offset: 1}, "a path": {Timezone: "../../etc/shadow"}, "a root": {Timezone: "/etc/localtime"}, "a day": {Offset: 86400}, "the node's": {Timezone: "Local"}} {
		if err := c.Validate(); !errdefs.IsInvalid(err) {
			t.Errorf("%s: %v", what, err)
		}
	}
	if _, err := (Clock{Timezone: "Mars/Base"}).East(summer); !errdefs.IsInvalid(err) {
		t.Errorf("an unknown zone: %v", err)
	}
}
