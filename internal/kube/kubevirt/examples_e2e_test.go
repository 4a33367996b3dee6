//go:build e2e

package kubevirt

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"k8s.io/apimachinery/pkg/util/validation/field"
	v1 "kubevirt.io/api/core/v1"
	"sigs.k8s.io/yaml"

	"cocoonstack.io/cocoon/internal/testkit/diff"
	"cocoonstack.io/cocoon/internal/testkit/section"
)

// TestExamples says what becomes of each example of KubeVirt's own: of each VirtualMachine and VirtualMachineInstance, which
// fields are refused or warned of. docs/kubevirt.md has the number of those that run.
func TestExamples(t *testing.T) {
	cmd := exec.CommandContext(t.Context(), "go", "-C", filepath.Join(section.Root(t), "tools/virtctl"), "list", "-mod=mod", "-m", "-f", "{{.Dir}}", "kubevirt.io/kubevirt")
	cmd.Env = append(os.Environ(), "GOWORK=off")
	dir, err := cmd.Output()
	if err != nil {
		t.Fatalf("find the module of KubeVirt: %v", err)
	}
	files, err := filepath.Glob(filepath.Join(strings.TrimSpace(string(dir)), "examples", "*.yaml"))
	if err != nil || len(files) == 0 {
		t.Fatalf("no examples in %s: %v", dir, err)
	}
	var got strings.Builder
	runs, all := 0, 0
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		for doc := range strings.SplitSeq("\n"+string(text), "\n---\n") {
			var o struct {
				Kind string `json:"kind"`
			}
			if err := yaml.Unmarshal([]byte(doc), &o); err != nil {
				t.Fatalf("%s: %v", file, err)
			}
			var errs field.ErrorList
			var warnings []string
			switch o.Kind {
			case "VirtualMachine":
				vm := &v1.VirtualMachine{}
				if err := yaml.Unmarshal([]byte(doc), vm); err != nil {
					t.Fatalf("%s: %v", file, err)
				}
				errs, warnings = CheckMachine(vm)
			case "VirtualMachineInstance":
				vmi := &v1.VirtualMachineInstance{}
				if err := yaml.Unmarshal([]byte(doc), vmi); err != nil {
					t.Fatalf("%s: %v", file, err)
				}
				errs, warnings = CheckInstance(vmi)
			default:
				continue
			}
			all++
			var lines []string
			for _, e := range errs {
				lines = append(lines, "  refused: "+e.Field)
			}
			for _, w := range warnings {
				path, _, _ := strings.Cut(w, " ")
				lines = append(lines, "  warned of: "+path)
			}
			slices.Sort(lines)
			outcome := "runs"
			if len(errs) > 0 {
				outcome = "refused"
			} else {
				runs++
			}
			fmt.Fprintf(&got, "%s: %s\n%s", filepath.Base(file), outcome, strings.Join(append(slices.Compact(lines), ""), "\n"))
		}
	}
	fmt.Fprintf(&got, "%d of %d run\n", runs, all)
	want, err := os.ReadFile("testdata/examples.txt")
	if err != nil || string(want) != got.String() {
		t.Errorf("%v\n%s", err, diff.Of(strings.Split(string(want), "\n"), strings.Split(got.String(), "\n")))
	}
}
