package admission

import (
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"cocoonstack.io/cocoon/api/contract"
)

// The webhook sends a pod to a node with the hypervisor that it asks for, where there is one; it changes nothing twice.
func TestCompletePrefersTheBackend(t *testing.T) {
	for _, b := range append(contract.Backends(), "", "bochs") {
		pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "prod", Name: "web", Annotations: map[string]string{contract.KeyBackend: string(b)}}}
		var want []string
		if slices.Contains(contract.Backends(), b) {
			want = []string{contract.LabelBackend(b)}
		}
		for _, first := range []bool{true, false} {
			if changed := complete(pod); changed != first {
				t.Errorf("backend %q: changed %t", b, changed)
			}
			if got := preferred(pod); !slices.Equal(got, want) {
				t.Errorf("backend %q: it prefers nodes with %q, want %q", b, got, want)
			}
		}
	}
}

// preferred returns the labels of the nodes that pod prefers.
func preferred(pod *corev1.Pod) (keys []string) {
	if pod.Spec.Affinity == nil || pod.Spec.Affinity.NodeAffinity == nil {
		return nil
	}
	for _, p := range pod.Spec.Affinity.NodeAffinity.PreferredDuringSchedulingIgnoredDuringExecution {
		for _, r := range p.Preference.MatchExpressions {
			if p.Weight > 0 && r.Operator == corev1.NodeSelectorOpExists {
				keys = append(keys, r.Key)
			}
		}
	}
	return keys
}

// The webhook refuses pods with invalid VM settings, before a node sees them.
func TestCheckPod(t *testing.T) {
	dirs := []string{"/srv/golden", "/srv/more/"}
	const name, image, mode, fork, dir, managed = contract.KeyName, contract.KeyImage, contract.KeyMode, contract.KeyForkFrom, contract.KeyCloneFromDir, contract.KeyManaged
	for what, tc := range map[string]struct {
		namespace string
		says      map[string]string
		want      string // the field and a part of the reason; "": the pod is allowed
	}{
		"nothing":                                           {"prod", nil, ""},
		"its default name":                                  {"prod", map[string]string{name: "vk-prod-web"}, ""},
		"a name that the user chose":                        {"prod", map[string]string{name: "agent"}, ""},
		"name of another namespace":                         {"prod", map[string]string{name: "vk-victim-db"}, name + "]: Forbidden: \"vk-victim-db\" is the name of a VM of another namespace"},
		"name of another namespace with a dash":             {"prod", map[string]string{name: "vk--prod-eu.db"}, name + "]: Forbidden"},
		"old name that two namespaces share":                {"prod", map[string]string{name: "vk-prod-eu-db"}, ""}, // owners distinguish them
		"its name in an earlier release":                    {"prod-eu", map[string]string{name: "vk-prod-eu-db"}, ""},
		"invalid VM name":                                   {"prod", map[string]string{name: "no/name"}, name + "]: Invalid"},
		"a fork of another namespace's VM":                  {"prod", map[string]string{fork: "vk-victim-db"}, fork + "]: Forbidden"},
		"a fork of its own namespace's VM":                  {"prod", map[string]string{fork: "vk-prod-db"}, ""},
		"a clone of another namespace's state":              {"prod", map[string]string{mode: "clone", image: "vk-victim-db:hibernate"}, image + "]: Forbidden"},
		"a clone of another namespace's repository":         {"prod", map[string]string{mode: "clone", image: "victim/vk-victim-db"}, image + "]: Forbidden"},
		"a clone of its own namespace's VM":                 {"prod", map[string]string{mode: "clone", image: "vk-prod-db"}, ""},
		"a clone of a template":                             {"prod", map[string]string{mode: "clone", image: "team/base:v2"}, ""},
		"an image with the name of a VM":                    {"prod", map[string]string{mode: "run", image: "vk-victim-db"}, ""},
		"an invalid deletion policy":                        {"prod", map[string]string{contract.KeyDeletionPolicy: "sleep"}, contract.KeyDeletionPolicy + "]: Invalid"},
		"a deletion policy that nodes refuse for this pod":  {"prod", map[string]string{contract.KeyDeletionPolicy: "hibernate"}, ""}, // a node of another version may accept it
		"an invalid value":                                  {"prod", map[string]string{managed: "perhaps"}, managed + "]: Invalid"},
		"a listed folder":                                   {"prod", map[string]string{managed: "true", dir: "/srv/golden"}, ""},
		"a folder below a listed folder":                    {"prod", map[string]string{managed: "true", dir: "/srv/golden/v2"}, ""},
		"a folder below a listed folder with a final slash": {"prod", map[string]string{managed: "true", dir: "/srv/more/v2"}, ""},
		"a folder beside a listed folder":                   {"prod", map[string]string{managed: "true", dir: "/srv/golden-secret"}, dir + "]: Forbidden: pods may not be cloned from this folder"},
		"the snapshot store of the node":                    {"prod", map[string]string{managed: "true", dir: "/var/lib/cocoon/snapshots/x"}, dir + "]: Forbidden"},
		"a folder outside by ..":                            {"prod", map[string]string{managed: "true", dir: "/srv/golden/../secret"}, dir + "]"},
	} {
		t.Run(what, func(t *testing.T) {
			pod := &corev1.Pod{
				ObjectMeta: metav1.ObjectMeta{Namespace: tc.namespace, Name: "web", Annotations: tc.says},
				Spec:       corev1.PodSpec{Containers: []corev1.Container{{Name: "c", Image: "cocoon/demo"}}},
			}
			errs := checkPod(pod, dirs)
			switch got := errs.ToAggregate(); {
			case tc.want == "" && got != nil:
				t.Errorf("the pod is refused: %v", got)
			case tc.want != "" && (len(errs) != 1 || !strings.Contains(got.Error(), tc.want)):
				t.Errorf("errors %v, want one that contains %q", got, tc.want)
			}
			if tc.says[dir] != "" && len(checkPod(pod, nil)) == 0 {
				t.Error("the folder is allowed although none is listed")
			}
		})
	}
}
