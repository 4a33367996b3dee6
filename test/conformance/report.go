package conformance

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
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
	Took    time.Duration `json:"-"`
}

// finally is the state that counts.
func (r result) finally() string {
	if r.Again != "" {
		return r.Again
	}
	return r.State
}

func (r result) isSkipped() bool   { return r.State == skipped }
func (r result) hasFailed() bool   { return r.finally() == failed }
func (r result) passedAlone() bool { return r.Again == passed }

// outcome is how the tests of one group went. It is kept in results/ until the group runs again.
type outcome struct {
	Group      string   `json:"group"`
	Day        string   `json:"day"`
	Kubernetes string   `json:"kubernetes"`
	Tests      int      `json:"tests"`             // of the group, with those that did not run
	Results    []result `json:"results,omitempty"` // of the tests that did not pass at once
	Excluded   []string `json:"excluded,omitempty"`
	Missing    []string `json:"missing,omitempty"`
}

// with adds results. They replace those of the same tests.
func (o outcome) with(results []result) outcome {
	again := make(map[string]bool, len(results))
	for _, r := range results {
		again[r.Test] = true
	}
	o.Results = slices.DeleteFunc(slices.Clone(o.Results), func(r result) bool {
		return again[r.Test] || slices.Contains(o.Excluded, r.Test) || slices.Contains(o.Missing, r.Test)
	})
	for _, r := range results {
		if r.State != passed {
			o.Results = append(o.Results, r)
		}
	}
	slices.SortFunc(o.Results, func(a, b result) int { return strings.Compare(a.Test, b.Test) })
	return o
}

// count is how many of the results are so.
func (o outcome) count(are func(result) bool) int {
	n := 0
	for _, r := range o.Results {
		if are(r) {
			n++
		}
	}
	return n
}

// ran is how many tests ran.
func (o outcome) ran() int {
	return o.Tests - len(o.Excluded) - len(o.Missing) - o.count(result.isSkipped)
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

// readOutcomes reads the last results of each group, in the order of groups. Groups that never ran as a whole are not among them.
func readOutcomes(dir string) ([]outcome, error) {
	var all []outcome
	for _, g := range groups {
		data, err := os.ReadFile(filepath.Join(dir, g.name+".json"))
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return nil, err
		}
		o := outcome{}
		if err := json.Unmarshal(data, &o); err != nil {
			return nil, fmt.Errorf("results of %s: %w", g.name, err)
		}
		all = append(all, o)
	}
	return all, nil
}

// write renders docs/conformance.md.
func write(w io.Writer, outcomes []outcome, known remarks) error {
	var text strings.Builder
	text.WriteString(`# Conformance

<!-- make conformance writes this page from test/conformance/results; reasons are in test/conformance/tests.yaml -->

This page says which of Kubernetes' own end-to-end tests pass on the virtual node of ` + "`cocoon up`" + `. ` + "`make conformance`" + ` builds the
tests from Kubernetes' modules, runs them, unmodified, against a cluster of two nodes, and writes this page. Their images are stand-ins of
ours with the same programs: agnhost and nonewprivs from Kubernetes, Debian's busybox, bash, curl, dig and nc.

The tests are those with ` + "`[Conformance]`" + ` in their names, which every Kubernetes passes, also the slow and the serial ones, and then those with
` + "`[NodeConformance]`" + ` alone. A test that fails runs once more, alone: guests are emulated on a machine without KVM, and there a test may
run out of time.

A missing test is one of something that Cocoon does not have. It does not run, because it would wait for minutes. An excluded one needs
what no VM has, such as the node's own namespaces or files, or what Cocoon does in another way on purpose.

A dozen quick node tests are part of ` + "`make test-e2e`" + `. They took 35 s on two busy cores. After the control plane, compiling the tests
takes another 2 min 36 s of CPU time: 2,503 of their 2,875 packages are the same.

| group | day | Kubernetes | run | passed | of these when run alone | failed | missing | skipped | excluded |
|---|---|---|---|---|---|---|---|---|---|
`)
	for _, o := range outcomes {
		broken := o.count(result.hasFailed)
		fmt.Fprintf(&text, "| %s | %s | %s | %d | %d | %d | %d | %d | %d | %d |\n", whatOf(o.Group), o.Day, o.Kubernetes,
			o.ran(), o.ran()-broken, o.count(result.passedAlone), broken, len(o.Missing), o.count(result.isSkipped), len(o.Excluded))
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
			if r.hasFailed() {
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
			if r.passedAlone() {
				rows = append(rows, row(r.Test, firstLine(r.Message)))
			}
		}
		section(&text, o.Group, "test | what failed before", rows)
	}
	text.WriteString("\n## Skipped\n")
	for _, o := range outcomes {
		var rows []string
		for _, r := range o.Results {
			if r.isSkipped() {
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
		section(&text, o.Group, "tests | reason", summary(o.Excluded, known.Excluded))
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
			what := fmt.Sprintf("%d tests without [Conformance] that match %s", others, one.Test)
			if others == 1 {
				what = "the test without [Conformance] that matches " + one.Test
			}
			rows = append(rows, row(what, one.Reason))
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
