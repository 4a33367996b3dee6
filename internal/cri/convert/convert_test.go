package convert_test

import (
	"slices"
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"cocoonstack.io/cocoon/internal/cri/convert"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/guest"
	"cocoonstack.io/cocoon/internal/testkit/diff"
	"cocoonstack.io/cocoon/internal/vm"
)

var node = convert.Node{Network: "pods", CPUs: 1, Memory: 1 << 30}

func pod() *cri.PodSandboxConfig {
	return &cri.PodSandboxConfig{
		Metadata: &cri.PodSandboxMetadata{Name: "web", Namespace: "shop", Uid: "u1", Attempt: 2}, Hostname: "web", LogDirectory: "/var/log/pods/shop_web_u1",
		DnsConfig:    &cri.DNSConfig{Servers: []string{"10.0.0.10"}, Searches: []string{"shop.svc.cluster.local"}, Options: []string{"ndots:5"}},
		PortMappings: []*cri.PortMapping{{ContainerPort: 80}, {ContainerPort: 53, HostPort: 5353, Protocol: cri.Protocol_UDP, HostIp: "0.0.0.0"}},
		Labels:       map[string]string{"app": "web"}, Annotations: map[string]string{"note": "x", "kubernetes.io/ingress-bandwidth": "10M", "kubernetes.io/egress-bandwidth": "512k", "vm.cocoonstack.io/disk-bandwidth": "10Mi"},
		Linux: &cri.LinuxPodSandboxConfig{
			CgroupParent: "/kubepods/podu1", Sysctls: map[string]string{"net.core.somaxconn": "100", "kernel.shm_rmid_forced": "1"},
			Resources: &cri.LinuxContainerResources{CpuQuota: 150000, CpuPeriod: 100000, MemoryLimitInBytes: 256 << 20},
		},
	}
}

func TestSandbox(t *testing.T) {
	s, owner, err := convert.Sandbox(pod(), "cocoon", node)
	if err != nil {
		t.Fatal(err)
	}
	if owner != (vm.Owner{Namespace: "shop", PodUID: "u1"}) {
		t.Errorf("owner %+v", owner)
	}
	if err := s.Default().Validate(); err != nil {
		t.Errorf("the engine refuses it: %v", err)
	}
	labels := s.Labels
	s.Labels = nil
	want := vm.Spec{
		Name: s.Name, Sandbox: true, CgroupParent: "/kubepods/podu1", Hostname: "web", CPUs: 2, Memory: 320 << 20, DiskRate: vm.DiskRate{Bytes: 10 << 20},
		NICs:    []vm.NICSpec{{Network: "pods", Ports: []vm.PortMapping{{Protocol: vm.UDP, HostPort: 5353, GuestPort: 53}}, Pod: vm.PodName{Namespace: "shop", Name: "web", UID: "u1"}, Bandwidth: vm.Bandwidth{Ingress: 10_000_000, Egress: 512_000}}},
		Sysctls: []vm.Sysctl{{Name: "kernel.shm_rmid_forced", Value: "1"}, {Name: "net.core.somaxconn", Value: "100"}},
		DNS:     &vm.DNS{Servers: []string{"10.0.0.10"}, Own: true, Searches: []string{"shop.svc.cluster.local"}, Options: []string{"ndots:5"}},
	}
	if d := diff.Of(want, s); d != "" {
		t.Error(d)
	}
	if !strings.HasPrefix(s.Name, "web.") || !strings.HasSuffix(s.Name, ".2") {
		t.Errorf("name %q", s.Name)
	}

	r := vm.Record{ID: vm.NewID(), Owner: owner, Spec: vm.Spec{Labels: labels}, State: vm.StateRunning, NICs: []vm.NIC{{IP: "10.1.0.2", IPv6: "fd00::2", Addresses: []string{"fd00::2/64", "10.2.0.2/24"}}}}
	if !proto.Equal(convert.Config(r), pod()) {
		t.Errorf("got %v", convert.Config(r))
	}
	st := convert.SandboxStatus(r)
	if st.GetState() != cri.PodSandboxState_SANDBOX_READY || st.GetRuntimeHandler() != "cocoon" || st.GetId() != "vm-"+string(r.ID) {
		t.Errorf("got %v", st)
	}
	if n := st.GetNetwork(); n.GetIp() != "10.1.0.2" || len(n.GetAdditionalIps()) != 2 || n.GetAdditionalIps()[0].GetIp() != "fd00::2" {
		t.Errorf("got %v", n)
	}
	r.NICs = nil
	if st := convert.Listed(r); st.GetState() != cri.PodSandboxState_SANDBOX_NOTREADY {
		t.Error("a sandbox without a network is ready")
	}
}

