package conformance

import (
	"flag"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"

	"cocoonstack.io/cocoon/internal/testkit/diff"
)

var update = flag.Bool("update", false, "write docs/conformance.md anew from the results")

const report = `[{"SpecReports": [
  {"LeafNodeType": "SynchronizedBeforeSuite", "State": "passed"},
  {"ContainerHierarchyTexts": ["[sig-node] Pods", ""], "LeafNodeText": "should run [Conformance]", "LeafNodeType": "It", "State": "passed", "RunTime": 5000},
  {"ContainerHierarchyTexts": ["[sig-node] Pods"], "LeafNodeText": "should <stop> [Conformance]", "LeafNodeType": "It", "State": "timedout", "Failure": {"Message": "too\nslow"}},
  {"ContainerHierarchyTexts": ["[sig-node] Pods"], "LeafNodeText": "should spread [Conformance]", "LeafNodeType": "It", "State": "skipped", "Failure": {"Message": "needs 2 nodes"}},
  {"ContainerHierarchyTexts": ["[sig-node] Pods"], "LeafNodeText": "was not chosen", "LeafNodeType": "It", "State": "skipped"}
]}]`

func TestReport(t *testing.T) {
	results, err := readReport(strings.NewReader(report))
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, r := range results {
		got = append(got, r.State+" "+r.Test)
	}
	want := []string{"failed [sig-node] Pods should <stop> [Conformance]", "passed [sig-node] Pods should run [Conformance]", "skipped [sig-node] Pods should spread [Conformance]"}
	if !slices.Equal(got, want) {
		t.Fatalf("got %q", got)
	}

	var page strings.Builder
	o := outcome{
		Group: "node", Day: "2026-11-24", Kubernetes: "v1", Tests: 7,
		Excluded: []string{"[sig-node] Pods should share [Conformance]"}, Missing: []string{"[sig-node] Pods grow [Conformance]", "[sig-node] Pods shrink", "[sig-node] Pods split"},
	}.with(results)
	known := remarks{Excluded: []remark{{Test: `.* should share .*`, Reason: "another | thing"}}, Missing: []remark{{Test: `.* Pods (grow|s).*`, Reason: "later"}}}
	if err := write(&page, []outcome{o}, known); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{
		"| sig-node | 2026-11-24 | v1 | 2 | 1 | 0 | 1 | 3 | 1 | 1 |\n",
		"| [sig-node] Pods grow [Conformance] | later |\n",
		"| 2 tests without [Conformance] that match .* Pods (grow\\|s).* | later |\n",
		"| sig-cli | not run as a whole yet |",
		"| [sig-node] Pods should &lt;stop> [Conformance] | not explained yet: too |\n",
		"| [sig-node] Pods should share [Conformance] | another \\| thing |\n",
		"| [sig-node] Pods should spread [Conformance] | needs 2 nodes |\n",
	} {
		if !strings.Contains(page.String(), want) {
			t.Errorf("the page lacks %q:\n%s", want, page.String())
		}
	}

	again := o.with([]result{{Test: results[0].Test, State: passed}})
	if len(o.Results) != 2 || len(again.Results) != 1 || again.Results[0].State != skipped || again.ran() != 2 {
		t.Errorf("%+v, then %+v", o, again)
	}
	again.Missing = append(again.Missing, results[2].Test)
	if again = again.with(nil); len(again.Results) != 0 || again.ran() != 2 {
		t.Errorf("a test that is missing now: %+v", again)
	}

	broken := `[{"SpecReports": [{"LeafNodeType": "SynchronizedBeforeSuite", "State": "failed", "Failure": {"Message": "no node"}}]}]`
	if _, err := readReport(strings.NewReader(broken)); err == nil || !strings.Contains(err.Error(), "no node") {
		t.Errorf("a suite that did not start is no error: %v", err)
	}
}

// TestPage checks that the page says what the results and the remarks say.
func TestPage(t *testing.T) {
	known, err := readRemarks(testsFile)
	if err != nil {
		t.Fatal(err)
	}
	outcomes, err := readOutcomes("results")
	if err != nil {
		t.Fatal(err)
	}
	var want strings.Builder
	if err := write(&want, outcomes, known); err != nil {
		t.Fatal(err)
	}
	const page = "../../docs/conformance.md"
	if *update {
		if err := os.WriteFile(page, []byte(want.String()), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	got, err := os.ReadFile(page)
	if err != nil {
		t.Fatal(err)
	}
	if d := diff.Of(want.String(), string(got)); d != "" {
		t.Errorf("docs/conformance.md is not what the results say; run this test with -update:\n%s", d)
	}
}

func TestRemarks(t *testing.T) {
	known, err := readRemarks(testsFile)
	if err != nil {
		t.Fatal(err)
	}
	for _, test := range known.Quick {
		if !strings.HasPrefix(test, "[sig-node] ") {
			t.Errorf("quick: %q", test)
		}
	}
	tests := []string{"[sig-node] a (b) [Conformance]", "[sig-node] a (b) c [Conformance]", "[sig-node] d", "[sig-apps] e [Conformance]"}
	out := []remark{{Test: `\[sig-node\] .* c .*`, Reason: "r"}, {Test: `nothing`, Reason: "r"}}
	if run, excluded := split(only(tests, groups[0].has), out); !slices.Equal(run, tests[:1]) || !slices.Equal(excluded, tests[1:2]) {
		t.Errorf("run %q, excluded %q", run, excluded)
	}
	if re := regexp.MustCompile(exactly(tests[:1])); !re.MatchString("Kubernetes e2e suite "+tests[0]) || re.MatchString("Kubernetes e2e suite "+tests[1]) {
		t.Error("exactly means other tests")
	}
	if unused := stale(out, tests); !slices.Equal(unused, []string{"nothing"}) {
		t.Errorf("stale: %q", unused)
	}
	for _, bad := range []string{"failing: [{test: '('}]", "failing: [{test: a}]", "unknown: []"} {
		if _, err := readRemarks([]byte(bad)); err == nil {
			t.Errorf("%s is no error", bad)
		}
	}
	if some, err := chosen("apps,node"); err != nil || len(some) != 2 || some[0].name != "apps" {
		t.Errorf("chosen: %v, %v", some, err)
	}
	if _, err := chosen("none"); err == nil {
		t.Error("an unknown group is no error")
	}
}
