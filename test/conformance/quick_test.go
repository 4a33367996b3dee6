//go:build e2e

package conformance

import (
	"os/signal"
	"syscall"
	"testing"
)

// TestQuickConformance runs a dozen of Kubernetes' node tests, as part of `make test-e2e`. `make conformance` runs them all.
func TestQuickConformance(t *testing.T) {
	if testing.Short() {
		t.Skip("it takes minutes: make test-e2e runs it, make test does not")
	}
	ctx, stop := signal.NotifyContext(t.Context(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	known, err := readRemarks(testsFile)
	if err != nil {
		t.Fatal(err)
	}
	results, err := newSuite(ctx, t).run(ctx, t, "quick", known.Quick, "3")
	if err != nil {
		t.Fatal(err)
	}
	if len(results) != len(known.Quick) {
		t.Errorf("%d of %d tests ran; compare their names in tests.yaml with those of this Kubernetes", len(results), len(known.Quick))
	}
	for _, r := range results {
		if r.State != passed {
			t.Errorf("%s: %s\n%s", r.State, r.Test, r.Message)
		}
	}
}
