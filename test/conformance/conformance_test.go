//go:build conformance

package conformance

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"
)

// TestConformance runs the groups that GROUP names, or all; FOCUS chooses among their tests. PROCS is how many tests run at once.
func TestConformance(t *testing.T) {
	ctx, stop := signal.NotifyContext(t.Context(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	known, err := readRemarks(testsFile)
	if err != nil {
		t.Fatal(err)
	}
	some, err := chosen(os.Getenv("GROUP"))
	if err != nil {
		t.Fatal(err)
	}
	s := newSuite(ctx, t)
	tests, err := s.list(ctx)
	if err != nil {
		t.Fatal(err)
	}
	for _, unused := range slices.Concat(stale(known.Excluded, tests), stale(known.Missing, tests), stale(known.Failing, tests)) {
		t.Errorf("tests.yaml: no test is called %s", unused)
	}
	for _, g := range some {
		if ctx.Err() != nil {
			t.Fatal("interrupted")
		}
		t.Run(g.name, func(t *testing.T) { s.group(ctx, t, g, tests, known) })
	}
	if err := s.document(known); err != nil {
		t.Error(err)
	}
}

// list returns the names of all tests.
func (s *suite) list(ctx context.Context) ([]string, error) {
	report := filepath.Join(s.dir, "tests.json")
	defer os.Remove(report)
	// A dry run reports every test with its name as the filters see it.
	if out, err := s.e2e(ctx, "--ginkgo.dry-run", "--ginkgo.json-report="+report, "--provider=skeleton", "--kubeconfig="+s.kubeconfig, "--ginkgo.seed=1").CombinedOutput(); err != nil {
		return nil, fmt.Errorf("list the tests: %w\n%s", err, lastLines(out))
	}
	f, err := os.Open(report)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	results, err := readReport(f)
	if err != nil {
		return nil, err
	}
	tests := make([]string, len(results))
	for i, r := range results {
		tests[i] = r.Test
	}
	return tests, nil
}

// group runs the tests of a group, and once more, alone, those that failed.
func (s *suite) group(ctx context.Context, t *testing.T, g group, tests []string, known remarks) {
	began := time.Now()
	run, excluded := split(only(tests, g.has), known.Excluded)
	run, missing := split(run, known.Missing)
	partial := false
	if focus := os.Getenv("FOCUS"); focus != "" {
		re, err := regexp.Compile(focus)
		if err != nil {
			t.Fatal(err)
		}
		run, partial = only(run, re.MatchString), true
	}
	if len(run) == 0 {
		t.Skip("no test is chosen")
	}
	o := outcome{Group: g.name, Day: began.Format(time.DateOnly), Kubernetes: s.kubernetes, Excluded: excluded, Missing: missing}
	var err error
	if o.Results, err = s.run(ctx, t, g.name, run, s.procs); err != nil {
		t.Fatal(err)
	}
	var again []string
	for _, r := range o.Results {
		if r.State == failed {
			again = append(again, r.Test)
		}
	}
	if len(again) > 0 && ctx.Err() == nil && !partial {
		if err := s.keep(g, o, partial); err != nil { // the second run may take long, and be interrupted
			t.Error(err)
		}
		seconds, err := s.run(ctx, t, g.name+"-again", again, "1")
		if err != nil {
			t.Fatal(err)
		}
		for _, second := range seconds {
			at := slices.IndexFunc(o.Results, func(r result) bool { return r.Test == second.Test })
			o.Results[at].Again = second.State
			if second.State == failed {
				o.Results[at].Message = second.Message
			}
		}
	}
	o.Took = time.Since(began)
	for _, r := range o.Results {
		_, expected := about(r.Test, known.Failing)
		switch {
		case r.finally() == failed && !expected:
			t.Errorf("failed: %s\n%s", r.Test, firstLine(r.Message))
		case r.finally() == passed && expected:
			t.Logf("passed, although tests.yaml has it as failing: %s", r.Test)
		}
	}
	t.Logf("%s: %d of %d passed in %s", g.name, len(o.tests(func(r result) bool { return r.finally() == passed })), len(o.Results), o.Took.Round(time.Second))
	if ctx.Err() != nil {
		return
	}
	if err := s.keep(g, o, partial); err != nil {
		t.Error(err)
	}
}

// keep stores the results of a whole group, or renews those of the tests that ran, if there are any of the whole group.
func (s *suite) keep(g group, o outcome, partial bool) error {
	if partial {
		whole, ok, err := s.last(g)
		if err != nil || !ok {
			return err
		}
		o = whole.renewed(o)
	}
	data, err := json.MarshalIndent(o, "", "  ")
	if err != nil {
		return err
	}
	return errors.Join(os.MkdirAll(filepath.Join(s.dir, "results"), 0o755), os.WriteFile(s.results(g), data, 0o644))
}

// last reads the results of a group's last run.
func (s *suite) last(g group) (o outcome, ok bool, err error) {
	data, err := os.ReadFile(s.results(g))
	if errors.Is(err, os.ErrNotExist) {
		return o, false, nil
	}
	if err != nil {
		return o, false, err
	}
	return o, true, json.Unmarshal(data, &o)
}

func (s *suite) results(g group) string { return filepath.Join(s.dir, "results", g.name+".json") }

// document writes the page from what is known of each group.
func (s *suite) document(known remarks) error {
	var outcomes []outcome
	for _, g := range groups {
		o, ok, err := s.last(g)
		if err != nil {
			return err
		}
		if !ok {
			continue
		}
		outcomes = append(outcomes, o)
	}
	if len(outcomes) == 0 {
		return nil
	}
	var page bytes.Buffer
	if err := write(&page, outcomes, known); err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(s.root, "docs", "conformance.md"), page.Bytes(), 0o644)
}

// lastLines is the end of an output.
func lastLines(out []byte) string {
	lines := strings.Split(strings.TrimSpace(string(out)), "\n")
	return strings.Join(lines[max(0, len(lines)-20):], "\n")
}
