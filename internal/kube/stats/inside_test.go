package stats

import (
	"context"
	"encoding/json"
	"errors"
	"math"
	"slices"
	"strings"
	"testing"
	"time"

	summary "k8s.io/kubelet/pkg/apis/stats/v1alpha1"

	"cocoonstack.io/cocoon/internal/guest"
	"cocoonstack.io/cocoon/internal/vm"
)

// fakeGuest answers as the guest of the machine's VM, which has two containers.
type fakeGuest struct {
	said    []guest.ContainerStats
	volumes []guest.VolumeStats
	err     error
	asked   int
}

func (m *machine) several() *fakeGuest {
	tell := &fakeGuest{}
	m.vms[0].Several, m.vms[0].Containers = true, []string{"web", "side"}
	m.c.cfg.Inside = func(_ context.Context, id vm.ID) (guest.Stats, error) {
		if id != "abc" {
			m.t.Errorf("asked %s", id)
		}
		tell.asked++
		return guest.Stats{Containers: tell.said, Volumes: tell.volumes}, tell.err
	}
	return tell
}

// later makes the guest's last answer older by d.
func (m *machine) later(d time.Duration) {
	for i := range m.c.accounts["abc"].shares.last {
		m.c.accounts["abc"].shares.last[i].At = time.Now().Add(-d)
	}
}

func TestContainersOfAVM(t *testing.T) {
	m := newMachine(t)
	tell := m.several()
	check := func(when string, want ...time.Duration) Usage {
		t.Helper()
		u := m.one()
		var got []time.Duration
		var rss, working uint64
		for _, c := range u.Containers {
			got, rss, working = append(got, c.CPU), rss+c.RSS, working+c.WorkingSet
		}
		if !slices.Equal(got, want) {
			t.Errorf("%s: %v, want %v", when, got, want)
		}
		if len(got) > 0 && (rss != u.Process.RSS || working != u.Process.WorkingSet) {
			t.Errorf("%s: %d and %d bytes of %+v", when, rss, working, u.Process)
		}
		return u
	}
	const ms = time.Millisecond
	m.process(500, 100, 50, 256) // 1.5 s
	tell.said = []guest.ContainerStats{{Name: "web", CPUSeconds: 0.8, Memory: 600_000}, {Name: "side", CPUSeconds: 0.2, Memory: 50_000}, {Name: "done", CPUSeconds: 0.1}}
	u := check("usage of no container is divided equally", 1050*ms, 450*ms)
	if more := u.Containers[0].RSS - u.Containers[1].RSS; more != 550_000 {
		t.Errorf("one holds %d more bytes than the other", more)
	}
	m.process(500, 200, 50, 256) // 1 s more of CPU time
	tell.said = []guest.ContainerStats{{Name: "web", CPUSeconds: 1.7}, {Name: "side", CPUSeconds: 0.2}}
	check("asked a moment ago", 1050*ms, 450*ms)
	if tell.asked != 1 {
		t.Errorf("the guest was asked %d times within a moment", tell.asked)
	}
	m.later(2 * askFresh)
	check("asked again", 2000*ms, 500*ms)
	m.process(500, 300, 50, 256)
	m.later(2 * askFresh)
	tell.err, tell.said = errors.New("the guest does not answer"), nil
	check("one missing answer", 2000*ms, 500*ms)
	m.later(2 * askStale)
	check("silent", 2500*ms, 1000*ms)
	m.later(2 * askFresh)
	m.process(500, 400, 50, 256)
	tell.err, tell.said = nil, []guest.ContainerStats{{Name: "web", CPUSeconds: 50}, {Name: "side", CPUSeconds: 0.3}}
	check("the last answer is too old", 3000*ms, 1500*ms)

	// The guest counts more than the host. The host's value is the limit.
	m.later(2 * askFresh)
	m.process(500, 500, 50, 256)
	tell.said = []guest.ContainerStats{{Name: "web", CPUSeconds: 53}, {Name: "side", CPUSeconds: 1.3}}
	check("shares in proportion", 3750*ms, 1750*ms)

	// The guest reboots and counts from zero.
	m.vms[0].PID = 0
	m.one()
	m.vms[0].PID = 10
	m.process(900, 100, 0, 1)
	m.later(2 * askFresh)
	tell.said = []guest.ContainerStats{{Name: "web", CPUSeconds: 0}, {Name: "side", CPUSeconds: 1, Memory: -7}}
	check("after a reboot", 3750*ms, 2750*ms)
	m.later(2 * askFresh)
	m.process(900, 200, 0, 1)
	tell.said = []guest.ContainerStats{{Name: "web", CPUSeconds: -1, Memory: math.MaxInt64}, {Name: "side", CPUSeconds: math.Inf(1)}}
	check("nonsense", 3750*ms, 3750*ms)

	// A single container has the usage of its VM, and the guest is not asked.
	m.vms[0].Containers, tell.asked = []string{"web"}, 0
	m.process(900, 300, 0, 1)
	check("alone", 4750*ms)
	m.vms[0].Containers = nil
	check("none runs")
	if tell.asked != 0 {
		t.Error("the guest of a VM with a single container was asked")
	}
}

func TestDivide(t *testing.T) {
	for _, tc := range []struct {
		whole     uint64
		own, want []uint64
	}{
		{10, []uint64{0, 0, 0}, []uint64{3, 3, 4}},
		{10, []uint64{5, 1}, []uint64{7, 3}},
		{10, []uint64{30, 10}, []uint64{7, 3}},
		{10, []uint64{math.MaxUint64, math.MaxUint64}, []uint64{5, 5}},
		{math.MaxUint64, []uint64{math.MaxUint64, 0}, []uint64{math.MaxUint64, 0}},
		{7, nil, []uint64{}},
	} {
		got := divide(tc.whole, tc.own)
		if !slices.Equal(got, tc.want) {
			t.Errorf("divide(%d, %v) = %v, want %v", tc.whole, tc.own, got, tc.want)
		}
	}
}

// Each container is reported separately. The pod's usage is that of the VM.
func TestContainersAreServed(t *testing.T) {
	m := newMachine(t)
	m.process(500, 100, 50, 256)
	tell := m.several()
	tell.said = []guest.ContainerStats{{Name: "web", CPUSeconds: 1, Memory: 100}, {Name: "side", CPUSeconds: 0.25, Memory: 50}}
	text := m.get("GET /metrics/resource", "/metrics/resource")
	for _, want := range []string{
		`container_cpu_usage_seconds_total{container="web",pod="web",namespace="default"} 1.125 `,
		`container_cpu_usage_seconds_total{container="side",pod="web",namespace="default"} 0.375 `,
		`pod_cpu_usage_seconds_total{namespace="default",pod="web"} 1.5 `,
	} {
		if !strings.Contains(text, want) {
			t.Errorf("%s is not in\n%s", want, text)
		}
	}
	var s summary.Summary
	if err := json.Unmarshal([]byte(m.get("GET /stats/summary", "/stats/summary")), &s); err != nil {
		t.Fatal(err)
	}
	p := s.Pods[0]
	if len(p.Containers) != 2 || p.Containers[1].Name != "side" || *p.Containers[1].CPU.UsageCoreNanoSeconds != 375_000_000 ||
		*p.Containers[0].Memory.WorkingSetBytes-*p.Containers[1].Memory.WorkingSetBytes != 50 {
		t.Errorf("containers %+v", p.Containers)
	}
	if *p.CPU.UsageCoreNanoSeconds != 1_500_000_000 {
		t.Errorf("pod %+v", p.CPU)
	}
}
