package vm

import (
	"fmt"
	"maps"
	"path"
	"regexp"
	"slices"
	"time"

	"cocoonstack.io/cocoon/internal/errdefs"
)

// MaxContainers is the maximum number of containers in one VM.
const MaxContainers = 32

// ContainerKind says when a container runs.
type ContainerKind string

// The kinds of containers.
const (
	ContainerInit    ContainerKind = "init"    // must succeed before the next containers start
	ContainerSidecar ContainerKind = "sidecar" // starts in its place among the init containers and is kept running
	ContainerApp     ContainerKind = "app"     // starts after all of those

	// ContainerEphemeral is added to a running guest and runs once. Nothing depends on its end. It ends with the guest at the
	// latest, and a guest that boots again does not have it.
	ContainerEphemeral ContainerKind = "ephemeral"
)

// RestartPolicy says which ended containers are started again.
type RestartPolicy string

// The restart policies.
const (
	RestartAlways    RestartPolicy = "always"
	RestartOnFailure RestartPolicy = "on-failure"
	RestartNever     RestartPolicy = "never"
)

// Restart says which ended runs of a container are followed by another one.
type Restart struct {
	Policy RestartPolicy `json:"policy"`
	Rules  []RestartRule `json:"rules,omitempty"` // a run that matches one is followed by another, whatever the policy says
}

// RestartRule matches runs by their exit code: those with one of the codes, or those with none of them.
type RestartRule struct {
	Not   bool  `json:"not,omitempty"`
	Codes []int `json:"codes,omitempty"` // 0 to 255
}

// MaxRestartRules and MaxRestartCodes limit a container's rules, and the codes of one of them. Kubernetes has the same limits.
const (
	MaxRestartRules = 20
	MaxRestartCodes = 255
)

// Again reports whether another run follows one that ended with this exit code. A run that was killed may have failed with code 0.
func (r Restart) Again(code int, failed bool) bool {
	for _, rule := range r.Rules {
		if slices.Contains(rule.Codes, code) != rule.Not {
			return true
		}
	}
	return r.Policy == RestartAlways || r.Policy == RestartOnFailure && failed
}

// Clone returns a copy of r that shares no memory with it.
func (r *Restart) Clone() *Restart {
	if r == nil {
		return nil
	}
	c := *r
	c.Rules = cloneSlice(c.Rules)
	for i := range c.Rules {
		c.Rules[i].Codes = cloneSlice(c.Rules[i].Codes)
	}
	return &c
}

// RestartOf returns what restarts c, a container of s: sidecars are always started again, init containers at most until they succeed.
func (s Spec) RestartOf(c Container) Restart {
	r := Restart{Policy: s.Restart}
	if c.Restart != nil {
		r = *c.Restart
	}
	switch {
	case c.Kind == ContainerSidecar:
		r = Restart{Policy: RestartAlways}
	case c.Kind == ContainerInit && r.Policy == RestartAlways:
		r.Policy = RestartOnFailure
	}
	return r
}

// Container is a program of an OCI guest that is started again in the running guest when it ends. It has its own root file
// system and shares the network, the kernel and the volumes with the other containers.
type Container struct {
	Name    string        `json:"name"` // unique in the VM, a DNS label
	Image   string        `json:"image"`
	Kind    ContainerKind `json:"kind"`
	Process Process       `json:"process"`          // overrides of the image's own configuration
	Mounts  []Mount       `json:"mounts,omitempty"` // mounts of the VM's volumes, in order
	// Hold delays the next containers until this one is released, or until the first run of an app is over.
	Hold bool `json:"hold,omitempty"`
	// Root makes the VM's own root the root of the container. Such a container is the only one of its VM, and it has no Image. If
	// the VM's image boots itself, the VM has no containers, and Process and Mounts are the VM's.
	Root bool `json:"root,omitempty"`
	// MessagePath is the file in which the container leaves the message of its end, at most MaxMessage bytes; "": none. With
	// MessageFromLog, a run that fails without such a message has the end of its output as message.
	MessagePath    string `json:"message_path,omitempty"`
	MessageFromLog bool   `json:"message_from_log,omitempty"`

	Resources *Resources `json:"resources,omitempty"` // nil: no limits
	Restart   *Restart   `json:"restart,omitempty"`   // nil: the policy of the VM

	Labels map[string]string `json:"labels,omitempty"` // opaque to the engine; doors keep their own keys here
	Manual bool              `json:"manual,omitempty"` // of kind ephemeral: it starts when somebody starts it
	PIDs   PIDs              `json:"pids,omitzero"`    // of kind ephemeral: the processes that it sees
	// Volumes are what only this container has, beside the volumes of its VM: folders, files and block devices of the node, and the files of
	// images. The guest gets them when the container is added to a sandbox, and loses them when it is removed.
	Volumes []Volume `json:"volumes,omitempty"`
}

