//go:build vm

package cocoond_test

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/testkit/ociimage"
	"cocoonstack.io/cocoon/internal/vm"
)

// counted returns the first and the last number in the log of a counter.
func (c *criClient) counted(log string) (first, last int) {
	lines := c.texts(log)
	if len(lines) == 0 {
		return 0, 0
	}
	_, _ = fmt.Sscanf(lines[0], "stdout F count %d", &first)
	_, _ = fmt.Sscanf(lines[len(lines)-1], "stdout F count %d", &last)
	return first, last
}

// TestVMCheckpoint: a pod is checkpointed while it runs, and another one goes on from there, with the volumes that its kubelet has for it. cocoond is
// killed meanwhile.
func TestVMCheckpoint(t *testing.T) {
	c, ctx := newCRI(t), t.Context()
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	// What a kubelet gives a container of a pod.
	mounts := func(pod string) []*cri.Mount {
		root := filepath.Join(c.dir, "volumes", pod)
		must(os.MkdirAll(root+"/empty", 0o755))
		must(os.WriteFile(root+"/hosts", []byte("10.0.0.9 "+pod+"\n"), 0o644))
		must(os.WriteFile(root+"/message", nil, 0o666))
		must(os.MkdirAll(root+"/secret", 0o755))
		must(os.WriteFile(root+"/secret/key", []byte("of "+pod), 0o644))
		return []*cri.Mount{
			{HostPath: root + "/secret", ContainerPath: "/secret", Readonly: true},
			{HostPath: root + "/hosts", ContainerPath: "/etc/hosts"},
			{HostPath: root + "/empty", ContainerPath: "/empty"},
			{HostPath: root + "/message", ContainerPath: "/dev/termination-log"},
		}
	}
	model := ociimage.Image{Layers: []ociimage.Layer{ociimage.Of(ociimage.File("weights", "of the model"))}}
	_, err := c.ImportImage(ctx, "model", bytes.NewReader(model.OCI()), nil)
	must(err)
	configs := func(pod string) (app, side *cri.ContainerConfig) {
		files := &cri.Mount{ContainerPath: "/model", Image: &cri.ImageSpec{Image: "model"}, Readonly: true}
		return scripted("app", "n=0; while :; do n=$((n+1)); echo count $n; echo $n >/empty/n; sleep 0.1; done", mounts(pod)...), scripted("side", "sleep 100000", append(mounts(pod), files)...)
	}
	p := c.pod("web")
	sandbox := c.run(p)
	past := c.create(sandbox, p, "past", "echo over", mounts("web")...)
	c.begin(past)
	c.is(past, cri.ContainerState_CONTAINER_EXITED)
	appConfig, sideConfig := configs("web")
	app, side := c.createAs(sandbox, p, appConfig), c.createAs(sandbox, p, sideConfig)
	c.begin(app)
	log := filepath.Join(c.logs, "web/app/0.log")
	c.until("it counts", func() bool { _, last := c.counted(log); return last > 5 })

	dir := filepath.Join(c.dir, "checkpoint")
	must(os.Mkdir(dir, 0o700))
	ask := &cri.CheckpointPodRequest{PodSandboxId: sandbox, OutputPath: dir, ContainerIds: []string{app, side}}
	refused := func(what string, want codes.Code, req *cri.CheckpointPodRequest) {
		t.Helper()
		if _, err := c.CheckpointPod(ctx, req); status.Code(err) != want {
			t.Errorf("%s: %v, want %s", what, err, want)
		}
		if left, err := os.ReadDir(dir); err != nil || len(left) > 0 {
			t.Errorf("%s: left %v, %v", what, left, err)
		}
	}
	refused("a container that was not started", codes.FailedPrecondition, ask)
	all, err := c.List(ctx)
	must(err)
	saves := func(id vm.ID) { // by hand, with a container that waits for its start
		t.Helper()
		_, err := c.SaveSnapshot(ctx, string(id), vm.SaveSpec{Name: "by-hand"})
		must(err)
		must(c.RemoveSnapshot(ctx, "by-hand"))
	}
	saves(all[0].ID)
	c.begin(side)
	refused("one of two", codes.FailedPrecondition, &cri.CheckpointPodRequest{PodSandboxId: sandbox, OutputPath: dir, ContainerIds: []string{app}})
	refused("one twice", codes.FailedPrecondition, &cri.CheckpointPodRequest{PodSandboxId: sandbox, OutputPath: dir, ContainerIds: []string{app, app, side}})
	refused("an option", codes.InvalidArgument, &cri.CheckpointPodRequest{PodSandboxId: sandbox, OutputPath: dir, ContainerIds: ask.ContainerIds, Options: map[string]string{"a": "b"}})
	refused("a relative path", codes.InvalidArgument, &cri.CheckpointPodRequest{PodSandboxId: sandbox, OutputPath: "x", ContainerIds: ask.ContainerIds})
	holder := c.create(sandbox, p, "holder", "exec 3>/empty/open; sleep 100000", mounts("web")...)
	c.begin(holder)
	c.until("it has a file open", func() bool {
		out, err := c.sync(holder, 60, "test", "-e", "/empty/open")
		return err == nil && out.GetExitCode() == 0
	})
	refused("an open file", codes.FailedPrecondition, &cri.CheckpointPodRequest{PodSandboxId: sandbox, OutputPath: dir, ContainerIds: []string{app, side, holder}})
	_, before := c.counted(log)
	c.until("it counts on", func() bool { _, last := c.counted(log); return last > before+3 })
	_, err = c.RemoveContainer(ctx, &cri.RemoveContainerRequest{ContainerId: holder})
	must(err)
	hider := scripted("hider", "unshare -m sh -c 'echo hidden; sleep 100000'", mounts("web")...)
	hider.Linux.SecurityContext = &cri.LinuxContainerSecurityContext{Privileged: true}
	holder = c.createAs(sandbox, p, hider)
	c.begin(holder)
	c.until("it has mounts of its own", func() bool { return len(c.texts(filepath.Join(c.logs, "web/hider/0.log"))) > 0 })
	refused("mounts of a program alone", codes.FailedPrecondition, &cri.CheckpointPodRequest{PodSandboxId: sandbox, OutputPath: dir, ContainerIds: []string{app, side, holder}})
	_, err = c.RemoveContainer(ctx, &cri.RemoveContainerRequest{ContainerId: holder})
	must(err)

	const size = "grep -c ^processor /proc/cpuinfo; awk '/MemTotal/ {print ($2 > 200000)}' /proc/meminfo"
	sizeOf := func(id string) string {
		out, err := c.sync(id, 60, "sh", "-c", size)
		return strings.Join(strings.Fields(string(out.GetStdout())), " ") + fmt.Sprint(err)
	}
	_, err = c.UpdatePodSandboxResources(ctx, &cri.UpdatePodSandboxResourcesRequest{PodSandboxId: sandbox, Resources: &cri.LinuxContainerResources{CpuPeriod: 100000, CpuQuota: 200000, MemoryLimitInBytes: 192 << 20}})
	must(err)
	c.until("the VM has grown", func() bool { return sizeOf(side) == "2 1<nil>" })
	archive := filepath.Join(c.dir, "checkpoint.tar")
	if _, err := c.CheckpointContainer(ctx, &cri.CheckpointContainerRequest{ContainerId: app, Location: archive}); status.Code(err) != codes.FailedPrecondition {
		t.Errorf("one of two, by itself: %v", err)
	}
	_, before = c.counted(log)
	if _, err := c.CheckpointPod(ctx, ask); err != nil {
		t.Fatal(err)
	}
	_, after := c.counted(log)
	c.until("it counts after the checkpoint", func() bool { _, last := c.counted(log); return last > after+3 })
	for i, text := range c.texts(log) {
		if want := fmt.Sprintf("stdout F count %d", i+1); text != want {
			t.Fatalf("line %d of the log is %q, want %q", i+1, text, want)
		}
	}
	if out, err := c.sync(side, 60, "cat", "/secret/key", "/etc/hosts"); err != nil || string(out.GetStdout()) != "of web10.0.0.9 web\n" {
		t.Errorf("the source has %v, %v", out, err)
	}
	if all, err := c.ListSnapshots(ctx); err != nil || len(all) > 0 {
		t.Errorf("snapshots that are left: %v, %v", all, err)
	}

	for what, files := range map[string]string{"it saves": filepath.Join(c.dir, "state/snapshots/tmp/*/memory-ranges"), "it exports": filepath.Join(c.dir, "cut/*")} {
		cut := filepath.Join(c.dir, "cut")
		must(os.RemoveAll(cut))
		must(os.Mkdir(cut, 0o700))
		ended := make(chan error, 1)
		go func() {
			_, err := c.CheckpointPod(ctx, &cri.CheckpointPodRequest{PodSandboxId: sandbox, OutputPath: cut, ContainerIds: ask.ContainerIds})
			ended <- err
		}()
		c.until(what, func() bool { found, _ := filepath.Glob(files); return len(found) > 0 })
		c.crash()
		t.Logf("killed while %s: %v", what, <-ended)
		c.serves()
		_, now := c.counted(log)
		c.until("it counts after cocoond was killed while "+what, func() bool { _, last := c.counted(log); return last > now+3 })
		c.until("the snapshot of the checkpoint is gone", func() bool { all, err := c.ListSnapshots(ctx); return err == nil && len(all) == 0 })
	}
	next := c.pod("web")
	next.Metadata.Uid, next.LogDirectory = "uid-next", filepath.Join(c.logs, "next")
	nextApp, nextSide := configs("next")
	want := &cri.RestorePodRequest{CheckpointPath: dir, Config: next, RuntimeHandler: "cocoon", ContainerConfigs: []*cri.ContainerConfig{nextSide, nextApp}}
	for what, change := range map[string]func(*cri.RestorePodRequest){
		"a container less": func(r *cri.RestorePodRequest) { r.ContainerConfigs = r.ContainerConfigs[:1] },
		"another command":  func(r *cri.RestorePodRequest) { r.ContainerConfigs[0].Command = []string{"sleep", "1"} },
		"a mount less":     func(r *cri.RestorePodRequest) { r.ContainerConfigs[0].Mounts = r.ContainerConfigs[0].Mounts[1:] },
		"another name":     func(r *cri.RestorePodRequest) { r.ContainerConfigs[0].Metadata.Name = "other" },
	} {
		one, two := configs("next")
		bad := &cri.RestorePodRequest{CheckpointPath: dir, Config: next, RuntimeHandler: "cocoon", ContainerConfigs: []*cri.ContainerConfig{one, two}}
		change(bad)
		if _, err := c.RestorePod(ctx, bad); status.Code(err) != codes.FailedPrecondition {
			t.Errorf("%s: %v", what, err)
		}
	}
	other := c.pod("web")
	other.Metadata.Namespace, other.Metadata.Uid = "other", "uid-other"
	if _, err := c.RestorePod(ctx, &cri.RestorePodRequest{CheckpointPath: dir, Config: other, RuntimeHandler: "cocoon", ContainerConfigs: want.ContainerConfigs}); status.Code(err) != codes.NotFound {
		t.Errorf("into another namespace: %v", err)
	}
	got, err := c.RestorePod(ctx, want)
	must(err)
	ids := map[string]string{}
	for _, r := range got.GetRestoredContainers() {
		ids[r.GetName()] = r.GetContainerId()
	}
	if len(ids) != 2 || got.GetPodSandboxId() == sandbox {
		t.Fatalf("restored: %v", got)
	}
	for _, id := range ids {
		c.is(id, cri.ContainerState_CONTAINER_CREATED)
		if _, err := c.sync(id, 60, "true"); status.Code(err) != codes.FailedPrecondition {
			t.Errorf("a command before the start: %v", err)
		}
	}
	c.crash() // before the caller has heard of it, for all that cocoond knows
	c.serves()
	if again, err := c.RestorePod(ctx, want); err != nil || again.GetPodSandboxId() != got.GetPodSandboxId() || !slices.EqualFunc(again.GetRestoredContainers(), got.GetRestoredContainers(), func(a, b *cri.RestoredContainer) bool { return a.GetContainerId() == b.GetContainerId() }) {
		t.Fatalf("restored again: %v, %v, want %v", again, err, got)
	}
	nextLog := filepath.Join(c.logs, "next/app/0.log")
	if lines := c.texts(nextLog); len(lines) > 0 {
		t.Errorf("before it is started: %v", lines)
	}
	if n, err := os.ReadFile(filepath.Join(c.dir, "volumes/next/empty/n")); err == nil {
		t.Errorf("before it is started, it has written %s", n)
	}
	nextVM := strings.TrimPrefix(got.GetPodSandboxId(), "vm-")
	saves(vm.ID(nextVM))
	holder = c.create(got.GetPodSandboxId(), next, "holder", "exec 3>/empty/open; sleep 100000", mounts("next")...)
	c.begin(holder)
	c.until("it has a file open", func() bool { _, err := os.Stat(filepath.Join(c.dir, "volumes/next/empty/open")); return err == nil })
	if _, err := c.SaveSnapshot(ctx, nextVM, vm.SaveSpec{Name: "by-hand"}); !errdefs.IsFailedPrecondition(err) {
		t.Errorf("saved with an open file: %v", err)
	}
	_, err = c.RemoveContainer(ctx, &cri.RemoveContainerRequest{ContainerId: holder})
	must(err)
	for _, id := range ids {
		c.is(id, cri.ContainerState_CONTAINER_CREATED)
	}
	if n, err := os.ReadFile(filepath.Join(c.dir, "volumes/next/empty/n")); err == nil {
		t.Errorf("saved before it is started, it has written %s", n)
	}
	c.crash()
	c.serves()
	for _, name := range []string{"side", "app"} {
		c.begin(ids[name])
		c.is(ids[name], cri.ContainerState_CONTAINER_RUNNING)
	}
	c.until("the counter goes on", func() bool { first, last := c.counted(nextLog); return first > 0 && last > first+3 })
	if first, _ := c.counted(nextLog); first <= before || first > after+3 {
		t.Errorf("the counter, which was between %d and %d, goes on with %d", before, after, first)
	}
	if out, err := c.sync(ids["side"], 60, "sh", "-c", "cat /secret/key /etc/hosts; hostname; cat /model/weights"); err != nil || string(out.GetStdout()) != "of next10.0.0.9 next\nweb\nof the model" {
		t.Errorf("the restored pod has %v, %v", out, err)
	}
	c.until("it writes to its volume", func() bool {
		n, err := os.ReadFile(filepath.Join(c.dir, "volumes/next/empty/n"))
		return err == nil && len(n) > 0
	})
	if got := sizeOf(ids["side"]); got != "2 1<nil>" {
		t.Errorf("the size of the restored VM is %s", got)
	}
	st, err := c.PodSandboxStatus(ctx, &cri.PodSandboxStatusRequest{PodSandboxId: got.GetPodSandboxId()})
	must(err)
	src, err := c.PodSandboxStatus(ctx, &cri.PodSandboxStatusRequest{PodSandboxId: sandbox})
	must(err)
	if a, b := st.GetStatus().GetNetwork().GetIp(), src.GetStatus().GetNetwork().GetIp(); a == "" || a == b {
		t.Errorf("both pods have the addresses %s and %s", a, b)
	}
	late := c.create(got.GetPodSandboxId(), next, "late", "echo late", mounts("next")...)
	c.begin(late)
	c.is(late, cri.ContainerState_CONTAINER_EXITED)
	if _, err := c.StopContainer(ctx, &cri.StopContainerRequest{ContainerId: ids["app"]}); err != nil {
		t.Error(err)
	}
	c.is(ids["app"], cri.ContainerState_CONTAINER_EXITED)

	// A kubelet of today can checkpoint a pod that has one container.
	for range 2 {
		_, err = c.CheckpointContainer(ctx, &cri.CheckpointContainerRequest{ContainerId: ids["side"], Location: archive, Timeout: 60})
		if fi, failed := os.Stat(archive); failed != nil || fi.Mode().Perm() != 0o600 || fi.Size() < 1<<20 {
			t.Errorf("the archive is %v, %v", fi, failed)
		}
	}
	if err == nil {
		t.Error("an archive was overwritten")
	}
	from, err := os.Open(archive)
	must(err)
	defer from.Close()
	_, err = c.ImportSnapshot(ctx, "imported", "", from, nil)
	must(err)
	out := filepath.Join(c.dir, "imported")
	must(c.ExportSnapshotDir(ctx, "imported", out))
	third := c.pod("third")
	_, thirdSide := configs("third")
	three, err := c.RestorePod(ctx, &cri.RestorePodRequest{CheckpointPath: out, Config: third, RuntimeHandler: "cocoon", ContainerConfigs: []*cri.ContainerConfig{thirdSide}})
	must(err)
	c.begin(three.GetRestoredContainers()[0].GetContainerId())
	if out, err := c.sync(three.GetRestoredContainers()[0].GetContainerId(), 60, "cat", "/secret/key"); err != nil || string(out.GetStdout()) != "of third" {
		t.Errorf("from an archive: %v, %v", out, err)
	}
	must(c.RemoveSnapshot(ctx, "imported"))

	// A pod that is not started is removed as any other.
	again := c.pod("again")
	againApp, againSide := configs("again")
	idle, err := c.RestorePod(ctx, &cri.RestorePodRequest{CheckpointPath: dir, Config: again, RuntimeHandler: "cocoon", ContainerConfigs: []*cri.ContainerConfig{againApp, againSide}})
	must(err)
	_, err = c.RemoveContainer(ctx, &cri.RemoveContainerRequest{ContainerId: idle.GetRestoredContainers()[0].GetContainerId()})
	must(err)
	for _, id := range []string{sandbox, got.GetPodSandboxId(), idle.GetPodSandboxId(), three.GetPodSandboxId()} {
		if _, err := c.StopPodSandbox(ctx, &cri.StopPodSandboxRequest{PodSandboxId: id}); err != nil {
			t.Error(err)
		}
		if _, err := c.RemovePodSandbox(ctx, &cri.RemovePodSandboxRequest{PodSandboxId: id}); err != nil {
			t.Error(err)
		}
	}
	if all, err = c.List(ctx); err != nil || len(all) != 0 {
		t.Errorf("left: %v, %v", all, err)
	}
	if b, err := os.ReadFile("/proc/self/mountinfo"); err != nil || strings.Contains(string(b), c.dir) {
		t.Errorf("a mount is left, or %v", err)
	}
}

