package convert

import (
	"reflect"
	"slices"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"

	"cocoonstack.io/cocoon/internal/testkit/diff"
	"cocoonstack.io/cocoon/internal/vm"
)

func needs(name, cpu, memory string) corev1.Container {
	return corev1.Container{Name: name, Image: name + ":1", Resources: corev1.ResourceRequirements{
		Limits: corev1.ResourceList{"cpu": resource.MustParse(cpu), "memory": resource.MustParse(memory)},
	}}
}

func TestSeveralContainers(t *testing.T) {
	pod := plain(func(p *corev1.Pod) {
		side := needs("side", "250m", "64Mi")
		side.RestartPolicy = ptr(corev1.ContainerRestartPolicyAlways)
		p.Spec.InitContainers = []corev1.Container{needs("first", "1", "1Gi"), side, needs("second", "100m", "960Mi")}
		p.Spec.Containers = []corev1.Container{needs("web", "500m", "128Mi"), needs("db", "600m", "256Mi")}
		p.Spec.Containers[1].Image = "web:1"
		p.Spec.Containers[1].Args = []string{"--me=$(ME)"}
		p.Spec.Containers[1].SecurityContext = &corev1.SecurityContext{RunAsUser: ptr(int64(33))}
		p.Spec.Containers[1].VolumeMounts = []corev1.VolumeMount{{Name: "kube-api-access-x7", MountPath: "/token"}}
		p.Spec.RestartPolicy = corev1.RestartPolicyOnFailure
	})
	if errs := Check(pod); len(errs) > 0 {
		t.Fatal(errs)
	}
	s := Spec(pod, Node{}, Environment{"db": {Env: []vm.EnvVar{{Name: "ME", Value: "db"}}}})
	var got []string
	for _, c := range s.Containers {
		got = append(got, c.Name+" "+c.Image+" "+string(c.Kind))
	}
	want := []string{"first first:1 init", "side side:1 sidecar", "second second:1 init", "web web:1 app", "db web:1 app"}
	if !reflect.DeepEqual(got, want) {
		t.Errorf("got %q, want %q", got, want)
	}
	db := s.Containers[4]
	if db.Process.User != "33" || db.Process.Args[0] != "--me=db" || len(db.Mounts) != 1 || len(s.Mounts) != 0 || !s.Process.Empty() {
		t.Errorf("process and mounts: %+v, of the VM %+v %+v", db, s.Process, s.Mounts)
	}
	// 250m + 500m + 600m run together. The second init container and the sidecar together need as much memory as the first.
	if s.CPUs != 2 || s.Memory != 1<<30 || s.Restart != vm.RestartOnFailure || Image(pod) != "web:1" {
		t.Errorf("%d CPUs, %d bytes, restart %s, image %s", s.CPUs, s.Memory, s.Restart, s.Image)
	}
	got = nil
	for _, r := range Pulls(pod) {
		got = append(got, r.Name)
	}
	if want := []string{"first:1", "side:1", "second:1", "web:1"}; !reflect.DeepEqual(got, want) {
		t.Errorf("images: got %q, want %q", got, want)
	}
}

