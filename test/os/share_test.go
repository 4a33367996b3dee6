//go:build os

package appliance

import (
	"os"
	"path/filepath"
	"strings"
)

// passOn gives the volume of the container to a micro-VM, larger than before, and back. Both see the same data, and so does who copies it.
func (o *operator) passOn() {
	o.t.Helper()
	blob := strings.Fields(o.do("workload", "exec", "web", "--", "sha256sum", "/data/blob"))[0]
	if out, err := o.try("volume", "resize", "data", "96"); err == nil {
		o.t.Errorf("a volume in use has grown: %s", out)
	}
	o.do("workload", "stop", "web")
	o.until("stopped   stopped", "workload", "list")
	o.do("volume", "resize", "data", "96")
	out, err := o.try("apply", "--wait", "--timeout", "10m", "-f", o.file("vm.yaml", `name: isolated
kind: MicroVM
microVm:
  image: cocoon/demo:latest
  memoryMib: 128
  command: [sh, -c]
  args: ["echo it has $(sha256sum /data/blob); echo vm >>/data/starts; exec /usr/bin/server"]
  ports: [{containerPort: 8080, hostPort: 8080}]
  mounts: [{volumeName: data, mountPath: /data}]
readinessProbe: {tcp: {port: 8080}}
`))
	if err != nil {
		events, _ := o.try("workload", "events", "isolated")
		serial, _ := o.try("workload", "logs", "isolated", "--serial")
		log, _ := o.try("capsule", "logs", "-n", "40")
		o.t.Fatalf("the micro-VM: %v\n%s\n%s\n%s\n%s", err, out, events, serial, log)
	}
	o.wait("the port of the micro-VM answers from outside", func() bool { return answers(o.port) })
	if out := o.do("workload", "logs", "isolated"); !strings.Contains(out, "it has "+blob) {
		o.t.Errorf("the micro-VM has other data than %s: %s", blob, out)
	}
	if out := o.do("workload", "logs", "isolated", "--serial"); out == "" {
		o.t.Error("the console of the micro-VM is empty")
	}
	if out := o.do("workload", "exec", "isolated", "--", "df", "-m", "/data"); !strings.Contains(out, "/data") || strings.Contains(out, " 64 ") {
		o.t.Errorf("the volume has not grown: %s", out)
	}
	copied := filepath.Join(o.dir, "starts")
	o.do("cp", "isolated:/data/starts", copied)
	if text := string(must(os.ReadFile(copied))); !strings.HasSuffix(text, "vm\n") {
		o.t.Errorf("copied from the micro-VM: %q", text)
	}
	o.do("workload", "delete", "isolated")
	o.wait("the micro-VM is gone", func() bool { return !strings.Contains(o.do("workload", "list"), "isolated") })
	o.do("workload", "start", "web")
	o.until("running   yes", "workload", "list")
	if out := o.do("workload", "exec", "web", "--", "sh", "-c", "grep -c vm /data/starts; sha256sum /data/blob"); !strings.HasPrefix(out, "1\n"+blob) {
		o.t.Errorf("the container has other data: %s", out)
	}
	o.do("cp", copied, "web:/tmp/copied")
	if out := o.do("workload", "exec", "web", "--", "tail", "-n", "1", "/tmp/copied"); out != "vm\n" {
		o.t.Errorf("copied to the container: %q", out)
	}
}

// restart restarts the machine. Its workloads are there again, with their logs.
func (o *operator) restart() {
	o.t.Helper()
	before := strings.Count(o.do("workload", "exec", "web", "--", "cat", "/data/starts"), "\n")
	o.m.from = o.m.now()
	o.do("capsule", "reboot")
	o.m.wait(o.m.serial, "10.0.2.15:50000")
	o.until("running   yes", "workload", "list")
	o.wait("the port of the container answers from outside", func() bool { return answers(o.port) })
	if after := strings.Count(o.do("workload", "exec", "web", "--", "cat", "/data/starts"), "\n"); after != before+1 {
		o.t.Errorf("the volume knows of %d starts, and before the restart of %d", after, before)
	}
}
