package convert

import (
	"maps"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"cocoonstack.io/cocoon/api/contract"
	"cocoonstack.io/cocoon/internal/testkit/diff"
)

func with(annotations map[string]string) func(*corev1.Pod) {
	return func(p *corev1.Pod) {
		if p.Annotations == nil {
			p.Annotations = map[string]string{}
		}
		maps.Copy(p.Annotations, annotations)
	}
}

func TestWhatAVMGoesOnFrom(t *testing.T) {
	const managed = contract.KeyManaged
	for name, tc := range map[string]struct {
		ask  map[string]string
		want Origin
	}{
		"plain":             {nil, Origin{}},
		"run":               {map[string]string{managed: "true", contract.KeyMode: "run"}, Origin{}},
		"managed":           {map[string]string{managed: "true", contract.KeyImage: "base"}, Origin{Snapshot: contract.SnapshotRef{Repo: "base", Tag: "latest"}}},
		"clone":             {map[string]string{contract.KeyMode: "clone", contract.KeyImage: "team/base:v1"}, Origin{Snapshot: contract.SnapshotRef{Repo: "team/base", Tag: "v1"}}},
		"fork":              {map[string]string{managed: "true", contract.KeyForkFrom: "vk-default-a-0", contract.KeyImage: "base"}, Origin{Fork: "vk-default-a-0"}},
		"fork beats run":    {map[string]string{managed: "true", contract.KeyForkFrom: "vk-default-a-0", contract.KeyMode: "run"}, Origin{Fork: "vk-default-a-0"}},
		"folder beats mode": {map[string]string{managed: "true", contract.KeyCloneFromDir: "/srv/x", contract.KeyMode: "clone"}, Origin{Dir: "/srv/x"}},
	} {
		t.Run(name, func(t *testing.T) {
			pod := plain(with(tc.ask))
			if errs := Check(pod); len(errs) > 0 {
				t.Fatal(errs.ToAggregate())
			}
			if got := OriginOf(pod); got != tc.want || got.Boots() != (tc.want == Origin{}) {
				t.Errorf("boots %v, %s", got.Boots(), diff.Of(tc.want, got))
			}
		})
	}
	for name, tc := range map[string]struct {
		ask map[string]string
		why string
	}{
		"folder of an unmanaged VM": {map[string]string{contract.KeyCloneFromDir: "/srv/x"}, "only a managed VM"},
		"folder and run":            {map[string]string{managed: "true", contract.KeyCloneFromDir: "/srv/x", contract.KeyMode: "run"}, "conflicts with mode run"},
		"folder and fork":           {map[string]string{managed: "true", contract.KeyCloneFromDir: "/srv/x", contract.KeyForkFrom: "a"}, "conflicts with vm.cocoonstack.io/fork-from"},
		"folder that is relative":   {map[string]string{managed: "true", contract.KeyCloneFromDir: "x"}, "absolute path"},
		"clone of a host's":         {map[string]string{contract.KeyMode: "clone", contract.KeyImage: "localhost:5000/base"}, "names a host"},
		"clone of a digest":         {map[string]string{contract.KeyMode: "clone", contract.KeyImage: "base@sha256:00"}, "digest"},
	} {
		t.Run(name, func(t *testing.T) {
			if msg := Check(plain(with(tc.ask))).ToAggregate(); msg == nil || !strings.Contains(msg.Error(), tc.why) {
				t.Errorf("reason %v, want %q in it", msg, tc.why)
			}
		})
	}
}

func TestWhatACloneInherits(t *testing.T) {
	if got := Inherited(plain()); got != nil {
		t.Errorf("a pod that asks for nothing: %v", got)
	}
	got := Inherited(plain(func(p *corev1.Pod) {
		c := &p.Spec.Containers[0]
		c.Args, c.Env = []string{"-v"}, []corev1.EnvVar{{Name: "A"}}
		c.VolumeMounts = append(c.VolumeMounts, corev1.VolumeMount{Name: "conf", MountPath: "/conf"})
	}))
	if strings.Join(got, ", ") != "command, env, the mount of conf" {
		t.Errorf("%v", got)
	}
}

func TestWhoseVMIsSaved(t *testing.T) {
	set := func(p *corev1.Pod) {
		p.Name = "a-0"
		p.OwnerReferences = []metav1.OwnerReference{{Kind: contract.OwnerKind, Name: "a"}}
	}
	for name, tc := range map[string]struct {
		change []func(*corev1.Pod)
		want   bool
	}{
		"plain":              {nil, false},
		"clone":              {[]func(*corev1.Pod){with(map[string]string{contract.KeyMode: "clone"})}, false},
		"managed":            {[]func(*corev1.Pod){with(map[string]string{contract.KeyManaged: "true"})}, true},
		"policy":             {[]func(*corev1.Pod){with(map[string]string{contract.KeySnapshotPolicy: "always"})}, true},
		"never":              {[]func(*corev1.Pod){with(map[string]string{contract.KeyManaged: "true", contract.KeySnapshotPolicy: "never"})}, false},
		"main":               {[]func(*corev1.Pod){set, with(map[string]string{contract.KeySnapshotPolicy: "main-only"})}, true},
		"not a main":         {[]func(*corev1.Pod){with(map[string]string{contract.KeySnapshotPolicy: "main-only"})}, false},
		"seat that is given": {[]func(*corev1.Pod){with(map[string]string{contract.KeyManaged: "true", contract.KeyKeepSnapshot: "true"})}, false},
	} {
		t.Run(name, func(t *testing.T) {
			pod := plain(tc.change...)
			if got := Saves(pod); got != tc.want {
				t.Errorf("saved: %v", got)
			}
			if got := Clone(pod, Node{Name: "n"}); (got.Labels[contract.VMLabelSave] == "true") != tc.want || got.Labels[contract.VMLabelNode] != "n" || got.Name != VMName(pod) {
				t.Errorf("clone %+v", got)
			}
		})
	}
}
