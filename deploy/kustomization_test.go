package deploy_test

import (
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	admissionv1 "k8s.io/api/admissionregistration/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	"sigs.k8s.io/yaml"

	"cocoonstack.io/cocoon/api/contract"
	vkcocoon "cocoonstack.io/cocoon/deploy/vk-cocoon"
)

type kustomization struct {
	Resources          []string
	ConfigMapGenerator []struct{ Files []string }
}

func kustomizationOf(t *testing.T, folder string) kustomization {
	t.Helper()
	var k kustomization
	readYAML(t, filepath.Join(folder, "kustomization.yaml"), &k)
	return k
}

func readYAML(t *testing.T, path string, v any) {
	t.Helper()
	text, err := os.ReadFile(path)
	if err == nil {
		err = yaml.Unmarshal(text, v)
	}
	if err != nil {
		t.Fatalf("%s: %v", path, err)
	}
}

// A manifest that no kustomization lists is never installed: neither by kubectl nor by the chart.
func TestEveryManifestIsListed(t *testing.T) {
	for _, folder := range []string{"crds", "epoch", "kubevirt", "manager", "runtimeclass", "scheduler", "vk-cocoon", "vk-cocoon/approve", "vk-cocoon/policies", "vk-cocoon/volumes", "vk-cocoon/wide"} {
		k := kustomizationOf(t, folder)
		for _, g := range k.ConfigMapGenerator {
			k.Resources = append(k.Resources, g.Files...)
		}
		files, err := filepath.Glob(filepath.Join(folder, "*.yaml"))
		if err != nil {
			t.Fatal(err)
		}
		crds, err := filepath.Glob(filepath.Join(folder, "crds", "*.yaml"))
		if err != nil {
			t.Fatal(err)
		}
		for _, f := range append(files, crds...) {
			if name := strings.TrimPrefix(f, folder+"/"); name != "kustomization.yaml" && !slices.Contains(k.Resources, name) {
				t.Errorf("%s is not in %s/kustomization.yaml", f, folder)
			}
		}
		// The chart reads the same folder.
		if strings.Contains(folder, "/") {
			continue // a subfolder: the link to its parent includes it
		}
		if to, err := os.Readlink(filepath.Join("chart", "files", folder)); err != nil || to != "../../"+folder {
			t.Errorf("the chart has %s from %q, %v", folder, to, err)
		}
	}
}

// A default installation lets neither a node nor anyone else create tokens of service accounts or read Secrets in all namespaces.
func TestDefaultInstallationIsNarrow(t *testing.T) {
	for _, folder := range kustomizationOf(t, ".").Resources {
		if strings.HasSuffix(folder, ".yaml") {
			continue
		}
		for _, file := range kustomizationOf(t, folder).Resources {
			text, err := os.ReadFile(filepath.Join(folder, file))
			if err != nil {
				t.Fatal(err)
			}
			for doc := range strings.SplitSeq(string(text), "\n---\n") {
				var role rbacv1.ClusterRole
				if err := yaml.Unmarshal([]byte(doc), &role); err != nil || role.Kind != "ClusterRole" {
					continue
				}
				for _, r := range role.Rules {
					if slices.Contains(r.APIGroups, "") && slices.ContainsFunc(r.Resources, func(s string) bool {
						return slices.Contains([]string{"secrets", "configmaps", "serviceaccounts/token", "*"}, s)
					}) {
						t.Errorf("%s/%s: ClusterRole %s gives %v on %v", folder, file, role.Name, r.Verbs, r.Resources)
					}
				}
			}
		}
	}
}

// The policy lets nodes write exactly the annotations that the contract assigns to them.
func TestPolicyKnowsTheAnnotationsOfNodes(t *testing.T) {
	for doc := range strings.SplitSeq(string(vkcocoon.Policies), "\n---\n") {
		var p admissionv1.ValidatingAdmissionPolicy
		if err := yaml.Unmarshal([]byte(doc), &p); err != nil {
			t.Fatal(err)
		}
		for _, v := range p.Spec.Variables {
			if v.Name != "own" {
				continue
			}
			var listed []string
			for _, m := range regexp.MustCompile(`'([^']+)'`).FindAllStringSubmatch(v.Expression, -1) {
				listed = append(listed, m[1])
			}
			if want := contract.NodeAnnotations(); !slices.Equal(listed, want) {
				t.Errorf("the policy lets nodes write %q, the contract says %q", listed, want)
			}
			return
		}
	}
	t.Error("no policy says which annotations are a node's")
}
