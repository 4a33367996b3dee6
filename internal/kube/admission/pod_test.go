package admission

import (
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"cocoonstack.io/cocoon/api/contract"
)

// Invalid VM settings of a pod are refused before a node sees it.
func TestCheckPod(t *testing.T) {
	dirs := []string{"/srv/golden", "/srv/more/"}
	const name, image, mode, fork, dir, managed = contract.KeyName, contract.KeyImage, contract.KeyMode, contract.KeyForkFrom, contract.KeyCloneFromDir, contract.KeyManaged
	for what, tc := range map[string]struct {
		namespace string
		says      map[string]string
		want      string // the field and a part of why; "": it passes
	}{
		"nothing":                          {"prod", nil, ""},
		"its name":                         {"prod", map[string]string{name: "vk-prod-web"}, ""},
		"a name of its own":                {"prod", map[string]string{name: "agent"}, ""},
		"another's name":                   {"prod", map[string]string{name: "vk-victim-db"}, name + "]: Forbidden: \"vk-victim-db\" is the name of a VM of another namespace"},
		"another's name, with a dash":      {"prod", map[string]string{name: "vk--prod-eu.db"}, name + "]: Forbidden"},
		"the old name that two may have":   {"prod", map[string]string{name: "vk-prod-eu-db"}, ""}, // owners distinguish them
		"its name by the old rule":         {"prod-eu", map[string]string{name: "vk-prod-eu-db"}, ""},
		"no name of a VM":                  {"prod", map[string]string{name: "no/name"}, name + "]: Invalid"},
		"a fork of another's":              {"prod", map[string]string{fork: "vk-victim-db"}, fork + "]: Forbidden"},
		"a fork of its own":                {"prod", map[string]string{fork: "vk-prod-db"}, ""},
		"a clone of another's state":       {"prod", map[string]string{mode: "clone", image: "vk-victim-db:hibernate"}, image + "]: Forbidden"},
		"a clone of another's, in a place": {"prod", map[string]string{mode: "clone", image: "victim/vk-victim-db"}, image + "]: Forbidden"},
		"a clone of its own":               {"prod", map[string]string{mode: "clone", image: "vk-prod-db"}, ""},
		"a clone of a template":            {"prod", map[string]string{mode: "clone", image: "team/base:v2"}, ""},
		"an image of such a name, booted":  {"prod", map[string]string{mode: "run", image: "vk-victim-db"}, ""},
		"a key nobody understands":         {"prod", map[string]string{managed: "perhaps"}, managed + "]: Invalid"},
		"a folder that is listed":          {"prod", map[string]string{managed: "true", dir: "/srv/golden"}, ""},
		"a folder below one":               {"prod", map[string]string{managed: "true", dir: "/srv/golden/v2"}, ""},
		"a folder below one with a slash":  {"prod", map[string]string{managed: "true", dir: "/srv/more/v2"}, ""},
		"a folder beside one":              {"prod", map[string]string{managed: "true", dir: "/srv/golden-secret"}, dir + "]: Forbidden: pods may not be cloned from this folder"},
		"the store of the node":            {"prod", map[string]string{managed: "true", dir: "/var/lib/cocoon/snapshots/x"}, dir + "]: Forbidden"},
		"out of one by dots":               {"prod", map[string]string{managed: "true", dir: "/srv/golden/../secret"}, dir + "]"},
	} {
		t.Run(what, func(t *testing.T) {
			pod := &corev1.Pod{
				ObjectMeta: metav1.ObjectMeta{Namespace: tc.namespace, Name: "web", Annotations: tc.says},
				Spec:       corev1.PodSpec{Containers: []corev1.Container{{Name: "c", Image: "cocoon/demo"}}},
			}
			errs := checkPod(pod, dirs)
			switch got := errs.ToAggregate(); {
			case tc.want == "" && got != nil:
				t.Errorf("it is refused: %v", got)
			case tc.want != "" && (len(errs) != 1 || !strings.Contains(got.Error(), tc.want)):
				t.Errorf("%v, want one with %q", got, tc.want)
			}
			if tc.says[dir] != "" && len(checkPod(pod, nil)) == 0 {
				t.Error("it passes where no folder is listed")
			}
		})
	}
}