// TestVMRestoreElsewhere: a checkpoint goes on at another node, which has nothing of the first one but the folder and the image.
func TestVMRestoreElsewhere(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "checkpoint")
	if err := os.Mkdir(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	counter := scripted("app", "n=0; while :; do n=$((n+1)); echo count $n; sleep 0.1; done")
	before := 0
	here := t.Run("here", func(t *testing.T) {
		c := newCRI(t)
		p := c.pod("web")
		sandbox := c.run(p)
		app := c.createAs(sandbox, p, counter)
		c.begin(app)
		log := filepath.Join(c.logs, "web/app/0.log")
		c.until("it counts", func() bool { _, before = c.counted(log); return before > 5 })
		if _, err := c.CheckpointPod(t.Context(), &cri.CheckpointPodRequest{PodSandboxId: sandbox, OutputPath: dir, ContainerIds: []string{app}}); err != nil {
			t.Fatal(err)
		}
	})
	if !here {
		return
	}
	t.Run("elsewhere", func(t *testing.T) {
		c := newCRI(t)
		r, err := c.RestorePod(t.Context(), &cri.RestorePodRequest{CheckpointPath: dir, Config: c.pod("next"), RuntimeHandler: "cocoon", ContainerConfigs: []*cri.ContainerConfig{counter}})
		if err != nil {
			t.Fatal(err)
		}
		id := r.GetRestoredContainers()[0].GetContainerId()
		c.begin(id)
		first := 0
		c.until("it goes on", func() (goes bool) {
			var last int
			first, last = c.counted(filepath.Join(c.logs, "next/app/0.log"))
			return last > first+3
		})
		if first <= before {
			t.Errorf("it goes on with %d, and was at %d", first, before)
		}
		if out, err := c.sync(id, 60, "hostname"); err != nil || string(out.GetStdout()) != "next\n" {
			t.Errorf("its name: %v, %v", out, err)
		}
		if _, err := c.RemovePodSandbox(t.Context(), &cri.RemovePodSandboxRequest{PodSandboxId: r.GetPodSandboxId()}); err != nil {
			t.Error(err)
		}
	})
}
