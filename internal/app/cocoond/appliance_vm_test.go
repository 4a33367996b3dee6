//go:build vm

package cocoond_test

import (
	"crypto/ed25519"
	"net"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	capsulev1 "cocoonstack.io/cocoon/api/capsule/v1"
	"cocoonstack.io/cocoon/internal/appliance/pid1"
	"cocoonstack.io/cocoon/internal/capsulewire"
)

// TestVMAppliance: an operator adopts a machine, and runs a micro-VM with a volume and a port, through all that a workload lives
// through, and the death of the daemon.
func TestVMAppliance(t *testing.T) {
	n, o := newAppliance(t)
	ctx := t.Context()
	if _, err := o.volumes.Create(ctx, &capsulev1.VolumeCreateRequest{Name: "data", SizeMib: 64}); err != nil {
		t.Fatal(err)
	}
	port := freePort(t)
	web := microVM("web", &capsulev1.MicroVMSpec{
		Command: []string{"sh", "-c", `echo "started $(cat /data/runs 2>/dev/null)"; echo x >>/data/runs; exec /usr/bin/server`},
		Env:     map[string]string{"SECRET": "s3cret"},
		Mounts:  []*capsulev1.VolumeMount{{VolumeName: "data", MountPath: "/data"}},
		Ports:   []*capsulev1.PortMapping{{ContainerPort: 8080, HostPort: parsePort(t, port)}},
	})
	web.ReadinessProbe = &capsulev1.Probe{Action: &capsulev1.Probe_Http{Http: &capsulev1.ProbeHTTP{Port: 8080}}, PeriodSeconds: 1}

	dry, err := o.workloads.Apply(ctx, &capsulev1.WorkloadApplyRequest{Workload: web, DryRun: true})
	if err != nil || dry.GetAction() != capsulev1.ApplyAction_APPLY_ACTION_CREATED || len(dry.GetChanges()) == 0 {
		t.Fatalf("dry run: %v, %v", dry, err)
	}
	if _, err := o.workloads.Get(ctx, &capsulev1.WorkloadGetRequest{Name: "web"}); status.Code(err) != codes.NotFound {
		t.Errorf("after a dry run: %v", err)
	}
	o.apply(web)
	st := o.ready("web")
	if st.GetAddress() == "" || st.GetObservedGeneration() != 1 {
		t.Errorf("status %v", st)
	}
	again, err := o.workloads.Apply(ctx, &capsulev1.WorkloadApplyRequest{Workload: web})
	if err != nil || again.GetAction() != capsulev1.ApplyAction_APPLY_ACTION_UNCHANGED {
		t.Errorf("applied again: %v, %v", again, err)
	}

	// What conflicts is refused before anything is changed.
	other := microVM("other", &capsulev1.MicroVMSpec{Ports: web.GetMicroVm().GetPorts(), Mounts: web.GetMicroVm().GetMounts()})
	_, err = o.workloads.Apply(ctx, &capsulev1.WorkloadApplyRequest{Workload: other})
	o.code("a workload with the same port and volume", err, codes.FailedPrecondition, "that of workload web")
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer listener.Close()
	_, listens, _ := net.SplitHostPort(listener.Addr().String())
	_, api, _ := net.SplitHostPort(o.addr)
	for p, words := range map[string]string{api: "the API of this machine", "53": "the names of workloads", listens: "listens on port"} {
		_, err = o.workloads.Apply(ctx, &capsulev1.WorkloadApplyRequest{Workload: microVM("other", &capsulev1.MicroVMSpec{Ports: []*capsulev1.PortMapping{{ContainerPort: 80, HostPort: parsePort(t, p)}}})})
		o.code("port "+p+" of the machine", err, codes.FailedPrecondition, words)
	}
	_, err = o.workloads.Apply(ctx, &capsulev1.WorkloadApplyRequest{Workload: microVM("other", &capsulev1.MicroVMSpec{Mounts: []*capsulev1.VolumeMount{{VolumeName: "none", MountPath: "/x"}}})})
	o.code("a volume that is not there", err, codes.FailedPrecondition, `no volume "none"`)
	_, err = o.workloads.Apply(ctx, &capsulev1.WorkloadApplyRequest{Workload: microVM("other", &capsulev1.MicroVMSpec{Backend: capsulev1.MicroVMBackend_MICRO_VM_BACKEND_FIRECRACKER})})
	o.code("a backend that is not there", err, codes.Unimplemented, "FIRECRACKER")
	_, err = o.volumes.Delete(ctx, &capsulev1.VolumeDeleteRequest{Name: "data", Force: true})
	o.code("delete a volume in use", err, codes.FailedPrecondition, "workload web")
	_, err = o.volumes.Resize(ctx, &capsulev1.VolumeResizeRequest{Name: "data", NewSizeMib: 128})
	o.code("resize a volume in use", err, codes.FailedPrecondition, "workload web")

	// Commands, files and logs.
	if out, code := o.exec("web", "", "sh", "-c", "echo $GREETING $SECRET; exit 3"); out != "hello s3cret\n" || code != 3 {
		t.Errorf("exec: %q, %d", out, code)
	}
	if out, code := o.exec("web", "some input", "cat"); out != "some input" || code != 0 {
		t.Errorf("exec with an input: %q, %d", out, code)
	}
	o.copyTo("web", "/tmp/a/renamed", "file", "content")
	o.copyTo("web", "/tmp/a/", "file", "content 2")
	if out, _ := o.exec("web", "", "cat", "/tmp/a/renamed", "/tmp/a/file"); out != "contentcontent 2" {
		t.Errorf("copied: %q", out)
	}
	if name, text := o.copyFrom("web", "/tmp/a/renamed"); name != "renamed" || text != "content" {
		t.Errorf("copied back: %q %q", name, text)
	}
	if got := o.logs(&capsulev1.WorkloadLogsRequest{Name: "web"}); !strings.HasPrefix(got, "started \n") {
		t.Errorf("log %q", got)
	}
	if got := o.logs(&capsulev1.WorkloadLogsRequest{Name: "web", Source: capsulev1.LogSource_LOG_SOURCE_SERIAL}); got == "" {
		t.Error("the serial log is empty")
	}

	// The daemon dies. The VM does not notice.
	pid := n.ready("web").PID
	n.crash()
	n.until("the appliance answers", func() bool {
		_, err := o.capsule.GetInfo(ctx, &capsulev1.GetInfoRequest{})
		return err == nil
	})
	o.ready("web")
	if now := n.ready("web"); now.PID != pid {
		t.Errorf("after the death of the daemon the VM is process %d, and was %d", now.PID, pid)
	}

	// It finds itself by its name, and nobody who has stopped.
	if out, code := o.exec("web", "", "nslookup", "web.capsule.internal"); code != 0 || !strings.Contains(out, st.GetAddress()) {
		t.Errorf("its own name: %q, %d", out, code)
	}
	if out, code := o.exec("web", "", "nslookup", "other.capsule.internal"); code == 0 {
		t.Errorf("a name that nobody has: %q", out)
	}
	if out, _ := o.exec("web", "", "cat", "/etc/resolv.conf"); !strings.Contains(out, "search capsule.internal") || strings.Count(out, "nameserver") != 1 {
		t.Errorf("resolv.conf %q", out)
	}

	// Its program ends: it starts again, and its log goes on. The volume stays.
	n.endIn("web", "", "kill $(pidof server)")
	o.until("web", "has started again", func(s *capsulev1.WorkloadStatus) bool { return s.GetRestartCount() == 1 && s.GetReady() })
	if got := o.logs(&capsulev1.WorkloadLogsRequest{Name: "web"}); !strings.HasPrefix(got, "started \n") || !strings.Contains(got, "started x\n") {
		t.Errorf("log after a restart %q", got)
	}
	if got := o.logs(&capsulev1.WorkloadLogsRequest{Name: "web", TailLines: 1}); strings.Count(got, "\n") != 1 {
		t.Errorf("the last line: %q", got)
	}

	// It stops, and stays so. Its volume can be grown, and another workload can have it.
	if _, err := o.workloads.Stop(ctx, &capsulev1.WorkloadStopRequest{Name: "web"}); err != nil {
		t.Fatal(err)
	}
	o.until("web", "has stopped", func(s *capsulev1.WorkloadStatus) bool {
		return s.GetPhase() == capsulev1.WorkloadPhase_WORKLOAD_PHASE_STOPPED
	})
	n.crash()
	if v, err := o.volumes.Resize(ctx, &capsulev1.VolumeResizeRequest{Name: "data", NewSizeMib: 96}, grpc.WaitForReady(true)); err != nil || v.GetSizeBytes() != 96<<20 {
		t.Errorf("grown: %v, %v", v, err)
	}
	o.apply(other)
	o.ready("other")
	if out, code := o.exec("other", "", "cat", "/data/runs"); code != 0 || out != "x\nx\n" {
		t.Errorf("the volume has %q, %d", out, code)
	}
	if out, code := o.exec("other", "", "nslookup", "web.capsule.internal"); code == 0 {
		t.Errorf("the name of a workload that has stopped: %q", out)
	}
	_, err = o.workloads.Start(ctx, &capsulev1.WorkloadStartRequest{Name: "web"})
	o.code("start what conflicts", err, codes.FailedPrecondition, "workload other")
	for _, name := range []string{"web", "other"} {
		if _, err := o.workloads.Delete(ctx, &capsulev1.WorkloadDeleteRequest{Name: name}); err != nil {
			t.Fatal(err)
		}
		n.until(name+" is gone", func() bool {
			_, err := o.workloads.Get(ctx, &capsulev1.WorkloadGetRequest{Name: name})
			return status.Code(err) == codes.NotFound
		})
	}
	if _, err := o.volumes.Delete(ctx, &capsulev1.VolumeDeleteRequest{Name: "data"}); err != nil {
		t.Error(err)
	}
	if all, err := n.List(ctx); err != nil || len(all) > 0 {
		t.Errorf("what is left: %v, %v", all, err)
	}
	audit, err := o.identity.Audit(ctx, &capsulev1.AuditRequest{})
	if err != nil || len(audit.GetEntries()) < 10 || audit.GetEntries()[0].GetMethod() != capsulev1.IdentityService_Adopt_FullMethodName {
		t.Errorf("audit: %v, %v", audit, err)
	}
}

