package convert

import (
	"cmp"
	"fmt"
	"path"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"cocoonstack.io/cocoon/api/contract"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/vm"
)

// Container returns a container that is to be added to a sandbox, with that name in the VM. Mounted, Filtered and PIDsOf complete it.
// Errors: InvalidArgument if a VM cannot have such a container.
func Container(c *cri.ContainerConfig, name string) (vm.Container, error) {
	what := c.GetMetadata().GetName()
	if what == "" || c.GetImage().GetImage() == "" {
		return vm.Container{}, errdefs.Invalidf("the container needs a name and an image")
	}
	if err := containable(c); err != nil {
		return vm.Container{}, fmt.Errorf("container %s: %w", what, err)
	}
	text, err := protojson.Marshal(shown(c))
	if err != nil {
		return vm.Container{}, fmt.Errorf("container %s: keep its configuration: %w", what, err)
	}
	return vm.Container{
		Name: name, Image: c.GetImage().GetImage(), Kind: vm.ContainerEphemeral, Manual: true,
		Process: process(c), Resources: Resources(nil, c.GetLinux().GetResources()),
		PIDs:   vm.PIDs{Own: pidMode(c) == cri.NamespaceMode_CONTAINER},
		Labels: map[string]string{contract.VMLabelCRIContainer: string(text)},
	}, nil
}

func pidMode(c *cri.ContainerConfig) cri.NamespaceMode {
	return c.GetLinux().GetSecurityContext().GetNamespaceOptions().GetPid()
}

// PIDsOf returns the id of the container whose processes another one is to see; "": it sees its own or those of all.
// Errors: InvalidArgument if the configuration names none.
func PIDsOf(c *cri.ContainerConfig) (id string, err error) {
	if pidMode(c) != cri.NamespaceMode_TARGET {
		return "", nil
	}
	if id = c.GetLinux().GetSecurityContext().GetNamespaceOptions().GetTargetId(); id == "" {
		err = errdefs.Invalidf("container %s is to see the processes of another one, and its configuration does not name that", c.GetMetadata().GetName())
	}
	return id, err
}

// shown returns what CRI wants to see again of the configuration. Its environment, which may be secret, is not part of that.
func shown(c *cri.ContainerConfig) *cri.ContainerConfig {
	kept := proto.Clone(c).(*cri.ContainerConfig)
	kept.Envs, kept.Command, kept.Args = nil, nil, nil
	return kept
}

// containable refuses what only a process of the node could have.
func containable(c *cri.ContainerConfig) error {
	switch sc := c.GetLinux().GetSecurityContext(); {
	case len(c.GetCDIDevices()) > 0:
		return errdefs.Invalidf("a VM has no device of the node, so not %s either; remove it", c.GetCDIDevices()[0].GetName())
	case sc.GetRunAsGroup() != nil && sc.GetRunAsUser() == nil && sc.GetRunAsUsername() == "":
		return errdefs.Invalidf("a group is given without a user; give the user, too")
	case sc.GetApparmor().GetProfileType() == cri.SecurityProfile_Localhost:
		return errdefs.Invalidf("the AppArmor profile %q is one of the node's kernel, and the guest has its own; use Unconfined", sc.GetApparmor().GetLocalhostRef())
	}
	for _, m := range c.GetMounts() {
		if m.GetPropagation() != cri.MountPropagation_PROPAGATION_PRIVATE {
			return errdefs.Invalidf("mount %s: mounts do not propagate between the node and a VM; use None", m.GetContainerPath())
		}
		if m.GetRecursiveReadOnly() && !m.GetReadonly() {
			return errdefs.Invalidf("mount %s: it is to be read-only with all that is mounted below it, but not itself; make it read-only", m.GetContainerPath())
		}
	}
	return nil
}

func process(c *cri.ContainerConfig) vm.Process {
	sc := c.GetLinux().GetSecurityContext()
	p := vm.Process{
		Entrypoint: c.GetCommand(), Args: c.GetArgs(), WorkDir: c.GetWorkingDir(), User: user(sc),
		TTY: c.GetTty(), Stdin: c.GetStdin(), StdinOnce: c.GetStdinOnce(),
		ReadOnlyRoot: sc.GetReadonlyRootfs(), Security: security(sc), StopSignal: stopSignal(c.GetStopSignal()),
	}
	for _, e := range c.GetEnvs() {
		p.Env = append(p.Env, vm.EnvVar{Name: e.GetKey(), Value: string(e.GetValue())})
	}
	return p
}

// user returns uid, name, uid:gid or name:gid, or "" for the image's own user.
func user(sc *cri.LinuxContainerSecurityContext) string {
	out := sc.GetRunAsUsername()
	if id := sc.GetRunAsUser(); id != nil {
		out = strconv.FormatInt(id.GetValue(), 10)
	}
	if id := sc.GetRunAsGroup(); id != nil {
		out += ":" + strconv.FormatInt(id.GetValue(), 10)
	}
	return out
}

