package conformance

import (
	"encoding/json"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"
)

// States of a test.
const (
	passed  = "passed"
	failed  = "failed" // also one that panicked or ran out of time
	skipped = "skipped"
)

// result is how one test went.
type result struct {
	Test    string        `json:"test"`
	State   string        `json:"state"`
	Again   string        `json:"again,omitempty"` // its state when it ran once more, alone, because it had failed
	Message string        `json:"message,omitempty"`
	Took    time.Duration `json:"took"`
}

// finally is the state that counts.
func (r result) finally() string {
	if r.Again != "" {
		return r.Again
	}
	return r.State
}

// outcome is how the tests of one group went. It is kept as a file until the group runs again.
type outcome struct {
	Group      string        `json:"group"`
	Day        string        `json:"day"`
	Kubernetes string        `json:"kubernetes"`
	Results    []result      `json:"results"`
	Excluded   []string      `json:"excluded"`
	Missing    []string      `json:"missing"`
	Took       time.Duration `json:"took"`
}

// tests are the names of those tests that are so.
func (o outcome) tests(are func(result) bool) []string {
	var names []string
	for _, r := range o.Results {
		if are(r) {
			names = append(names, r.Test)
		}
	}
	return names
}

// renewed is a whole run of which some tests ran again later.
func (o outcome) renewed(later outcome) outcome {
	for _, r := range later.Results {
		if at := slices.IndexFunc(o.Results, func(old result) bool { return old.Test == r.Test }); at >= 0 {
			o.Results[at] = r
		}
	}
	o.Day, o.Kubernetes = later.Day, later.Kubernetes
	return o
}

// readReport reads the results from ginkgo's JSON report.
func readReport(r io.Reader) ([]result, error) {
	var suites []struct {
		SpecReports []struct {
			ContainerHierarchyTexts []string
			LeafNodeText            string
			LeafNodeType            string
			State                   string
			RunTime                 time.Duration
			Failure                 struct{ Message string }
		}
	}
	if err := json.NewDecoder(r).Decode(&suites); err != nil {
		return nil, fmt.Errorf("read ginkgo's report: %w", err)
	}
	var all []result
	for _, suite := range suites {
		for _, spec := range suite.SpecReports {
			texts := slices.DeleteFunc(append(slices.Clone(spec.ContainerHierarchyTexts), spec.LeafNodeText), func(s string) bool { return s == "" })
			name := strings.Join(texts, " ")
			one := result{Test: name, Took: spec.RunTime, Message: spec.Failure.Message}
			switch spec.State {
			case "passed":
				one.State = passed
			case "skipped":
				if one.Message == "" {
					continue // not chosen
				}
				one.State = skipped
			case "failed", "panicked", "aborted", "interrupted", "timedout":
				one.State = failed
			default:
				continue
			}
			if spec.LeafNodeType == "It" {
				all = append(all, one)
			} else if one.State == failed {
				return nil, fmt.Errorf("the suite itself failed in %s: %s", spec.LeafNodeType, one.Message)
			}
		}
	}
	slices.SortFunc(all, func(a, b result) int { return strings.Compare(a.Test, b.Test) })
	return all, nil
}