// TestLongNames: the longest names of Kubernetes make names of VMs, and names that begin alike make different ones.
func TestLongNames(t *testing.T) {
	seen := map[string]bool{}
	for _, name := range []string{strings.Repeat("a", 253), strings.Repeat("a", 252) + "b", strings.Repeat("a.", 100) + "b", "x"} {
		for _, uid := range []string{"u1", "u2"} {
			c := pod()
			c.Metadata.Name, c.Metadata.Uid, c.Metadata.Attempt = name, uid, 1<<32-1
			s, _, err := convert.Sandbox(c, "cocoon", node)
			if err != nil {
				t.Fatal(err)
			}
			if err := s.Default().Validate(); err != nil || seen[s.Name] {
				t.Errorf("name %q: %v", s.Name, err)
			}
			seen[s.Name] = true
		}
	}
}

func TestRefusedSandboxes(t *testing.T) {
	for name, change := range map[string]func(*cri.PodSandboxConfig){
		"no metadata":              func(c *cri.PodSandboxConfig) { c.Metadata = nil },
		"a bandwidth that is none": func(c *cri.PodSandboxConfig) { c.Annotations["kubernetes.io/egress-bandwidth"] = "fast" },
		"a bandwidth below zero":   func(c *cri.PodSandboxConfig) { c.Annotations["kubernetes.io/ingress-bandwidth"] = "-1M" },
		"a limit that is none":     func(c *cri.PodSandboxConfig) { c.Annotations["vm.cocoonstack.io/disk-bandwidth"] = "fast" },
		"no namespace":             func(c *cri.PodSandboxConfig) { c.Metadata.Namespace = "" },
		"hostNetwork": func(c *cri.PodSandboxConfig) {
			c.Linux.SecurityContext = namespaces(&cri.NamespaceOption{Network: cri.NamespaceMode_NODE})
		},
		"hostPID": func(c *cri.PodSandboxConfig) {
			c.Linux.SecurityContext = namespaces(&cri.NamespaceOption{Pid: cri.NamespaceMode_NODE})
		},
		"hostIPC": func(c *cri.PodSandboxConfig) {
			c.Linux.SecurityContext = namespaces(&cri.NamespaceOption{Ipc: cri.NamespaceMode_NODE})
		},
	} {
		c := pod()
		change(c)
		if _, _, err := convert.Sandbox(c, "cocoon", node); !errdefs.Is(err, errdefs.InvalidArgument) {
			t.Errorf("%s: got %v, want InvalidArgument", name, err)
		}
	}
}

func namespaces(o *cri.NamespaceOption) *cri.LinuxSandboxSecurityContext {
	return &cri.LinuxSandboxSecurityContext{NamespaceOptions: o}
}

func container() *cri.ContainerConfig {
	return &cri.ContainerConfig{
		Metadata: &cri.ContainerMetadata{Name: "app", Attempt: 1}, Image: &cri.ImageSpec{Image: "sha256:ab", UserSpecifiedImage: "busybox"},
		Command: []string{"sh"}, Args: []string{"-c", "true"}, WorkingDir: "/w", Envs: []*cri.KeyValue{{Key: "TOKEN", Value: []byte("secret")}},
		Labels: map[string]string{"l": "1"}, Annotations: map[string]string{"a": "2"}, LogPath: "app/1.log", Tty: true, Stdin: true, StdinOnce: true,
		StopSignal: cri.Signal_SIGNAL_SIGRTMINPLUS3,
		Linux: &cri.LinuxContainerConfig{
			Resources: &cri.LinuxContainerResources{CpuQuota: 50000, CpuPeriod: 100000, CpuShares: 1024, MemoryLimitInBytes: 64 << 20, OomScoreAdj: 300},
			SecurityContext: &cri.LinuxContainerSecurityContext{
				RunAsUser: &cri.Int64Value{Value: 1000}, RunAsGroup: &cri.Int64Value{Value: 2000}, SupplementalGroups: []int64{7}, ReadonlyRootfs: true, NoNewPrivs: true,
				Capabilities: &cri.Capability{AddCapabilities: []string{"NET_ADMIN"}, DropCapabilities: []string{"ALL"}},
				Seccomp:      &cri.SecurityProfile{ProfileType: cri.SecurityProfile_RuntimeDefault},
				MaskedPaths:  []string{"/proc/kcore", "/sys/firmware/"}, ReadonlyPaths: []string{"/proc/sys"},
			},
		},
	}
}

