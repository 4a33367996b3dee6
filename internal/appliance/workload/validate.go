package workload

import (
	"errors"
	"fmt"
	"maps"
	"path"
	"regexp"
	"slices"
	"strings"

	"google.golang.org/protobuf/proto"

	capsulev1 "cocoonstack.io/cocoon/api/capsule/v1"
	"cocoonstack.io/cocoon/internal/errdefs"
)

// Limits of a workload.
const (
	MaxBytes = 256 << 10 // of the whole message
	maxList  = 256       // mounts, ports, workloads to wait for, and paths of the machine
	maxTold  = 20        // faults in one answer
	maxGrace = 3600      // seconds
	maxProbe = 86400     // seconds, of each time of a probe
)

var nameRE = regexp.MustCompile(`^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$`)

// ValidateName returns an InvalidArgument error unless name can be that of a workload or a volume: a DNS label (RFC 1123).
func ValidateName(name string) error {
	if !nameRE.MatchString(name) {
		return errdefs.Invalidf("the name %.80q is no DNS label: use 1 to 63 lower-case letters, digits and hyphens, with a letter or digit at both ends", name)
	}
	return nil
}

// Validate returns an InvalidArgument error that names each invalid field of w.
func Validate(w *capsulev1.Workload) error {
	if err := ValidateName(w.GetName()); err != nil {
		return err
	}
	if n := proto.Size(w); n > MaxBytes {
		return errdefs.Invalidf("workload %s has %d bytes; at most %d are possible", w.GetName(), n, MaxBytes)
	}
	if unknown(w.ProtoReflect()) {
		return errdefs.Invalidf("workload %s has fields that this version of Cocoon does not know; update the machine, or leave them out", w.GetName())
	}
	lists := []int{len(w.GetDependsOn()), len(PartsOf(w).GetMounts()), len(PartsOf(w).GetPorts()), len(w.GetContainer().GetHostBindPaths())}
	if slices.Max(lists) > maxList {
		return errdefs.Invalidf("workload %s: a list of mounts, ports, paths or workloads has at most %d entries", w.GetName(), maxList)
	}
	var v faults
	switch w.GetKind() {
	case capsulev1.WorkloadKind_WORKLOAD_KIND_CONTAINER:
		v.that(w.GetContainer() != nil && w.GetMicroVm() == nil, "container", "a workload of kind Container has this field, and not microVm")
		v.container(w.GetContainer())
	case capsulev1.WorkloadKind_WORKLOAD_KIND_MICRO_VM:
		v.that(w.GetMicroVm() != nil && w.GetContainer() == nil, "microVm", "a workload of kind MicroVM has this field, and not container")
		v.microVM(w.GetMicroVm())
	case capsulev1.WorkloadKind_WORKLOAD_KIND_UNSPECIFIED:
		fallthrough
	default:
		v.add("kind", "use Container or MicroVM")
	}
	v.common(w)
	if len(v) == 0 {
		v.parts(w)
	}
	if len(v) > 0 {
		return errdefs.New(errdefs.InvalidArgument, "workload %s: %w", w.GetName(), errors.Join(v[:min(len(v), maxTold)]...))
	}
	return nil
}

// faults are what is wrong with a workload.
type faults []error

func (v *faults) add(field, format string, args ...any) {
	*v = append(*v, fmt.Errorf("%s: %s", field, fmt.Sprintf(format, args...)))
}

func (v *faults) that(holds bool, field, format string, args ...any) {
	if !holds {
		v.add(field, format, args...)
	}
}

func (v *faults) common(w *capsulev1.Workload) {
	_, known := capsulev1.DesiredState_name[int32(w.GetDesiredState())]
	v.that(known && w.GetDesiredState() != capsulev1.DesiredState_DESIRED_STATE_DELETING, "desiredState", "use RUNNING or STOPPED; delete a workload to remove it")
	_, known = capsulev1.RestartPolicy_name[int32(w.GetRestartPolicy())]
	v.that(known, "restartPolicy", "there is no policy %d", w.GetRestartPolicy())
	v.that(w.GetStopGraceSeconds() <= maxGrace, "stopGraceSeconds", "%d is more than %d", w.GetStopGraceSeconds(), maxGrace)
	v.that(w.GetHostname() == "" || nameRE.MatchString(w.GetHostname()), "hostname", "%.80q is no DNS label", w.GetHostname())
	for i, name := range w.GetDependsOn() {
		field := fmt.Sprintf("dependsOn[%d]", i)
		v.that(nameRE.MatchString(name), field, "%.80q is not the name of a workload", name)
		v.that(name != w.GetName(), field, "a workload cannot wait for itself")
		v.that(!slices.Contains(w.GetDependsOn()[:i], name), field, "%.80q is there twice", name)
	}
	for field, p := range map[string]*capsulev1.Probe{"startupProbe": w.GetStartupProbe(), "livenessProbe": w.GetLivenessProbe()} {
		v.probe(field, p, w)
		v.that(p.GetSuccessThreshold() <= 1, field+".successThreshold", "it is 1 for this probe")
	}
	v.probe("readinessProbe", w.GetReadinessProbe(), w)
}