// PIDs says which processes the programs of a container see. The zero value stands for all of the guest. Of at most one field is set.
type PIDs struct {
	Own bool   `json:"own,omitempty"` // those of the container, whose program is process 1
	Of  string `json:"of,omitempty"`  // those that the running container with this name sees
}

// MaxMessage is the maximum length of the message of a container's end in bytes, as with a kubelet.
const MaxMessage = 4096

// ContainerRecord is what is known about one container of a VM.
type ContainerRecord struct {
	Name        string `json:"name"`
	ImageDigest string `json:"image_digest"`
	Root        bool   `json:"root,omitempty"` // as in Container
	// ImageManifest is the manifest at the time of a snapshot. Only records of snapshots have it.
	ImageManifest string          `json:"image_manifest,omitempty"`
	Process       Process         `json:"process"`          // resolved: image configuration and spec merged
	Layers        []string        `json:"layers,omitempty"` // serials of the disks that hold its image, the lowest layer first
	Status        ContainerStatus `json:"status"`           // as last reported by its guest
}

// Ephemeral is a container that was added to the guest of a running VM.
type Ephemeral struct {
	Spec   Container       `json:"spec"`
	Record ContainerRecord `json:"record"` // its Layers are disks with a Port, or disks of other containers; none once its guest has ended
	// Volumes are those of Spec.Volumes that are disks: the layers of an image, or a device, which has one disk and no image. As for the
	// layers, there are none once its guest has ended.
	Volumes []ImageVolume `json:"volumes,omitempty"`

	CreatedAt time.Time `json:"created_at,omitzero"` // when it was added; zero: by an earlier release
}

// Clone returns a copy of e that shares no memory with it.
func (e Ephemeral) Clone() Ephemeral {
	e.Spec, e.Record, e.Volumes = e.Spec.Clone(), e.Record.Clone(), cloneSlice(e.Volumes)
	for i := range e.Volumes {
		e.Volumes[i] = e.Volumes[i].Clone()
	}
	return e
}

// Uses reports whether the disk with that serial holds a part of e.
func (e Ephemeral) Uses(serial string) bool {
	return slices.Contains(e.Record.Layers, serial) ||
		slices.ContainsFunc(e.Volumes, func(v ImageVolume) bool { return slices.Contains(v.Layers, serial) })
}

// ContainerState is the state of a container. The strings are public API.
type ContainerState string

// The states of a container.
const (
	ContainerWaiting    ContainerState = "waiting" // waits for its turn, or for its next start
	ContainerCreated    ContainerState = "created" // Manual, and nobody has started it yet
	ContainerRunning    ContainerState = "running"
	ContainerTerminated ContainerState = "terminated" // ended for good
)

// ContainerStatus is the state of a container and how it got there.
type ContainerStatus struct {
	State     ContainerState `json:"state,omitempty"` // "" until the guest has reported
	Reason    string         `json:"reason,omitempty"`
	Message   string         `json:"message,omitempty"`
	StartedAt time.Time      `json:"started_at,omitzero"` // start of the current run, or of the last one
	Exit      *ContainerExit `json:"exit,omitempty"`      // of the last run, when State is terminated
	Last      *ContainerExit `json:"last,omitempty"`      // of the run before it
	Restarts  int            `json:"restarts"`

	User *ContainerUser `json:"user,omitempty"` // of the current run, or of the last one; nil: it has not started, or its guest does not tell
}

// ContainerUser is the user that the first process of a container began as. The guest finds it in the files of the image.
type ContainerUser struct {
	UID    int64   `json:"uid"`
	GID    int64   `json:"gid"`
	Groups []int64 `json:"groups,omitempty"` // all of them, GID included; at most MaxUserGroups are told
}

// MaxUserGroups is the maximum number of groups in a ContainerUser.
const MaxUserGroups = 256

// Clone returns a copy of u that shares no memory with it.
func (u *ContainerUser) Clone() *ContainerUser {
	if u == nil {
		return nil
	}
	c := *u
	c.Groups = cloneSlice(u.Groups)
	return &c
}

// ContainerExit is how one run of a container ended.
type ContainerExit struct {
	Code       int       `json:"code"` // 128+n for death by signal n
	Reason     string    `json:"reason"`
	Message    string    `json:"message,omitempty"`
	StartedAt  time.Time `json:"started_at,omitzero"`
	FinishedAt time.Time `json:"finished_at,omitzero"`
}