func TestContainer(t *testing.T) {
	c, err := convert.Container(container(), "name")
	if err != nil {
		t.Fatal(err)
	}
	if err := c.ValidateEphemeral(); err != nil {
		t.Errorf("the engine refuses it: %v", err)
	}
	labels := c.Labels
	c.Labels = nil
	want := vm.Container{
		Name: "name", Image: "sha256:ab", Kind: vm.ContainerEphemeral, Manual: true,
		Process: vm.Process{
			Entrypoint: []string{"sh"}, Args: []string{"-c", "true"}, WorkDir: "/w", User: "1000:2000", TTY: true, Stdin: true, StdinOnce: true,
			Env: []vm.EnvVar{{Name: "TOKEN", Value: "secret"}}, ReadOnlyRoot: true, StopSignal: "SIGRTMIN+3",
			Security: &vm.Security{
				Capabilities: []string{"NET_ADMIN"}, NoNewPrivileges: true, Groups: []int64{7}, Filtered: true,
				Masked: []string{"/proc/kcore", "/sys/firmware"}, ReadOnly: []string{"/proc/sys"},
			},
		},
		Resources: &vm.Resources{CPULimit: 500, CPUWeight: vm.CPUWeightOf(1024), CPUShares: 1024, MemoryLimit: 64 << 20, OOMScoreAdj: 300},
	}
	if d := diff.Of(want, c); d != "" {
		t.Error(d)
	}
	for key, text := range labels {
		if strings.Contains(text, "secret") {
			t.Errorf("label %s has the environment: %s", key, text)
		}
	}

	spec, _, err := convert.Sandbox(pod(), "cocoon", node)
	if err != nil {
		t.Fatal(err)
	}
	at := time.Unix(100, 5)
	r := vm.Record{ID: vm.NewID(), Spec: spec}
	e := vm.Ephemeral{Spec: vm.Container{Name: "name", Labels: labels}, CreatedAt: at, Record: vm.ContainerRecord{Name: "name", ImageDigest: "sha256:ab", Status: vm.ContainerStatus{State: vm.ContainerCreated}}}
	st := convert.ContainerStatus(r, e)
	if st.GetState() != cri.ContainerState_CONTAINER_CREATED || st.GetCreatedAt() != at.UnixNano() || st.GetStartedAt() != 0 || st.GetLogPath() != "/var/log/pods/shop_web_u1/app/1.log" ||
		st.GetMetadata().GetAttempt() != 1 || st.GetImage().GetUserSpecifiedImage() != "busybox" || st.GetLabels()["l"] != "1" || st.GetImageId() != "sha256:ab" {
		t.Errorf("got %v", st)
	}
	e.Record.Status = vm.ContainerStatus{State: vm.ContainerTerminated, StartedAt: at.Add(1), Exit: &vm.ContainerExit{Code: 137, Reason: "OOMKilled", Message: "bye", FinishedAt: at.Add(2)}}
	st = convert.ContainerStatus(r, e)
	if st.GetUser() != nil {
		t.Errorf("a user that no guest has told: %v", st.GetUser())
	}
	e.Record.Status.User = &vm.ContainerUser{UID: 7, GID: 8, Groups: []int64{8, 9}}
	if u := convert.ContainerStatus(r, e).GetUser().GetLinux(); u.GetUid() != 7 || u.GetGid() != 8 || !slices.Equal(u.GetSupplementalGroups(), []int64{8, 9}) {
		t.Errorf("got %v", u)
	}
	if st.GetState() != cri.ContainerState_CONTAINER_EXITED || st.GetExitCode() != 137 || st.GetReason() != "OOMKilled" || st.GetMessage() != "bye" ||
		st.GetStartedAt() != at.UnixNano()+1 || st.GetFinishedAt() != at.UnixNano()+2 {
		t.Errorf("got %v", st)
	}
}

