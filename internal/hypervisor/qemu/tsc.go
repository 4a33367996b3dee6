package qemu

import (
	"os"
	"slices"
	"sync"
	"time"

	"cocoonstack.io/cocoon/internal/hypervisor/jail"
)

const (
	tscBaseline = 100 * time.Millisecond // shortest time between the two readings of a measurement
	tscStale    = 10 * time.Second       // a host may have slept since an older reading
	tscTries    = 5
)

// newTSC returns a function that measures, once, the frequency in kHz of the time stamp counter that emulated guests read, which
// is the host's own. 0 means unknown: the counter stops or changes its speed.
//
// A guest measures the frequency itself when it boots. On a busy host, an emulated guest measures nonsense, and its clock is wrong by
// the same factor (https://docs.kernel.org/admin-guide/kernel-parameters.html, tsc_early_khz).
func newTSC() func() int {
	first := readTSC()
	return sync.OnceValue(func() int {
		info, _ := os.ReadFile("/proc/cpuinfo") // unreadable: no flags
		if !steadyTSC(jail.CPUFlags(string(info))) {
			return 0
		}
		if time.Since(first.at) > tscStale {
			first = readTSC()
		}
		time.Sleep(tscBaseline - time.Since(first.at)) //nolint:forbidigo // the time that passes is what is measured
		return first.kHz(readTSC())
	})
}

// steadyTSC reports whether the counter of a CPU with these flags always runs at one speed. A hypervisor often hides nonstop_tsc
// from a host that is a virtual machine, because its sleep states are not the CPU's; it counts on all the same.
func steadyTSC(flags []string) bool {
	has := func(flag string) bool { return slices.Contains(flags, flag) }
	return has("tsc_known_freq") || has("constant_tsc") && (has("nonstop_tsc") || has("hypervisor"))
}

// tscReading is the counter at one moment.
type tscReading struct {
	at    time.Time
	count int64
	blur  int64 // ticks within which at was read
}

// readTSC returns the least blurred of some readings: a thread may lose its CPU between two instructions.
func readTSC() tscReading {
	var best tscReading
	for i := range tscTries {
		before := rdtsc()
		at := time.Now()
		blur := rdtsc() - before
		if i == 0 || blur < best.blur {
			best = tscReading{at, before + blur/2, blur}
		}
	}
	return best
}

// kHz returns the frequency between two readings, 0 if they give none.
func (r tscReading) kHz(later tscReading) int {
	ticks, took := later.count-r.count, later.at.Sub(r.at)
	if ticks <= 0 || took <= 0 {
		return 0
	}
	return int(float64(ticks) / took.Seconds() / 1000)
}
