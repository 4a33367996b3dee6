package engine_test

import (
	"fmt"
	"os"
	"runtime"
	"runtime/debug"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"

	"cocoonstack.io/cocoon/internal/hypervisor/fake"
	"cocoonstack.io/cocoon/internal/vm"
)

// scale configures a rig with the driver of scale runs.
func scale(r *rig) {
	r.t.Helper()
	host, err := fake.NewHost("")
	if err != nil {
		r.t.Fatal(err)
	}
	r.vmm = fake.New(fake.Config{}, host)
}

func plain(name string) vm.Spec { return vm.Spec{Name: name, Image: "disk"} }

// BenchmarkLaunchRemove measures the cost of the engine and its journal: several clients launch and remove VMs, with
// a hypervisor that costs nothing.
func BenchmarkLaunchRemove(b *testing.B) {
	for _, clients := range []int{1, 16} {
		b.Run(fmt.Sprint(clients), func(b *testing.B) {
			r := newRig(b, scale)
			var n atomic.Int64
			b.SetParallelism(max(clients/runtime.GOMAXPROCS(0), 1))
			b.ReportAllocs()
			b.RunParallel(func(pb *testing.PB) {
				for pb.Next() {
					name := fmt.Sprint("vm", n.Add(1))
					if _, err := r.Launch(b.Context(), plain(name)); err != nil {
						b.Error(err)
						return
					}
					if err := r.Remove(b.Context(), name, true); err != nil {
						b.Error(err)
						return
					}
				}
			})
			b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "VMs/s")
		})
	}
}

// BenchmarkRunningVMs measures the memory of a running VM: b.N of them at once.
func BenchmarkRunningVMs(b *testing.B) {
	r := newRig(b, scale)
	before := rss(b)
	for i := range b.N {
		if _, err := r.Launch(b.Context(), plain(fmt.Sprint("vm", i))); err != nil {
			b.Fatal(err)
		}
	}
	b.StopTimer()
	b.ReportMetric(float64(rss(b)-before)/float64(b.N), "RSS-B/VM")
}

// rss returns the resident memory of this process in bytes.
func rss(b *testing.B) int64 {
	b.Helper()
	debug.FreeOSMemory()
	data, err := os.ReadFile("/proc/self/statm")
	if err != nil {
		b.Fatal(err)
	}
	pages, err := strconv.ParseInt(strings.Fields(string(data))[1], 10, 64)
	if err != nil {
		b.Fatal(err)
	}
	return pages * int64(os.Getpagesize())
}