// TestProcesses: a container sees the processes of its pod, its own, or those of another container.
func TestProcesses(t *testing.T) {
	for _, tt := range []struct {
		options *cri.NamespaceOption
		own     bool
		of      string
		refused bool
	}{
		{options: nil},
		{options: &cri.NamespaceOption{Pid: cri.NamespaceMode_POD, TargetId: "x"}},
		{options: &cri.NamespaceOption{Pid: cri.NamespaceMode_CONTAINER}, own: true},
		{options: &cri.NamespaceOption{Pid: cri.NamespaceMode_TARGET, TargetId: "x"}, of: "x"},
		{options: &cri.NamespaceOption{Pid: cri.NamespaceMode_TARGET}, refused: true},
	} {
		config := container()
		config.Linux.SecurityContext.NamespaceOptions = tt.options
		c, err := convert.Container(config, "name")
		if err != nil {
			t.Fatal(err)
		}
		of, err := convert.PIDsOf(config)
		if c.PIDs != (vm.PIDs{Own: tt.own}) || of != tt.of || errdefs.IsInvalid(err) != tt.refused {
			t.Errorf("%v: %+v, %q, %v", tt.options, c.PIDs, of, err)
		}
		if b := convert.Booting(c); b.PIDs != (vm.PIDs{}) {
			t.Errorf("%v: a container that boots itself has %+v", tt.options, b.PIDs)
		}
	}
}

// TestNumbers: stats and metrics of a pod have those of its running containers, and each metric has a value for each key of its description.
func TestNumbers(t *testing.T) {
	spec, _, err := convert.Sandbox(pod(), "cocoon", node)
	if err != nil {
		t.Fatal(err)
	}
	made, err := convert.Container(container(), "name")
	if err != nil {
		t.Fatal(err)
	}
	ended := made.Clone()
	ended.Name = "ended"
	r := vm.Record{ID: vm.NewID(), Spec: spec, Ephemeral: []vm.Ephemeral{
		{Spec: made, Record: vm.ContainerRecord{Status: vm.ContainerStatus{State: vm.ContainerRunning, StartedAt: time.Unix(40, 0)}}},
		{Spec: ended, Record: vm.ContainerRecord{Status: vm.ContainerStatus{State: vm.ContainerTerminated}}},
	}}
	st := guest.Stats{CPUSeconds: 3.5, MemoryUsed: 100, NetworkRxBytes: 7, NetworkTxBytes: 8, Processes: 4, Containers: []guest.ContainerStats{
		{
			Name: "name", CPUSeconds: 2.5, Memory: 60, MemoryTotal: 70, Anonymous: 50, PageFaults: 9, MajorFaults: 1, Written: &guest.DiskUse{Bytes: 4096, Inodes: 3},
			Pressure: guest.Pressure{Memory: &guest.Stall{Some: guest.Waits{Total: time.Second, Avg10: 1.5}}, IO: &guest.Stall{}},
		},
		{Name: "ended"},
	}}
	at := time.Unix(50, 0)
	s := convert.SandboxStats(r, st, "/store", at).GetLinux()
	if s.GetCpu().GetUsageCoreNanoSeconds().GetValue() != 3_500_000_000 || s.GetMemory().GetWorkingSetBytes().GetValue() != 100 || s.GetNetwork().GetDefaultInterface().GetTxBytes().GetValue() != 8 || s.GetProcess().GetProcessCount().GetValue() != 4 ||
		len(s.GetContainers()) != 1 || s.GetContainers()[0].GetCpu().GetUsageCoreNanoSeconds().GetValue() != 2_500_000_000 || s.GetContainers()[0].GetMemory().GetTimestamp() != at.UnixNano() {
		t.Errorf("got %v", s)
	}
	c := s.GetContainers()[0]
	if mem, w := c.GetMemory(), c.GetWritableLayer(); mem.GetUsageBytes().GetValue() != 70 || mem.GetRssBytes().GetValue() != 50 || mem.GetMajorPageFaults().GetValue() != 1 || mem.GetAvailableBytes().GetValue() != 64<<20-60 ||
		w.GetUsedBytes().GetValue() != 4096 || w.GetInodesUsed().GetValue() != 3 || w.GetFsId().GetMountpoint() != "/store" {
		t.Errorf("got %v", c)
	}
	if p := c.GetMemory().GetPsi().GetSome(); p.GetTotal() != 1e9 || p.GetAvg10() != 1.5 || c.GetIo().GetPsi() == nil || c.GetCpu().GetPsi() != nil || s.GetIo() != nil {
		t.Errorf("the time that programs wait: %v", c)
	}
	if b := convert.ContainerStats(r, r.Ephemeral[1], guest.Stats{}, "", at); b.GetCpu() != nil || b.GetWritableLayer() != nil {
		t.Errorf("of a container of which the guest tells nothing: %v", b)
	}
	keys := map[string]int{}
	for _, d := range convert.MetricDescriptors() {
		keys[d.GetName()] = len(d.GetLabelKeys())
	}
	m := convert.Metrics(r, st, at)
	if len(m.GetContainerMetrics()) != 1 {
		t.Fatalf("got %v", m)
	}
	for _, one := range append(m.GetMetrics(), m.GetContainerMetrics()[0].GetMetrics()...) {
		if len(one.GetLabelValues()) != keys[one.GetName()] || one.GetLabelValues()[0] != "web" || one.GetLabelValues()[1] != "shop" {
			t.Errorf("got %v, want %d labels", one, keys[one.GetName()])
		}
	}
	values := map[string]uint64{}
	for _, one := range m.GetContainerMetrics()[0].GetMetrics() {
		values[one.GetName()] += one.GetValue().GetValue()
	}
	want := map[string]uint64{
		"container_cpu_usage_seconds_total": 2, "container_memory_working_set_bytes": 60, "container_memory_usage_bytes": 70, "container_memory_rss": 50,
		"container_memory_failures_total": 9 + 1, "container_fs_usage_bytes": 4096, "container_spec_memory_limit_bytes": 64 << 20, "container_start_time_seconds": 40,
	}
	if d := diff.Of(want, values); d != "" {
		t.Error(d)
	}
}

