//go:build bench

// Package bench measures the product side by side with the software below it, in one run, and prints one table of medians.
// It asserts no times: machines differ, and a slow one is not a bug. It contains no product logic.
//
// It needs root, `make build`, and a network namespace of its own: hack/test.sh bench provides all of it.
package bench

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"text/tabwriter"
	"time"
)

// Sizes of the guests: those of examples/pod.yaml.
const (
	guestCPUs    = 1
	guestMemory  = 256 << 20 // bytes
	guestStorage = 1 << 30   // bytes
)

// TestBench runs all measurements, one after the other, and prints the results.
func TestBench(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Fatal("the benchmarks need root; run them with `make bench`")
	}
	var results table
	defer func() { fmt.Print(results.String()) }()
	for _, b := range []struct {
		name string
		run  func(*testing.T, *table)
	}{
		{"probes", probes},
		{"boot", boot},
		{"clones", clones},
		{"carry", carry},
		{"idle", idle},
		{"pods", pods},
		{"starts", starts},
		{"machines", machines},
		{"density", density},
		{"claims", claims},
		{"fake", fakes},
		{"records", records},
		{"many", manyOnOne},
		{"sets", sets},
		{"sticky", stickies},
		{"removed", removed},
		{"admissions", admissions},
		{"pulls", pulls},
		{"layers", layers},
		{"volumes", volumes},
		{"volume io", volumeIO},
		{"plugs", plugs},
		{"pods with claims", podsWithClaims},
		{"leases", leases},
	} {
		if !t.Run(b.name, func(t *testing.T) { b.run(t, &results) }) {
			return
		}
	}
}

// table collects the rows of the final print.
type table struct {
	rows  []row
	notes strings.Builder
}

// row is one result. Empty cells are printed as such.
type row struct {
	what, a, b, figure, goal string
	n                        int
	missed                   bool
}

func (t *table) add(r row) { t.rows = append(t.rows, r) }

// note adds lines below the table.
func (t *table) note(format string, args ...any) { fmt.Fprintf(&t.notes, format+"\n", args...) }

func (t *table) String() string {
	var out bytes.Buffer
	w := tabwriter.NewWriter(&out, 0, 0, 2, ' ', 0)
	fmt.Fprintln(w, "\nWHAT\tA\tB\tFIGURE\tGOAL\tN\t")
	for _, r := range t.rows {
		verdict := ""
		switch {
		case r.missed:
			verdict = "MISSED"
		case r.goal != "":
			verdict = "ok"
		}
		fmt.Fprintf(w, "%s\t%s\t%s\t%s\t%s\t%d\t%s\n", r.what, r.a, r.b, r.figure, r.goal, r.n, verdict)
	}
	w.Flush()
	fmt.Fprintf(&out, "\n%s\n", t.notes.String())
	return out.String()
}

// samples are the times of repeated measurements of one thing.
type samples []time.Duration

func (s samples) quantile(q float64) time.Duration {
	if len(s) == 0 {
		return 0
	}
	sorted := slices.Sorted(slices.Values(s))
	return sorted[min(int(q*float64(len(sorted))), len(sorted)-1)]
}

func (s samples) median() time.Duration { return s.quantile(0.5) }

func ms(d time.Duration) string { return fmt.Sprintf("%.0f ms", float64(d)/1e6) }

// millis formats times in ms with tenths.
func millis(d time.Duration) string { return fmt.Sprintf("%.1f ms", float64(d)/1e6) }

func bin(name string) string {
	path, err := filepath.Abs(filepath.Join("..", "..", "bin", name))
	if err != nil {
		panic(err)
	}
	return path
}

// run runs a program. A failure ends the test.
func run(t *testing.T, path string, args ...string) {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), path, args...)
	var out, errs bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errs
	if err := cmd.Run(); err != nil {
		t.Fatalf("%s %v: %v\n%s%s", path, args, err, out.Bytes(), errs.Bytes())
	}
}

// scratch creates a folder whose path is short enough for sockets.
func scratch(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "cocoon-bench-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	if err := os.Chmod(dir, 0o711); err != nil { // VM processes are unprivileged
		t.Fatal(err)
	}
	return dir
}

// until calls ok every few milliseconds until it returns true, and returns the time of that.
func until(t *testing.T, limit time.Duration, what string, ok func() bool) time.Time {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), limit)
	defer cancel()
	tick := time.NewTicker(2 * time.Millisecond)
	defer tick.Stop()
	for {
		if ok() {
			return time.Now()
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			t.Fatalf("%s: not within %v", what, limit)
		}
	}
}

func must[T any](v T, err error) func(*testing.T) T {
	return func(t *testing.T) T {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
		return v
	}
}
