package node

import (
	"context"
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/version"
	"k8s.io/client-go/kubernetes/fake"

	"cocoonstack.io/cocoon/api/contract"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/vm"
)

// proc returns a /proc folder of a machine with half of its memory free and few process ids in use.
func proc(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	for name, text := range map[string]string{
		"meminfo": "MemTotal: 8000000 kB\nMemAvailable: 4000000 kB\n",
		"loadavg": "0.1 0.2 0.3 1/950 77\n", "sys/kernel/pid_max": "1000\n",
	} {
		path := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

func TestCapacity(t *testing.T) {
	u := usage{cpus: 4, memory: 8 << 30, huge: map[vm.HugePages]int64{vm.HugePages2M: 6 << 20, vm.HugePages1G: 1 << 30}, disk: 100 << 30, diskFree: 50 << 30}
	all, free := capacity(u, Sizes{}, 20)
	for _, c := range []struct {
		list corev1.ResourceList
		name corev1.ResourceName
		want string
	}{
		{all, "cpu", "4"},
		{free, "cpu", "3200m"},
		{all, "memory", "8Gi"},
		{free, "memory", "6007921049"}, // what is set aside is no other memory,
		{all, "ephemeral-storage", "100Gi"},
		{free, "ephemeral-storage", "40Gi"},
		{all, "hugepages-2Mi", "6Mi"},
		{free, "hugepages-1Gi", "1Gi"},
		{all, "pods", "256"},
		{free, "pods", "256"},
	} {
		got := c.list[c.name]
		if want := resource.MustParse(c.want); got.Cmp(want) != 0 {
			t.Errorf("%s is %s, want %s", c.name, got.String(), c.want)
		}
	}
	all, free = capacity(u, Sizes{Virtual: 10}, 20)
	if q, f, m := all[corev1.ResourceCPU], free[corev1.ResourceCPU], free[corev1.ResourceMemory]; q.Value() != 4 || f.Value() != 32 || m.Value() != 6007921049 {
		t.Errorf("ten virtual CPUs per CPU: %v of %v", free, all)
	}
	all, free = capacity(u, Sizes{CPU: resource.MustParse("128"), Storage: resource.MustParse("1Ti"), Pods: 7}, 50)
	if q, f, s, p := all[corev1.ResourceCPU], free[corev1.ResourceCPU], free[corev1.ResourceEphemeralStorage], all[corev1.ResourcePods]; q.Value() != 128 || f.Value() != 64 || s.Value() != 512<<30 || p.Value() != 7 {
		t.Errorf("configured sizes: %v of %v", free, all)
	}
}

func TestVersionsParse(t *testing.T) {
	for own, want := range map[string]string{"v0.3-4-gab12": "cocoon.v0.3-4-gab12", "c30e313-dirty": "cocoon.c30e313-dirty", "0012": "cocoon.0012", "a/b c": "cocoon.a-b-c", "": ""} {
		got, err := version.ParseSemantic(kubeletVersion(own))
		if err != nil || got.Major() != 1 || got.Minor() < 30 || got.BuildMetadata() != want {
			t.Errorf("%q: %v, %v", own, got, err)
		}
	}
	mod, err := os.ReadFile("../../../go.mod")
	if want := "k8s.io/api v0." + strings.TrimPrefix(kubernetesVersion, "v1.") + "\n"; err != nil || !strings.Contains(string(mod), want) {
		t.Errorf("go.mod (%v) does not say %q; change kubernetesVersion", err, want)
	}
}

func TestConditionsAreTrueAndStable(t *testing.T) {
	var fault error
	n, err := New(Config{Name: "node-1", IP: "192.0.2.1", Proc: proc(t), Sys: t.TempDir(), Root: filepath.Join(t.TempDir(), "not", "there"), Healthy: func() error { return fault }})
	if err != nil {
		t.Fatal(err)
	}
	o := n.Object()
	if o.Labels[contract.LabelPool] != "default" || len(o.Spec.Taints) != 1 || o.Status.Addresses[0].Address != "192.0.2.1" {
		t.Errorf("node: %+v", o)
	}
	if f := o.Status.Features; f == nil || f.SupplementalGroupsPolicy == nil || !*f.SupplementalGroupsPolicy {
		t.Errorf("features: %+v", f)
	}
	get := func(all []corev1.NodeCondition, kind corev1.NodeConditionType) corev1.NodeCondition {
		i := index(all, kind)
		if i < 0 {
			t.Fatalf("no condition %s", kind)
		}
		return all[i]
	}
	first := o.Status.Conditions
	if get(first, corev1.NodeReady).Status != corev1.ConditionTrue || get(first, corev1.NodePIDPressure).Status != corev1.ConditionTrue {
		t.Errorf("conditions: %+v", first)
	}
	u := usage{memory: 8 << 30, memFree: 50 << 20, disk: 100 << 30, diskFree: 1 << 30}
	later := time.Now().Add(time.Hour)
	second := n.conditions(first, u, nil, hypervisor{}, later)
	if get(second, corev1.NodeMemoryPressure).Status != corev1.ConditionTrue || get(second, corev1.NodeDiskPressure).Status != corev1.ConditionTrue {
		t.Errorf("conditions: %+v", second)
	}
	if get(second, corev1.NodeReady).LastTransitionTime != get(first, corev1.NodeReady).LastTransitionTime ||
		!get(second, corev1.NodeMemoryPressure).LastTransitionTime.Time.Equal(later) {
		t.Errorf("transition times: %+v", second)
	}
	fault = errdefs.Unavailablef("cocoond does not answer")
	third := n.conditions(second, u, errors.New("no /proc"), hypervisor{}, later)
	if c := get(third, corev1.NodeReady); c.Status != corev1.ConditionFalse || c.Reason != "EngineUnreachable" {
		t.Errorf("ready: %+v", c)
	}
	if get(third, corev1.NodeDiskPressure).Status != corev1.ConditionTrue {
		t.Error("the condition says that there is no pressure although the host was not measured")
	}
}

// Pressure begins at one limit and ends at a higher one, so that a value near the limit is reported once.
func TestPressureHasTwoLimits(t *testing.T) {
	n, err := New(Config{Name: "node-1", Proc: proc(t), Sys: t.TempDir(), Root: "/", Healthy: func() error { return nil }})
	if err != nil {
		t.Fatal(err)
	}
	well := usage{memory: 8 << 30, memFree: 1 << 30, disk: 100 << 30, diskFree: 50 << 30, inodes: 1000, inodeFree: 500, pids: 10, pidsCeiling: 1000}
	for _, c := range []struct {
		kind corev1.NodeConditionType
		set  func(u *usage, share int64) // of the limit, in per cent
	}{
		{corev1.NodeMemoryPressure, func(u *usage, share int64) { u.memFree = leastMemory * share / 100 }},
		{corev1.NodeDiskPressure, func(u *usage, share int64) { u.diskFree = leastDisk * share / 100 }},
		{corev1.NodeDiskPressure, func(u *usage, share int64) { u.inodeFree = 50 * share / 100 }},
		{corev1.NodePIDPressure, func(u *usage, share int64) { u.pids = 1000 - 100*share/100 }},
	} {
		var now []corev1.NodeCondition
		for _, step := range []struct {
			share int64
			want  corev1.ConditionStatus
		}{{120, "False"}, {98, "True"}, {120, "True"}, {148, "True"}, {152, "False"}, {120, "False"}} {
			u := well
			c.set(&u, step.share)
			now = n.conditions(now, u, nil, hypervisor{}, time.Now())
			if got := now[index(now, c.kind)]; got.Status != step.want {
				t.Errorf("%s at %d %% of its limit is %s", c.kind, step.share, got.Status)
			}
		}
	}
}

func TestStorageIsToldInSteps(t *testing.T) {
	const gi = 1 << 30
	reported := int64(0)
	for _, c := range []struct{ free, want int64 }{
		{50*gi + 7, 50 * gi},
		{51*gi + 7, 50 * gi}, // slightly more
		{50 * gi, 50 * gi},
		{50*gi - 1, 49 * gi}, // never more than is free
		{50*gi + 5, 49 * gi},
		{51 * gi, 51 * gi},
		{3*gi + 5, 3 * gi},
		{3*gi - 1, 3*gi - 64<<20},
		{0, 0},
	} {
		if reported = steady(reported, c.free); reported != c.want {
			t.Errorf("%d bytes free are reported as %d, want %d", c.free, reported, c.want)
		}
	}
}

// The host's capacity may change, and its hypervisor may fail and recover. Unchanged values are not written again.
func TestCapacityAndHypervisorAreLive(t *testing.T) {
	dir := proc(t)
	var broken, lost error
	usable := []contract.Backend{contract.BackendFirecracker, contract.BackendQEMU}
	has, strays := []corev1.ContainerImage{{Names: []string{"base:v1"}, SizeBytes: 1}}, 0
	n, err := New(Config{
		Name: "node-1", Proc: dir, Sys: t.TempDir(), Root: "/", Healthy: func() error { return nil }, Sizes: Sizes{Storage: resource.MustParse("10Gi")},
		Hypervisors: func(context.Context) (Hypervisors, error) { return Hypervisors{"qemu 7.2", usable}, broken }, CPUClass: "zen4",
		Strays:    func(context.Context) (int, error) { return strays, lost },
		Snapshots: func(context.Context) ([]corev1.ContainerImage, error) { return slices.Clone(has), lost },
	})
	if err != nil {
		t.Fatal(err)
	}
	var reported []*corev1.Node
	n.NotifyNodeStatus(t.Context(), func(node *corev1.Node) { reported = append(reported, node) })
	at := func(kind corev1.NodeConditionType) corev1.NodeCondition {
		all := reported[len(reported)-1].Status.Conditions
		return all[index(all, kind)]
	}
	n.refresh(t.Context())
	if len(reported) != 1 || at(ConditionHypervisor).Status != corev1.ConditionTrue || at(ConditionHypervisor).Message != "qemu 7.2" {
		t.Fatalf("reported %d times: %+v", len(reported), reported)
	}
	labels := func() string {
		of := reported[len(reported)-1].Labels
		return of[contract.LabelBackend(contract.BackendCloudHypervisor)] + "," + of[contract.LabelBackend(contract.BackendFirecracker)] + "," + of[contract.LabelBackend(contract.BackendQEMU)]
	}
	if got := labels(); got != ",true,true" {
		t.Errorf("labels of hypervisors: %s", got)
	}
	if images := reported[0].Status.Images; len(images) != 1 || images[0].Names[0] != "base:v1" || reported[0].Labels[contract.LabelSnapshotCPUClass] != "zen4" {
		t.Errorf("snapshots %v, labels %v", images, reported[0].Labels)
	}
	for range 2 * engineTurn {
		n.refresh(t.Context())
	}
	if len(reported) != 1 {
		t.Errorf("%d writes although nothing changed", len(reported)-1)
	}
	if err := os.WriteFile(filepath.Join(dir, "meminfo"), []byte("MemTotal: 9000000 kB\nMemAvailable: 4000000 kB\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	n.refresh(t.Context())
	if q := reported[len(reported)-1].Status.Capacity[corev1.ResourceMemory]; len(reported) != 2 || q.Value() != 9000000<<10 {
		t.Errorf("reported %d times, memory %v", len(reported), q.String())
	}
	has, lost = nil, errdefs.Unavailablef("cocoond does not answer")
	for range engineTurn {
		n.refresh(t.Context())
	}
	if len(reported) != 2 {
		t.Error("the snapshots were dropped although the engine did not answer")
	}
	if c := at(ConditionComplete); c.Status != corev1.ConditionTrue {
		t.Errorf("no unknown VMs: %+v", c)
	}
	lost, strays = nil, 2
	for range engineTurn {
		n.refresh(t.Context())
	}
	if c := at(ConditionComplete); c.Status != corev1.ConditionFalse || c.Reason != "UnknownVMs" || !strings.HasPrefix(c.Message, "2 VMs") {
		t.Errorf("two unknown VMs: %+v", c)
	}
	if len(reported) != 3 || len(reported[2].Status.Images) != 0 {
		t.Errorf("reported %d times after the snapshots were removed", len(reported))
	}
	broken, usable = errdefs.Preconditionf("QEMU is not installed"), usable[:1]
	for range engineTurn {
		n.refresh(t.Context())
	}
	if got := labels(); got != ",true," {
		t.Errorf("labels of hypervisors after one went: %s", got)
	}
	if at(ConditionHypervisor).Status != corev1.ConditionFalse || at(corev1.NodeReady).Reason != "HypervisorUnusable" {
		t.Errorf("hypervisor unusable: %+v", reported[len(reported)-1].Status.Conditions)
	}
	broken = errdefs.Unavailablef("cocoond does not answer")
	for range engineTurn {
		n.refresh(t.Context())
	}
	if at(ConditionHypervisor).Status != corev1.ConditionFalse {
		t.Error("the condition became True although the engine did not answer")
	}
	broken = nil
	for range engineTurn {
		n.refresh(t.Context())
	}
	if at(ConditionHypervisor).Status != corev1.ConditionTrue || at(corev1.NodeReady).Status != corev1.ConditionTrue {
		t.Errorf("hypervisor usable again: %+v", reported[len(reported)-1].Status.Conditions)
	}
}

func TestServe(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		healthy := errors.New("starting")
		n, err := New(Config{Name: "node-1", Proc: proc(t), Sys: t.TempDir(), Root: "/", Port: 10250, ProviderID: "x://1", Healthy: func() error { return healthy }})
		if err != nil {
			t.Fatal(err)
		}
		// The node exists, with the taint of another owner, but without our taint and provider id.
		client := fake.NewClientset(&corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "node-1"}, Spec: corev1.NodeSpec{Taints: []corev1.Taint{{Key: "other", Effect: corev1.TaintEffectNoExecute}}}})
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan struct{}, 2)
		go func() { _ = n.Serve(ctx, client, slog.New(slog.DiscardHandler)); ended <- struct{}{} }()
		go func() { _ = n.Run(ctx); ended <- struct{}{} }()
		get := func() *corev1.Node {
			time.Sleep(time.Second) //nolint:forbidigo // the bubble's clock
			synctest.Wait()
			node, err := client.CoreV1().Nodes().Get(t.Context(), "node-1", metav1.GetOptions{})
			if err != nil {
				t.Fatal(err)
			}
			return node
		}
		node := get()
		if len(node.Spec.Taints) != 2 || node.Spec.ProviderID != "x://1" || node.Status.DaemonEndpoints.KubeletEndpoint.Port != 10250 {
			t.Errorf("node: %+v", node.Spec)
		}
		if c := node.Status.Conditions[0]; c.Type != corev1.NodeReady || c.Status != corev1.ConditionFalse {
			t.Errorf("ready: %+v", c)
		}
		healthy = nil
		n.Poke()
		node = get()
		if c := node.Status.Conditions[index(node.Status.Conditions, corev1.NodeReady)]; c.Status != corev1.ConditionTrue {
			t.Errorf("ready: %+v", c)
		}
		if _, err := client.CoordinationV1().Leases(corev1.NamespaceNodeLease).Get(t.Context(), "node-1", metav1.GetOptions{}); err != nil {
			t.Errorf("lease: %v", err)
		}
		if err := client.CoreV1().Nodes().Delete(t.Context(), "node-1", metav1.DeleteOptions{}); err != nil {
			t.Fatal(err)
		}
		healthy = errors.New("again") // the next status update finds no node
		n.Poke()
		get()
		cancel()
		<-ended
		<-ended
	})
}

func TestNewRefuses(t *testing.T) {
	if _, err := New(Config{Reserve: 101}); !errdefs.IsInvalid(err) {
		t.Errorf("a reserve of 101 %%: %v", err)
	}
	if _, err := New(Config{Proc: t.TempDir(), Root: "/"}); err == nil {
		t.Error("New succeeds on a host without /proc/meminfo")
	}
}
