package kubeletnode

import (
	"context"
	"strings"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"cocoonstack.io/cocoon/internal/cri/relay"
	"cocoonstack.io/cocoon/internal/doctor"
)

// ContainerdSocket is where containerd listens, unless it is told otherwise.
const ContainerdSocket = "/run/containerd/containerd.sock"

// Ask asks the container runtime at the path of a unix socket who it is.
func Ask(ctx context.Context, socket string) (doctor.Runtime, error) {
	r, err := relay.Dial(socket)
	if err != nil {
		return doctor.Runtime{}, err
	}
	defer r.Close()
	var v cri.VersionResponse
	if err := r.Call(ctx, cri.RuntimeService_Version_FullMethodName, &cri.VersionRequest{}, &v); err != nil {
		return doctor.Runtime{}, err
	}
	out := doctor.Runtime{Name: v.GetRuntimeName(), Version: v.GetRuntimeVersion()}
	var c cri.RuntimeConfigResponse // old ones do not know it
	if r.Call(ctx, cri.RuntimeService_RuntimeConfig_FullMethodName, &cri.RuntimeConfigRequest{}, &c) == nil && c.GetLinux() != nil {
		out.CgroupDriver = strings.ToLower(c.GetLinux().GetCgroupDriver().String())
	}
	return out, nil
}