// TestLogPath: a log is always below the folder of its pod.
func TestLogPath(t *testing.T) {
	c := container()
	c.LogPath = "../../../etc/passwd"
	made, err := convert.Container(c, "name")
	if err != nil {
		t.Fatal(err)
	}
	spec, _, err := convert.Sandbox(pod(), "cocoon", node)
	if err != nil {
		t.Fatal(err)
	}
	if got := convert.LogPath(vm.Record{Spec: spec}, made); got != "/var/log/pods/shop_web_u1/etc/passwd" {
		t.Errorf("got %q", got)
	}
}

// TestPrivileged: a privileged container has all rights over its guest and sees all of it.
func TestPrivileged(t *testing.T) {
	c := container()
	c.Linux.SecurityContext.Privileged = true
	got, err := convert.Container(c, "name")
	if err != nil {
		t.Fatal(err)
	}
	want := &vm.Security{Capabilities: vm.AllCapabilities(), NoNewPrivileges: true, Groups: []int64{7}}
	if d := diff.Of(want, got.Process.Security); d != "" {
		t.Error(d)
	}
}

func TestRefusedContainers(t *testing.T) {
	for name, change := range map[string]func(*cri.ContainerConfig){
		"no name":  func(c *cri.ContainerConfig) { c.Metadata = nil },
		"no image": func(c *cri.ContainerConfig) { c.Image = nil },
		"CDI":      func(c *cri.ContainerConfig) { c.CDIDevices = []*cri.CDIDevice{{Name: "vendor.com/gpu=0"}} },
		"propagation": func(c *cri.ContainerConfig) {
			c.Mounts = []*cri.Mount{{ContainerPath: "/m", Propagation: cri.MountPropagation_PROPAGATION_BIDIRECTIONAL}}
		},
		"group alone": func(c *cri.ContainerConfig) { c.Linux.SecurityContext.RunAsUser = nil },
		"AppArmor": func(c *cri.ContainerConfig) {
			c.Linux.SecurityContext.Apparmor = &cri.SecurityProfile{ProfileType: cri.SecurityProfile_Localhost}
		},
	} {
		c := container()
		change(c)
		if _, err := convert.Container(c, "name"); !errdefs.Is(err, errdefs.InvalidArgument) {
			t.Errorf("%s: got %v, want InvalidArgument", name, err)
		}
	}
}

func TestIDs(t *testing.T) {
	id := vm.NewID()
	name := convert.NewContainerName()
	for text, want := range map[string][2]string{
		convert.SandboxID(id): {string(id), ""}, convert.ContainerID(id, name): {string(id), name}, "vm-ab": {"ab", ""}, "vm-ab-c": {"ab", "c"},
	} {
		machine, container, err := convert.ParseID(text)
		if err != nil || machine != want[0] || container != want[1] || !convert.Ours(text) {
			t.Errorf("%s: got %q, %q, %v", text, machine, container, err)
		}
	}
	for _, text := range []string{"", "vm-", "c0ffee", "vm", "-"} {
		if _, _, err := convert.ParseID(text); !errdefs.IsNotFound(err) {
			t.Errorf("%q: got %v, want NotFound", text, err)
		}
	}
}

