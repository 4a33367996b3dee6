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
	"kubevirt.io/api/instancetype/v1beta1"
	poolv1 "kubevirt.io/api/pool/v1beta1"
	"sigs.k8s.io/yaml"

	"cocoonstack.io/cocoon/internal/testkit/diff"
	"cocoonstack.io/cocoon/internal/testkit/section"
)

// TestExamples says what becomes of each example of KubeVirt's own: of each VirtualMachine, VirtualMachineInstance,
// VirtualMachineInstanceReplicaSet and VirtualMachinePool, which fields are refused or warned of. The instancetypes and preferences of
// the examples are there. docs/kubevirt.md has the number of those that run.
func TestExamples(t *testing.T) {
	docs, types := examples(t)
	var got strings.Builder
	runs, all := 0, 0
	for _, d := range docs {
		var errs field.ErrorList
		var warnings []string
		again := ""
		switch d.kind {
		case "VirtualMachine":
			vm := &v1.VirtualMachine{}
			d.into(t, vm)
			base := types.of(t, vm)
			errs, warnings = CheckMachine(vm, base)
			// The generator of the examples writes memory into each template, so KubeVirt refuses those with an instancetype, too.
			if base.Instancetype != nil && len(errs) > 0 {
				vm.Spec.Template.Spec.Domain.Memory = nil
				without, _ := CheckMachine(vm, base)
				again = "  without spec.template.spec.domain.memory: " + outcome(without) + "\n"
			}
		case "VirtualMachineInstance":
			vmi := &v1.VirtualMachineInstance{}
			d.into(t, vmi)
			errs, warnings = CheckInstance(vmi)
		case "VirtualMachineInstanceReplicaSet":
			set := &v1.VirtualMachineInstanceReplicaSet{}
			d.into(t, set)
			errs, warnings = CheckReplicaSet(set)
		case "VirtualMachinePool":
			pool := &poolv1.VirtualMachinePool{}
			d.into(t, pool)
			if errs = CheckPool(pool); len(errs) == 0 {
				errs, warnings = InPool(CheckMachine(PoolTemplate(pool), Base{}))
			}
		default:
			continue
		}
		all++
		if len(errs) == 0 {
			runs++
		}
		var lines []string
		for _, e := range errs {
			lines = append(lines, "  refused: "+e.Field)
		}
		for _, w := range warnings {
			path, _, _ := strings.Cut(w, " ")
			lines = append(lines, "  warned of: "+path)
		}
		slices.Sort(lines)
		fmt.Fprintf(&got, "%s: %s\n%s%s", d.file, outcome(errs), strings.Join(append(slices.Compact(lines), ""), "\n"), again)
	}
	fmt.Fprintf(&got, "%d of %d run\n", runs, all)
	want, err := os.ReadFile("testdata/examples.txt")
	if err != nil || string(want) != got.String() {
		t.Errorf("%v\n%s", err, diff.Of(strings.Split(string(want), "\n"), strings.Split(got.String(), "\n")))
	}
}

func outcome(errs field.ErrorList) string {
	if len(errs) > 0 {
		return "refused"
	}
	return "runs"
}

// example is one object of the examples.
type example struct{ file, kind, text string }

func (e example) into(t *testing.T, o any) {
	t.Helper()
	if err := yaml.Unmarshal([]byte(e.text), o); err != nil {
		t.Fatalf("%s: %v", e.file, err)
	}
}

// baseTypes are the instancetypes and preferences of the examples, by KIND/NAME.
type baseTypes struct {
	instancetypes map[string]*Part[v1beta1.VirtualMachineInstancetypeSpec]
	preferences   map[string]*Part[v1beta1.VirtualMachinePreferenceSpec]
}

// of returns what a machine of the examples builds on.
func (b baseTypes) of(t *testing.T, vm *v1.VirtualMachine) (base Base) {
	t.Helper()
	if m := vm.Spec.Instancetype; m != nil {
		if base.Instancetype = b.instancetypes[InstancetypeKind(m.Kind)+"/"+m.Name]; base.Instancetype == nil {
			t.Errorf("%s: no instancetype %s", vm.Name, m.Name)
		}
	}
	if m := vm.Spec.Preference; m != nil {
		if base.Preference = b.preferences[PreferenceKind(m.Kind)+"/"+m.Name]; base.Preference == nil {
			t.Errorf("%s: no preference %s", vm.Name, m.Name)
		}
	}
	return base
}

// examples reads KubeVirt's examples from its module.
func examples(t *testing.T) (docs []example, types baseTypes) {
	t.Helper()
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
	types = baseTypes{map[string]*Part[v1beta1.VirtualMachineInstancetypeSpec]{}, map[string]*Part[v1beta1.VirtualMachinePreferenceSpec]{}}
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		for doc := range strings.SplitSeq("\n"+string(text), "\n---\n") {
			d := example{file: filepath.Base(file), text: doc}
			var o struct {
				Kind     string `json:"kind"`
				Metadata struct {
					Name string `json:"name"`
				} `json:"metadata"`
			}
			d.into(t, &o)
			d.kind = o.Kind
			docs = append(docs, d)
			switch o.Kind {
			case KindInstancetype, KindClusterInstancetype:
				p := &Part[v1beta1.VirtualMachineInstancetypeSpec]{Kind: o.Kind, Name: o.Metadata.Name}
				d.into(t, p)
				types.instancetypes[o.Kind+"/"+p.Name] = p
			case KindPreference, KindClusterPreference:
				p := &Part[v1beta1.VirtualMachinePreferenceSpec]{Kind: o.Kind, Name: o.Metadata.Name}
				d.into(t, p)
				types.preferences[o.Kind+"/"+p.Name] = p
			}
		}
	}
	return docs, types
}
