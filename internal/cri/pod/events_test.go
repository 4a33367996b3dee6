package pod

import (
	"fmt"
	"slices"
	"testing"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"cocoonstack.io/cocoon/internal/cri/convert"
	"cocoonstack.io/cocoon/internal/vm"
)

// TestChanges: each change of a sandbox and of its containers is told once, and nobody hears that a container started before it was created.
func TestChanges(t *testing.T) {
	r := vm.Record{ID: vm.NewID(), State: vm.StateCreated, NICs: []vm.NIC{{}}}
	sandbox, app := convert.SandboxID(r.ID), convert.ContainerID(r.ID, "app")
	in := func(s vm.ContainerState) []vm.Ephemeral {
		return []vm.Ephemeral{{Spec: vm.Container{Name: "app"}, Record: vm.ContainerRecord{Status: vm.ContainerStatus{State: s}}}}
	}
	const (
		created = cri.ContainerEventType_CONTAINER_CREATED_EVENT
		started = cri.ContainerEventType_CONTAINER_STARTED_EVENT
		stopped = cri.ContainerEventType_CONTAINER_STOPPED_EVENT
		deleted = cri.ContainerEventType_CONTAINER_DELETED_EVENT
	)
	k := changes{}
	for i, step := range []struct {
		change  func()
		removed bool
		want    []change
	}{
		{func() {}, false, []change{{sandbox, created}, {sandbox, started}}},
		{func() { r.State = vm.StateRunning }, false, nil},
		{func() { r.Ephemeral = in(vm.ContainerCreated) }, false, []change{{app, created}}},
		{func() { r.Ephemeral = in(vm.ContainerRunning) }, false, []change{{app, started}}},
		{func() {}, false, nil},
		{func() { r.Ephemeral = in(vm.ContainerTerminated) }, false, []change{{app, stopped}}},
		{func() { r.Ephemeral = nil }, false, []change{{app, deleted}}},
		{func() { r.Ephemeral = in(vm.ContainerRunning) }, false, []change{{app, created}, {app, started}}},
		{func() { r.State, r.NICs, r.Ephemeral = vm.StateStopped, nil, in(vm.ContainerTerminated) }, false, []change{{sandbox, stopped}, {app, stopped}}},
		{func() {}, true, []change{{app, deleted}, {sandbox, deleted}}},
	} {
		step.change()
		if got := k.of(r, step.removed); !slices.Equal(got, step.want) {
			t.Errorf("step %d: got %v, want %v", i, fmt.Sprint(got), step.want)
		}
	}
	if len(k) != 0 {
		t.Errorf("it remembers %v", k)
	}
}