// A container holds the containers after it only if the node must decide whether it has started.
func TestContainersThatHoldOthers(t *testing.T) {
	hook := &corev1.Lifecycle{PostStart: &corev1.LifecycleHandler{Sleep: &corev1.SleepAction{Seconds: 1}}}
	probe := &corev1.Probe{ProbeHandler: corev1.ProbeHandler{Exec: &corev1.ExecAction{Command: []string{"up"}}}}
	pod := plain(func(p *corev1.Pod) {
		for name, change := range map[string]func(*corev1.Container){
			"a-probed": func(c *corev1.Container) { c.StartupProbe = probe },
			"b-hooked": func(c *corev1.Container) { c.Lifecycle = hook },
			"c-ready":  func(c *corev1.Container) { c.ReadinessProbe, c.LivenessProbe = probe, probe },
			"d-init":   func(c *corev1.Container) { c.RestartPolicy = nil },
		} {
			c := needs(name, "100m", "64Mi")
			c.RestartPolicy = ptr(corev1.ContainerRestartPolicyAlways)
			change(&c)
			p.Spec.InitContainers = append(p.Spec.InitContainers, c)
		}
		slices.SortFunc(p.Spec.InitContainers, func(a, b corev1.Container) int { return int(a.Name[0]) - int(b.Name[0]) })
		p.Spec.Containers = []corev1.Container{needs("e-hooked", "100m", "64Mi"), needs("f-probed", "100m", "64Mi"), needs("g-last", "100m", "64Mi")}
		p.Spec.Containers[0].Lifecycle, p.Spec.Containers[1].StartupProbe, p.Spec.Containers[2].Lifecycle = hook, probe, hook
	})
	if errs := Check(pod); len(errs) > 0 {
		t.Fatal(errs)
	}
	var holding, observed []string
	for _, c := range Spec(pod, Node{}, Environment{}).Containers {
		if c.Hold {
			holding = append(holding, c.Name)
		}
	}
	for _, c := range Observed(pod) {
		observed = append(observed, c.Name)
	}
	if want := []string{"a-probed", "b-hooked", "e-hooked"}; !slices.Equal(holding, want) {
		t.Errorf("holding: %q, want %q", holding, want)
	}
	if want := []string{"a-probed", "b-hooked", "c-ready", "e-hooked", "f-probed", "g-last"}; !slices.Equal(observed, want) {
		t.Errorf("observed: %q, want %q", observed, want)
	}
}

func TestContainersWithTheirOwnRestarts(t *testing.T) {
	pod := plain(func(p *corev1.Pod) {
		p.Spec.RestartPolicy = corev1.RestartPolicyNever
		with := func(name string, policy corev1.ContainerRestartPolicy, rules ...corev1.ContainerRestartRule) corev1.Container {
			c := needs(name, "100m", "64Mi")
			c.RestartPolicy, c.RestartPolicyRules = &policy, rules
			return c
		}
		rule := func(op corev1.ContainerRestartRuleOnExitCodesOperator, codes ...int32) corev1.ContainerRestartRule {
			return corev1.ContainerRestartRule{Action: corev1.ContainerRestartRuleActionRestart, ExitCodes: &corev1.ContainerRestartRuleOnExitCodes{Operator: op, Values: codes}}
		}
		p.Spec.InitContainers = []corev1.Container{
			with("init", corev1.ContainerRestartPolicyNever, rule(corev1.ContainerRestartRuleOnExitCodesOpIn, 42)), with("side", corev1.ContainerRestartPolicyAlways),
		}
		p.Spec.Containers = []corev1.Container{
			needs("pods", "100m", "64Mi"), with("always", corev1.ContainerRestartPolicyAlways),
			with("but", corev1.ContainerRestartPolicyOnFailure, rule(corev1.ContainerRestartRuleOnExitCodesOpNotIn, 0, 1)),
		}
	})
	if errs := Check(pod); len(errs) > 0 {
		t.Fatal(errs)
	}
	spec := Spec(pod, Node{}, Environment{})
	got := map[string]vm.Restart{}
	for _, c := range spec.Containers {
		got[c.Name] = spec.RestartOf(c)
	}
	want := map[string]vm.Restart{
		"init": {Policy: vm.RestartNever, Rules: []vm.RestartRule{{Codes: []int{42}}}}, "side": {Policy: vm.RestartAlways},
		"pods": {Policy: vm.RestartNever}, "always": {Policy: vm.RestartAlways},
		"but": {Policy: vm.RestartOnFailure, Rules: []vm.RestartRule{{Not: true, Codes: []int{0, 1}}}},
	}
	if d := diff.Of(want, got); d != "" {
		t.Error(d)
	}
	if !OwnRestarts(pod) || !AnyRestarts(pod, 137, true) {
		t.Error("the containers have no policies of their own")
	}
	pod.Spec.Containers = pod.Spec.Containers[:1]
	if pod.Spec.InitContainers = pod.Spec.InitContainers[1:]; OwnRestarts(pod) || AnyRestarts(pod, 137, true) {
		t.Error("a sidecar counts")
	}
}