// FuzzConfig: no message makes the door panic, and what it makes of a sandbox is found again.
func FuzzConfig(f *testing.F) {
	a, _ := proto.Marshal(pod())
	b, _ := proto.Marshal(container())
	f.Add(a, b)
	f.Fuzz(func(t *testing.T, a, b []byte) {
		var p cri.PodSandboxConfig
		var c cri.ContainerConfig
		if proto.Unmarshal(a, &p) != nil || proto.Unmarshal(b, &c) != nil {
			return // gRPC refuses it before
		}
		s, owner, err := convert.Sandbox(&p, "cocoon", node)
		if err != nil {
			return
		}
		r := vm.Record{ID: vm.NewID(), Owner: owner, Spec: s}
		if !convert.IsSandbox(r) || convert.Listed(r).GetMetadata().GetUid() != p.GetMetadata().GetUid() {
			t.Errorf("sandbox %v became %v", &p, convert.Listed(r))
		}
		_ = s.Default().Validate()
		made, err := convert.Container(&c, convert.NewContainerName())
		if err != nil {
			return
		}
		_ = made.ValidateEphemeral()
		e := vm.Ephemeral{Spec: made}
		r.Ephemeral = append(r.Ephemeral, e)
		if convert.ContainerStatus(r, e).GetMetadata().GetName() != c.GetMetadata().GetName() {
			t.Errorf("container %v became %v", &c, convert.ContainerStatus(r, e))
		}
	})
}

// TestBackend: the VM of a pod runs in the hypervisor that VM pods need. Its pod may ask for another one, as every pod of other operators does.
func TestBackend(t *testing.T) {
	of := node
	of.Driver = "qemu"
	for want, tc := range map[string]struct {
		told string
		err  bool
	}{
		"": {}, "qemu": {},
		"firecracker":      {told: "runs in qemu, which stands in for firecracker"},
		"cloud-hypervisor": {told: "runs in qemu, which stands in for cloud-hypervisor"},
		"bochs":            {err: true},
	} {
		c := pod()
		if want != "" {
			c.Annotations["vm.cocoonstack.io/backend"] = want
		}
		s, _, err := convert.Sandbox(c, "cocoon", of)
		if tc.err {
			if !errdefs.IsInvalid(err) {
				t.Errorf("%q: %v", want, err)
			}
			continue
		}
		if err != nil || s.Driver != "qemu" {
			t.Errorf("%q: driver %q, %v", want, s.Driver, err)
		}
		got := convert.StandIn(vm.Record{Spec: s, Driver: s.Driver})
		if tc.told == "" && got != "" || tc.told != "" && got != "VM "+s.Name+" "+tc.told {
			t.Errorf("%q: %q", want, got)
		}
	}
}

func TestMappable(t *testing.T) {
	one := []*cri.IDMapping{{HostId: 100000, Length: 65536}}
	for what, tt := range map[string]struct {
		u  *cri.UserNamespace
		ok bool
	}{
		"none":          {nil, true},
		"of the node":   {&cri.UserNamespace{Mode: cri.NamespaceMode_NODE}, true},
		"of the pod":    {&cri.UserNamespace{Mode: cri.NamespaceMode_POD, Uids: one, Gids: one}, true},
		"container":     {&cri.UserNamespace{Mode: cri.NamespaceMode_CONTAINER}, false},
		"target":        {&cri.UserNamespace{Mode: cri.NamespaceMode_TARGET}, false},
		"two mappings":  {&cri.UserNamespace{Uids: append(one, one...), Gids: one}, false},
		"no groups":     {&cri.UserNamespace{Uids: one}, false},
		"not from 0 on": {&cri.UserNamespace{Uids: one, Gids: []*cri.IDMapping{{ContainerId: 1, HostId: 1, Length: 1}}}, false},
	} {
		c := &cri.PodSandboxConfig{Metadata: &cri.PodSandboxMetadata{Name: "a", Namespace: "b", Uid: "c"}, Linux: &cri.LinuxPodSandboxConfig{
			SecurityContext: &cri.LinuxSandboxSecurityContext{NamespaceOptions: &cri.NamespaceOption{UsernsOptions: tt.u}},
		}}
		_, _, err := convert.Sandbox(c, "cocoon", convert.Node{CPUs: 1, Memory: 1 << 28})
		if tt.ok && err != nil || !tt.ok && !errdefs.Is(err, errdefs.InvalidArgument) {
			t.Errorf("%s: %v", what, err)
		}
	}
}
