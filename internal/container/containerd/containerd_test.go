package containerd

import (
	"context"
	"errors"
	"fmt"
	"net"
	"slices"
	"testing"
	"time"

	"github.com/containerd/containerd/api/types/task"
	"github.com/containerd/containerd/v2/core/containers"
	registry "github.com/containerd/containerd/v2/core/remotes/errors"
	cerrdefs "github.com/containerd/errdefs"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/timestamppb"

	"cocoonstack.io/cocoon/internal/container"
	"cocoonstack.io/cocoon/internal/errdefs"
)

func TestStopSignalOfImage(t *testing.T) {
	for name, want := range map[string]int{"": 15, "SIGQUIT": 3, "quit": 3, "10": 10, "SIGRTMIN+3": 37, "nonsense": 15, "-1": 15, "999": 15} {
		if got := stopSignal(name); got != want {
			t.Errorf("%q: %d, want %d", name, got, want)
		}
	}
}

func TestCommand(t *testing.T) {
	image := ocispec.ImageConfig{Entrypoint: []string{"entry"}, Cmd: []string{"cmd"}}
	for _, tt := range []struct {
		s    container.Spec
		want []string
	}{
		{container.Spec{}, []string{"entry", "cmd"}},
		{container.Spec{Args: []string{"a"}}, []string{"entry", "a"}},
		{container.Spec{Command: []string{"c"}}, []string{"c"}},
		{container.Spec{Command: []string{"c"}, Args: []string{"a"}}, []string{"c", "a"}},
	} {
		if got := command(tt.s, image); !slices.Equal(got, tt.want) {
			t.Errorf("%+v: %v, want %v", tt.s, got, tt.want)
		}
	}
}

func TestNormal(t *testing.T) {
	for ref, want := range map[string]string{
		"nginx": "docker.io/library/nginx:latest", "a/b:1": "docker.io/a/b:1", "host:5000/a": "host:5000/a:latest",
		"UPPER": "", "": "", "a b": "", "../x": "", "-x": "",
	} {
		got, err := normal(ref)
		if got != want || (want == "") != errdefs.IsInvalid(err) {
			t.Errorf("%q: %q, %v, want %q", ref, got, err, want)
		}
	}
}

func TestState(t *testing.T) {
	start, end := time.Unix(100, 0).UTC(), time.Unix(200, 0).UTC()
	created := &task.Process{Status: task.Status_CREATED, Pid: 9}
	stopped := &task.Process{Status: task.Status_STOPPED, Pid: 9, ExitStatus: 5, ExitedAt: timestamppb.New(end)}
	for name, tt := range map[string]struct {
		n    run
		t    *task.Process
		want container.State
	}{
		"created":                {want: container.State{Phase: container.Created}},
		"is being started":       {t: created, want: container.State{Phase: container.Created}},
		"runs":                   {run{Started: start}, &task.Process{Status: task.Status_RUNNING, Pid: 9}, container.State{Phase: container.Running, PID: 9, StartedAt: start}},
		"stopped, not recorded":  {run{Started: start}, stopped, container.State{Phase: container.Exited, ExitCode: 5, StartedAt: start, FinishedAt: end}},
		"recorded":               {run{Started: start, Ended: &ended{Code: 6, At: end}}, nil, container.State{Phase: container.Exited, ExitCode: 6, StartedAt: start, FinishedAt: end}},
		"is being started again": {run{Started: start, Ended: &ended{Code: 6, At: end}}, created, container.State{Phase: container.Exited, ExitCode: 6, StartedAt: start, FinishedAt: end}},
		"lost":                   {run{Started: start}, nil, container.State{Phase: container.Exited, ExitCode: container.ExitUnknown, StartedAt: start, Reason: lostWords}},
	} {
		if got := state(tt.n, tt.t); got != tt.want {
			t.Errorf("%s: %+v, want %+v", name, got, tt.want)
		}
	}
}

func TestRecord(t *testing.T) {
	k := record{Spec: container.Spec{ID: "a", Image: "b", Labels: map[string]string{"x": "y"}}, Digest: "sha256:0", Stop: 15}
	opt, err := k.extension()
	if err != nil {
		t.Fatal(err)
	}
	c := containers.Container{ID: "a"}
	if err := opt(t.Context(), nil, &c); err != nil {
		t.Fatal(err)
	}
	got, ours, err := recordOf(c)
	if err != nil || !ours || got.Spec.Labels["x"] != "y" || got.Stop != 15 || got.Digest != k.Digest {
		t.Errorf("got %+v, %v, %v", got, ours, err)
	}
	if _, ours, err := recordOf(containers.Container{ID: "theirs"}); ours || err != nil {
		t.Errorf("a container of others: %v, %v", ours, err)
	}
	if _, err := runOf(containers.Container{Labels: map[string]string{runLabel: "{"}}); errdefs.ClassOf(err) != errdefs.DataLoss {
		t.Errorf("a damaged run: %v", err)
	}
}

func TestClasses(t *testing.T) {
	for name, tt := range map[string]struct {
		err  error
		want errdefs.Class
	}{
		"native":        {fmt.Errorf("x: %w", cerrdefs.ErrNotFound), errdefs.NotFound},
		"wire":          {status.Error(codes.AlreadyExists, "x"), errdefs.AlreadyExists},
		"away":          {status.Error(codes.Unavailable, "x"), errdefs.Unavailable},
		"canceled":      {status.Error(codes.Canceled, "x"), errdefs.Canceled},
		"late":          {context.DeadlineExceeded, errdefs.DeadlineExceeded},
		"ours":          {errdefs.Exhaustedf("x"), errdefs.ResourceExhausted},
		"anything else": {errors.New("not found"), errdefs.Internal},
	} {
		if got := errdefs.ClassOf(failed(tt.err, "try")); got != tt.want {
			t.Errorf("%s: %v, want %v", name, got, tt.want)
		}
	}
	for name, tt := range map[string]struct {
		err  error
		want errdefs.Class
	}{
		"denied":  {registry.ErrUnexpectedStatus{StatusCode: 403}, errdefs.FailedPrecondition},
		"busy":    {registry.ErrUnexpectedStatus{StatusCode: 429}, errdefs.Unavailable},
		"broken":  {registry.ErrUnexpectedStatus{StatusCode: 503}, errdefs.Unavailable},
		"away":    {&net.OpError{Op: "dial", Err: errors.New("refused")}, errdefs.Unavailable},
		"unknown": {cerrdefs.ErrNotFound, errdefs.NotFound},
	} {
		if got := errdefs.ClassOf(unpulled(fmt.Errorf("x: %w", tt.err), "image")); got != tt.want {
			t.Errorf("%s: %v, want %v", name, got, tt.want)
		}
	}
	if err := refused(errors.New("runc says no"), "start"); !errdefs.IsFailedPrecondition(err) {
		t.Errorf("what runc refuses: %v", err)
	}
}
