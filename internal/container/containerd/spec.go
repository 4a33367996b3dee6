package containerd

import (
	"context"
	"path/filepath"
	"slices"

	"github.com/containerd/containerd/api/types/runc/options"
	"github.com/containerd/containerd/v2/client"
	"github.com/containerd/containerd/v2/contrib/seccomp"
	"github.com/containerd/containerd/v2/core/containers"
	"github.com/containerd/containerd/v2/pkg/oci"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"cocoonstack.io/cocoon/internal/container"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/vm"
)

const (
	cpuPeriod = 100_000 // microseconds
	softFiles = 1024    // open files: more breaks programs that use select
	hardFiles = 524_288 // a program that wants more than softFiles raises its limit to this
)

// runcOptions are the options of the shim.
func (r *Runtime) runcOptions() *options.Options {
	return &options.Options{BinaryName: r.cfg.Runc, Root: r.cfg.RuncRoot}
}

// specOf returns what makes the runtime specification of a container.
// Errors: InvalidArgument when there is nothing to run.
func (r *Runtime) specOf(s container.Spec, image client.Image, ic ocispec.ImageConfig) ([]oci.SpecOpts, error) {
	args := command(s, ic)
	if len(args) == 0 {
		return nil, errdefs.Invalidf("container %s: image %s has no command, so one is needed", s.ID, s.Image)
	}
	hostname := s.Hostname
	if hostname == "" {
		hostname = s.ID
	}
	all := []oci.SpecOpts{
		oci.WithImageConfig(image),
		oci.WithProcessArgs(args...),
		oci.WithEnv(append(environment(s.Env), "HOSTNAME="+hostname)),
		oci.WithHostname(hostname[:min(len(hostname), 64)]),
		oci.WithCgroup(filepath.Join(r.cfg.Cgroup, s.ID)),
		oci.WithRlimit(&specs.POSIXRlimit{Type: "RLIMIT_NOFILE", Soft: softFiles, Hard: files()}),
		oci.WithMounts(r.mountsOf(s)),
	}
	if s.WorkDir != "" {
		all = append(all, oci.WithProcessCwd(s.WorkDir))
	}
	if s.User != "" {
		all = append(all, oci.WithUser(s.User), ofUser)
	}
	return slices.Concat(all, networkOf(s.Network), hostOf(s.Host), limitsOf(s.Limits)), nil
}

// command returns what the main process is: the command replaces what the image says, the arguments only the image's.
func command(s container.Spec, ic ocispec.ImageConfig) []string {
	switch {
	case len(s.Command) > 0:
		return slices.Concat(s.Command, s.Args)
	case len(s.Args) > 0:
		return slices.Concat(ic.Entrypoint, s.Args)
	}
	return slices.Concat(ic.Entrypoint, ic.Cmd)
}

func environment(env []vm.EnvVar) []string {
	var all []string
	for _, e := range env {
		all = append(all, e.Name+"="+e.Value)
	}
	return all
}

// ofUser adds the groups that a user has in the image, as for the user of the image itself.
func ofUser(ctx context.Context, c oci.Client, k *containers.Container, s *oci.Spec) error {
	uid := s.Process.User.UID
	return oci.WithAdditionalGIDs(itoa(uid))(ctx, c, k, s)
}

// files is the hard limit of open files. Without CAP_SYS_RESOURCE, runc cannot raise that of the node.
func files() uint64 {
	var l unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &l); err != nil {
		return softFiles
	}
	return min(max(l.Max, softFiles), hardFiles)
}

// mountsOf returns the mounts of a container beyond the usual ones.
func (r *Runtime) mountsOf(s container.Spec) []specs.Mount {
	all := []specs.Mount{{
		Destination: "/sys/fs/cgroup", Type: "cgroup", Source: "cgroup", Options: []string{"nosuid", "noexec", "nodev", "relatime", "ro"},
	}}
	for _, f := range r.filesOf(s) {
		all = append(all, bind(f.source, f.path, "rw", "rprivate"))
	}
	for _, m := range s.Mounts {
		access := "rw"
		if m.ReadOnly {
			access = "ro"
		}
		all = append(all, bind(m.Source, m.Path, access, "rprivate"))
	}
	propagation := "rslave"
	if s.Host.Mount {
		propagation = "rshared"
	}
	for _, p := range s.Host.BindPaths {
		all = append(all, bind(p, p, "rw", propagation))
	}
	return all
}

func bind(source, path, access, propagation string) specs.Mount {
	return specs.Mount{Destination: path, Type: "bind", Source: source, Options: []string{"rbind", access, propagation}}
}

func networkOf(n container.Network) []oci.SpecOpts {
	if n.Host {
		return []oci.SpecOpts{oci.WithHostNamespace(specs.NetworkNamespace)}
	}
	return []oci.SpecOpts{
		oci.WithLinuxNamespace(specs.LinuxNamespace{Type: specs.NetworkNamespace, Path: n.NetNS}),
		func(_ context.Context, _ oci.Client, _ *containers.Container, s *oci.Spec) error {
			// Users other than root may serve low ports and send pings, because the namespace is the container's own.
			s.Linux.Sysctl = map[string]string{"net.ipv4.ip_unprivileged_port_start": "0", "net.ipv4.ping_group_range": "0 2147483647"}
			return nil
		},
	}
}

func hostOf(h container.Host) []oci.SpecOpts {
	var all []oci.SpecOpts
	if h.Privileged {
		all = append(all, oci.WithPrivileged, oci.WithAllDevicesAllowed, oci.WithHostDevices, oci.WithNewPrivileges)
	} else {
		all = append(all, oci.WithLinuxNamespace(specs.LinuxNamespace{Type: specs.CgroupNamespace}), seccomp.WithDefaultProfile())
	}
	if h.PID {
		all = append(all, oci.WithHostNamespace(specs.PIDNamespace))
	}
	if h.IPC {
		all = append(all, oci.WithHostNamespace(specs.IPCNamespace), hostIPC)
	}
	if h.Mount {
		all = append(all, func(_ context.Context, _ oci.Client, _ *containers.Container, s *oci.Spec) error {
			s.Linux.RootfsPropagation = "rshared"
			return nil
		})
	}
	return all
}

// hostIPC shows the shared memory of the node, which is files, too.
func hostIPC(_ context.Context, _ oci.Client, _ *containers.Container, s *oci.Spec) error {
	for i, m := range s.Mounts {
		if m.Destination == "/dev/shm" {
			s.Mounts[i] = bind(m.Destination, m.Destination, "rw", "rprivate")
		}
	}
	return nil
}

func limitsOf(l container.Limits) []oci.SpecOpts {
	var all []oci.SpecOpts
	if l.CPU > 0 {
		all = append(all, oci.WithCPUCFS(l.CPU*cpuPeriod/1000, cpuPeriod))
	}
	if l.Memory > 0 {
		all = append(all, oci.WithMemoryLimit(uint64(l.Memory)))
		if accountsSwap() {
			all = append(all, oci.WithMemorySwap(l.Memory)) // of both memory and swap
		}
	}
	if l.PIDs > 0 {
		all = append(all, oci.WithPidsLimit(l.PIDs))
	}
	return all
}

// accountsSwap reports whether the kernel limits swap: with cgroup version 1 it may be configured not to.
func accountsSwap() bool {
	return unix.Access("/sys/fs/cgroup/cgroup.controllers", unix.F_OK) == nil ||
		unix.Access("/sys/fs/cgroup/memory/memory.memsw.limit_in_bytes", unix.F_OK) == nil
}
