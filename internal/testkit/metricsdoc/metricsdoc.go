// Package metricsdoc keeps docs/metrics.md correct: a program's test checks that its section lists the metric families
// of its registry, by name, type, labels and help. It measures nothing.
package metricsdoc

import (
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus"
)

var update = flag.Bool("update-metrics", false, "write the section of docs/metrics.md anew")

// Check compares the section with the families of r. Families of Go and of the process are left out: they belong to the
// library.
func Check(t *testing.T, section string, r *prometheus.Registry) {
	t.Helper()
	path := filepath.Join(root(t), "docs", "metrics.md")
	data, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	begin, end := "<!-- "+section+" -->\n", "<!-- end of "+section+" -->"
	before, rest, ok := strings.Cut(string(data), begin)
	old, after, closed := strings.Cut(rest, end)
	if !ok || !closed {
		t.Fatalf("docs/metrics.md has no section %q", section)
	}
	want := table(t, r)
	if old == want {
		return
	}
	if !*update {
		t.Fatalf("the section %q of docs/metrics.md is stale; write it anew with: go test %s -run %s -args -update-metrics\n%s", section, "./"+here(t), t.Name(), want)
	}
	if err := os.WriteFile(path, []byte(before+begin+want+end+after), 0o644); err != nil {
		t.Fatal(err)
	}
}

func root(t *testing.T) string {
	t.Helper()
	dir, err := os.Getwd()
	if err != nil {
		t.Fatal(err)
	}
	for {
		if _, err := os.Stat(filepath.Join(dir, "go.mod")); err == nil {
			return dir
		}
		up := filepath.Dir(dir)
		if up == dir {
			t.Fatal("no go.mod above this folder")
		}
		dir = up
	}
}

func here(t *testing.T) string {
	t.Helper()
	dir, err := os.Getwd()
	if err != nil {
		t.Fatal(err)
	}
	rel, err := filepath.Rel(root(t), dir)
	if err != nil {
		t.Fatal(err)
	}
	return rel
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
