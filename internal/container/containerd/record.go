package containerd

import (
	"context"
	"encoding/json"
	"fmt"
	"time"

	"github.com/containerd/containerd/v2/client"
	"github.com/containerd/containerd/v2/core/containers"
	"github.com/containerd/typeurl/v2"
	"google.golang.org/protobuf/types/known/anypb"

	"cocoonstack.io/cocoon/internal/container"
	"cocoonstack.io/cocoon/internal/errdefs"
)

// What containerd keeps of a container for us. A container without specKey is not ours: it is not listed, and not touched.
const (
	specKey   = "cocoonstack.io/spec"         // extension: a record as JSON
	specType  = "cocoonstack.io/container.v1" // its type
	runLabel  = "cocoonstack.io/run"          // label: a run as JSON
	goneLabel = "cocoonstack.io/removing"     // label: keep or drop its log, once its removal has begun
	lostWords = "nobody saw how it ended: the node, or the shim of the container, ended with it"
)

// record is what never changes of a container.
type record struct {
	Spec   container.Spec `json:"spec"`
	Digest string         `json:"digest"`
	Stop   int            `json:"stop"` // signal
}

// run is the last run of a container.
type run struct {
	Started time.Time `json:"started"`
	Ended   *ended    `json:"ended,omitempty"` // nil: it has not ended, or nobody saw it
}

// ended is the end of a run.
type ended struct {
	Code int       `json:"code"`
	At   time.Time `json:"at"`
	OOM  bool      `json:"oom,omitempty"`
}

// extension returns the option that keeps a record.
func (k record) extension() (client.NewContainerOpts, error) {
	b, err := json.Marshal(k)
	if err != nil {
		return nil, fmt.Errorf("write the record of container %s: %w", k.Spec.ID, err)
	}
	return func(_ context.Context, _ *client.Client, c *containers.Container) error {
		if c.Extensions == nil {
			c.Extensions = map[string]typeurl.Any{}
		}
		c.Extensions[specKey] = &anypb.Any{TypeUrl: specType, Value: b}
		return nil
	}, nil
}

// recordOf returns the record of a container of ours. False: it is not ours.
func recordOf(c containers.Container) (record, bool, error) {
	ext, ok := c.Extensions[specKey]
	if !ok || ext.GetTypeUrl() != specType {
		return record{}, false, nil
	}
	var k record
	if err := json.Unmarshal(ext.GetValue(), &k); err != nil {
		return record{}, true, errdefs.DataLossf("read the record of container %s: %w", c.ID, err)
	}
	return k, true, nil
}

// runOf returns the last run of a container; the zero value if it was never started.
func runOf(c containers.Container) (run, error) {
	var n run
	text, ok := c.Labels[runLabel]
	if !ok {
		return n, nil
	}
	if err := json.Unmarshal([]byte(text), &n); err != nil {
		return n, errdefs.DataLossf("read the last run of container %s: %w", c.ID, err)
	}
	return n, nil
}

// keep records a run.
func (r *Runtime) keep(ctx context.Context, id string, n run) error {
	b, err := json.Marshal(n)
	if err != nil {
		return fmt.Errorf("write the run of container %s: %w", id, err)
	}
	c := containers.Container{ID: id, Labels: map[string]string{runLabel: string(b)}}
	if _, err := r.client.ContainerService().Update(ctx, c, "labels."+runLabel); err != nil {
		return failed(err, "record the run of container %s", id)
	}
	return nil
}

// removing reports whether the removal of a container has begun, and whether its log is kept.
func removing(c containers.Container) (begun, keepLog bool) {
	how, begun := c.Labels[goneLabel]
	return begun, how == "keep"
}

// doom records that the removal of a container begins.
func (r *Runtime) doom(ctx context.Context, id string, keepLog bool) error {
	how := "drop"
	if keepLog {
		how = "keep"
	}
	c := containers.Container{ID: id, Labels: map[string]string{goneLabel: how}}
	if _, err := r.client.ContainerService().Update(ctx, c, "labels."+goneLabel); err != nil {
		return failed(err, "remove container %s", id)
	}
	return nil
}

// get returns a container of ours with its record. Errors: NotFound.
func (r *Runtime) get(ctx context.Context, id string) (containers.Container, record, error) {
	if err := container.CheckID(id); err != nil {
		return containers.Container{}, record{}, err
	}
	c, err := r.client.ContainerService().Get(ctx, id)
	if err != nil {
		return c, record{}, failed(err, "find container %s", id)
	}
	k, ours, err := recordOf(c)
	if err == nil && !ours {
		err = errdefs.NotFoundf("container %s of namespace %s was made by another program", id, r.cfg.Namespace)
	}
	return c, k, err
}
