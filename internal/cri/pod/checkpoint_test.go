package pod

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"cocoonstack.io/cocoon/internal/cri/convert"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/image"
	"cocoonstack.io/cocoon/internal/snapshot"
	"cocoonstack.io/cocoon/internal/vm"
)

// saver is an engine with one sandbox, which it saves.
type saver struct {
	stopper
	all      []snapshot.Snapshot
	exported error             // of an export
	inDir    snapshot.Snapshot // what a folder holds
	cloned   vm.SandboxClone
	ready    vm.Record // what a watch tells of the clone
}

func (e *saver) SaveSnapshot(_ context.Context, _ string, spec vm.SaveSpec) (snapshot.Snapshot, error) {
	x := snapshot.Snapshot{ID: "s", Name: spec.Name, Labels: spec.Labels}
	e.all = append(e.all, x)
	return x, nil
}

func (e *saver) ListSnapshots(context.Context) ([]snapshot.Snapshot, error) { return e.all, nil }

func (e *saver) RemoveSnapshot(_ context.Context, id string) error {
	e.all = slices.DeleteFunc(slices.Clone(e.all), func(x snapshot.Snapshot) bool { return x.ID == id })
	return nil
}

func (e *saver) ExportSnapshot(_ context.Context, _ string, w io.Writer) error {
	_, err := io.WriteString(w, "part")
	return errors.Join(err, e.exported)
}

func (e *saver) ExportSnapshotDir(context.Context, string, string) error { return e.exported }

func (e *saver) SnapshotInDir(context.Context, string) (snapshot.Snapshot, error) {
	return e.inDir, nil
}

func (e *saver) CloneSandbox(_ context.Context, c vm.SandboxClone) (vm.Record, error) {
	e.cloned = c
	return e.ready, nil
}

func (e *saver) Watch(ctx context.Context, _ int64, fn func(vm.Event) error) error {
	if err := fn(vm.Event{Record: e.ready}); err != nil {
		return err
	}
	<-ctx.Done()
	return ctx.Err()
}

func (e *saver) Remove(context.Context, string, bool) error {
	e.done = append(e.done, "remove")
	return nil
}

type anyImage struct{}

func (anyImage) Ensure(_ context.Context, _ string, i *cri.ImageSpec) (image.Image, error) {
	return image.Image{ID: i.GetImage(), Type: vm.ImageOCI}, nil
}

func podOf(t *testing.T, namespace string) (vm.Spec, *cri.PodSandboxConfig) {
	t.Helper()
	config := &cri.PodSandboxConfig{Metadata: &cri.PodSandboxMetadata{Name: "web", Namespace: namespace, Uid: "u1"}}
	spec, _, err := convert.Sandbox(config, "cocoon", convert.Node{CPUs: 1})
	if err != nil {
		t.Fatal(err)
	}
	return spec, config
}

func app(state vm.ContainerState) vm.Ephemeral {
	c, err := convert.Container(appConfig(), "c1")
	if err != nil {
		panic(err)
	}
	return vm.Ephemeral{Spec: c, Record: vm.ContainerRecord{Name: "c1", ImageDigest: "sha256:1", Status: vm.ContainerStatus{State: state}}}
}

func appConfig() *cri.ContainerConfig {
	return &cri.ContainerConfig{Metadata: &cri.ContainerMetadata{Name: "app"}, Image: &cri.ImageSpec{Image: "sha256:1"}, Command: []string{"run"}}
}

func localhost(profile string) *cri.LinuxContainerConfig {
	return &cri.LinuxContainerConfig{SecurityContext: &cri.LinuxContainerSecurityContext{
		Seccomp: &cri.SecurityProfile{ProfileType: cri.SecurityProfile_Localhost, LocalhostRef: profile},
	}}
}

func processes(mode cri.NamespaceMode, of string) *cri.LinuxContainerConfig {
	return &cri.LinuxContainerConfig{SecurityContext: &cri.LinuxContainerSecurityContext{NamespaceOptions: &cri.NamespaceOption{Pid: mode, TargetId: of}}}
}