// Reasons of a container's state. They are the reasons of Kubernetes.
const (
	ContainerCompleted  = "Completed"
	ContainerError      = "Error"
	ContainerStartError = "StartError"        // it could not be started
	ContainerCrashLoop  = "CrashLoopBackOff"  // it is started again after a back-off
	ContainerInitGoing  = "PodInitializing"   // other containers must finish first
	ContainerCreating   = "ContainerCreating" // it is about to start
	ContainerUnknown    = "ContainerStatusUnknown"
	ContainerOOMKilled  = "OOMKilled" // the guest's memory ran out

	ContainerConfigError = "CreateContainerConfigError" // what it needs from a volume is not there yet
)

// LostExitCode is the exit code of a run whose end nobody saw: the code of a killed process.
const LostExitCode = 137

// Run is the number of the current run, or of the last one. The first run is 1.
func (s ContainerStatus) Run() int { return s.Restarts + 1 }

// Next is the number of a container's first run in a guest that boots now, where s is its status before the boot. The very
// first run is 1.
func (s ContainerStatus) Next() int {
	if s.State == "" || s.StartedAt.IsZero() {
		return s.Restarts + 1
	}
	return s.Restarts + 2
}

// Cut returns s for a guest that ended at that time without reporting how the container ended.
func (s ContainerStatus) Cut(at time.Time) ContainerStatus {
	if s.State != ContainerRunning {
		return s
	}
	s.State, s.Reason, s.Message = ContainerTerminated, ContainerError, ""
	s.Exit = &ContainerExit{
		Code: LostExitCode, Reason: ContainerUnknown, Message: "its VM ended while it ran", StartedAt: s.StartedAt, FinishedAt: at,
	}
	return s
}

// Clone returns a copy of s that shares no memory with it.
func (s ContainerStatus) Clone() ContainerStatus {
	s.Exit, s.Last, s.User = s.Exit.clone(), s.Last.clone(), s.User.Clone()
	return s
}

func (x *ContainerExit) clone() *ContainerExit {
	if x == nil {
		return nil
	}
	return new(*x)
}

// Clone returns a copy of c that shares no memory with it.
func (c Container) Clone() Container {
	c.Process, c.Mounts, c.Resources, c.Restart = c.Process.Clone(), cloneSlice(c.Mounts), c.Resources.Clone(), c.Restart.Clone()
	c.Labels, c.Volumes = maps.Clone(c.Labels), cloneSlice(c.Volumes)
	for i := range c.Volumes {
		c.Volumes[i] = c.Volumes[i].Clone()
	}
	return c
}

// Clone returns a copy of c that shares no memory with it.
func (c ContainerRecord) Clone() ContainerRecord {
	c.Process, c.Layers, c.Status = c.Process.Clone(), cloneSlice(c.Layers), c.Status.Clone()
	return c
}

// RootContainer reports whether r's VM has a single container, whose root is the VM's own.
func (r Record) RootContainer() bool { return len(r.Containers) == 1 && r.Containers[0].Root }

// Bootable returns s for an image that boots itself: a container whose root would be the VM's own is no container there.
func (s Spec) Bootable() Spec {
	if len(s.Containers) == 1 && s.Containers[0].Root {
		s.Process, s.Mounts = s.Containers[0].Process, s.Containers[0].Mounts
		s.Containers, s.Restart = nil, ""
	}
	return s
}

// Container returns the record of the container called name, nil if none exists; see Ephemeral for those that were added. A container that is the whole VM is found by any
// name, because the pod of a clone has names of its own.
func (r Record) Container(name string) *ContainerRecord {
	for i := range r.Ephemeral {
		if r.Ephemeral[i].Record.Name == name {
			return &r.Ephemeral[i].Record
		}
	}
	for i := range r.Containers {
		if r.Containers[i].Name == name || r.RootContainer() {
			return &r.Containers[i]
		}
	}
	return nil
}

var containerRE = regexp.MustCompile(`^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$`)

