package doctor

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"cocoonstack.io/cocoon/internal/proc"
)

// Kubelet is what a kubelet of this machine has to do with Cocoon: cocoond serves CRI for it, in front of containerd.
type Kubelet struct {
	Socket      string // of cocoond's CRI
	Containerd  string // socket of containerd
	NetworkMode string // of cocoond: bridge or cni
	ConfDir     string // folder of conflists
	BinDirs     []string
	Driver      string // in which VM pods run, whatever the default is
	Root        string // below which the kubelet's files are; default /

	// Ask asks the runtime at a socket who it is.
	Ask func(ctx context.Context, socket string) (Runtime, error)
}

// Runtime is a container runtime, as it says itself.
type Runtime struct {
	Name, Version string
	CgroupDriver  string // cgroupfs or systemd; "": it does not say
}

// modeCNI is the network mode in which VMs and containers meet.
const modeCNI = "cni"

// kubeletChecks are for a machine whose kubelet has its pods by us.
func (d doctor) kubeletChecks() []check {
	return []check{
		{name: "containerd", feature: "pods of a kubelet that are no VMs", look: d.containerd},
		{name: "cri socket", feature: "pods of a kubelet", look: d.criSocket},
		{name: "pod network", feature: "pods of a kubelet that are VMs", look: d.podNetwork},
		{name: "kubelet", feature: "pods of a kubelet", look: d.kubelet},
		{name: "cgroup driver", feature: "limits of pods", look: d.cgroupDriver},
		{name: "runc", feature: "pods of a kubelet that are no VMs", look: d.runc},
	}
}

func (d doctor) ask(ctx context.Context, socket string) (Runtime, error) {
	ctx, cancel := context.WithTimeout(ctx, probeTimeout)
	defer cancel()
	return d.cfg.Kubelet.Ask(ctx, socket)
}

// oldestContainerd is the first major version of containerd without gaps that we know.
const oldestContainerd = 2

// containerd reports a containerd to which nothing can be passed on, and an old one.
func (d doctor) containerd(ctx context.Context) finding {
	socket := d.cfg.Kubelet.Containerd
	r, err := d.ask(ctx, socket)
	if err != nil {
		return finding{Warn, fmt.Sprintf("nobody answers at %s: %v", socket, err), "start containerd, or name its socket with --cri-containerd; VM pods go on without it"}
	}
	detail := fmt.Sprintf("%s %s at %s", r.Name, r.Version, socket)
	number, _, _ := strings.Cut(strings.TrimPrefix(r.Version, "v"), ".")
	if major, err := strconv.Atoi(number); err == nil && r.Name == "containerd" && major < oldestContainerd {
		return finding{
			Warn, detail + ": it has no RuntimeConfig, and 1.6 refuses to stop what is gone; cocoond fills both gaps, but a kubelet from 1.38 on wants 2.0",
			"install containerd 2.0 or later",
		}
	}
	return finding{status: OK, detail: detail}
}

func (d doctor) criSocket(ctx context.Context) finding {
	socket := d.cfg.Kubelet.Socket
	if _, err := d.ask(ctx, socket); err != nil {
		return finding{Warn, fmt.Sprintf("nobody answers at %s: %v", socket, err), "sudo systemctl restart cocoond, and look at `journalctl -u cocoond`; it needs --cri-socket or COCOOND_CRI_SOCKET"}
	}
	return finding{status: OK, detail: "cocoond answers at " + socket}
}

// podNetwork checks that VMs join the network of the other pods. The check "networks" tells whether that network works.
func (d doctor) podNetwork(context.Context) finding {
	k := d.cfg.Kubelet
	if k.NetworkMode != modeCNI {
		return finding{
			Warn, fmt.Sprintf("cocoond has the network mode %s: VMs get addresses that are none of the cluster's", cmp.Or(k.NetworkMode, "bridge")),
			"set COCOOND_NETWORK_MODE=cni in /etc/cocoon/cocoond.env, and sudo systemctl restart cocoond",
		}
	}
	files, err := filepath.Glob(filepath.Join(k.ConfDir, "*.conflist"))
	if err != nil || len(files) == 0 {
		return finding{Warn, "there is no conflist in " + k.ConfDir + ": no pod gets a network", "install the network of the cluster, or name the folder with COCOOND_CNI_CONF_DIR"}
	}
	slices.Sort(files)
	var list struct {
		Name    string `json:"name"`
		Plugins []struct {
			Type string `json:"type"`
		} `json:"plugins"`
	}
	text, err := os.ReadFile(files[0])
	if err == nil {
		err = json.Unmarshal(text, &list)
	}
	if err != nil || len(list.Plugins) == 0 {
		return finding{Warn, fmt.Sprintf("%s is no conflist that can be read: %v", files[0], cmp.Or(err, errors.New("it has no plugins"))), "correct the file"}
	}
	for _, p := range list.Plugins {
		if !slices.ContainsFunc(k.BinDirs, func(dir string) bool { return executable(filepath.Join(dir, filepath.Base(p.Type))) }) {
			return finding{Warn, fmt.Sprintf("network %s needs the plugin %q, which is in none of %s", list.Name, p.Type, strings.Join(k.BinDirs, ", ")), apt("containernetworking-plugins")}
		}
	}
	return finding{status: OK, detail: fmt.Sprintf("%s of %s", list.Name, files[0])}
}

func executable(path string) bool {
	fi, err := os.Stat(path)
	return err == nil && fi.Mode().IsRegular() && fi.Mode()&0o111 != 0
}

func (d doctor) runc(context.Context) finding {
	for _, name := range []string{"runc", "/usr/local/sbin/runc", "/usr/sbin/runc"} { // sbin is not in the PATH of all users
		if path, err := exec.LookPath(name); err == nil {
			return finding{status: OK, detail: path}
		}
	}
	return finding{Warn, "runc is not installed: containerd runs no containers", apt("runc")}
}