func (v *faults) probe(field string, p *capsulev1.Probe, w *capsulev1.Workload) {
	if p == nil {
		return
	}
	alone := Network(w) == capsulev1.NetworkMode_NETWORK_MODE_NONE
	switch a := p.GetAction().(type) {
	case *capsulev1.Probe_Exec:
		v.that(len(a.Exec.GetCommand()) > 0 && a.Exec.GetCommand()[0] != "", field+".exec.command", "name a program")
	case *capsulev1.Probe_Http:
		v.port(field+".http.port", a.Http.GetPort())
		v.that(!alone, field+".http", "a workload without a network has only exec probes")
		v.that(slices.Contains([]string{"", "http", "https"}, lower(a.Http.GetScheme())), field+".http.scheme", "use http or https")
		v.that(a.Http.GetPath() == "" || strings.HasPrefix(a.Http.GetPath(), "/"), field+".http.path", "begin with /")
	case *capsulev1.Probe_Tcp:
		v.port(field+".tcp.port", a.Tcp.GetPort())
		v.that(!alone, field+".tcp", "a workload without a network has only exec probes")
	default:
		v.add(field, "use one of exec, http and tcp")
	}
	for name, n := range map[string]uint32{"initialDelaySeconds": p.GetInitialDelaySeconds(), "periodSeconds": p.GetPeriodSeconds(), "timeoutSeconds": p.GetTimeoutSeconds()} {
		v.that(n <= maxProbe, field+"."+name, "%d is more than %d", n, maxProbe)
	}
	v.that(p.GetSuccessThreshold() <= 1000 && p.GetFailureThreshold() <= 1000, field, "a threshold is at most 1000")
}

func (v *faults) container(c *capsulev1.ContainerSpec) {
	v.image("container.image", c.GetImage())
	_, known := capsulev1.NetworkMode_name[int32(c.GetNetworkMode())]
	v.that(known, "container.networkMode", "there is no mode %d", c.GetNetworkMode())
	for i, b := range c.GetHostBindPaths() {
		_, err := ParseBind(b)
		v.that(err == nil, fmt.Sprintf("container.hostBindPaths[%d]", i), "%v", err)
	}
	v.that(c.GetMemoryMib() == 0 || c.GetMemoryMib() >= 6, "container.memoryMib", "%d is too little for any program; use at least 6", c.GetMemoryMib())
}

func (v *faults) microVM(m *capsulev1.MicroVMSpec) {
	own := m.GetKernelPath() != "" || m.GetRootfsPath() != "" || m.GetInitramfsPath() != ""
	v.that(!own || m.GetImage() == "", "microVm.image", "a VM boots an image, or kernelPath and rootfsPath")
	if !own {
		v.image("microVm.image", m.GetImage())
	}
	for field, p := range map[string]string{"microVm.kernelPath": m.GetKernelPath(), "microVm.rootfsPath": m.GetRootfsPath()} {
		v.that(!own || absolute(p), field, "%.200q is not the absolute path of a file", p)
	}
	v.that(m.GetInitramfsPath() == "" || absolute(m.GetInitramfsPath()), "microVm.initramfsPath", "%.200q is not the absolute path of a file", m.GetInitramfsPath())
	_, known := capsulev1.MicroVMBackend_name[int32(m.GetBackend())]
	v.that(known, "microVm.backend", "there is no backend %d", m.GetBackend())
}

// OwnImages begins the names of the images that the machine makes of kernels and file systems of its administrator. No workload names one,
// and nobody sends one.
const OwnImages = "capsule-own/"

// image checks the name of an image roughly. The store of images says whether it is one.
func (v *faults) image(field, name string) {
	v.that(!strings.Contains(name, OwnImages), field, "images of %s are made by the machine; use kernelPath and rootfsPath", OwnImages)
	v.that(name != "" && len(name) <= 512 && !strings.ContainsFunc(name, func(r rune) bool { return r <= ' ' || r > '~' }), field, "%.80q is not the name of an image", name)
}

// parts checks what both kinds have. Precondition: w has the field of its kind.
func (v *faults) parts(w *capsulev1.Workload) {
	p, at := PartsOf(w), "container."
	if w.GetMicroVm() != nil {
		at = "microVm."
	}
	for _, text := range slices.Concat(p.GetCommand(), p.GetArgs(), slices.Collect(maps.Values(p.GetEnv()))) {
		v.that(!strings.ContainsRune(text, 0), at+"command", "arguments and variables cannot contain a zero byte")
	}
	for _, name := range slices.Sorted(maps.Keys(p.GetEnv())) {
		v.that(name != "" && !strings.ContainsAny(name, "=\x00"), at+"env", "%.80q is not the name of a variable", name)
	}
	v.mounts(at, p.GetMounts())
	v.ports(at, p.GetPorts())
	if len(p.GetPorts()) > 0 {
		v.that(Network(w) == capsulev1.NetworkMode_NETWORK_MODE_BRIDGE, at+"ports", "only workloads on the bridge have ports of the machine; in mode HOST each port is one")
	}
}

