package doctor

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// kubeletHost is a machine with these files, whose containerd and cocoond answer.
func kubeletHost(t *testing.T, files map[string]string) doctor {
	t.Helper()
	cfg := host(t, files)
	root := filepath.Dir(cfg.Proc)
	cfg.Kubelet = &Kubelet{
		Socket: "/run/cocoon/cri.sock", Containerd: "/run/containerd/containerd.sock", NetworkMode: "cni", Root: root,
		ConfDir: filepath.Join(root, "net.d"), BinDirs: []string{filepath.Join(root, "none"), filepath.Join(root, "bin")},
		Ask: func(context.Context, string) (Runtime, error) {
			return Runtime{Name: "containerd", Version: "v2.1.4", CgroupDriver: "systemd"}, nil
		},
	}
	return doctor{cfg}
}

// wantFinding checks a finding: each that is not OK has a remedy.
func wantFinding(t *testing.T, what string, f finding, status, detail string) {
	t.Helper()
	if f.status != status || !strings.Contains(f.detail, detail) || (f.status == OK) != (f.remedy == "") {
		t.Errorf("%s: %+v, want status %s and %q", what, f, status, detail)
	}
}

func TestRuntimes(t *testing.T) {
	d := kubeletHost(t, nil)
	for _, tt := range []struct {
		r      Runtime
		err    error
		status string
		detail string
	}{
		{r: Runtime{Name: "containerd", Version: "v2.1.4"}, status: OK, detail: "containerd v2.1.4 at /run/containerd/containerd.sock"},
		{r: Runtime{Name: "containerd", Version: "1.6.20~ds1"}, status: Warn, detail: "no RuntimeConfig"},
		{r: Runtime{Name: "cri-o", Version: "1.33.0"}, status: OK, detail: "cri-o"},
		{r: Runtime{Name: "containerd", Version: "unknown"}, status: OK, detail: "unknown"},
		{err: errors.New("connection refused"), status: Warn, detail: "nobody answers at /run/containerd/containerd.sock: connection refused"},
	} {
		d.cfg.Kubelet.Ask = func(context.Context, string) (Runtime, error) { return tt.r, tt.err }
		wantFinding(t, tt.r.Version, d.containerd(t.Context()), tt.status, tt.detail)
	}
	wantFinding(t, "our socket", d.criSocket(t.Context()), Warn, "/run/cocoon/cri.sock")
	wantFinding(t, "our socket", kubeletHost(t, nil).criSocket(t.Context()), OK, "/run/cocoon/cri.sock")
}

func TestPodNetwork(t *testing.T) {
	const list = `{"cniVersion": "1.0.0", "name": "pods", "plugins": [{"type": "bridge"}, {"type": "portmap"}]}`
	for what, tt := range map[string]struct {
		mode, list, plugin string
		status, detail     string
	}{
		"good":      {"cni", list, "portmap", OK, "pods of "},
		"bridge":    {"bridge", list, "portmap", Warn, "network mode bridge"},
		"unset":     {"", list, "portmap", Warn, "network mode bridge"},
		"no list":   {"cni", "", "portmap", Warn, "no conflist"},
		"torn":      {"cni", "{", "portmap", Warn, "can be read"},
		"empty":     {"cni", "{}", "portmap", Warn, "no plugins"},
		"no plugin": {"cni", list, "other", Warn, `"portmap"`},
	} {
		files := map[string]string{"bin/bridge": "", "bin/" + tt.plugin: ""}
		if tt.list != "" {
			files["net.d/10-pods.conflist"] = tt.list
		}
		d := kubeletHost(t, files)
		d.cfg.Kubelet.NetworkMode = tt.mode
		for name := range files {
			if err := os.Chmod(filepath.Join(d.cfg.Kubelet.Root, name), 0o755); err != nil {
				t.Fatal(err)
			}
		}
		wantFinding(t, what, d.podNetwork(t.Context()), tt.status, tt.detail)
	}
}