const noKubelet = "there is no kubelet on this machine yet"

// kubelet reports a kubelet that does not ask us.
func (d doctor) kubelet(context.Context) finding {
	set, ok := d.kubeletSettings()
	if !ok {
		return finding{status: OK, detail: noKubelet}
	}
	endpoint := strings.TrimPrefix(set.endpoint, "unix://")
	if endpoint == d.cfg.Kubelet.Socket {
		return finding{status: OK, detail: fmt.Sprintf("it asks %s (%s)", endpoint, set.from)}
	}
	return finding{
		Warn, fmt.Sprintf("it asks %s (%s), so no pod becomes a VM", cmp.Or(endpoint, "its default"), set.from),
		fmt.Sprintf("set containerRuntimeEndpoint: unix://%s, or for a kubelet of kubeadm: sudo install -D -m 0644 /usr/share/cocoon/examples/kubelet/20-cocoon.conf /etc/systemd/system/kubelet.service.d/20-cocoon.conf && sudo systemctl daemon-reload && sudo systemctl restart kubelet", d.cfg.Kubelet.Socket),
	}
}

// cgroupDriver reports what a kubelet and its runtime do not agree on.
func (d doctor) cgroupDriver(ctx context.Context) finding {
	set, found := d.kubeletSettings()
	_, err := os.Stat(filepath.Join(d.cfg.Sys, "fs/cgroup/cgroup.controllers"))
	version := "cgroup v2"
	if err != nil {
		version = "cgroup v1"
		if found && !set.acceptsV1 {
			return finding{Warn, "cgroup v1, with which a kubelet from 1.35 on does not start", "boot with systemd.unified_cgroup_hierarchy=1, or set failCgroupV1: false for the kubelet"}
		}
	}
	r, err := d.ask(ctx, d.cfg.Kubelet.Containerd)
	if err != nil || r.CgroupDriver == "" {
		return finding{status: OK, detail: version + "; the driver is not examined: containerd does not tell its own"}
	}
	if found && set.driver != "" && set.driver != r.CgroupDriver {
		return finding{
			Warn, fmt.Sprintf("%s; the kubelet is set to the driver %s (%s), and containerd to %s", version, set.driver, set.from, r.CgroupDriver),
			fmt.Sprintf("set cgroupDriver: %s for the kubelet, or SystemdCgroup for runc in containerd's configuration", r.CgroupDriver),
		}
	}
	return finding{status: OK, detail: version + ", driver " + r.CgroupDriver}
}

// kubeletSettings are those of a kubelet that matter here.
type kubeletSettings struct {
	endpoint  string // of its runtime; "": its default
	driver    string // of cgroups; "": it asks the runtime
	from      string // where that was found
	acceptsV1 bool   // cgroup v1
}

var (
	kubeletFlag = regexp.MustCompile(`--(container-runtime-endpoint|cgroup-driver|config)[= ]["']?([^\s"']+)`)
	kubeletKey  = regexp.MustCompile(`(?m)^["' ]*(containerRuntimeEndpoint|cgroupDriver|failCgroupV1)["']?:[ ]*["']?([^\s"',]+)`)
)

// kubeletSettings reads those of the kubelet that runs, or those in the files of one that does not. ok is false if there is none.
func (d doctor) kubeletSettings() (set kubeletSettings, ok bool) {
	root := cmp.Or(d.cfg.Kubelet.Root, "/")
	flags, from := d.kubeletArgs(), "its arguments"
	if flags == "" {
		from = "its files"
		var files []string
		for _, pattern := range []string{"var/lib/kubelet/kubeadm-flags.env", "etc/systemd/system/kubelet.service.d/*.conf", "etc/sysconfig/kubelet", "etc/default/kubelet"} {
			found, _ := filepath.Glob(filepath.Join(root, pattern)) // the later counts
			files = append(files, found...)
		}
		for _, file := range files {
			text, err := os.ReadFile(file)
			if err == nil {
				flags += string(text) + "\n"
			}
		}
	}
	given := map[string]string{}
	for _, m := range kubeletFlag.FindAllStringSubmatch(flags, -1) {
		given[m[1]] = m[2]
	}
	config := filepath.Join(root, "var/lib/kubelet/config.yaml")
	if given["config"] != "" && !strings.Contains(given["config"], "$") {
		config = filepath.Join(root, given["config"])
	}
	text, err := os.ReadFile(config)
	if errors.Is(err, fs.ErrNotExist) && flags == "" {
		return set, false
	}
	keys := map[string]string{}
	for _, m := range kubeletKey.FindAllStringSubmatch(string(text), -1) {
		keys[m[1]] = m[2]
	}
	set = kubeletSettings{
		endpoint: cmp.Or(given["container-runtime-endpoint"], keys["containerRuntimeEndpoint"]), driver: cmp.Or(given["cgroup-driver"], keys["cgroupDriver"]),
		from: config, acceptsV1: keys["failCgroupV1"] == "false",
	}
	if given["container-runtime-endpoint"] != "" {
		set.from = from
	}
	return set, true
}

// kubeletArgs returns the arguments of the kubelet that runs, "" if none does.
func (d doctor) kubeletArgs() string {
	all, _ := filepath.Glob(filepath.Join(d.cfg.Proc, "[0-9]*"))
	for _, dir := range all {
		text, err := proc.CommandLine(dir)
		if err != nil {
			continue
		}
		if args := strings.Split(strings.TrimRight(string(text), "\x00"), "\x00"); filepath.Base(args[0]) == "kubelet" {
			return strings.Join(args, " ")
		}
	}
	return ""
}
