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
	o := outcome{Group: g.name, Day: began.Format(time.DateOnly), Kubernetes: s.kubernetes, Tests: len(only(tests, g.has)), Excluded: excluded, Missing: missing}
	results, err := s.run(ctx, t, g.name, run, s.procs)
	if err != nil {
		t.Fatal(err)
	}
	var again []string
	for _, r := range results {
		if r.State == failed {
			again = append(again, r.Test)
		}
	}
	if len(again) > 0 && ctx.Err() == nil && !partial {
		if err := s.keep(o, results, partial); err != nil { // the second run may take long, and be interrupted
			t.Error(err)
		}
		seconds, err := s.run(ctx, t, g.name+"-again", again, "1")
		if err != nil {
			t.Fatal(err)
		}
		for _, second := range seconds {
			at := slices.IndexFunc(results, func(r result) bool { return r.Test == second.Test })
			results[at].Again = second.State
			if second.State == failed {
				results[at].Message = second.Message
			}
		}
	}
	good := 0
	for _, r := range results {
		_, expected := about(r.Test, known.Failing)
		switch {
		case r.hasFailed() && !expected:
			t.Errorf("failed: %s\n%s", r.Test, firstLine(r.Message))
		case r.finally() == passed && expected:
			t.Logf("passed, although tests.yaml has it as failing: %s", r.Test)
		}
		if r.finally() == passed {
			good++
		}
	}
	t.Logf("%s: %d of %d passed in %s", g.name, good, len(results), time.Since(began).Round(time.Second))
	if ctx.Err() != nil {
		return
	}
	if err := s.keep(o, results, partial); err != nil {
		t.Error(err)
	}
}

// keep stores the results of a whole group, or adds those of the tests that ran to the last ones of the whole group, if there are any.
func (s *suite) keep(o outcome, results []result, partial bool) error {
	if partial {
		all, err := readOutcomes(s.results())
		if err != nil {
			return err
		}
		at := slices.IndexFunc(all, func(last outcome) bool { return last.Group == o.Group })
		if at < 0 {
			return nil
		}
		o.Results = all[at].Results
	}
	for i := range results {
		results[i].Message = firstLine(results[i].Message)
	}
	data, err := json.MarshalIndent(o.with(results), "", "  ")
	if err != nil {
		return err
	}
	return errors.Join(os.MkdirAll(s.results(), 0o755), os.WriteFile(filepath.Join(s.results(), o.Group+".json"), append(data, '\n'), 0o644))
}

func (s *suite) results() string { return filepath.Join(s.root, "test", "conformance", "results") }

// document writes the page from what is known of each group.
func (s *suite) document(known remarks) error {
	outcomes, err := readOutcomes(s.results())
	if err != nil {
		return err
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
