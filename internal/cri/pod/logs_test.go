package pod

import (
	"context"
	"os"
	"path/filepath"
	"sync/atomic"
	"testing"
	"time"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"cocoonstack.io/cocoon/internal/cri/convert"
	"cocoonstack.io/cocoon/internal/guest"
	"cocoonstack.io/cocoon/internal/vm"
)

// slow is an engine whose container has ended before its output is read.
type slow struct {
	stopper
	asks  atomic.Int32
	asked chan struct{} // closed when somebody beside the follower asks
}

func (e *slow) Inspect(context.Context, string) (vm.Record, error) {
	if e.asks.Add(1) == 2 {
		close(e.asked)
	}
	return e.record, nil
}

func (e *slow) Logs(ctx context.Context, _ string, _ guest.LogOptions, fn func(guest.LogEntry) error) error {
	select {
	case <-e.asked:
		return fn(guest.LogEntry{Time: time.Unix(100, 0), Data: []byte("the end\n")})
	case <-ctx.Done():
		return ctx.Err()
	}
}

// TestStatusFollowsTheLog: who is told that a container has ended finds all that it has printed.
func TestStatusFollowsTheLog(t *testing.T) {
	dir := t.TempDir()
	spec, _, err := convert.Sandbox(&cri.PodSandboxConfig{Metadata: &cri.PodSandboxMetadata{Name: "web", Namespace: "shop", Uid: "u1"}, LogDirectory: dir}, "cocoon", convert.Node{CPUs: 1})
	if err != nil {
		t.Fatal(err)
	}
	config := appConfig()
	config.LogPath = "app.log"
	c, err := convert.Container(config, "c1")
	if err != nil {
		t.Fatal(err)
	}
	exit := &vm.ContainerExit{FinishedAt: time.Now()}
	ended := vm.Ephemeral{Spec: c, Record: vm.ContainerRecord{Name: "c1", Status: vm.ContainerStatus{State: vm.ContainerTerminated, Exit: exit}}}
	e := &slow{asked: make(chan struct{})}
	e.record = vm.Record{ID: vm.NewID(), Spec: spec, State: vm.StateRunning, Ephemeral: []vm.Ephemeral{ended}}
	s := serviceOf(e)
	s.logs = newFollowers(t.Context(), e, s.log)
	s.logs.follow(e.record, ended)
	st, err := s.ContainerStatus(t.Context(), &cri.ContainerStatusRequest{ContainerId: convert.ContainerID(e.record.ID, "c1")})
	if err != nil || st.GetStatus().GetState() != cri.ContainerState_CONTAINER_EXITED {
		t.Fatalf("got %v, %v", st, err)
	}
	if text, err := os.ReadFile(filepath.Join(dir, "app.log")); err != nil || len(text) == 0 {
		t.Errorf("the log has %q, %v", text, err)
	}
	s.logs.drop(convert.ContainerID(e.record.ID, "c1"))
}
