package stats

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	dto "github.com/prometheus/client_model/go"
	"golang.org/x/sys/unix"
	summary "k8s.io/kubelet/pkg/apis/stats/v1alpha1"

	"cocoonstack.io/cocoon/internal/testkit/diff"
	"cocoonstack.io/cocoon/internal/vm"
)

// machine is a /proc and a cgroup tree in a directory, with one VM.
type machine struct {
	t     *testing.T
	dir   string
	vms   []VM
	links map[string]link
	c     *Collector
}

func newMachine(t *testing.T) *machine {
	t.Helper()
	m := &machine{t: t, dir: t.TempDir(), links: map[string]link{}}
	m.write("meminfo", "MemTotal: 1000 kB\nMemFree: 200 kB\nMemAvailable: 400 kB\nInactive(file): 100 kB\n")
	m.write("stat", "cpu  100 50 25 9999 77 5 10 10 40 0\ncpu0 1 1 1 1 1 1 1 1 1 1\nbtime 1700000000\n")
	m.write("loadavg", "0.1 0.2 0.3 1/950 77\n")
	m.write("sys/kernel/pid_max", "1000\n")
	m.write("self/mountinfo", "24 1 0:21 / /x rw - tmpfs tmpfs rw\n25 1 0:22 / "+strings.ReplaceAll(m.dir, " ", `\040`)+"/cg rw,relatime - cgroup2 cgroup2 rw\n")
	cow := filepath.Join(m.dir, "cow")
	if err := os.WriteFile(cow, make([]byte, 64<<10), 0o600); err != nil {
		t.Fatal(err)
	}
	m.vms = []VM{{
		ID: "abc", Name: "vk-default-web", Namespace: "default", Pod: "web", UID: "u", Containers: []string{"c"}, Backend: "qemu", PID: 10,
		StartedAt: time.Unix(1700000100, 0), Taps: []Tap{{Name: "t0"}}, COW: cow,
	}}
	var err error
	m.c, err = New(Config{Node: "node-1", Proc: m.dir, Root: m.dir, Source: func() []VM { return m.vms }, Log: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	m.c.links = func(netns string) (map[string]link, error) {
		if netns != "" {
			return nil, errors.New("no such namespace")
		}
		return m.links, nil
	}
	return m
}

func (m *machine) write(name, text string) {
	m.t.Helper()
	path := filepath.Join(m.dir, name)
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		m.t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
		m.t.Fatal(err)
	}
}

// process creates process 10 with CPU time in ticks (user and system) and resident pages.
func (m *machine) process(start, user, system, pages int) {
	m.write("10/stat", fmt.Sprintf("10 (qemu) a) (b) S 1 1 1 0 -1 4194560 1 0 0 0 %d %d 7 7 20 0 3 0 %d 999999 %d 18446744073709551615 1\n", user, system, start, pages))
	m.write("10/cmdline", "qemu-system-x86_64\x00-name\x00guest=vk-default-web,debug-threads=on\x00")
	m.write("10/cgroup", "3:cpu:/\n0::/\n")
}

func (m *machine) one() Usage {
	m.t.Helper()
	all := m.c.CollectContainers(m.t.Context())
	if len(all) != 1 {
		m.t.Fatalf("%d VMs", len(all))
	}
	return all[0]
}

func TestCountersNeverFall(t *testing.T) {
	m := newMachine(t)
	m.process(500, 100, 50, 256)
	m.links["t0"] = link{index: 7, counters: [4]uint64{linkRx: 1000, linkTx: 2000, linkRxErrors: 1, linkTxErrors: 2}}
	u := m.one()
	page := uint64(os.Getpagesize())
	if p := u.Process; p == nil || p.CPU != 1500*time.Millisecond || p.RSS != 256*page || p.WorkingSet != p.RSS || !p.Since.Equal(time.Unix(1700000100, 0)) {
		t.Fatalf("process %+v", u.Process)
	}
	if d := diff.Of(&NetworkUsage{RxBytes: 2000, TxBytes: 1000, RxErrors: 2, TxErrors: 1}, u.Network); d != "" {
		t.Errorf("network %s", d)
	}
	if u.Disk == nil || *u.Disk < 64<<10 {
		t.Errorf("disk %v", u.Disk)
	}

	// Of a stopped VM only the disk is measured.
	m.vms[0].PID = 0
	if u := m.one(); u.Process != nil || u.Network != nil || u.Disk == nil {
		t.Errorf("stopped: %+v", u)
	}
	// The VM is restarted in place, with the same pid and lower counters, and a new tap that counted more than the old one.
	m.vms[0].PID, m.vms[0].StartedAt = 10, time.Unix(1700000200, 0)
	m.process(900, 20, 5, 128)
	m.links["t0"] = link{index: 8, counters: [4]uint64{linkRx: 1500, linkTx: 10}}
	u = m.one()
	if p := u.Process; p == nil || p.CPU != 1750*time.Millisecond || p.RSS != 128*page || !p.Since.Equal(time.Unix(1700000100, 0)) {
		t.Errorf("second run: %+v", u.Process)
	}
	if n := u.Network; n == nil || n.TxBytes != 2500 || n.RxBytes != 2010 {
		t.Errorf("second run: %+v", u.Network)
	}
	// Kernel rounding may make the value one tick lower.
	m.process(900, 20, 4, 128)
	if p := m.one().Process; p == nil || p.CPU != 1750*time.Millisecond {
		t.Errorf("the CPU time decreased: %+v", p)
	}
	m.vms = nil
	m.c.Collect()
	if len(m.c.accounts) != 0 {
		t.Error("the state of a removed VM is kept")
	}
}

func TestAbsentNotZero(t *testing.T) {
	m := newMachine(t)
	if u := m.one(); u.Process != nil || u.Network != nil {
		t.Errorf("without the process: %+v", u)
	}
	m.process(500, 100, 50, 256)
	if u := m.one(); u.Process == nil || u.Network != nil {
		t.Errorf("without the tap: %+v", u)
	}
	m.vms[0].ID, m.vms[0].Name = "other", "vk-default-other" // the pid belongs to another machine, or here to another process
	if u := m.one(); u.Process != nil || u.Network != nil {
		t.Errorf("process of another program: %+v", u)
	}
	m.vms[0].ID, m.vms[0].Name, m.vms[0].Taps[0].NetNS = "abc", "vk-default-web", "/gone"
	if u := m.one(); u.Process == nil || u.Network != nil {
		t.Errorf("without the namespace: %+v", u)
	}
	for _, bad := range []string{"", "10 (x", "10 (x) S 1 2 3", "10 (x) Z 1 1 1 0 -1 1 1 0 0 0 1 1 7 7 20 0 3 0 1 9 1 1", "10 (x) S 1 1 1 0 -1 1 1 0 0 0 x 1 7 7 20 0 3 0 1 9 1 1"} {
		m.write("10/stat", bad)
		if u := m.one(); u.Process != nil {
			t.Errorf("%q: %+v", bad, u.Process)
		}
	}
}

func TestOwnCgroup(t *testing.T) {
	m := newMachine(t)
	m.process(500, 100, 50, 256)
	m.write("10/cgroup", "3:cpu:/\n0::/cocoon/abc\n")
	m.write("cg/cocoon/abc/cpu.stat", "usage_usec 1234567\nuser_usec 1\n")
	if p := m.one().Process; p == nil || p.CPU != 1234567*time.Microsecond || p.WorkingSet != p.RSS {
		t.Errorf("without memory controller: %+v", p)
	}
	m.write("cg/cocoon/abc/memory.current", "5000000\n")
	m.write("cg/cocoon/abc/memory.stat", "anon 1\ninactive_file 1000000\n")
	if p := m.one().Process; p == nil || p.WorkingSet != 4000000 {
		t.Errorf("with it: %+v", p)
	}
	if err := os.Remove(filepath.Join(m.dir, "cg/cocoon/abc/cpu.stat")); err != nil {
		t.Fatal(err)
	}
	if p := m.one().Process; p != nil {
		t.Errorf("the cgroup is gone: %+v", p)
	}
	// A shared cgroup does not count the usage of one VM.
	m.process(501, 1, 0, 1)
	m.write("10/cgroup", "0::/cocoon\n")
	m.write("cg/cocoon/cpu.stat", "usage_usec 99999999\n")
	if p := m.one().Process; p == nil || p.CPU != 1234567*time.Microsecond+10*time.Millisecond {
		t.Errorf("shared: %+v", p)
	}
	m.process(502, 1, 0, 1)
	m.write("10/cgroup", "0::/kubepods/pod1/cocoon-abc\n") // that of a sandbox
	m.write("cg/kubepods/pod1/cocoon-abc/cpu.stat", "usage_usec 5\n")
	if p := m.one().Process; p == nil || p.CPU != 1234572*time.Microsecond+10*time.Millisecond {
		t.Errorf("in the cgroup of a pod: %+v", p)
	}
}

func TestSummary(t *testing.T) {
	m := newMachine(t)
	m.process(500, 100, 50, 256)
	m.links["t0"] = link{index: 7, counters: [4]uint64{linkRx: 1000, linkTx: 2000}}
	m.vms = append(m.vms, VM{ID: "stopped", Pod: "idle", Namespace: "default", Containers: []string{"c"}})
	var s summary.Summary
	if err := json.Unmarshal([]byte(m.get("GET /stats/summary", "/stats/summary")), &s); err != nil {
		t.Fatal(err)
	}
	if s.Node.NodeName != "node-1" || *s.Node.CPU.UsageCoreNanoSeconds != 2e9 || *s.Node.Memory.WorkingSetBytes != 700<<10 ||
		*s.Node.Memory.AvailableBytes != 300<<10 || *s.Node.Fs.CapacityBytes == 0 || *s.Node.Rlimit.MaxPID != 1000 || s.Node.StartTime.Unix() != 1700000000 {
		t.Errorf("node %+v", s.Node)
	}
	if len(s.Pods) != 1 {
		t.Fatalf("%d pods", len(s.Pods))
	}
	p := s.Pods[0]
	if p.PodRef != (summary.PodReference{Name: "web", Namespace: "default", UID: "u"}) || *p.CPU.UsageCoreNanoSeconds != 15e8 || *p.Memory.RSSBytes == 0 ||
		*p.Network.RxBytes != 2000 || *p.Network.Interfaces[0].TxBytes != 1000 || len(p.Containers) != 1 || p.Containers[0].Name != "c" ||
		*p.Containers[0].CPU.UsageCoreNanoSeconds != 15e8 || *p.EphemeralStorage.UsedBytes < 64<<10 {
		t.Errorf("pod %+v", p)
	}
	s = summary.Summary{}
	if err := json.Unmarshal([]byte(m.get("GET /stats/summary", "/stats/summary?only_cpu_and_memory=true")), &s); err != nil {
		t.Fatal(err)
	}
	if s.Node.Fs != nil || s.Pods[0].Network != nil || s.Pods[0].CPU == nil {
		t.Errorf("CPU and memory only: %+v", s)
	}
	m.vms[0].Containers, m.vms[0].Several = []string{"c", "d"}, true // without Inside the containers get equal shares
	s = *m.c.Summary(t.Context())
	if c := s.Pods[0].Containers; len(c) != 2 || c[1].Name != "d" || *c[0].CPU.UsageCoreNanoSeconds != 75e7 || *c[1].CPU.UsageCoreNanoSeconds != 75e7 ||
		*c[1].Memory.RSSBytes != *s.Pods[0].Memory.RSSBytes/2 || *c[1].Rootfs.UsedBytes != *s.Pods[0].EphemeralStorage.UsedBytes/2 {
		t.Errorf("of two containers: %+v", c)
	}
	if text := m.get("GET /metrics/resource", "/metrics/resource"); !strings.Contains(text, `container_cpu_usage_seconds_total{container="d",pod="web",namespace="default"} 0.75`) {
		t.Errorf("of two containers:\n%s", text)
	}
}

func (m *machine) get(route, url string) string {
	m.t.Helper()
	w := httptest.NewRecorder()
	m.c.Routes()[route].ServeHTTP(w, httptest.NewRequestWithContext(m.t.Context(), http.MethodGet, url, nil))
	body, err := io.ReadAll(w.Result().Body)
	if err != nil || w.Code != http.StatusOK {
		m.t.Fatalf("%s: %d %v", url, w.Code, err)
	}
	return string(body)
}

func TestResource(t *testing.T) {
	m := newMachine(t)
	m.process(500, 100, 50, 256)
	got := m.get("GET /metrics/resource", "/metrics/resource")
	for _, want := range []string{
		"# TYPE node_cpu_usage_seconds_total counter\nnode_cpu_usage_seconds_total 2 ",
		"# TYPE node_memory_working_set_bytes gauge\nnode_memory_working_set_bytes 716800 ",
		`container_cpu_usage_seconds_total{container="c",pod="web",namespace="default"} 1.5 `,
		`container_memory_working_set_bytes{container="c",pod="web",namespace="default"} 1.048576e+06 `,
		`container_start_time_seconds{container="c",pod="web",namespace="default"} 1.7000001e+09`,
		`pod_cpu_usage_seconds_total{namespace="default",pod="web"} 1.5 `,
		`pod_memory_working_set_bytes{namespace="default",pod="web"} 1.048576e+06 `,
		"resource_scrape_error 0",
	} {
		if !strings.Contains(got, want) {
			t.Errorf("no %q in\n%s", want, got)
		}
	}
	if err := os.Remove(filepath.Join(m.dir, "meminfo")); err != nil {
		t.Fatal(err)
	}
	if got := m.get("GET /metrics/resource", "/metrics/resource"); !strings.Contains(got, "resource_scrape_error 1") || strings.Contains(got, "node_memory") {
		t.Errorf("without meminfo:\n%s", got)
	}
}

// The documented families exist, with their names, types and labels.
func TestFamilies(t *testing.T) {
	m := newMachine(t)
	m.process(500, 100, 50, 256)
	m.links["t0"] = link{index: 7, counters: [4]uint64{linkRx: 1000, linkTx: 2000}}
	r := prometheus.NewPedanticRegistry()
	r.MustRegister(Families{m.c}, Resource{m.c})
	families, err := r.Gather()
	if err != nil {
		t.Fatal(err)
	}
	got := map[string]*dto.MetricFamily{}
	for _, f := range families {
		got[f.GetName()] = f
	}
	for name, kind := range map[string]dto.MetricType{
		"vk_cocoon_vm_cpu_seconds_total": dto.MetricType_COUNTER, "vk_cocoon_vm_memory_rss_bytes": dto.MetricType_GAUGE,
		"vk_cocoon_vm_disk_cow_bytes": dto.MetricType_GAUGE, "vk_cocoon_vm_network_rx_bytes_total": dto.MetricType_COUNTER,
		"vk_cocoon_vm_network_tx_bytes_total": dto.MetricType_COUNTER, "vk_cocoon_node_cpu_seconds_total": dto.MetricType_COUNTER,
		"vk_cocoon_node_memory_used_bytes": dto.MetricType_GAUGE, "vk_cocoon_node_storage_available_bytes": dto.MetricType_GAUGE,
		"vk_cocoon_node_storage_total_bytes": dto.MetricType_GAUGE,
	} {
		f := got[name]
		if f == nil || f.GetType() != kind {
			t.Errorf("%s is %v", name, f)
			continue
		}
		var labels []string
		for _, l := range f.Metric[0].Label {
			labels = append(labels, l.GetName()+"="+l.GetValue())
		}
		want := ""
		if strings.HasPrefix(name, "vk_cocoon_vm_") {
			want = "backend=qemu namespace=default pod=web vm=vk-default-web"
		}
		if strings.Join(labels, " ") != want {
			t.Errorf("%s has the labels %v", name, labels)
		}
	}
	if v := got["vk_cocoon_vm_network_rx_bytes_total"].Metric[0].Counter.GetValue(); v != 2000 {
		t.Errorf("the guest received %v", v)
	}
}

// The kernel's real links and this process are measured.
func TestRealKernel(t *testing.T) {
	links, err := readLinks("")
	if err != nil || links["lo"].index == 0 {
		t.Fatalf("links %v, %v", links, err)
	}
	again, err := readLinks("/proc/thread-self/ns/net")
	if err == nil && again["lo"].index != links["lo"].index { // entering a namespace needs privileges
		t.Errorf("by namespace: %v", again)
	}
	if _, err := readLinks("/does/not/exist"); err == nil {
		t.Error("links of no namespace")
	}
	c, err := New(Config{Root: t.TempDir(), Source: func() []VM { return []VM{{ID: vm.ID(filepath.Base(os.Args[0])), PID: os.Getpid()}} }, Log: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	for spin := time.Now(); time.Since(spin) < 30*time.Millisecond; {
	}
	u := c.Collect()[0]
	if u.Process == nil || u.Process.CPU <= 0 || u.Process.RSS < 1<<20 {
		t.Errorf("this process: %+v", u.Process)
	}
	s := c.Summary(t.Context())
	if s.Node.CPU == nil || s.Node.Memory == nil || s.Node.Fs == nil || *s.Node.CPU.UsageCoreNanoSeconds == 0 {
		t.Errorf("this machine: %+v", s.Node)
	}
}

func FuzzProcessStat(f *testing.F) {
	f.Add([]byte("10 (qemu) a) (b) S 1 1 1 0 -1 4194560 1 0 0 0 1 2 7 7 20 0 3 0 4 5 6 7"))
	f.Add([]byte("10 (x) "))
	f.Fuzz(func(_ *testing.T, data []byte) { _, _ = parseProcessStat(data) })
}

func FuzzLink(f *testing.F) {
	f.Add(make([]byte, 40))
	f.Fuzz(func(_ *testing.T, data []byte) {
		if len(data) >= 16 {
			_, _, _ = parseLink(data)
		}
	})
}

// A thousand VMs, each with its own tap and disk. All VMs share one process, which is measured a thousand times.
func BenchmarkScrape(b *testing.B) {
	dir := b.TempDir()
	vms := make([]VM, 1000)
	for i := range vms {
		name := fmt.Sprintf("vk-default-%d", i)
		cow := filepath.Join(dir, name)
		if err := os.WriteFile(cow, []byte("x"), 0o600); err != nil {
			b.Fatal(err)
		}
		vms[i] = VM{ID: vm.ID(name), Name: name, Namespace: "default", Pod: name, UID: name, Containers: []string{"c"}, Backend: "qemu", PID: os.Getpid(), StartedAt: time.Now(), Taps: []Tap{{Name: "lo"}}, COW: cow}
	}
	c, err := New(Config{Root: dir, Source: func() []VM { return vms }, Log: slog.New(slog.DiscardHandler), Owns: func(string, VM) bool { return true }})
	if err != nil {
		b.Fatal(err)
	}
	routes := c.Routes()
	families := prometheus.NewRegistry()
	families.MustRegister(Families{c})
	routes["GET /metrics"] = promhttp.HandlerFor(families, promhttp.HandlerOpts{})
	for _, route := range []string{"GET /metrics/resource", "GET /metrics", "GET /stats/summary"} {
		b.Run(strings.ReplaceAll(route, "GET /", ""), func(b *testing.B) {
			began := cpuTime(b)
			for b.Loop() {
				w := httptest.NewRecorder()
				routes[route].ServeHTTP(w, httptest.NewRequestWithContext(b.Context(), http.MethodGet, "/", nil))
				if w.Code != http.StatusOK || w.Body.Len() < 100_000 {
					b.Fatalf("%d, %d bytes", w.Code, w.Body.Len())
				}
			}
			b.ReportMetric(float64((cpuTime(b)-began).Microseconds())/1000/float64(b.N), "cpu-ms/op") // independent of other load
		})
	}
}

// BenchmarkLinks reads the links of this network namespace. Run it in a namespace with a thousand links.
func BenchmarkLinks(b *testing.B) {
	began := cpuTime(b)
	var n int
	for b.Loop() {
		links, err := readLinks("")
		if err != nil {
			b.Fatal(err)
		}
		n = len(links)
	}
	b.ReportMetric(float64(n), "links")
	b.ReportMetric(float64((cpuTime(b)-began).Microseconds())/1000/float64(b.N), "cpu-ms/op")
}

func cpuTime(b *testing.B) time.Duration {
	b.Helper()
	var u unix.Rusage
	if err := unix.Getrusage(unix.RUSAGE_SELF, &u); err != nil {
		b.Fatal(err)
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// Huge pages are counted by size; a size that the kernel does not have is not listed.
func TestHugePages(t *testing.T) {
	m := newMachine(t)
	h := Host{Proc: m.dir, Sys: t.TempDir(), Root: m.dir}
	dir := vm.HugePages1G.Dir(h.Sys)
	if err := os.MkdirAll(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	for text, want := range map[string]string{"3\n": "map[1Gi:3221225472] <nil>", "many": `map[] measure huge pages of 1Gi: strconv.ParseInt: parsing "many": invalid syntax`} {
		if err := os.WriteFile(filepath.Join(dir, "nr_hugepages"), []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
		memory, err := h.Memory()
		if got := fmt.Sprint(memory.Huge, " ", err); got != want {
			t.Errorf("%s: %s, want %s", text, got, want)
		}
	}
}
