//go:build vm

package cocoond_test

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"google.golang.org/grpc/codes"

	capsulev1 "cocoonstack.io/cocoon/api/capsule/v1"
	"cocoonstack.io/cocoon/internal/testkit/need"
)

// TestVMApplianceOwnKernel: a micro-VM boots a kernel and a file system of the administrator, from a folder that no path leaves. Without
// an agent it has a log, and no commands.
func TestVMApplianceOwnKernel(t *testing.T) {
	n, o := newAppliance(t)
	ctx := t.Context()
	dir := filepath.Join(n.dir, "state/files")
	if err := os.MkdirAll(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	kernel, err := os.ReadFile(need.Built(t, "bin/guest/vmlinux", "make guest"))
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, "vmlinux"), kernel, 0o600); err != nil {
		t.Fatal(err)
	}
	if out, err := exec.Command(need.Tool(t, "mkfs.ext4"), "-q", filepath.Join(dir, "root.ext4"), "32M").CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	if err := os.Symlink("/etc/passwd", filepath.Join(dir, "link")); err != nil {
		t.Fatal(err)
	}
	own := func(m *capsulev1.MicroVMSpec) *capsulev1.Workload {
		w := microVM("own", m)
		m.Image = ""
		if m.KernelPath == "" {
			m.KernelPath = filepath.Join(dir, "vmlinux")
		}
		if m.RootfsPath == "" {
			m.RootfsPath = filepath.Join(dir, "root.ext4")
		}
		return w
	}
	for what, c := range map[string]struct {
		m     *capsulev1.MicroVMSpec
		code  codes.Code
		words string
	}{
		"a path outside":       {&capsulev1.MicroVMSpec{KernelPath: "/etc/passwd"}, codes.InvalidArgument, "not below"},
		"a link that leaves":   {&capsulev1.MicroVMSpec{RootfsPath: filepath.Join(dir, "link")}, codes.FailedPrecondition, "escapes"},
		"a folder":             {&capsulev1.MicroVMSpec{RootfsPath: dir}, codes.InvalidArgument, "not below"},
		"a missing file":       {&capsulev1.MicroVMSpec{RootfsPath: filepath.Join(dir, "none")}, codes.FailedPrecondition, "no such file"},
		"an initramfs outside": {&capsulev1.MicroVMSpec{InitramfsPath: "/etc/passwd"}, codes.InvalidArgument, "not below"},
		"a missing initramfs":  {&capsulev1.MicroVMSpec{InitramfsPath: filepath.Join(dir, "none")}, codes.FailedPrecondition, "no such file"},
		"a command":            {&capsulev1.MicroVMSpec{Command: []string{"sh"}}, codes.Unimplemented, "leave microVm.command"},
		"hostile arguments":    {&capsulev1.MicroVMSpec{KernelCmdlineExtra: "a\nb"}, codes.InvalidArgument, "kernelCmdlineExtra"},
	} {
		_, err := o.workloads.Apply(ctx, &capsulev1.WorkloadApplyRequest{Workload: own(c.m)})
		o.code(what, err, c.code, c.words)
	}
	named := microVM("named", &capsulev1.MicroVMSpec{})
	named.MicroVm.Image = "docker.io/capsule-own/rootfs:x"
	_, err = o.workloads.Apply(ctx, &capsulev1.WorkloadApplyRequest{Workload: named})
	o.code("the image of another system", err, codes.InvalidArgument, "made by the machine")

	// The kernel of the tests has the drivers of disks as modules, so it starts with these arguments and does not get as far as the file system.
	w := own(&capsulev1.MicroVMSpec{KernelCmdlineExtra: "panic=0 cocoon.test=1"})
	w.StopGraceSeconds = 1
	o.apply(w)
	st := o.ready("own")
	says := func(words string) func() bool {
		return func() bool { return strings.Contains(o.logs(&capsulev1.WorkloadLogsRequest{Name: "own"}), words) }
	}
	n.until("it has started with its arguments", says("ro root=/dev/vda console=ttyS0 reboot=k panic=1 ip=dhcp panic=0 cocoon.test=1"))
	n.until("it has looked for its disk", says(`root device "vda"`))
	if st.GetAddress() == "" {
		t.Error("it has no address")
	}
	s, err := o.workloads.Exec(ctx)
	if err != nil {
		t.Fatal(err)
	}
	_ = s.Send(&capsulev1.WorkloadExecClientMessage{Payload: &capsulev1.WorkloadExecClientMessage_Config{Config: &capsulev1.WorkloadExecConfig{Name: "own", Command: []string{"sh"}}}})
	_, err = s.Recv()
	o.code("exec", err, codes.Unimplemented, "no agent of ours")
	n.crash()
	o.ready("own")
	if _, err := o.workloads.Stop(ctx, &capsulev1.WorkloadStopRequest{Name: "own"}); err != nil {
		t.Fatal(err)
	}
	o.until("own", "is stopped", func(s *capsulev1.WorkloadStatus) bool {
		return s.GetPhase() == capsulev1.WorkloadPhase_WORKLOAD_PHASE_STOPPED
	})
	if !says("cocoon.test=1")() {
		t.Error("the log of the VM that is gone is lost")
	}
}
