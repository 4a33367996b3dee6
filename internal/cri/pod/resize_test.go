package pod

import (
	"context"
	"log/slog"
	"strings"
	"testing"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"cocoonstack.io/cocoon/internal/cri/convert"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/vm"
)

// sizer records to what a VM is resized.
type sizer struct {
	stopper
	to vm.Size
}

func (s *sizer) Resize(_ context.Context, _ string, to vm.Size) (vm.Record, error) {
	s.to = to
	return s.record, nil
}

// TestUpdatePodSandboxResources: what fits in the VM is accepted. A VM that can grow grows for what needs more, and what needs more than that is
// refused before the kubelet changes a container.
func TestUpdatePodSandboxResources(t *testing.T) {
	limits := func(quota, memory int64) *cri.LinuxContainerResources {
		return &cri.LinuxContainerResources{CpuPeriod: 100_000, CpuQuota: quota, MemoryLimitInBytes: memory, CpuShares: 512}
	}
	spec, _, err := convert.Sandbox(&cri.PodSandboxConfig{
		Metadata: &cri.PodSandboxMetadata{Name: "web", Namespace: "shop", Uid: "u1"},
		Linux:    &cri.LinuxPodSandboxConfig{Resources: limits(150_000, 256<<20)},
	}, "cocoon", convert.Node{CPUs: 1, Memory: 512 << 20, Most: vm.Size{CPUs: 4, Memory: 1 << 30}})
	if err != nil {
		t.Fatal(err)
	}
	up := vm.Record{ID: vm.NewID(), Spec: spec, State: vm.StateRunning, NICs: []vm.NIC{{}}}
	down := up
	down.State = vm.StateStopped
	for name, tc := range map[string]struct {
		record vm.Record
		to     *cri.LinuxContainerResources
		size   vm.Size // to which it grows
		want   string  // in the refusal; "" if it is accepted
	}{
		"as it is":        {up, limits(150_000, 256<<20), vm.Size{}, ""},
		"smaller":         {up, limits(50_000, 64<<20), vm.Size{}, ""},
		"all CPUs":        {up, limits(200_000, 256<<20), vm.Size{}, ""},
		"shares only":     {up, limits(0, 0), vm.Size{}, ""},
		"without quota":   {up, limits(-1, 0), vm.Size{}, ""},
		"more CPUs":       {up, limits(200_001, 0), vm.Size{CPUs: 3, Memory: 320 << 20}, ""},
		"more memory":     {up, limits(0, 256<<20+1), vm.Size{CPUs: 2, Memory: 322 << 20}, ""},
		"all that it can": {up, limits(400_000, 960<<20), vm.Size{CPUs: 4, Memory: 1 << 30}, ""},
		"too many CPUs":   {up, limits(400_001, 0), vm.Size{}, "needs 5 CPUs, and its VM can have 4"},
		"too much memory": {up, limits(0, 960<<20+1), vm.Size{}, "and its VM can have 1073741824"},
		"not ready":       {down, limits(0, 0), vm.Size{}, "not ready"},
	} {
		e := &sizer{stopper: stopper{record: tc.record}}
		s := &Service{engine: e, log: slog.New(slog.DiscardHandler)}
		_, err := s.UpdatePodSandboxResources(t.Context(), &cri.UpdatePodSandboxResourcesRequest{PodSandboxId: convert.SandboxID(tc.record.ID), Resources: tc.to})
		if tc.want == "" && err != nil || tc.want != "" && (!errdefs.IsFailedPrecondition(err) || !strings.Contains(err.Error(), tc.want)) {
			t.Errorf("%s: %v, want %q", name, err, tc.want)
		}
		if e.to != tc.size {
			t.Errorf("%s: it grows to %+v, want %+v", name, e.to, tc.size)
		}
	}
}
