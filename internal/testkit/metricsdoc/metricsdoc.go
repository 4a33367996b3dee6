// Package metricsdoc keeps docs/metrics.md correct: a program's test checks that its section lists the metric families
// of its registry, by name, type, labels and help. It measures nothing.
package metricsdoc

import (
	"fmt"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus"

	"cocoonstack.io/cocoon/internal/testkit/section"
)

// Check compares the section with the families of r. Families of Go and of the process are left out: they belong to the
// library.
func Check(t *testing.T, name string, r *prometheus.Registry) {
	t.Helper()
	section.Check(t, "docs/metrics.md", name, table(t, r))
}

// The library offers the content of a description only as text.
var described = regexp.MustCompile(`^Desc\{fqName: "([^"]*)", help: "(.*?)"(?:, unit: "[^"]*")?, constLabels: \{[^}]*\}, variableLabels: \{([^}]*)\}\}$`)

func table(t *testing.T, r *prometheus.Registry) string {
	t.Helper()
	kinds := map[string]string{}
	families, err := r.Gather()
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range families {
		kinds[f.GetName()] = strings.ToLower(f.GetType().String())
	}
	all := make(chan *prometheus.Desc)
	go func() {
		defer close(all)
		r.Describe(all)
	}()
	var rows []string
	for d := range all {
		m := described.FindStringSubmatch(d.String())
		if m == nil {
			t.Errorf("not understood: %s", d)
			continue
		}
		name, help, labels := m[1], m[2], strings.ReplaceAll(m[3], ",", ", ")
		if strings.HasPrefix(name, "go_") || strings.HasPrefix(name, "process_") {
			continue
		}
		kind := kinds[name]
		if kind == "" {
			kind = byName(name)
		}
		rows = append(rows, fmt.Sprintf("| `%s` | %s | %s | %s |\n", name, kind, labels, help))
	}
	slices.Sort(rows)
	return "| family | type | labels | what it says |\n|---|---|---|---|\n" + strings.Join(slices.Compact(rows), "")
}

// byName is the type of a family that has no series yet, derived from its name.
func byName(name string) string {
	switch {
	case strings.HasSuffix(name, "_total"):
		return "counter"
	case strings.HasSuffix(name, "_seconds"):
		return "histogram"
	}
	return "gauge"
}