func security(sc *cri.LinuxContainerSecurityContext) *vm.Security {
	out := &vm.Security{
		Capabilities:    vm.GrantCapabilities(sc.GetCapabilities().GetAddCapabilities(), sc.GetCapabilities().GetDropCapabilities()),
		NoNewPrivileges: sc.GetNoNewPrivs(), Groups: sc.GetSupplementalGroups(),
		StrictGroups: sc.GetSupplementalGroupsPolicy() == cri.SupplementalGroupsPolicy_Strict,
		Filtered:     sc.GetSeccomp() != nil && sc.GetSeccomp().GetProfileType() == cri.SecurityProfile_RuntimeDefault,
	}
	if sc.GetPrivileged() { // in the guest
		out.Capabilities, out.Filtered = vm.AllCapabilities(), false
		return out
	}
	out.Masked, out.ReadOnly = cleaned(sc.GetMaskedPaths()), cleaned(sc.GetReadonlyPaths())
	return out
}

func cleaned(paths []string) (out []string) {
	for _, p := range paths {
		out = append(out, path.Clean(p))
	}
	return out
}

// stopSignal returns the name of a signal; "" is that of the image.
func stopSignal(s cri.Signal) string {
	if s == cri.Signal_SIGNAL_RUNTIME_DEFAULT {
		return ""
	}
	name := strings.TrimPrefix(s.String(), "SIGNAL_")
	return strings.NewReplacer("MINPLUS", "MIN+", "MAXMINUS", "MAX-").Replace(name)
}

// configOf returns what is kept of the configuration with which the container was made.
func configOf(c vm.Container) *cri.ContainerConfig {
	var out cri.ContainerConfig
	if err := (protojson.UnmarshalOptions{DiscardUnknown: true}).Unmarshal([]byte(c.Labels[contract.VMLabelCRIContainer]), &out); err != nil {
		return &cri.ContainerConfig{Metadata: &cri.ContainerMetadata{Name: c.Name}}
	}
	return &out
}

func containerState(s vm.ContainerStatus) cri.ContainerState {
	switch s.State {
	case vm.ContainerRunning:
		return cri.ContainerState_CONTAINER_RUNNING
	case vm.ContainerTerminated:
		return cri.ContainerState_CONTAINER_EXITED
	default:
		return cri.ContainerState_CONTAINER_CREATED
	}
}

// ListedContainer returns a container of r as in a list.
func ListedContainer(r vm.Record, e vm.Ephemeral) *cri.Container {
	c := configOf(e.Spec)
	return &cri.Container{
		Id: ContainerID(r.ID, e.Spec.Name), PodSandboxId: SandboxID(r.ID), Metadata: c.GetMetadata(), Image: c.GetImage(),
		ImageRef: e.Record.ImageDigest, ImageId: e.Record.ImageDigest, State: containerState(e.Record.Status), CreatedAt: e.CreatedAt.UnixNano(),
		Labels: c.GetLabels(), Annotations: c.GetAnnotations(),
	}
}

// ContainerStatus returns the state of a container of r.
func ContainerStatus(r vm.Record, e vm.Ephemeral) *cri.ContainerStatus {
	c, st := configOf(e.Spec), e.Record.Status
	out := &cri.ContainerStatus{
		Id: ContainerID(r.ID, e.Spec.Name), Metadata: c.GetMetadata(), State: containerState(st), CreatedAt: e.CreatedAt.UnixNano(),
		Image: c.GetImage(), ImageRef: e.Record.ImageDigest, ImageId: e.Record.ImageDigest,
		Labels: c.GetLabels(), Annotations: c.GetAnnotations(), Mounts: c.GetMounts(), LogPath: LogPath(r, e.Spec),
		Resources:  &cri.ContainerResources{Linux: allowed(c, e.Spec.Resources)},
		StopSignal: c.GetStopSignal(), Reason: st.Reason, Message: st.Message,
	}
	if out.State == cri.ContainerState_CONTAINER_CREATED {
		out.Reason, out.Message = "", ""
		return out
	}
	if u := st.User; u != nil {
		out.User = &cri.ContainerUser{Linux: &cri.LinuxContainerUser{Uid: u.UID, Gid: u.GID, SupplementalGroups: slices.Clone(u.Groups)}}
	}
	x := st.Exit
	if out.State != cri.ContainerState_CONTAINER_EXITED {
		x = nil
	}
	began := st.StartedAt
	if began.IsZero() && x != nil {
		began = x.StartedAt
	}
	if !began.IsZero() {
		out.StartedAt = max(began.UnixNano(), out.GetCreatedAt()) // the guest's clock may be some milliseconds behind
	}
	if x != nil {
		out.ExitCode, out.FinishedAt = int32(x.Code), max(x.FinishedAt.UnixNano(), out.GetStartedAt()) //nolint:gosec // an exit code has a byte
		out.Reason, out.Message = cmp.Or(x.Reason, st.Reason), cmp.Or(x.Message, st.Message)
		if _, text := Message(e); text != "" {
			out.Message = "" // the kubelet reads it in the file
		}
	}
	return out
}

// LogPath returns the file for the output of a container of r; "": it has none.
func LogPath(r vm.Record, c vm.Container) string {
	dir, file := Config(r).GetLogDirectory(), configOf(c).GetLogPath()
	if dir == "" || file == "" {
		return ""
	}
	return filepath.Join(dir, path.Clean("/"+file))
}