// TestVMApplianceMachineEnds: a machine that ends asks its workloads to end, and waits for what they write; when it is back they start
// again, whatever code they ended with. Without that, the daemon ends alone, and nobody notices.
func TestVMApplianceMachineEnds(t *testing.T) {
	n, o := newAppliance(t)
	w := microVM("web", &capsulev1.MicroVMSpec{Command: []string{"sh", "-c", "trap 'sleep 1; echo bye; exit 0' TERM; echo hello; while :; do sleep 0.1; done"}})
	w.RestartPolicy = capsulev1.RestartPolicy_RESTART_POLICY_ON_FAILURE
	o.apply(w)
	o.ready("web")
	end := func() {
		t.Helper()
		if err := n.process.Process.Signal(syscall.SIGTERM); err != nil {
			t.Fatal(err)
		}
		if err := n.process.Wait(); err != nil {
			t.Fatal(err)
		}
		n.start()
		n.until("web runs", func() bool {
			r, err := o.workloads.Get(t.Context(), &capsulev1.WorkloadGetRequest{Name: "web"})
			return err == nil && r.GetStatus().GetReady()
		})
	}
	pid := n.ready("web").PID
	end()
	if now := n.ready("web").PID; now != pid {
		t.Errorf("when the daemon ends alone, the VM is process %d, and was %d", now, pid)
	}
	ending := filepath.Join(n.dir, "run", pid1.EndingFile)
	if err := os.WriteFile(ending, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	end()
	if err := os.Remove(ending); err != nil {
		t.Fatal(err)
	}
	o.until("web", "has started again", func(s *capsulev1.WorkloadStatus) bool { return s.GetReady() && s.GetRestartCount() == 1 })
	got := ""
	n.until("web says hello again", func() bool {
		got = o.logs(&capsulev1.WorkloadLogsRequest{Name: "web"})
		return strings.HasSuffix(got, "hello\n")
	})
	if !strings.HasPrefix(got, "hello\n") || !strings.HasSuffix(got, "bye\nhello\n") { // between them the shell speaks of its sleep
		t.Errorf("log %q", got)
	}
}

// TestVMApplianceRoles: what a key may do follows from its role, and strangers may do nothing.
func TestVMApplianceRoles(t *testing.T) {
	n, o := newAppliance(t)
	ctx := t.Context()
	info, err := o.capsule.GetInfo(ctx, &capsulev1.GetInfoRequest{})
	if err != nil || info.GetMemoryTotalBytes() == 0 || info.GetActiveSlot() != "" {
		t.Fatalf("info: %v, %v", info, err)
	}
	w := microVM("web", &capsulev1.MicroVMSpec{Command: []string{"sleep", "1000"}, Env: map[string]string{"SECRET": "s3cret"}})
	o.apply(w)
	as := func(role capsulev1.Role) *operator {
		t.Helper()
		_, key, err := ed25519.GenerateKey(nil)
		if err != nil {
			t.Fatal(err)
		}
		if role != capsulev1.Role_ROLE_UNSPECIFIED {
			if _, err := o.identity.KeyAdd(ctx, &capsulev1.KeyAddRequest{Pubkey: key.Public().(ed25519.PublicKey), Name: role.String(), Role: role}); err != nil {
				t.Fatal(err)
			}
		}
		return operate(n, o.addr, key, dial(t, o.addr, info.GetTlsFingerprintSha256(), grpc.WithPerRPCCredentials(capsulewire.Credentials(key, info.GetCapsuleId()))))
	}
	viewer, worker, stranger := as(capsulev1.Role_ROLE_VIEW), as(capsulev1.Role_ROLE_OPERATE), as(capsulev1.Role_ROLE_UNSPECIFIED)
	got, err := viewer.workloads.Get(ctx, &capsulev1.WorkloadGetRequest{Name: "web"})
	if err != nil || got.GetMicroVm().GetEnv()["SECRET"] == "s3cret" {
		t.Errorf("a viewer sees %v, %v", got.GetMicroVm().GetEnv(), err)
	}
	if got, err := worker.workloads.Get(ctx, &capsulev1.WorkloadGetRequest{Name: "web"}); err != nil || got.GetMicroVm().GetEnv()["SECRET"] != "s3cret" {
		t.Errorf("a worker sees %v, %v", got.GetMicroVm().GetEnv(), err)
	}
	for who, tc := range map[string]struct {
		o    *operator
		want codes.Code
	}{"a viewer": {viewer, codes.PermissionDenied}, "a stranger": {stranger, codes.Unauthenticated}} {
		_, err := tc.o.workloads.Delete(ctx, &capsulev1.WorkloadDeleteRequest{Name: "web"})
		tc.o.code(who+" deletes", err, tc.want, "")
		s, err := tc.o.workloads.Exec(ctx)
		if err == nil {
			_, err = s.Recv()
		}
		tc.o.code(who+" executes", err, tc.want, "")
		l, err := tc.o.workloads.Logs(ctx, &capsulev1.WorkloadLogsRequest{Name: "web"})
		if err == nil {
			_, err = l.Recv()
		}
		tc.o.code(who+" reads a log", err, tc.want, "")
	}
	_, err = stranger.capsule.GetInfo(ctx, &capsulev1.GetInfoRequest{})
	o.code("a stranger looks", err, codes.Unauthenticated, "")
	root := &capsulev1.Workload{Name: "root", Kind: capsulev1.WorkloadKind_WORKLOAD_KIND_CONTAINER, Container: &capsulev1.ContainerSpec{Image: demo, Privileged: true}}
	_, err = worker.workloads.Apply(ctx, &capsulev1.WorkloadApplyRequest{Workload: root})
	o.code("a worker applies what has control over the machine", err, codes.PermissionDenied, "privileged")
	_, err = worker.identity.KeyAdd(ctx, &capsulev1.KeyAddRequest{Pubkey: make([]byte, 32), Name: "x"})
	o.code("a worker adds a key", err, codes.PermissionDenied, "needs the role admin")
	_, err = worker.capsule.RebootNode(ctx, &capsulev1.RebootNodeRequest{})
	o.code("a worker reboots", err, codes.PermissionDenied, "")
	_, err = o.capsule.RebootNode(ctx, &capsulev1.RebootNodeRequest{})
	o.code("reboot of a laptop", err, codes.FailedPrecondition, "another operating system")
	_, err = capsulev1.NewIdentityServiceClient(dial(t, o.addr, info.GetTlsFingerprintSha256())).Adopt(ctx, &capsulev1.AdoptRequest{Pubkey: make([]byte, 32)})
	o.code("adopt again", err, codes.FailedPrecondition, "adoption window closed")
	if _, err := worker.workloads.Delete(ctx, &capsulev1.WorkloadDeleteRequest{Name: "web"}); err != nil {
		t.Errorf("a worker deletes: %v", err)
	}
	n.until("web is gone", func() bool {
		_, err := o.workloads.Get(ctx, &capsulev1.WorkloadGetRequest{Name: "web"})
		return status.Code(err) == codes.NotFound
	})
}