func (v *faults) mounts(at string, mounts []*capsulev1.VolumeMount) {
	var paths, names []string
	for i, m := range mounts {
		field := fmt.Sprintf("%smounts[%d]", at, i)
		v.that(nameRE.MatchString(m.GetVolumeName()), field+".volumeName", "%.80q is not the name of a volume", m.GetVolumeName())
		v.that(!slices.Contains(names, m.GetVolumeName()), field+".volumeName", "%.80q is mounted twice", m.GetVolumeName())
		p := m.GetMountPath()
		v.that(absolute(p) && p != "/" && !below(p, "/proc", "/sys", "/dev"), field+".mountPath", "%.200q is not an absolute path without . and .. below which a volume can be; it is not /, /proc, /sys or /dev", p)
		v.that(!slices.Contains(paths, p), field+".mountPath", "%.200q is there twice", p)
		paths, names = append(paths, p), append(names, m.GetVolumeName())
	}
}

func (v *faults) ports(at string, ports []*capsulev1.PortMapping) {
	var seen []string
	for i, p := range ports {
		field := fmt.Sprintf("%sports[%d]", at, i)
		v.port(field+".containerPort", p.GetContainerPort())
		v.port(field+".hostPort", p.GetHostPort())
		v.that(slices.Contains([]string{"tcp", "udp", "sctp"}, Protocol(p)), field+".protocol", "%.20q is not tcp, udp or sctp", p.GetProtocol())
		v.that(!slices.Contains(seen, hostPort(p)), field+".hostPort", "%s is there twice", hostPort(p))
		seen = append(seen, hostPort(p))
	}
}

func (v *faults) port(field string, n uint32) {
	v.that(n >= 1 && n <= 65535, field, "%d is not a port; use 1 to 65535", n)
}

func hostPort(p *capsulev1.PortMapping) string {
	return fmt.Sprintf("%d/%s", p.GetHostPort(), Protocol(p))
}

func below(p string, dirs ...string) bool {
	return slices.ContainsFunc(dirs, func(d string) bool { return p == d || strings.HasPrefix(p, d+"/") })
}

// absolute reports whether p is an absolute path without . and .. parts.
func absolute(p string) bool { return path.IsAbs(p) && path.Clean(p) == p }

func lower(s string) string { return strings.ToLower(s) }

// Bind is a path of the machine that a container sees.
type Bind struct {
	Source, Path string
	ReadOnly     bool
}

// ParseBind parses PATH, SOURCE:PATH, or either with :ro or :rw at the end. Errors: InvalidArgument.
func ParseBind(text string) (Bind, error) {
	parts := strings.Split(text, ":")
	var b Bind
	if last := parts[len(parts)-1]; len(parts) > 1 && (last == "ro" || last == "rw") {
		b.ReadOnly, parts = last == "ro", parts[:len(parts)-1]
	}
	b.Source, b.Path = parts[0], parts[len(parts)-1]
	for _, p := range parts {
		if !absolute(p) {
			return Bind{}, errdefs.Invalidf("%.200q is not PATH or SOURCE:PATH, with :ro at the end for reading only; paths are absolute, without . and ..", text)
		}
	}
	if len(parts) > 2 {
		return Bind{}, errdefs.Invalidf("%.200q has more than two paths", text)
	}
	return b, nil
}

// Reaches returns the fields of w that give control over the machine, or over its network. Only administrators may set them.
func Reaches(w *capsulev1.Workload) (fields []string) {
	c := w.GetContainer()
	for _, f := range []struct {
		set  bool
		name string
	}{
		{c.GetPrivileged(), "privileged"},
		{c.GetNetworkMode() == capsulev1.NetworkMode_NETWORK_MODE_HOST, "networkMode HOST"},
		{c.GetHostPid(), "hostPid"},
		{c.GetHostMount(), "hostMount"},
		{c.GetHostIpc(), "hostIpc"},
		{len(c.GetHostBindPaths()) > 0, "hostBindPaths"},
		{w.GetMicroVm().GetKernelPath() != "", "kernelPath"},
		{w.GetMicroVm().GetRootfsPath() != "", "rootfsPath"},
		{w.GetMicroVm().GetInitramfsPath() != "", "initramfsPath"},
	} {
		if f.set {
			fields = append(fields, f.name)
		}
	}
	return fields
}
