package qemu

import (
	"maps"
	"slices"
	"testing"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/vm"
)

func TestParseCPUs(t *testing.T) {
	const features = "\nRecognized CPUID flags:\n  3dnow sse4.1\n  lahf-lm\n"
	f := parseCPUs("Available CPUs:\n  486                   (alias configured by machine type)\n  max                   Enables all\n" + features)
	if old := parseCPUs("Available CPUs:\nx86 486                   (alias configured by machine type)\nx86 max                   Enables all\n" + features); !maps.Equal(old.models, f.models) {
		t.Errorf("of an older version: %v", old.models)
	}
	if got := slices.Sorted(maps.Keys(f.models)); !slices.Equal(got, []string{"486", "max"}) {
		t.Errorf("models %q", got)
	}
	if got := slices.Sorted(maps.Keys(f.features)); !slices.Equal(got, []string{"3dnow", "lahf-lm", "sse4.1"}) {
		t.Errorf("features %q", got)
	}
	for what, c := range map[string]vm.CPU{"model": {Model: "387"}, "feature": {Features: []vm.CPUFeature{{Name: "vmx"}}}} {
		if err := f.check(c); !errdefs.IsInvalid(err) {
			t.Errorf("an unknown %s: %v", what, err)
		}
	}
	if err := parseCPUs("").check(vm.CPU{Model: "387", Features: []vm.CPUFeature{{Name: "vmx"}}}); err != nil {
		t.Errorf("of a QEMU that lists nothing: %v", err)
	}
	if err := f.check(vm.CPU{Model: "486", Features: []vm.CPUFeature{{Name: "lahf_lm"}, {Name: "sse4.1"}}}); err != nil {
		t.Error(err)
	}
}

func TestLacking(t *testing.T) {
	has := func(policy vm.FeaturePolicy) vm.CPU {
		return vm.CPU{Features: []vm.CPUFeature{{Name: "a_b", Policy: policy}}}
	}
	model := vm.CPU{Model: "Haswell", Features: []vm.CPUFeature{{Name: "x", Policy: vm.FeatureOptional}}}
	for what, c := range map[string]struct {
		want    vm.CPU
		lacks   []string
		accel   vm.Accel
		refused bool
	}{
		"nothing":         {has(""), nil, vm.AccelKVM, false},
		"another":         {has(""), []string{"c"}, vm.AccelKVM, false},
		"required":        {has(""), []string{"a-b"}, vm.AccelTCG, true},
		"optional":        {has(vm.FeatureOptional), []string{"a-b"}, vm.AccelTCG, false},
		"disabled":        {has(vm.FeatureDisable), []string{"a-b"}, vm.AccelTCG, false},
		"model":           {model, []string{"rtm"}, vm.AccelKVM, true},
		"model, emulated": {model, []string{"rtm"}, vm.AccelTCG, false},
		"beside a model":  {model, []string{"x"}, vm.AccelKVM, false},
	} {
		if err := lacking(c.want, c.lacks, c.accel); errdefs.Is(err, errdefs.FailedPrecondition) != c.refused || !c.refused && err != nil {
			t.Errorf("%s: %v", what, err)
		}
	}
}
