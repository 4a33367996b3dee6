package vm

import (
	"regexp"
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
)

// RestartPolicy says which ended containers are started again. Sidecars are always started again.
type RestartPolicy string

// The restart policies.
const (
	RestartAlways    RestartPolicy = "always"
	RestartOnFailure RestartPolicy = "on-failure"
	RestartNever     RestartPolicy = "never"
)

// Container is one of several programs of an OCI guest. It has its own root file system and shares the network, the kernel
// and the volumes with the other containers.
type Container struct {
	Name    string        `json:"name"` // unique in the VM, a DNS label
	Image   string        `json:"image"`
	Kind    ContainerKind `json:"kind"`
	Process Process       `json:"process"`          // overrides of the image's own configuration
	Mounts  []Mount       `json:"mounts,omitempty"` // mounts of the VM's volumes, in order
	// Hold delays the next containers until this one is released, or until the first run of an app is over.
	Hold bool `json:"hold,omitempty"`
}

// ContainerRecord is what is known about one container of a VM.
type ContainerRecord struct {
	Name        string `json:"name"`
	ImageDigest string `json:"image_digest"`
	// ImageManifest is the manifest at the time of a snapshot. Only records of snapshots have it.
	ImageManifest string          `json:"image_manifest,omitempty"`
	Process       Process         `json:"process"`          // resolved: image configuration and spec merged
	Layers        []string        `json:"layers,omitempty"` // serials of the disks that hold its image, the lowest layer first
	Status        ContainerStatus `json:"status"`           // as last reported by its guest
}

// ContainerState is the state of a container. The strings are public API.
type ContainerState string

// The states of a container.
const (
	ContainerWaiting    ContainerState = "waiting" // waits for its turn, or for its next start
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
	ContainerStartError = "StartError"       // it could not be started
	ContainerCrashLoop  = "CrashLoopBackOff" // it is started again after a back-off
	ContainerInitGoing  = "PodInitializing"  // other containers must finish first
	ContainerUnknown    = "ContainerStatusUnknown"
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
	s.Exit, s.Last = s.Exit.clone(), s.Last.clone()
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
	c.Process, c.Mounts = c.Process.Clone(), cloneSlice(c.Mounts)
	return c
}

// Clone returns a copy of c that shares no memory with it.
func (c ContainerRecord) Clone() ContainerRecord {
	c.Process, c.Layers, c.Status = c.Process.Clone(), cloneSlice(c.Layers), c.Status.Clone()
	return c
}

// Container returns the record of the container called name, nil if none exists.
func (r Record) Container(name string) *ContainerRecord {
	for i := range r.Containers {
		if r.Containers[i].Name == name {
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
	case s.Restart != RestartAlways && s.Restart != RestartOnFailure && s.Restart != RestartNever:
		return errdefs.Invalidf("invalid restart policy %q; use always, on-failure or never", s.Restart)
	}
	known, apps := map[string]bool{}, 0
	for _, c := range s.Containers {
		switch {
		case !containerRE.MatchString(c.Name):
			return errdefs.Invalidf("container name %q is not a DNS label", c.Name)
		case known[c.Name]:
			return errdefs.Invalidf("two containers have the name %q", c.Name)
		case c.Image == "":
			return errdefs.Invalidf("container %s: an image is needed", c.Name)
		case c.Hold && c.Kind == ContainerInit:
			return errdefs.Invalidf("container %s: an init container cannot hold the containers after it; they already wait for its success", c.Name)
		case c.Kind == ContainerApp:
			apps++
		case c.Kind != ContainerInit && c.Kind != ContainerSidecar:
			return errdefs.Invalidf("container %s: invalid kind %q; use init, sidecar or app", c.Name, c.Kind)
		case apps > 0:
			return errdefs.Invalidf("container %s must be listed before the app containers", c.Name)
		}
		known[c.Name] = true
		for _, e := range c.Process.Env {
			if !envRE.MatchString(e.Name) {
				return errdefs.Invalidf("container %s: invalid environment variable name %q", c.Name, e.Name)
			}
		}
	}
	if apps == 0 {
		return errdefs.Invalidf("no container is of kind app; at least one is needed")
	}
	return nil
}
