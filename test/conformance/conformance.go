// Package conformance runs Kubernetes' own end-to-end tests against `cocoon up` and writes docs/conformance.md. The tests, their
// runner and the programs in their images are Kubernetes' modules, unmodified; hack/conformance builds them. The images themselves
// are stand-ins of ours, which a registry on loopback serves. `make conformance` runs it.
//
// It contains no test of its own, and no product logic.
package conformance

import (
	_ "embed"
	"fmt"
	"regexp"
	"slices"
	"strings"

	"sigs.k8s.io/yaml"
)

// group is a part of the suite.
type group struct {
	name, what string
	has        func(test string) bool
}

// groups are in the order in which they run.
var groups = []group{
	{"node", "sig-node", conformant(`^\[sig-node\]`)},
	{"storage", "sig-storage: " + volumes, conformant(ofVolumes)},
	{"cli", "sig-cli", conformant(`^\[sig-cli\]`)},
	{"apps", "sig-apps", conformant(`^\[sig-apps\]`)},
	{"network", "sig-network", conformant(`^\[sig-network\]`)},
	{"auth", "sig-auth", conformant(`^\[sig-auth\]`)},
	{"nodeconformance", "`[NodeConformance]` alone: sig-node, and sig-storage as above", func(test string) bool {
		return strings.Contains(test, "[NodeConformance]") && !strings.Contains(test, "[Conformance]") &&
			(strings.HasPrefix(test, "[sig-node]") || regexp.MustCompile(ofVolumes).MatchString(test))
	}},
}

// The storage that a VM has without disks of a cluster.
const (
	volumes   = "ConfigMap, Secret, projected, downward API, emptyDir, subPath"
	ofVolumes = `^\[sig-storage\] (ConfigMap|Secrets|Projected|Downward API volume|EmptyDir|Subpath)`
)

// conformant chooses the tests that every Kubernetes must pass.
func conformant(names string) func(string) bool {
	re := regexp.MustCompile(names)
	return func(test string) bool { return strings.Contains(test, "[Conformance]") && re.MatchString(test) }
}

// chosen returns the groups with these names, separated by commas; all groups if there is none.
func chosen(list string) ([]group, error) {
	if list == "" {
		return groups, nil
	}
	var some []group
	for name := range strings.SplitSeq(list, ",") {
		at := slices.IndexFunc(groups, func(g group) bool { return g.name == name })
		if at < 0 {
			return nil, fmt.Errorf("there is no group %q", name)
		}
		some = append(some, groups[at])
	}
	return some, nil
}

// remark is what we know about tests.
type remark struct {
	Test   string `json:"test"` // a regular expression for their whole names
	Reason string `json:"reason"`
}

// remarks is the content of tests.yaml.
type remarks struct {
	Excluded []remark `json:"excluded"` // do not run, because no VM can pass them
	Missing  []remark `json:"missing"`  // do not run, because Cocoon lacks what they test
	Failing  []remark `json:"failing"`  // run, and are known to fail
	Quick    []string `json:"quick"`    // names of quick tests of sig-node, which run together as a group of their own
}

//go:embed tests.yaml
var testsFile []byte

// readRemarks reads tests.yaml.
func readRemarks(data []byte) (remarks, error) {
	var r remarks
	if err := yaml.UnmarshalStrict(data, &r); err != nil {
		return r, fmt.Errorf("tests.yaml: %w", err)
	}
	for _, one := range slices.Concat(r.Excluded, r.Missing, r.Failing) {
		if _, err := regexp.Compile(one.Test); err != nil {
			return r, fmt.Errorf("tests.yaml: %w", err)
		}
		if one.Test == "" || one.Reason == "" {
			return r, fmt.Errorf("tests.yaml: %+v lacks its test or its reason", one)
		}
	}
	return r, nil
}

// about returns the reason of the first remark that matches a test.
func about(test string, list []remark) (string, bool) {
	for _, one := range list {
		if regexp.MustCompile(`^(?:` + one.Test + `)$`).MatchString(test) {
			return one.Reason, true
		}
	}
	return "", false
}

// stale returns the remarks that match none of the tests.
func stale(list []remark, tests []string) []string {
	var unused []string
	for _, one := range list {
		if !slices.ContainsFunc(tests, func(test string) bool { _, ok := about(test, []remark{one}); return ok }) {
			unused = append(unused, one.Test)
		}
	}
	return unused
}

// exactly is a regular expression for these names and no others. The runner puts the name of the suite before each.
func exactly(tests []string) string {
	quoted := make([]string, len(tests))
	for i, test := range tests {
		quoted[i] = regexp.QuoteMeta(test)
	}
	return `^Kubernetes e2e suite (?:` + strings.Join(quoted, "|") + `)$`
}

// split returns the tests that no remark matches, and the others.
func split(tests []string, remarks []remark) (rest, matched []string) {
	for _, test := range tests {
		if _, ok := about(test, remarks); ok {
			matched = append(matched, test)
		} else {
			rest = append(rest, test)
		}
	}
	return rest, matched
}

// only returns the tests that are so.
func only(tests []string, are func(string) bool) []string {
	return slices.DeleteFunc(slices.Clone(tests), func(test string) bool { return !are(test) })
}