func serviceOf(e Engine) *Service {
	return &Service{engine: e, images: anyImage{}, log: slog.New(slog.DiscardHandler)}
}

// TestCheckpointFails: a checkpoint that cannot be written leaves nothing, and neither does one whose process has ended.
func TestCheckpointFails(t *testing.T) {
	spec, _ := podOf(t, "shop")
	e := &saver{exported: errdefs.Exhaustedf("the disk is full")}
	e.record = vm.Record{ID: vm.NewID(), Spec: spec, State: vm.StateRunning, Ephemeral: []vm.Ephemeral{app(vm.ContainerRunning)}}
	s, dir := serviceOf(e), t.TempDir()
	id := convert.ContainerID(e.record.ID, "c1")
	if _, err := s.CheckpointPod(t.Context(), &cri.CheckpointPodRequest{PodSandboxId: convert.SandboxID(e.record.ID), OutputPath: dir, ContainerIds: []string{id}}); !errdefs.Is(err, errdefs.ResourceExhausted) {
		t.Errorf("into a folder: %v", err)
	}
	file := filepath.Join(dir, "a.tar")
	if _, err := s.CheckpointContainer(t.Context(), &cri.CheckpointContainerRequest{ContainerId: id, Location: file}); !errdefs.Is(err, errdefs.ResourceExhausted) {
		t.Errorf("into a file: %v", err)
	}
	if _, err := os.Stat(file); !errors.Is(err, os.ErrNotExist) || len(e.all) > 0 {
		t.Errorf("left: %v, %v", err, e.all)
	}
	e.all = []snapshot.Snapshot{
		{ID: "1", Name: checkpointPrefix + "x", Labels: spec.Labels}, {ID: "2", Name: checkpointPrefix + "mine"}, {ID: "3", Name: "other", Labels: spec.Labels},
	}
	s.dropCheckpoints(t.Context())
	if len(e.all) != 2 || e.all[0].ID != "2" {
		t.Errorf("left by an earlier process: %+v", e.all)
	}
}

