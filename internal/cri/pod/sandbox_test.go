package pod

import (
	"context"
	"log/slog"
	"slices"
	"strings"
	"testing"
	"time"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"cocoonstack.io/cocoon/api/contract"
	"cocoonstack.io/cocoon/internal/cri/convert"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/vm"
)

// stopper is an engine with one sandbox. It notes what is done to that, and refuses to stop a VM that is lost, as the engine does.
type stopper struct {
	Engine
	record vm.Record
	done   []string
}

func (e *stopper) Inspect(context.Context, string) (vm.Record, error) { return e.record, nil }

func (e *stopper) Stop(context.Context, string, time.Duration) (vm.Record, error) {
	e.done = append(e.done, "stop")
	if e.record.State == vm.StateError {
		return e.record, errdefs.Preconditionf("it is lost; remove it")
	}
	return e.record, nil
}

func (e *stopper) ReleaseNICs(context.Context, string) (vm.Record, error) {
	e.done = append(e.done, "release")
	return e.record, nil
}

// TestBackendThatPodsLack: crictl inspectp says in which hypervisor a pod runs, and why it is not the one that it asks for.
func TestBackendThatPodsLack(t *testing.T) {
	c := &cri.PodSandboxConfig{Metadata: &cri.PodSandboxMetadata{Name: "web", Namespace: "shop", Uid: "u1"}, Annotations: map[string]string{contract.KeyBackend: "firecracker"}}
	spec, _, err := convert.Sandbox(c, "cocoon", convert.Node{CPUs: 1, Driver: "qemu"})
	if err != nil {
		t.Fatal(err)
	}
	e := &stopper{record: vm.Record{ID: vm.NewID(), Spec: spec, State: vm.StateRunning, Driver: spec.Driver}}
	s := &Service{engine: e, log: slog.New(slog.DiscardHandler)}
	got, err := s.PodSandboxStatus(t.Context(), &cri.PodSandboxStatusRequest{PodSandboxId: convert.SandboxID(e.record.ID), Verbose: true})
	if err != nil || got.GetInfo()["hypervisor"] != "qemu" || !strings.HasSuffix(got.GetInfo()["standIn"], "runs in qemu, which stands in for firecracker") {
		t.Errorf("%v, %v", got.GetInfo(), err)
	}
}

// TestStopPodSandbox: a kubelet can stop every sandbox, also one that is lost, because it removes none before.
func TestStopPodSandbox(t *testing.T) {
	spec, _, err := convert.Sandbox(&cri.PodSandboxConfig{Metadata: &cri.PodSandboxMetadata{Name: "web", Namespace: "shop", Uid: "u1"}}, "cocoon", convert.Node{CPUs: 1})
	if err != nil {
		t.Fatal(err)
	}
	for state, want := range map[vm.State][]string{
		vm.StateRunning: {"stop", "release"}, vm.StateCreated: {"stop", "release"}, vm.StateStopped: {"stop", "release"}, vm.StateError: {"release"},
	} {
		e := &stopper{record: vm.Record{ID: vm.NewID(), Spec: spec, State: state}}
		s := &Service{engine: e, log: slog.New(slog.DiscardHandler)}
		_, err := s.StopPodSandbox(t.Context(), &cri.StopPodSandboxRequest{PodSandboxId: convert.SandboxID(e.record.ID)})
		if err != nil || !slices.Equal(e.done, want) {
			t.Errorf("%s: %v, %v; want %v", state, e.done, err, want)
		}
	}
}