func TestKubeletAsksUs(t *testing.T) {
	const ours, theirs = "unix:///run/cocoon/cri.sock", "unix:///run/containerd/containerd.sock"
	const config, flags = "var/lib/kubelet/config.yaml", "var/lib/kubelet/kubeadm-flags.env"
	const dropIn = "etc/systemd/system/kubelet.service.d/"
	for what, tt := range map[string]struct {
		files          map[string]string
		status, detail string
	}{
		"none":      {nil, OK, noKubelet},
		"file":      {map[string]string{config: "kind: KubeletConfiguration\ncontainerRuntimeEndpoint: \"" + ours + "\"\n"}, OK, "config.yaml"},
		"as JSON":   {map[string]string{config: "{\n  \"containerRuntimeEndpoint\": \"" + ours + "\",\n}\n"}, OK, "cri.sock"},
		"not set":   {map[string]string{config: "kind: KubeletConfiguration\n"}, Warn, "its default"},
		"theirs":    {map[string]string{config: "containerRuntimeEndpoint: " + theirs + "\n"}, Warn, "/run/containerd/containerd.sock"},
		"flag":      {map[string]string{config: "", flags: `KUBELET_KUBEADM_ARGS="--container-runtime-endpoint=` + ours + ` --x"`}, OK, "its files"},
		"our unit":  {map[string]string{config: "containerRuntimeEndpoint: " + theirs, flags: "--container-runtime-endpoint=" + theirs, dropIn + "10-kubeadm.conf": "Environment=\"KUBELET_CONFIG_ARGS=--config=/var/lib/kubelet/config.yaml\"", dropIn + "20-cocoon.conf": "Environment=KUBELET_EXTRA_ARGS=--container-runtime-endpoint=" + ours}, OK, "its files"},
		"defaults":  {map[string]string{dropIn + "20-cocoon.conf": "Environment=KUBELET_EXTRA_ARGS=--container-runtime-endpoint=" + ours, "etc/default/kubelet": "KUBELET_EXTRA_ARGS=--container-runtime-endpoint=" + theirs}, Warn, "its files"},
		"runs":      {map[string]string{"proc/7/cmdline": "/usr/bin/kubelet\x00--config\x00/etc/k.yaml\x00", "etc/k.yaml": "containerRuntimeEndpoint: " + ours, config: "containerRuntimeEndpoint: " + theirs}, OK, "k.yaml"},
		"arguments": {map[string]string{"proc/7/cmdline": "kubelet\x00--container-runtime-endpoint=" + theirs + "\x00", config: "containerRuntimeEndpoint: " + ours}, Warn, "its arguments"},
		"another":   {map[string]string{"proc/7/cmdline": "/usr/bin/vim\x00kubelet\x00", "proc/8/cmdline": ""}, OK, noKubelet},
	} {
		wantFinding(t, what, kubeletHost(t, tt.files).kubelet(t.Context()), tt.status, tt.detail)
	}
}

func TestCgroupDriver(t *testing.T) {
	const v2, config = "sys/fs/cgroup/cgroup.controllers", "var/lib/kubelet/config.yaml"
	for what, tt := range map[string]struct {
		files          map[string]string
		driver         string
		status, detail string
	}{
		"agree":      {map[string]string{v2: "cpu", config: "cgroupDriver: systemd\n"}, "systemd", OK, "cgroup v2, driver systemd"},
		"asks":       {map[string]string{v2: "cpu", config: "x: y\n"}, "cgroupfs", OK, "driver cgroupfs"},
		"differ":     {map[string]string{v2: "cpu", config: "cgroupDriver: cgroupfs\n"}, "systemd", Warn, "cgroupfs"},
		"no kubelet": {map[string]string{v2: "cpu"}, "systemd", OK, "driver systemd"},
		"silent":     {map[string]string{v2: "cpu", config: "cgroupDriver: cgroupfs\n"}, "", OK, "not examined"},
		"v1":         {map[string]string{config: "cgroupDriver: cgroupfs\n"}, "cgroupfs", Warn, "1.35"},
		"v1 wanted":  {map[string]string{config: "cgroupDriver: cgroupfs\nfailCgroupV1: false\n"}, "cgroupfs", OK, "cgroup v1"},
		"v1, nobody": {nil, "cgroupfs", OK, "cgroup v1"},
	} {
		d := kubeletHost(t, tt.files)
		d.cfg.Kubelet.Ask = func(context.Context, string) (Runtime, error) {
			return Runtime{Name: "containerd", Version: "v2.0.0", CgroupDriver: tt.driver}, nil
		}
		wantFinding(t, what, d.cgroupDriver(t.Context()), tt.status, tt.detail)
	}
}

// TestKubeletFailsNothing: a machine that lacks all of it still runs VMs.
func TestKubeletFailsNothing(t *testing.T) {
	d := kubeletHost(t, nil)
	d.cfg.Kubelet.Ask = func(context.Context, string) (Runtime, error) { return Runtime{}, errors.New("nobody") }
	for _, c := range d.kubeletChecks() {
		if f := c.look(t.Context()); f.status == Fail || f.detail == "" || (f.status == OK) != (f.remedy == "") {
			t.Errorf("%s: %+v", c.name, f)
		}
	}
}
