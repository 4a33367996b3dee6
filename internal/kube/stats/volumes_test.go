package stats

import (
	"encoding/json"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	summary "k8s.io/kubelet/pkg/apis/stats/v1alpha1"

	"cocoonstack.io/cocoon/internal/guest"
	"cocoonstack.io/cocoon/internal/testkit/diff"
)

func TestVolumesOfClaims(t *testing.T) {
	m := newMachine(t)
	tell := m.several()
	m.process(500, 100, 50, 256)
	m.vms[0].Several, m.vms[0].Claims = false, map[string]string{"data": "data-web-0"}
	tell.volumes = []guest.VolumeStats{{Name: "data", Size: 1000, Used: 300, Available: 600, Inodes: 50, InodesFree: 40}, {Name: "scratch", Size: 5}}
	families := func() string {
		r := prometheus.NewRegistry()
		r.MustRegister(Claims{m.c})
		all, err := r.Gather()
		if err != nil {
			t.Fatal(err)
		}
		got := map[string]float64{}
		for _, f := range all {
			m := f.GetMetric()[0]
			if m.GetLabel()[0].GetValue() != "default" || m.GetLabel()[1].GetValue() != "data-web-0" || len(f.GetMetric()) != 1 {
				t.Errorf("%s: %v", f.GetName(), f.GetMetric())
			}
			got[strings.TrimPrefix(f.GetName(), "kubelet_volume_stats_")] = m.GetGauge().GetValue()
		}
		if len(got) == 0 {
			return ""
		}
		want := map[string]float64{"capacity_bytes": 1000, "used_bytes": 300, "available_bytes": 600, "inodes": 50, "inodes_free": 40, "inodes_used": 10}
		if d := diff.Of(want, got); d != "" {
			t.Error(d)
		}
		return "told"
	}
	if families() == "" || tell.asked != 1 {
		t.Errorf("the guest was asked %d times", tell.asked)
	}
	var s summary.Summary
	if err := json.Unmarshal([]byte(m.get("GET /stats/summary", "/stats/summary")), &s); err != nil {
		t.Fatal(err)
	}
	v := s.Pods[0].VolumeStats
	if len(v) != 1 || v[0].Name != "data" || v[0].PVCRef.Name != "data-web-0" || *v[0].CapacityBytes != 1000 || *v[0].AvailableBytes != 600 || *v[0].InodesUsed != 10 {
		t.Errorf("volumes %+v", v)
	}

	// A guest that does not answer has its last answer for a while, and a new process has none.
	tell.err = errors.New("no answer")
	a := m.c.accounts["abc"]
	for age, want := range map[time.Duration]string{askFresh + time.Second: "told", askStale + time.Second: ""} {
		a.volumes.at = time.Now().Add(-age)
		if got := families(); got != want {
			t.Errorf("after %s: %q", age, got)
		}
	}
	a.volumes.at = time.Now()
	m.vms[0].PID = 11
	if got := families(); got != "" {
		t.Error("the volumes of an earlier process are told")
	}
}
