// Package tsc measures the speed of this host's time stamp counter, which emulated guests read too.
package tsc

import (
	"fmt"
	"os"
	"slices"
	"sync"
	"time"

	"cocoonstack.io/cocoon/internal/hypervisor/jail"
)

const (
	baseline = 100 * time.Millisecond // shortest time between the two readings of a measurement
	stale    = 10 * time.Second       // a host may have slept since an older reading
	tries    = 5
)

// New returns a function that measures, once, the frequency in kHz of the time stamp counter that emulated guests read, which
// is the host's own. 0 means unknown: the counter stops or changes its speed.
//
// A guest measures the frequency itself when it boots. On a busy host, an emulated guest measures nonsense, and its clock is wrong by
// the same factor (https://docs.kernel.org/admin-guide/kernel-parameters.html, tsc_early_khz).
func New() func() int {
	first := read()
	return sync.OnceValue(func() int {
		info, _ := os.ReadFile("/proc/cpuinfo") // unreadable: no flags
		if !steady(jail.CPUFlags(string(info))) {
			return 0
		}
		if time.Since(first.at) > stale {
			first = read()
		}
		time.Sleep(baseline - time.Since(first.at)) //nolint:forbidigo // the time that passes is what is measured
		return first.kHz(read())
	})
}

// Args tell an emulated kernel that its counter is its clock, without the time that it takes to compare it with others. With a counter of unknown speed (0 kHz)
// it must compare: otherwise its time is wrong for good. They begin with a space, unless there are none.
func Args(kHz int) string {
	if kHz <= 0 {
		return ""
	}
	return fmt.Sprintf(" tsc=reliable tsc_early_khz=%d", kHz)
}

// steady reports whether the counter of a CPU with these flags always runs at one speed. A hypervisor often hides nonstop_tsc
// from a host that is a virtual machine, because its sleep states are not the CPU's; it counts on all the same.
func steady(flags []string) bool {
	has := func(flag string) bool { return slices.Contains(flags, flag) }
	return has("tsc_known_freq") || has("constant_tsc") && (has("nonstop_tsc") || has("hypervisor"))
}

// reading is the counter at one moment.
type reading struct {
	at    time.Time
	count int64
	blur  int64 // ticks within which at was read
}

// read returns the least blurred of some readings: a thread may lose its CPU between two instructions.
func read() reading {
	var best reading
	for i := range tries {
		before := rdtsc()
		at := time.Now()
		blur := rdtsc() - before
		if i == 0 || blur < best.blur {
			best = reading{at, before + blur/2, blur}
		}
	}
	return best
}

// kHz returns the frequency between two readings, 0 if they give none.
func (r reading) kHz(later reading) int {
	ticks, took := later.count-r.count, later.at.Sub(r.at)
	if ticks <= 0 || took <= 0 {
		return 0
	}
	return int(float64(ticks) / took.Seconds() / 1000)
}
