//go:build cri

package cocoond_test

import (
	"context"
	"fmt"
	"io"
	"net"
	"os"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	capsulev1 "cocoonstack.io/cocoon/api/capsule/v1"
	"cocoonstack.io/cocoon/internal/appliance/containers"
	"cocoonstack.io/cocoon/internal/testkit/containerdtest"
	"cocoonstack.io/cocoon/internal/testkit/need"
)

func ofContainer(name string, c *capsulev1.ContainerSpec) *capsulev1.Workload {
	c.Image = "cocoon/demo:latest"
	return &capsulev1.Workload{Name: name, Kind: capsulev1.WorkloadKind_WORKLOAD_KIND_CONTAINER, Container: c}
}

// push sends the demo image to the appliance.
func (o *operator) push() {
	o.n.t.Helper()
	f, err := os.Open(need.Built(o.n.t, "bin/demo.tar", "make demo-image"))
	if err != nil {
		o.n.t.Fatal(err)
	}
	defer f.Close()
	s, err := o.images.Push(o.n.t.Context())
	if err != nil {
		o.n.t.Fatal(err)
	}
	_ = s.Send(&capsulev1.ImagePushRequest{Msg: &capsulev1.ImagePushRequest_Metadata{Metadata: &capsulev1.ImagePushMetadata{}}})
	for {
		b := make([]byte, 1<<20)
		n, err := f.Read(b)
		if err == io.EOF {
			break
		}
		if err != nil {
			o.n.t.Fatal(err)
		}
		_ = s.Send(&capsulev1.ImagePushRequest{Msg: &capsulev1.ImagePushRequest_Chunk{Chunk: b[:n]}})
	}
	resp, err := s.CloseAndRecv()
	if err != nil || len(resp.GetImageRefs()) != 1 || resp.GetImageRefs()[0] != "cocoon/demo:latest" {
		o.n.t.Fatalf("push: %v, %v", resp, err)
	}
}

func (o *operator) delete(names ...string) {
	o.n.t.Helper()
	for _, name := range names {
		if _, err := o.workloads.Delete(o.n.t.Context(), &capsulev1.WorkloadDeleteRequest{Name: name}); err != nil {
			o.n.t.Fatal(err)
		}
	}
	for _, name := range names {
		o.n.until(name+" is gone", func() bool {
			_, err := o.workloads.Get(o.n.t.Context(), &capsulev1.WorkloadGetRequest{Name: name})
			return status.Code(err) == codes.NotFound
		})
	}
}

// answers reports whether an HTTP server answers at an address.
func answers(address string) bool {
	ctx, cancel := context.WithTimeout(context.Background(), 3*time.Second)
	defer cancel()
	c, err := (&net.Dialer{}).DialContext(ctx, "tcp", address)
	if err != nil {
		return false
	}
	defer c.Close()
	_ = c.SetDeadline(time.Now().Add(3 * time.Second))
	fmt.Fprintf(c, "GET / HTTP/1.0\r\n\r\n")
	line := make([]byte, 12)
	_, err = io.ReadFull(c, line)
	return err == nil && strings.HasPrefix(string(line), "HTTP/1.")
}

