package deploy_test

import (
	"os"
	"path/filepath"
	"slices"
	"testing"

	"sigs.k8s.io/yaml"
)

// A manifest that no kustomization names is installed by nobody: neither by kubectl nor by the chart.
func TestEveryManifestIsListed(t *testing.T) {
	optional := []string{"vk-cocoon/bootstrap.yaml"} // for nodes that ask for an identity of their own
	for _, folder := range []string{"crds", "epoch", "manager", "scheduler", "vk-cocoon"} {
		text, err := os.ReadFile(filepath.Join(folder, "kustomization.yaml"))
		if err != nil {
			t.Fatal(err)
		}
		var k struct {
			Resources          []string
			ConfigMapGenerator []struct{ Files []string }
		}
		if err := yaml.Unmarshal(text, &k); err != nil {
			t.Fatal(err)
		}
		for _, g := range k.ConfigMapGenerator {
			k.Resources = append(k.Resources, g.Files...)
		}
		files, err := filepath.Glob(filepath.Join(folder, "*.yaml"))
		if err != nil {
			t.Fatal(err)
		}
		for _, f := range files {
			if name := filepath.Base(f); name != "kustomization.yaml" && !slices.Contains(k.Resources, name) && !slices.Contains(optional, f) {
				t.Errorf("%s is not in %s/kustomization.yaml", f, folder)
			}
		}
		// The chart reads the same folder.
		if to, err := os.Readlink(filepath.Join("chart", "files", folder)); err != nil || to != "../../"+folder {
			t.Errorf("the chart has %s from %q, %v", folder, to, err)
		}
	}
}
