package podprovider

import (
	"context"
	"log/slog"
	"slices"
	"testing"

	"github.com/prometheus/client_golang/prometheus"
	"k8s.io/client-go/kubernetes/fake"
	"k8s.io/client-go/tools/record"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/kube/convert"
	"cocoonstack.io/cocoon/internal/testkit/diff"
	"cocoonstack.io/cocoon/internal/vm"
)

// firmwares is a Runtime with what the firmware of removed VMs has kept.
type firmwares struct {
	*engine
	kept []vm.KeptFirmware
}

func (f *firmwares) KeptFirmware(context.Context) ([]vm.KeptFirmware, error) {
	return slices.Clone(f.kept), nil
}

func (f *firmwares) DropFirmware(_ context.Context, k vm.KeptFirmware) error {
	f.kept = slices.DeleteFunc(f.kept, func(x vm.KeptFirmware) bool { return x == k })
	return nil
}

func TestFirmwareGoesWithTheClaim(t *testing.T) {
	mine := vm.KeptFirmware{VM: "by-hand", Key: "k"}
	kept := vm.KeptFirmware{Owner: vm.Owner{Namespace: "default"}, VM: vmName, Key: "uid"}
	for name, tc := range map[string]struct {
		change func(*firmwares, *registrar)
		want   []vm.KeptFirmware
	}{
		"claimed here":               {want: []vm.KeptFirmware{mine, kept}},
		"no claim":                   {change: func(_ *firmwares, r *registrar) { r.lose() }, want: []vm.KeptFirmware{mine}},
		"claimed elsewhere":          {change: func(_ *firmwares, r *registrar) { r.move("node-2") }, want: []vm.KeptFirmware{mine}},
		"the API server is away":     {change: func(_ *firmwares, r *registrar) { r.say(errdefs.Unavailablef("away")) }, want: []vm.KeptFirmware{mine, kept}},
		"the daemon does not answer": {change: func(f *firmwares, r *registrar) { r.lose(); f.down = errdefs.Unavailablef("away") }, want: []vm.KeptFirmware{mine, kept}},
		"the VM exists without claim": {change: func(f *firmwares, r *registrar) {
			r.lose()
			f.recs["x"] = &vm.Record{ID: "x", Owner: kept.Owner, Spec: vm.Spec{Name: vmName}}
		}, want: []vm.KeptFirmware{mine, kept}},
	} {
		t.Run(name, func(t *testing.T) {
			f := &firmwares{engine: newEngine(), kept: []vm.KeptFirmware{mine, kept}}
			r := &registrar{e: f.engine}
			if tc.change != nil {
				tc.change(f, r)
			}
			p, err := New(Config{Node: convert.Node{Name: "node-1"}}, Deps{Runtime: f, Placements: r, Client: fake.NewClientset(), Recorder: record.NewFakeRecorder(10), Metrics: NewMetrics(prometheus.NewRegistry()), Log: slog.New(slog.DiscardHandler)})
			if err != nil {
				t.Fatal(err)
			}
			p.sweepFirmware(t.Context())
			if d := diff.Of(tc.want, f.kept); d != "" {
				t.Error(d)
			}
		})
	}
}
