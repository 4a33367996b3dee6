package translate

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"

	"sigs.k8s.io/yaml"

	"cocoonstack.io/cocoon/deploy/crds"
)

type schema struct {
	Properties           map[string]schema `json:"properties"`
	Items                *schema           `json:"items"`
	AdditionalProperties *schema           `json:"additionalProperties"`
	Preserve             bool              `json:"x-kubernetes-preserve-unknown-fields"`
}

// The schema of the objects has all keys of rules, so that kubectl can explain all of them.
func TestObjectsHaveTheKeysOfFiles(t *testing.T) {
	var crd struct {
		Spec struct {
			Versions []struct {
				Schema struct {
					Root schema `json:"openAPIV3Schema"`
				} `json:"schema"`
			} `json:"versions"`
		} `json:"spec"`
	}
	if err := yaml.Unmarshal(crds.ImageMappings, &crd); err != nil {
		t.Fatal(err)
	}
	spec := crd.Spec.Versions[0].Schema.Root.Properties["spec"]
	rule, profile := *spec.Properties["translations"].Items, *spec.Properties["transports"].AdditionalProperties
	tls := profile.Properties["tls"]
	for what, part := range map[string]schema{
		"": spec, "translations: [%s]": rule, "transports: {x: %s}": profile, "transports: {x: {tls: %s}}": tls,
		"transports: {x: {tls: {certificates: [%s]}}}": *tls.Properties["certificates"].Items,
	} {
		if !part.Preserve || len(part.Properties) == 0 {
			t.Errorf("%s: keys that are not known are dropped before they are told", what)
		}
		if what == "" {
			what = "%s"
		}
		// The error for an unknown key lists the known keys.
		m := parseMapping("test", "m", fmt.Sprintf(what, "{Unknown: 1}"))
		if len(m.problems) == 0 {
			t.Fatalf("%s: no problem", what)
		}
		_, known, _ := strings.Cut(m.problems[0].Message, "; use ")
		known = strings.ReplaceAll(known, " and ", ", ")
		got, want := strings.Split(known, ", "), slices.Sorted(maps.Keys(part.Properties))
		if slices.Sort(got); !slices.Equal(got, want) {
			t.Errorf("%s: the parser knows %q, the schema %q", what, got, want)
		}
	}
}