// ValidateContainers is the part of Validate that checks containers.
func (s Spec) ValidateContainers() error {
	if len(s.Containers) == 0 {
		if s.Restart != "" {
			return errdefs.Invalidf("a restart policy is set, but the VM has no containers; omit the policy")
		}
		return nil
	}
	switch {
	case len(s.Containers) > MaxContainers:
		return errdefs.Invalidf("too many containers: %d; at most %d are possible", len(s.Containers), MaxContainers)
	case !s.Process.Empty() || len(s.Mounts) > 0:
		return errdefs.Invalidf("a VM with containers cannot have a process or mounts of its own; set them for its containers")
	}
	if err := s.Restart.validate(); err != nil {
		return err
	}
	known, apps := map[string]bool{}, 0
	for _, c := range s.Containers {
		switch {
		case !containerRE.MatchString(c.Name):
			return errdefs.Invalidf("container name %q is not a DNS label", c.Name)
		case known[c.Name]:
			return errdefs.Invalidf("two containers have the name %q", c.Name)
		case c.Image == "" && !c.Root:
			return errdefs.Invalidf("container %s: an image is needed", c.Name)
		case c.Hold && c.Kind == ContainerInit:
			return errdefs.Invalidf("container %s: an init container cannot hold the containers after it; they already wait for its success", c.Name)
		case len(c.Volumes) > 0:
			return errdefs.Invalidf("container %s: only a container of kind %s can have volumes of its own; give the volumes to the VM", c.Name, ContainerEphemeral)
		case c.PIDs != PIDs{}:
			return errdefs.Invalidf("container %s: only a container of kind %s can have processes of its own or those of another container", c.Name, ContainerEphemeral)
		case c.Manual:
			return errdefs.Invalidf("container %s: only a container of kind %s can wait for somebody to start it", c.Name, ContainerEphemeral)
		case c.Root && (len(s.Containers) > 1 || c.Kind != ContainerApp || c.Image != ""):
			return errdefs.Invalidf("container %s cannot have the VM's own root; only the single app container of a VM can, without an image of its own", c.Name)
		case c.Kind == ContainerApp:
			apps++
		case c.Kind != ContainerInit && c.Kind != ContainerSidecar:
			return errdefs.Invalidf("container %s: invalid kind %q; use init, sidecar or app", c.Name, c.Kind)
		case apps > 0:
			return errdefs.Invalidf("container %s must be listed before the app containers", c.Name)
		}
		if err := c.validateProgram(); err != nil {
			return err
		}
		if err := c.Restart.validate(); err != nil {
			return fmt.Errorf("container %s: %w", c.Name, err)
		}
		known[c.Name] = true
	}
	if apps == 0 {
		return errdefs.Invalidf("no container is of kind app; at least one is needed")
	}
	return nil
}

func (p RestartPolicy) validate() error {
	if p != RestartAlways && p != RestartOnFailure && p != RestartNever {
		return errdefs.Invalidf("invalid restart policy %q; use always, on-failure or never", p)
	}
	return nil
}

func (r *Restart) validate() error {
	if r == nil {
		return nil
	}
	if len(r.Rules) > MaxRestartRules {
		return errdefs.Invalidf("%d restart rules; at most %d are possible", len(r.Rules), MaxRestartRules)
	}
	for _, rule := range r.Rules {
		if len(rule.Codes) > MaxRestartCodes {
			return errdefs.Invalidf("a restart rule has %d exit codes; at most %d are possible", len(rule.Codes), MaxRestartCodes)
		}
		for _, code := range rule.Codes {
			if code < 0 || code > 255 {
				return errdefs.Invalidf("a restart rule has the exit code %d; use 0 to 255", code)
			}
		}
	}
	return r.Policy.validate()
}

// validateProgram checks what c runs and the message of its end.
func (c Container) validateProgram() error {
	if err := c.Process.validate(); err != nil {
		return fmt.Errorf("container %s: %w", c.Name, err)
	}
	if err := c.Resources.Validate(); err != nil {
		return fmt.Errorf("container %s: %w", c.Name, err)
	}
	if c.MessagePath != "" && (!path.IsAbs(c.MessagePath) || path.Clean(c.MessagePath) != c.MessagePath || c.MessagePath == "/") {
		return errdefs.Invalidf("container %s: the path of its message, %q, must be absolute and without . and ..", c.Name, c.MessagePath)
	}
	for _, e := range c.Process.Env {
		if !envRE.MatchString(e.Name) {
			return errdefs.Invalidf("container %s: invalid environment variable name %q", c.Name, e.Name)
		}
	}
	return nil
}

// ValidateEphemeral checks a container that is to be added to a running guest.
func (c Container) ValidateEphemeral() error {
	switch {
	case !containerRE.MatchString(c.Name):
		return errdefs.Invalidf("container name %q is not a DNS label", c.Name)
	case c.Kind != ContainerEphemeral:
		return errdefs.Invalidf("container %s has the kind %q; only a container of kind %s can be added to a running VM", c.Name, c.Kind, ContainerEphemeral)
	case c.Image == "":
		return errdefs.Invalidf("container %s: an image is needed", c.Name)
	case len(c.Mounts) > MaxMounts:
		return errdefs.Invalidf("container %s has %d mounts; at most %d are possible", c.Name, len(c.Mounts), MaxMounts)
	case c.PIDs.Of != "" && (c.PIDs.Own || c.PIDs.Of == c.Name):
		return errdefs.Invalidf("container %s is to see its own processes and those of container %s; choose one", c.Name, c.PIDs.Of)
	case c.Root || c.Hold || c.Restart != nil:
		return errdefs.Invalidf("container %s is added to a running VM, so it cannot have the VM's own root, hold other containers or restart", c.Name)
	}
	if err := c.validateVolumes(); err != nil {
		return fmt.Errorf("container %s: %w", c.Name, err)
	}
	return c.validateProgram()
}
