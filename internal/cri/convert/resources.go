package convert

import (
	"cmp"

	"google.golang.org/protobuf/proto"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"cocoonstack.io/cocoon/internal/vm"
)

// Resources returns what a container may use that has been asked for r. What r does not say, its zero values, stays as in was; nil: there is
// nothing yet. A negative quota or limit of memory stands for none.
func Resources(was *vm.Resources, r *cri.LinuxContainerResources) *vm.Resources {
	if r == nil {
		return was
	}
	out := &vm.Resources{}
	if was != nil {
		*out = *was
	}
	if quota := r.GetCpuQuota(); quota != 0 {
		out.CPULimit = max(quota, 0) * 1000 / cmp.Or(r.GetCpuPeriod(), defaultPeriod)
	}
	if shares := r.GetCpuShares(); shares > 0 {
		out.CPUShares, out.CPUWeight = shares, vm.CPUWeightOf(shares)
	}
	if limit := r.GetMemoryLimitInBytes(); limit != 0 {
		out.MemoryLimit = max(limit, 0)
	}
	out.OOMScoreAdj = cmp.Or(int(r.GetOomScoreAdj()), out.OOMScoreAdj)
	return out
}

// allowed returns what a container may use now, in the words of CRI. What a VM has none of is as it was asked for.
func allowed(c *cri.ContainerConfig, now *vm.Resources) *cri.LinuxContainerResources {
	asked := c.GetLinux().GetResources()
	if first := Resources(nil, asked); now == nil || first != nil && *now == *first {
		return asked
	}
	out := &cri.LinuxContainerResources{}
	if asked != nil {
		out = proto.CloneOf(asked)
	}
	out.MemoryLimitInBytes, out.CpuShares, out.OomScoreAdj = now.MemoryLimit, now.CPUShares, int64(now.OOMScoreAdj)
	out.CpuPeriod = cmp.Or(out.GetCpuPeriod(), defaultPeriod)
	out.CpuQuota = now.CPULimit * out.GetCpuPeriod() / 1000
	return out
}
