package cocoond

import (
	"context"
	"maps"
	"path/filepath"
	"testing"

	"github.com/prometheus/client_golang/prometheus"

	"cocoonstack.io/cocoon/internal/vm"
	"cocoonstack.io/cocoon/internal/volume"
	"cocoonstack.io/cocoon/internal/volume/file"
)

func TestVolumesAreMeasured(t *testing.T) {
	store, err := file.New(t.Context(), file.Config{Dir: filepath.Join(t.TempDir(), "volumes")})
	if err != nil {
		t.Fatal(err)
	}
	defer store.Close()
	dev := vm.OnBehalf(t.Context(), vm.Owner{Namespace: "dev"})
	for range 2 { // two owners may use the same name
		if _, err := store.Create(dev, volume.Spec{Name: "data", Size: 2 << 20}); err != nil {
			t.Fatal(err)
		}
		dev = t.Context()
	}
	if _, _, err := store.Attach(t.Context(), "dev/data", vm.NewID(), volume.Mode{}); err != nil {
		t.Fatal(err)
	}
	usage, err := store.Usage(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	v, err := store.Get(t.Context(), "dev/data")
	if err != nil {
		t.Fatal(err)
	}
	got, allocated := gauges(t, volumeCollector{store}), float64(usage[v.ID].Allocated)
	want := map[string]float64{
		"cocoon_volume_attachments file  data": 0, "cocoon_volume_attachments file dev data": 1,
		"cocoon_volume_size_bytes file  data": 2 << 20, "cocoon_volume_size_bytes file dev data": 2 << 20,
		"cocoon_volume_allocated_bytes file  data": allocated, "cocoon_volume_allocated_bytes file dev data": allocated,
	}
	if !maps.Equal(got, want) {
		t.Errorf("got %v, want %v", got, want)
	}
}

type pools []volume.Pool

func (p pools) Pools(context.Context) []volume.Pool { return p }

func TestPoolsOfVolumesAreMeasured(t *testing.T) {
	got := gauges(t, thinPoolCollector{pools{
		{Kind: "lvm", Name: "vg/a", Size: 100, Used: 7, MetadataSize: 10, MetadataUsed: 1},
		{Kind: "lvm", Name: "vg/b", Size: 100, Used: 95, MetadataSize: 10, MetadataUsed: 2, Fault: "full"},
		{Kind: "lvm", Name: "vg/c", Fault: "not active"},
	}})
	want := map[string]float64{
		"cocoon_volume_pool_usable lvm vg/a": 1, "cocoon_volume_pool_usable lvm vg/b": 0, "cocoon_volume_pool_usable lvm vg/c": 0,
		"cocoon_volume_pool_size_bytes lvm vg/a": 100, "cocoon_volume_pool_size_bytes lvm vg/b": 100,
		"cocoon_volume_pool_used_bytes lvm vg/a": 7, "cocoon_volume_pool_used_bytes lvm vg/b": 95,
		"cocoon_volume_pool_metadata_size_bytes lvm vg/a": 10, "cocoon_volume_pool_metadata_size_bytes lvm vg/b": 10,
		"cocoon_volume_pool_metadata_used_bytes lvm vg/a": 1, "cocoon_volume_pool_metadata_used_bytes lvm vg/b": 2,
	}
	if !maps.Equal(got, want) {
		t.Errorf("got %v, want %v", got, want)
	}
}

// gauges returns what a collector reports, by the name of the family and the values of its labels.
func gauges(t *testing.T, c prometheus.Collector) map[string]float64 {
	t.Helper()
	r := prometheus.NewPedanticRegistry()
	r.MustRegister(c)
	families, err := r.Gather()
	if err != nil {
		t.Fatal(err)
	}
	out := map[string]float64{}
	for _, f := range families {
		for _, m := range f.GetMetric() {
			key := f.GetName()
			for _, l := range m.GetLabel() { // sorted by name
				key += " " + l.GetValue()
			}
			out[key] = m.GetGauge().GetValue()
		}
	}
	return out
}

func BenchmarkVolumes200Scrape(b *testing.B) {
	store, err := file.New(b.Context(), file.Config{Dir: filepath.Join(b.TempDir(), "volumes")})
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { _ = store.Close() })
	const volumes = 200
	for range volumes {
		if _, err := store.Create(b.Context(), volume.Spec{Size: volume.MinSize}); err != nil {
			b.Fatal(err)
		}
	}
	r := prometheus.NewRegistry()
	r.MustRegister(volumeCollector{store})
	for b.Loop() {
		families, err := r.Gather()
		if err != nil || len(families) != 3 {
			b.Fatal(len(families), err)
		}
	}
}
