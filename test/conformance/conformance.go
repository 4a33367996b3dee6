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
	name  string
	what  string // of it, in words
	focus string // a regular expression for the names of its tests
}

const conformant = `.*\[(Node)?Conformance\]`

// groups are in the order in which they run.
var groups = []group{
	{"node", "sig-node", `^\[sig-node\]` + conformant},
	{"storage", "sig-storage: ConfigMap, Secret, projected, downward API, emptyDir, subPath", `^\[sig-storage\] (ConfigMap|Secrets|Projected|Downward API volume|EmptyDir|Subpath)` + conformant},
	{"cli", "sig-cli", `^\[sig-cli\]` + conformant},
	{"apps", "sig-apps", `^\[sig-apps\]` + conformant},
	{"network", "sig-network", `^\[sig-network\]` + conformant},
	{"auth", "sig-auth", `^\[sig-auth\]` + conformant},
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

// selected returns the tests that a regular expression chooses, without the excluded ones, and those.
func selected(tests []string, focus string, exclusions []remark) (run, excluded []string, err error) {
	re, err := regexp.Compile(focus)
	if err != nil {
		return nil, nil, fmt.Errorf("focus: %w", err)
	}
	for _, test := range tests {
		if !re.MatchString(test) {
			continue
		}
		if _, ok := about(test, exclusions); ok {
			excluded = append(excluded, test)
		} else {
			run = append(run, test)
		}
	}
	return run, excluded, nil
}
