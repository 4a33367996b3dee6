//go:build vm

package qemu

import (
	"strings"
	"testing"
	"time"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/vm"
)

// A guest sees the model, the features and the local time that its machine asks for. One that needs what the node lacks does not start.
func TestCPUAndClock(t *testing.T) {
	a, d := needGuest(t), testDriver(t)
	p := a.plan(t)
	p.CPU = vm.CPU{Model: "Nehalem", Features: []vm.CPUFeature{{Name: "aes"}, {Name: "popcnt", Policy: vm.FeatureDisable}}}
	p.Clock = vm.Clock{Offset: 3 * 60 * 60, CatchUp: true, NoHPET: true}
	i := start(t, d, p)
	logged(t, i, "GUEST-READY")
	say(t, i, "sh grep -m1 name /proc/cpuinfo; grep -m1 -o -w aes /proc/cpuinfo; grep -c popcnt /proc/cpuinfo; ls /dev/hpet; cat /sys/class/rtc/rtc0/date; date -u -d@$(cat /sys/class/rtc/rtc0/since_epoch) +RTC-%Y-%m-%dT%H")
	log := line(t, i, "model name")
	for _, want := range []string{"Nehalem", " aes 0 "} {
		if !strings.Contains(log, want) {
			t.Errorf("the guest sees %s; want %q", log, want)
		}
	}
	east := time.Now().UTC().Add(3 * time.Hour)
	if !strings.Contains(log, "RTC-"+east.Format("2006-01-02T15")) && !strings.Contains(log, "RTC-"+east.Add(-time.Minute).Format("2006-01-02T15")) {
		t.Errorf("its clock says %s; want %s", log, east)
	}

	for what, c := range map[string]struct {
		cpu   vm.CPU
		class errdefs.Class
	}{
		"unknown model":   {vm.CPU{Model: "Nohalem"}, errdefs.InvalidArgument},
		"unknown feature": {vm.CPU{Features: []vm.CPUFeature{{Name: "levitation"}}}, errdefs.InvalidArgument},
		"missing feature": {vm.CPU{Features: []vm.CPUFeature{{Name: "sgx"}}}, errdefs.FailedPrecondition},
	} {
		p := a.plan(t)
		p.CPU = c.cpu
		if i, err := d.Launch(t.Context(), p); err == nil || !errdefs.Is(err, c.class) {
			t.Errorf("%s: %v", what, err)
			if err == nil {
				_ = i.Kill(t.Context())
			}
		}
		if left := left(t, p); len(left) > 0 {
			t.Errorf("%s: left %v", what, left)
		}
	}
}

// A guest finds the port of the device by which it says that it has panicked.
func TestPanic(t *testing.T) {
	a, d := needGuest(t), testDriver(t)
	p := a.plan(t)
	p.Panic = vm.PanicISA
	i := start(t, d, p)
	logged(t, i, "GUEST-READY")
	say(t, i, "sh cat /proc/ioports")
	logged(t, i, "0505-0505 : QEMU0001")
}
