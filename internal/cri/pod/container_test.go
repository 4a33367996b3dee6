package pod

import (
	"testing"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"cocoonstack.io/cocoon/internal/cri/convert"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/vm"
)

// TestPIDsOf: a container joins the PID namespace of a container in its own sandbox only.
func TestPIDsOf(t *testing.T) {
	spec, _ := podOf(t, "shop")
	e := &stopper{record: vm.Record{ID: vm.NewID(), Spec: spec, Ephemeral: []vm.Ephemeral{app(vm.ContainerRunning)}}}
	other := e.record
	other.ID = vm.NewID()
	for _, tt := range []struct {
		in    vm.Record
		id    string
		want  string
		class errdefs.Class
	}{
		{e.record, convert.ContainerID(e.record.ID, "c1"), "c1", -1},
		{e.record, convert.ContainerID(e.record.ID, "c2"), "", errdefs.NotFound},
		{e.record, "c1", "", errdefs.NotFound},
		{other, convert.ContainerID(e.record.ID, "c1"), "", errdefs.InvalidArgument},
	} {
		config := appConfig()
		config.Linux = processes(cri.NamespaceMode_TARGET, tt.id)
		got, err := serviceOf(e).pidsOf(t.Context(), tt.in, config)
		if got != tt.want || tt.class < 0 && err != nil || tt.class >= 0 && errdefs.ClassOf(err) != tt.class {
			t.Errorf("%s in %s: %q, %v", tt.id, tt.in.ID, got, err)
		}
	}
}
