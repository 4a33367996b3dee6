package convert_test

import (
	"math"
	"testing"

	"google.golang.org/protobuf/proto"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"cocoonstack.io/cocoon/internal/cri/convert"
	"cocoonstack.io/cocoon/internal/vm"
)

// TestUpdatedResources: an update changes what it names, and the status of the container tells what holds then.
func TestUpdatedResources(t *testing.T) {
	asked := container().GetLinux().GetResources()
	for name, tt := range map[string]struct {
		update, want *cri.LinuxContainerResources
	}{
		"only a set of CPUs":          {&cri.LinuxContainerResources{CpusetCpus: "0-1"}, asked},
		"a limit of CPUs":             {&cri.LinuxContainerResources{CpuQuota: 40000, CpuPeriod: 20000}, &cri.LinuxContainerResources{CpuQuota: 200000, CpuPeriod: 100000, CpuShares: 1024, MemoryLimitInBytes: 64 << 20, OomScoreAdj: 300}},
		"no limit of CPUs any more":   {&cri.LinuxContainerResources{CpuQuota: -1}, &cri.LinuxContainerResources{CpuPeriod: 100000, CpuShares: 1024, MemoryLimitInBytes: 64 << 20, OomScoreAdj: 300}},
		"memory and shares":           {&cri.LinuxContainerResources{MemoryLimitInBytes: 96 << 20, CpuShares: 102}, &cri.LinuxContainerResources{CpuQuota: 50000, CpuPeriod: 100000, CpuShares: 102, MemoryLimitInBytes: 96 << 20, OomScoreAdj: 300}},
		"no limit of memory any more": {&cri.LinuxContainerResources{MemoryLimitInBytes: -1}, &cri.LinuxContainerResources{CpuQuota: 50000, CpuPeriod: 100000, CpuShares: 1024, OomScoreAdj: 300}},
	} {
		c, err := convert.Container(container(), "name")
		if err != nil {
			t.Fatal(err)
		}
		c.Resources = convert.Resources(c.Resources, tt.update)
		if err := c.Resources.Validate(); err != nil {
			t.Errorf("%s: the engine refuses it: %v", name, err)
		}
		got := convert.ContainerStatus(vm.Record{}, vm.Ephemeral{Spec: c}).GetResources().GetLinux()
		if !proto.Equal(tt.want, got) {
			t.Errorf("%s: the container may use %v, want %v", name, got, tt.want)
		}
	}
}

// TestMemoryOfPod: a VM has whole MiB, and a limit that no VM can have does not become a small one.
func TestMemoryOfPod(t *testing.T) {
	for limit, want := range map[int64]int64{
		0: node.Memory, -1: node.Memory, 1: vm.MinMemory, 100_000_000: 160 << 20, 256 << 20: 320 << 20, math.MaxInt64: vm.MaxMemory + convert.GuestOverhead,
	} {
		c := &cri.PodSandboxConfig{
			Metadata: &cri.PodSandboxMetadata{Name: "web", Namespace: "shop", Uid: "u1"},
			Linux:    &cri.LinuxPodSandboxConfig{Resources: &cri.LinuxContainerResources{MemoryLimitInBytes: limit}},
		}
		if s, _, err := convert.Sandbox(c, "cocoon", node); err != nil || s.Memory != want {
			t.Errorf("a limit of %d bytes: %d, %v; want %d", limit, s.Memory, err, want)
		}
	}
}