// write renders docs/conformance.md.
func write(w io.Writer, outcomes []outcome, known remarks) error {
	var text strings.Builder
	text.WriteString(`# Conformance

<!-- make conformance writes this page; reasons are in test/conformance/tests.yaml -->

This page says which of Kubernetes' own end-to-end tests pass on the virtual node of ` + "`cocoon up`" + `. ` + "`make conformance`" + ` builds the
tests from Kubernetes' modules, runs them, unmodified, against a cluster of two nodes, and writes this page. Their images are stand-ins of
ours with the same programs: agnhost and nonewprivs from Kubernetes, Debian's busybox, bash, curl, dig and nc.

The tests are those with ` + "`[Conformance]`" + ` in their names, which every Kubernetes passes, also the slow and the serial ones, and then those with
` + "`[NodeConformance]`" + ` alone. A test that fails runs once more, alone: guests are emulated on a machine without KVM, and there a test may
run out of time.

A missing test is one of something that Cocoon does not have. It does not run, because it would wait for minutes. An excluded one needs
the node's own namespaces or files, which no VM has.

A dozen quick node tests are part of ` + "`make test-e2e`" + `. They took 35 s on two busy cores. After the control plane, compiling the tests
takes another 2 min 36 s of CPU time: 2,503 of their 2,875 packages are the same.

| group | day | Kubernetes | run | passed | of these when run alone | failed | missing | skipped | excluded |
|---|---|---|---|---|---|---|---|---|---|
`)
	for _, o := range outcomes {
		fmt.Fprintf(&text, "| %s | %s | %s | %d | %d | %d | %d | %d | %d | %d |\n", whatOf(o.Group), o.Day, o.Kubernetes,
			len(o.tests(func(r result) bool { return r.State != skipped })), len(o.tests(func(r result) bool { return r.finally() == passed })),
			len(o.tests(func(r result) bool { return r.Again == passed })), len(o.tests(func(r result) bool { return r.finally() == failed })),
			len(o.Missing), len(o.tests(func(r result) bool { return r.State == skipped })), len(o.Excluded))
	}
	for _, g := range groups {
		if !slices.ContainsFunc(outcomes, func(o outcome) bool { return o.Group == g.name }) {
			fmt.Fprintf(&text, "| %s | not run as a whole yet | | | | | | | | |\n", g.what)
		}
	}
	text.WriteString("\nA test is skipped when it asks for something that the cluster does not have, such as a third node.\n")
	text.WriteString("\n## Failed\n")
	for _, o := range outcomes {
		var rows []string
		for _, r := range o.Results {
			if r.finally() == failed {
				reason, ok := about(r.Test, known.Failing)
				if !ok {
					reason = "not explained yet: " + firstLine(r.Message)
				}
				rows = append(rows, row(r.Test, reason))
			}
		}
		section(&text, o.Group, "test | reason", rows)
	}
	text.WriteString("\n## Passed only when run alone\n")
	for _, o := range outcomes {
		var rows []string
		for _, r := range o.Results {
			if r.Again == passed {
				rows = append(rows, row(r.Test, firstLine(r.Message)))
			}
		}
		section(&text, o.Group, "test | what failed before", rows)
	}
	text.WriteString("\n## Skipped\n")
	for _, o := range outcomes {
		var rows []string
		for _, r := range o.Results {
			if r.State == skipped {
				rows = append(rows, row(r.Test, firstLine(r.Message)))
			}
		}
		section(&text, o.Group, "test | the test's words", rows)
	}
	text.WriteString("\n## Missing\n")
	for _, o := range outcomes {
		section(&text, o.Group, "tests | reason", summary(o.Missing, known.Missing))
	}
	text.WriteString("\n## Excluded\n")
	for _, o := range outcomes {
		var rows []string
		for _, test := range o.Excluded {
			reason, _ := about(test, known.Excluded)
			rows = append(rows, row(test, reason))
		}
		section(&text, o.Group, "test | reason", rows)
	}
	_, err := io.WriteString(w, text.String())
	return err
}

// summary has a row for each test with [Conformance], and one for the others of each remark.
func summary(tests []string, remarks []remark) []string {
	var rows []string
	for _, one := range remarks {
		others := 0
		for _, test := range tests {
			if _, ok := about(test, []remark{one}); !ok {
				continue
			}
			if strings.Contains(test, "[Conformance]") {
				rows = append(rows, row(test, one.Reason))
			} else {
				others++
			}
		}
		if others > 0 {
			rows = append(rows, row(fmt.Sprintf("%d tests without [Conformance] that match %s", others, one.Test), one.Reason))
		}
	}
	return rows
}

func section(text *strings.Builder, group, header string, rows []string) {
	if len(rows) == 0 {
		return
	}
	fmt.Fprintf(text, "\n%s:\n\n| %s |\n|---|---|\n%s", whatOf(group), header, strings.Join(rows, ""))
}

func row(test, reason string) string {
	return fmt.Sprintf("| %s | %s |\n", cell(test), cell(reason))
}

// cell makes text fit a cell of a table.
func cell(s string) string {
	return strings.NewReplacer("|", `\|`, "<", "&lt;", "\n", " ").Replace(strings.TrimSpace(s))
}

// firstLine is the beginning of a message that is mostly a dump of objects.
func firstLine(s string) string {
	line, _, _ := strings.Cut(strings.TrimSpace(s), "\n")
	if r := []rune(line); len(r) > 200 {
		line = string(r[:200]) + "…"
	}
	return line
}

func whatOf(name string) string {
	for _, g := range groups {
		if g.name == name {
			return g.what
		}
	}
	return name
}
