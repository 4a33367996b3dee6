// Package cri runs critest, the conformance tests of container runtimes by Kubernetes, unmodified, against a real containerd and against
// what stands before it, and compares the outcomes spec by spec. `make critest` runs it.
//
// The images that critest pulls are stand-ins of ours (internal/testkit/containerdtest). The package contains no product logic.
package cri

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"cocoonstack.io/cocoon/internal/testkit/need"
)

// State is how a spec ended.
type State string

// The states that ginkgo reports and that we tell apart. All others, as of a spec that took too long, count as failed.
const (
	Passed  State = "passed"
	Failed  State = "failed"
	Skipped State = "skipped" // by the spec itself, which says why
)

// Outcome is what became of one spec.
type Outcome struct {
	State State
	Why   string // of a spec that did not pass: one line
	Time  time.Duration
}

// Run is one run of critest.
type Run struct {
	Socket  string        // path of the socket of CRI, for pods and images
	Handler string        // runtime handler of all pods; "": the default one
	Focus   string        // regular expression for the names of specs; "": all
	Skip    string        // regular expression for the names of specs that do not run; "": none
	Nodes   int           // how many specs run at once; 0: 4, for they mostly wait
	Dir     string        // folder for files; containers must be able to reach it
	Path    string        // PATH with critest and ginkgo
	Log     string        // file that gets all that critest prints; "": none
	Limit   time.Duration // the most that the run may take; 0: 20 minutes
}

// Score runs critest and returns the outcome of every spec that was chosen, by its name. That specs fail is no error; that critest does
// not run is one, and ends the test.
func Score(t testing.TB, r Run) map[string]Outcome {
	t.Helper()
	critest := need.Built(t, "bin/containerd/critest", "make containerd")
	ginkgo := need.Built(t, "bin/containerd/ginkgo", "make containerd")
	suite := filepath.Join(r.Dir, "cri.test") // ginkgo wants such a name
	if err := os.Symlink(critest, suite); err != nil {
		t.Fatal(err)
	}
	defer os.Remove(suite)
	const file = "report.json"
	if err := os.Remove(filepath.Join(r.Dir, file)); err != nil && !errors.Is(err, os.ErrNotExist) {
		t.Fatal(err)
	}
	limit := cmp.Or(r.Limit, 20*time.Minute)
	args := []string{
		"--nodes=" + strconv.Itoa(cmp.Or(r.Nodes, 4)), "--json-report=" + file, "--output-dir=" + r.Dir, "--keep-going", "--no-color", "--silence-skips",
		"--timeout=" + limit.String(), "--poll-progress-after=0",
	}
	if r.Focus != "" {
		args = append(args, "--focus="+r.Focus)
	}
	if r.Skip != "" {
		args = append(args, "--skip="+r.Skip)
	}
	socket := "unix://" + r.Socket
	args = append(args, suite, "--", "-runtime-endpoint="+socket, "-image-endpoint="+socket, "-runtime-handler="+r.Handler, "-config=/dev/null")

	ctx, cancel := context.WithTimeout(t.Context(), limit+time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, ginkgo, args...)
	cmd.Dir = r.Dir
	cmd.Env = append(os.Environ(), "PATH="+r.Path, "TMPDIR="+r.Dir)
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	err := cmd.Run() // it is an error that specs fail
	if r.Log != "" {
		if err := os.WriteFile(r.Log, out.Bytes(), 0o644); err != nil {
			t.Error(err)
		}
	}
	report, readErr := os.ReadFile(filepath.Join(r.Dir, file))
	if readErr != nil {
		t.Fatalf("critest wrote no report: %v, %v\n%s", err, readErr, out.Bytes())
	}
	scores, parseErr := parse(report)
	if parseErr != nil || len(scores) == 0 {
		t.Fatalf("critest's report has no specs: %v, %v\n%s", err, parseErr, out.Bytes())
	}
	return scores
}

// parse reads a report of ginkgo. Specs that were not chosen are left out.
func parse(report []byte) (map[string]Outcome, error) {
	var suites []struct {
		SpecReports []struct {
			ContainerHierarchyTexts    []string
			LeafNodeType, LeafNodeText string
			State                      string
			RunTime                    time.Duration
			Failure                    struct{ Message string }
		}
	}
	if err := json.Unmarshal(report, &suites); err != nil {
		return nil, fmt.Errorf("read a report of ginkgo: %w", err)
	}
	all := map[string]Outcome{}
	for _, suite := range suites {
		for _, spec := range suite.SpecReports {
			if spec.LeafNodeType != "It" || spec.State == "pending" || spec.State == "skipped" && spec.Failure.Message == "" {
				continue
			}
			o := Outcome{State: Failed, Time: spec.RunTime, Why: oneLine(spec.Failure.Message)}
			if s := State(spec.State); s == Passed || s == Skipped {
				o.State = s
			}
			name := strings.TrimPrefix(strings.Join(append(spec.ContainerHierarchyTexts, spec.LeafNodeText), " "), "[k8s.io] ")
			all[name] = o
		}
	}
	return all, nil
}

// Compare returns the differences between two scores, one line each: a spec must end in ours as in theirs, unless better names it and it
// passes in ours.
func Compare(ours, theirs map[string]Outcome, better map[string]string) []string {
	var all []string
	for name, o := range ours {
		their, ran := theirs[name]
		switch {
		case !ran:
			all = append(all, fmt.Sprintf("%s: %s, and does not run there", name, o.State))
		case o.State == their.State, better[name] != "" && o.State == Passed:
		default:
			all = append(all, fmt.Sprintf("%s: %s, and there %s: %s", name, o.State, their.State, o.Why+their.Why))
		}
	}
	for name := range theirs {
		if _, ran := ours[name]; !ran {
			all = append(all, name+": does not run")
		}
	}
	for name, why := range better {
		if o, ran := ours[name]; ran && o.State != Passed {
			all = append(all, fmt.Sprintf("%s: %s, and should pass because %s", name, o.State, why))
		}
	}
	slices.Sort(all)
	return slices.Compact(all)
}

// Table writes a score as text: how many specs ended how, each that did not pass with the reason, and the slowest.
func Table(score map[string]Outcome) string {
	count := map[State]int{}
	for _, o := range score {
		count[o.State]++
	}
	var b strings.Builder
	fmt.Fprintf(&b, "%d specs: %d passed, %d failed, %d skipped\n", len(score), count[Passed], count[Failed], count[Skipped])
	names := slices.Sorted(maps.Keys(score))
	for _, name := range names {
		if o := score[name]; o.State != Passed {
			fmt.Fprintf(&b, "  %s %s: %s\n", o.State, name, o.Why)
		}
	}
	slices.SortFunc(names, func(a, b string) int { return int(score[b].Time - score[a].Time) })
	for _, name := range names[:min(5, len(names))] {
		fmt.Fprintf(&b, "  %6.1fs %s\n", score[name].Time.Seconds(), name)
	}
	return b.String()
}

func oneLine(s string) string {
	const most = 300
	s = strings.Join(strings.Fields(s), " ")
	if len(s) > most {
		s = strings.ToValidUTF8(s[:most], "") + "…"
	}
	return s
}
