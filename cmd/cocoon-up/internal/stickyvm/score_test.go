package stickyvm

import (
	"testing"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	fwk "k8s.io/kube-scheduler/framework"
	"k8s.io/kubernetes/pkg/scheduler/framework"
)

func cloning(image string, annotations map[string]string) *v1.Pod {
	return &v1.Pod{ObjectMeta: metav1.ObjectMeta{Annotations: annotations}, Spec: v1.PodSpec{Containers: []v1.Container{{Image: image}}}}
}

func TestSnapshotOf(t *testing.T) {
	for name, c := range map[string]struct {
		pod  *v1.Pod
		want string
	}{
		"an ordinary pod":          {cloning("base", nil), ""},
		"it boots":                 {cloning("base", map[string]string{modeAnnotation: "run", managedAnnotation: "true"}), ""},
		"a clone":                  {cloning("base", map[string]string{modeAnnotation: "clone"}), "base:latest"},
		"managed":                  {cloning("team/base:v2", map[string]string{managedAnnotation: "true"}), "team/base:v2"},
		"managed, but not so":      {cloning("base", map[string]string{managedAnnotation: "yes"}), ""},
		"named by the annotation":  {cloning("none", map[string]string{modeAnnotation: "clone", imageAnnotation: "base:v1"}), "base:v1"},
		"a fork":                   {cloning("base", map[string]string{managedAnnotation: "true", forkAnnotation: "vm"}), ""},
		"from a folder":            {cloning("base", map[string]string{managedAnnotation: "true", dirAnnotation: "/x"}), ""},
		"a clone without anything": {&v1.Pod{ObjectMeta: metav1.ObjectMeta{Annotations: map[string]string{modeAnnotation: "clone"}}}, ""},
	} {
		if got := snapshotOf(c.pod); got != c.want {
			t.Errorf("%s: %q, want %q", name, got, c.want)
		}
	}
}

func TestScore(t *testing.T) {
	pl, _ := plugin(t, nil)
	nodes := map[string]*v1.Node{}
	for name, class := range map[string]string{"has": "zen4", "alike": "zen4", "other": "xeon", "plain": ""} {
		n := nodeOf(name, name, "")
		if class != "" {
			n.Labels = map[string]string{classLabel: class}
		}
		nodes[name] = n
	}
	nodes["has"].Status.Images = []v1.ContainerImage{{Names: []string{"base:latest"}, SizeBytes: 1}, {Names: []string{"rare:v1"}}}
	nodes["plain"].Status.Images = []v1.ContainerImage{{Names: []string{"classless:v1"}}}
	for _, n := range nodes {
		if err := pl.holders.Add(n); err != nil {
			t.Fatal(err)
		}
	}
	score := func(pod *v1.Pod) map[string]int64 {
		state := framework.NewCycleState()
		switch status := pl.PreScore(t.Context(), state, pod, nil); {
		case status.IsSkip():
			return nil
		case !status.IsSuccess():
			t.Fatal(status)
		}
		got := map[string]int64{}
		for name, n := range nodes {
			info := framework.NewNodeInfo()
			info.SetNode(n)
			info.ImageStates = map[string]*fwk.ImageStateSummary{} // as the scheduler's cache fills them
			for _, image := range n.Status.Images {
				info.ImageStates[image.Names[0]] = &fwk.ImageStateSummary{}
			}
			s, status := pl.Score(t.Context(), state, pod, info)
			if !status.IsSuccess() {
				t.Fatal(status)
			}
			got[name] = s
		}
		return got
	}
	clone := func(image string) *v1.Pod { return cloning(image, map[string]string{modeAnnotation: "clone"}) }
	if got := score(clone("base")); got["has"] != fwk.MaxNodeScore || got["alike"] != alikeScore || got["other"] != 0 || got["plain"] != 0 {
		t.Errorf("%v", got)
	}
	if got := score(clone("classless:v1")); got["plain"] != fwk.MaxNodeScore || got["has"]+got["alike"]+got["other"] != 0 {
		t.Errorf("no class is known: %v", got)
	}
	for name, pod := range map[string]*v1.Pod{"that nobody has": clone("unheard"), "of another tag": clone("base:v2"), "not asked for": cloning("base", nil)} {
		if got := score(pod); got != nil {
			t.Errorf("a snapshot %s: %v", name, got)
		}
	}
	// Pods that prefer different nodes must not be in one batch.
	one, _ := pl.SignPod(t.Context(), clone("base"))
	two, _ := pl.SignPod(t.Context(), clone("rare:v1"))
	same, _ := pl.SignPod(t.Context(), clone("base:latest"))
	if one[0] == two[0] || one[0] != same[0] {
		t.Errorf("signed %v, %v, %v", one, two, same)
	}
}
