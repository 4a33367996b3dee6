//go:build vm

package cocoond_test

import (
	"strings"
	"testing"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// TestVMKubeletOtherDefault: the pods of a kubelet run in QEMU on a node with another default, also one that asks for that by name.
func TestVMKubeletOtherDefault(t *testing.T) {
	c := newCRI(t, func(string) string { return "driver: firecracker" })
	p := c.pod("web")
	p.Annotations = map[string]string{"vm.cocoonstack.io/backend": "firecracker"}
	sandbox := c.run(p)
	id := c.create(sandbox, p, "main", "exit 7")
	c.begin(id)
	if st := c.is(id, cri.ContainerState_CONTAINER_EXITED); st.GetExitCode() != 7 {
		t.Errorf("it ended with %d, %s", st.GetExitCode(), st.GetMessage())
	}
	got, err := c.PodSandboxStatus(t.Context(), &cri.PodSandboxStatusRequest{PodSandboxId: sandbox, Verbose: true})
	if err != nil || got.GetInfo()["hypervisor"] != "qemu" || !strings.HasSuffix(got.GetInfo()["standIn"], "runs in qemu, which stands in for firecracker") {
		t.Errorf("%v, %v", got.GetInfo(), err)
	}
	if _, err := c.RemovePodSandbox(t.Context(), &cri.RemovePodSandboxRequest{PodSandboxId: sandbox}); err != nil {
		t.Error(err)
	}
}