// TestApplianceContainers: containers of an appliance live through all that a workload lives through, beside a micro-VM, with which one
// shares a volume and the network.
func TestApplianceContainers(t *testing.T) {
	d := containerdtest.Start(t)
	n, o := newAppliance(t, "appliance: {containerd: "+d.Socket()+", listen: ADDR}")
	ctx := t.Context()
	o.push()
	for _, name := range []string{"data", "other"} {
		if _, err := o.volumes.Create(ctx, &capsulev1.VolumeCreateRequest{Name: name, SizeMib: 64}); err != nil {
			t.Fatal(err)
		}
	}
	port := freePort(t)
	web := ofContainer("web", &capsulev1.ContainerSpec{
		Command: []string{"sh", "-c", `echo "started $(cat /data/runs 2>/dev/null)"; echo x >>/data/runs; /usr/bin/server & wait $!; exit 7`},
		Env:     map[string]string{"SECRET": "s3cret"}, MemoryMib: 64,
		Mounts: []*capsulev1.VolumeMount{{VolumeName: "data", MountPath: "/data"}},
		Ports:  []*capsulev1.PortMapping{{ContainerPort: 8080, HostPort: parsePort(t, port)}},
	})
	web.ReadinessProbe = &capsulev1.Probe{Action: &capsulev1.Probe_Http{Http: &capsulev1.ProbeHTTP{Port: 8080}}, PeriodSeconds: 1}
	o.apply(web)
	st := o.ready("web")
	if !answers(net.JoinHostPort(st.GetAddress(), "8080")) {
		t.Errorf("no answer at %s", st.GetAddress())
	}
	if out, code := o.exec("web", "", "sh", "-c", "echo $GREETING $SECRET; hostname; exit 3"); out != "hello s3cret\nweb\n" || code != 3 {
		t.Errorf("exec: %q, %d", out, code)
	}
	if out, code := o.exec("web", "some input", "cat"); out != "some input" || code != 0 {
		t.Errorf("exec with an input: %q, %d", out, code)
	}
	o.copyTo("web", "/tmp/a/", "file", "content")
	if name, text := o.copyFrom("web", "/tmp/a/file"); name != "file" || text != "content" {
		t.Errorf("copied back: %q %q", name, text)
	}
	_, err := o.workloads.Apply(ctx, &capsulev1.WorkloadApplyRequest{Workload: microVM("vm", &capsulev1.MicroVMSpec{Mounts: web.GetContainer().GetMounts()})})
	o.code("a VM with the volume of a container", err, codes.FailedPrecondition, "in use by workload web")

	// A VM beside it reaches it by the network of both.
	o.apply(microVM("vm", &capsulev1.MicroVMSpec{Command: []string{"sleep", "100000"}}))
	o.ready("vm")
	if out, code := o.exec("vm", "", "sh", "-c", "wget -q -O - http://"+st.GetAddress()+":8080/ | head -c 1 | wc -c"); code != 0 || strings.TrimSpace(out) != "1" {
		t.Errorf("from the VM: %q, %d", out, code)
	}

	// Each finds the other by its name.
	for _, name := range []string{"web", "web.capsule.internal"} {
		if out, code := o.exec("vm", "", "sh", "-c", "wget -q -O - http://"+name+":8080/ | head -c 1 | wc -c"); code != 0 || strings.TrimSpace(out) != "1" {
			t.Errorf("from the VM, %s: %q, %d", name, out, code)
		}
	}
	if out, code := o.exec("web", "", "nslookup", "vm.capsule.internal"); code != 0 || !strings.Contains(out, o.get("vm").GetStatus().GetAddress()) {
		t.Errorf("from the container: %q, %d", out, code)
	}

	// The daemon dies: the container goes on. containerd dies: so it does.
	pid, _ := o.exec("web", "", "sh", "-c", "cat /proc/1/stat | cut -d' ' -f22")
	n.crash()
	o.ready("web")
	d.Kill()
	d.Start()
	n.until("containerd is found again", func() bool {
		_, err := o.images.List(ctx, &capsulev1.ImageListRequest{})
		return err == nil
	})
	if out, code := o.exec("web", "", "nslookup", "vm.capsule.internal"); code != 0 || !strings.Contains(out, o.get("vm").GetStatus().GetAddress()) {
		t.Errorf("from the container, after the daemon died: %q, %d", out, code)
	}
	if now, _ := o.exec("web", "", "sh", "-c", "cat /proc/1/stat | cut -d' ' -f22"); now != pid {
		t.Errorf("the main process began at %q, and was there since %q", now, pid)
	}

	// It ends, and starts again, with its volume, its address and its log.
	_, _ = o.exec("web", "", "sh", "-c", "kill -9 $(pidof server)")
	again := o.until("web", "has started again", func(s *capsulev1.WorkloadStatus) bool { return s.GetRestartCount() == 1 && s.GetReady() })
	if again.GetAddress() != st.GetAddress() || again.GetExitCode() != 7 {
		t.Errorf("it ended with %d, and had the address %s: %v", again.GetExitCode(), st.GetAddress(), again)
	}
	if got := o.logs(&capsulev1.WorkloadLogsRequest{Name: "web"}); !strings.HasPrefix(got, "started \n") || !strings.Contains(got, "started x\n") {
		t.Errorf("log after a restart %q", got)
	}
	// More memory than it may have.
	hog := ofContainer("hog", &capsulev1.ContainerSpec{Command: []string{"sh", "-c", "tail /dev/zero"}, MemoryMib: 16, NetworkMode: capsulev1.NetworkMode_NETWORK_MODE_NONE})
	hog.RestartPolicy = capsulev1.RestartPolicy_RESTART_POLICY_NEVER
	o.apply(hog)
	o.until("hog", "is killed", func(s *capsulev1.WorkloadStatus) bool {
		return s.GetPhase() == capsulev1.WorkloadPhase_WORKLOAD_PHASE_FAILED && s.GetReason() == "OOMKilled"
	})

	// The volume moves to the VM.
	o.delete("web", "vm", "hog")
	o.apply(microVM("vm", &capsulev1.MicroVMSpec{Command: []string{"sh", "-c", "cat /data/runs; echo from the vm >>/data/runs; sync; sleep 100000"}, Mounts: web.GetContainer().GetMounts()}))
	o.ready("vm")
	n.until("the VM has read the volume", func() bool { return o.logs(&capsulev1.WorkloadLogsRequest{Name: "vm"}) == "x\nx\n" })
	o.delete("vm")
	web.RestartPolicy, web.ReadinessProbe = capsulev1.RestartPolicy_RESTART_POLICY_NEVER, nil
	web.Container.Command = []string{"cat", "/data/runs"}
	o.apply(web)
	o.until("web", "has completed", func(s *capsulev1.WorkloadStatus) bool { return s.GetReason() == "Completed" })
	if got := o.logs(&capsulev1.WorkloadLogsRequest{Name: "web"}); got != "x\nx\nfrom the vm\n" {
		t.Errorf("the volume has %q", got)
	}

	// Nothing is left.
	o.delete("web")
	for _, name := range []string{"data", "other"} {
		if _, err := o.volumes.Delete(ctx, &capsulev1.VolumeDeleteRequest{Name: name}); err != nil {
			t.Error(err)
		}
	}
	id := string(containers.ID("web"))
	for _, dir := range []string{"run/netns", "run/mounted", "state/nics", "state/containers"} {
		all, _ := os.ReadDir(n.dir + "/" + dir)
		for _, f := range all {
			if strings.HasPrefix(f.Name(), id) {
				t.Errorf("%s/%s is left", dir, f.Name())
			}
		}
	}
}