// TestRestorePodRefuses: a pod is restored only in its namespace and with the program that it had, and goes again if its guest ends.
func TestRestorePodRefuses(t *testing.T) {
	spec, config := podOf(t, "shop")
	saved := snapshot.Snapshot{Owner: vm.Owner{Namespace: "shop"}, Record: vm.Record{Spec: spec, Ephemeral: []vm.Ephemeral{app(vm.ContainerRunning)}}}
	up := vm.Record{ID: vm.NewID(), Spec: spec, State: vm.StateRunning, AgentReady: true}
	ended := up
	ended.State = vm.StateStopped
	const none = errdefs.Class(-1)
	deny := filepath.Join(t.TempDir(), "deny.json")
	if err := os.WriteFile(deny, []byte(`{"defaultAction": "SCMP_ACT_ALLOW", "syscalls": [{"names": ["chmod"], "action": "SCMP_ACT_ERRNO"}]}`), 0o600); err != nil {
		t.Fatal(err)
	}
	for what, tt := range map[string]struct {
		change func(*cri.RestorePodRequest, *saver)
		class  errdefs.Class
	}{
		"as it was":         {func(*cri.RestorePodRequest, *saver) {}, none},
		"the operator's":    {func(_ *cri.RestorePodRequest, e *saver) { e.inDir.Owner = vm.Owner{} }, none},
		"another namespace": {func(_ *cri.RestorePodRequest, e *saver) { e.inDir.Owner.Namespace = "other" }, errdefs.NotFound},
		"an option":         {func(r *cri.RestorePodRequest, _ *saver) { r.Options = map[string]string{"a": "b"} }, errdefs.InvalidArgument},
		"a relative path":   {func(r *cri.RestorePodRequest, _ *saver) { r.CheckpointPath = "x" }, errdefs.InvalidArgument},
		"another image":     {func(r *cri.RestorePodRequest, _ *saver) { r.ContainerConfigs[0].Image.Image = "sha256:2" }, errdefs.FailedPrecondition},
		"another command":   {func(r *cri.RestorePodRequest, _ *saver) { r.ContainerConfigs[0].Command = []string{"x"} }, errdefs.FailedPrecondition},
		"another name":      {func(r *cri.RestorePodRequest, _ *saver) { r.ContainerConfigs[0].Metadata.Name = "x" }, errdefs.FailedPrecondition},
		"one that has ended": {func(_ *cri.RestorePodRequest, e *saver) {
			e.inDir.Record.Ephemeral = []vm.Ephemeral{app(vm.ContainerTerminated)}
		}, errdefs.FailedPrecondition},
		"another filter": {func(r *cri.RestorePodRequest, _ *saver) {
			r.ContainerConfigs[0].Linux = &cri.LinuxContainerConfig{SecurityContext: &cri.LinuxContainerSecurityContext{Seccomp: &cri.SecurityProfile{}}}
		}, errdefs.FailedPrecondition},
		"processes of its own": {func(r *cri.RestorePodRequest, _ *saver) {
			r.ContainerConfigs[0].Linux = processes(cri.NamespaceMode_CONTAINER, "")
		}, errdefs.FailedPrecondition},
		"a profile of the node": {func(r *cri.RestorePodRequest, _ *saver) {
			r.ContainerConfigs[0].Linux = localhost(deny)
		}, errdefs.FailedPrecondition},
		"the same profile": {func(r *cri.RestorePodRequest, e *saver) {
			r.ContainerConfigs[0].Linux = localhost(deny)
			had := app(vm.ContainerRunning)
			had.Spec.Process.Security.SystemCalls = &vm.SystemCalls{
				Default: vm.CallAction{Do: vm.CallAllow}, Rules: []vm.CallRule{{Calls: []string{"chmod"}, Action: vm.CallAction{Do: vm.CallErrno, Data: 1}}},
			}
			e.inDir.Record.Ephemeral = []vm.Ephemeral{had}
		}, none},
		"the guest ends": {func(_ *cri.RestorePodRequest, e *saver) { e.ready = ended }, errdefs.FailedPrecondition},
	} {
		e := &saver{inDir: saved, ready: up}
		req := &cri.RestorePodRequest{CheckpointPath: "/checkpoint", Config: config, RuntimeHandler: "cocoon", ContainerConfigs: []*cri.ContainerConfig{appConfig()}}
		tt.change(req, e)
		got, err := serviceOf(e).RestorePod(t.Context(), req)
		if tt.class == none {
			if err != nil || got.GetPodSandboxId() != convert.SandboxID(up.ID) || got.GetRestoredContainers()[0].GetContainerId() != convert.ContainerID(up.ID, "c1") {
				t.Errorf("%s: %v, %v", what, got, err)
			}
			continue
		}
		if errdefs.ClassOf(err) != tt.class {
			t.Errorf("%s: %v", what, err)
		}
		if removed := len(e.done) > 0; removed != (what == "the guest ends") {
			t.Errorf("%s: removed %v", what, removed)
		}
	}
}

// TestProfileFiles: a seccomp profile is a file of the node that is not too large, and nobody waits for it.
func TestProfileFiles(t *testing.T) {
	dir := t.TempDir()
	at := func(name string) string { return filepath.Join(dir, name) }
	for name, size := range map[string]int{"fits": maxProfile, "large": maxProfile + 1} {
		if err := os.WriteFile(at(name), make([]byte, size), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if err := errors.Join(os.Symlink("fits", at("link")), unix.Mkfifo(at("pipe"), 0o600)); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"fits", "link"} {
		if text, err := profile(at(name)); err != nil || len(text) != maxProfile {
			t.Errorf("%s: %d bytes, %v", name, len(text), err)
		}
	}
	for _, name := range []string{"large", "pipe", "none", ".", "../../../dev/null"} {
		if _, err := profile(at(name)); !errdefs.IsFailedPrecondition(err) || !strings.Contains(err.Error(), at(name)) {
			t.Errorf("%s: %v", name, err)
		}
	}
}
