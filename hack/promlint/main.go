// Command promlint checks the shipped monitoring files with Prometheus' own parsers: alert rules and the expressions of
// Grafana dashboards are well-formed, and docs/metrics.md lists every metric that they name.
//
//	promlint METRICS.md FILE...
package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"regexp"
	"strings"

	"github.com/prometheus/common/model"
	"github.com/prometheus/prometheus/model/rulefmt"
	"github.com/prometheus/prometheus/promql/parser"
)

func main() {
	if len(os.Args) < 3 {
		fmt.Fprintln(os.Stderr, "usage: promlint METRICS.md FILE...")
		os.Exit(2)
	}
	if err := run(os.Args[1], os.Args[2:]); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func run(catalogue string, files []string) error {
	l := linter{parser: parser.NewParser(parser.Options{})}
	if err := l.load(catalogue); err != nil {
		return err
	}
	var all []error
	for _, f := range files {
		check := l.rules
		if filepath.Ext(f) == ".json" {
			check = l.dashboard
		}
		for _, err := range check(f) {
			all = append(all, fmt.Errorf("%s: %w", f, err))
		}
	}
	return errors.Join(all...)
}

type linter struct {
	parser parser.Parser
	known  map[string]bool
}

// row is a metric family in a table: its name and its type.
var row = regexp.MustCompile("(?m)^\\| `([a-z0-9_]+)` \\| (counter|gauge|histogram|summary) \\|")

func (l *linter) load(path string) error {
	data, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	l.known = map[string]bool{"up": true} // Prometheus' own metric
	for _, m := range row.FindAllSubmatch(data, -1) {
		name := string(m[1])
		l.known[name] = true
		if string(m[2]) == "histogram" {
			delete(l.known, name)
			for _, s := range []string{"_bucket", "_sum", "_count"} {
				l.known[name+s] = true
			}
		}
	}
	if len(l.known) < 10 {
		return fmt.Errorf("%s lists no metrics", path)
	}
	return nil
}

// expr checks that one expression is well-formed and that every metric in it is known.
func (l *linter) expr(text string) error {
	e, err := l.parser.ParseExpr(text)
	if err != nil {
		return fmt.Errorf("%s: %w", text, err)
	}
	var unknown []string
	parser.Inspect(e, func(n parser.Node, _ []parser.Node) error {
		if v, ok := n.(*parser.VectorSelector); ok && !l.known[v.Name] {
			unknown = append(unknown, v.Name)
		}
		return nil
	})
	if len(unknown) > 0 {
		return fmt.Errorf("%s: no such metric: %s", text, strings.Join(unknown, ", "))
	}
	return nil
}

func (l *linter) rules(path string) (all []error) {
	data, err := os.ReadFile(path)
	if err != nil {
		return []error{err}
	}
	groups, all := rulefmt.Parse(data, false, model.LegacyValidation, l.parser, slog.New(slog.DiscardHandler))
	if groups == nil {
		return all
	}
	for _, g := range groups.Groups {
		for _, r := range g.Rules {
			if err := l.expr(r.Expr); err != nil {
				all = append(all, fmt.Errorf("%s%s: %w", r.Alert, r.Record, err))
			}
			if r.Alert != "" && (r.Labels["severity"] == "" || r.Annotations["summary"] == "" || r.Annotations["description"] == "") {
				all = append(all, fmt.Errorf("%s: severity, summary or description is missing", r.Alert))
			}
		}
	}
	return all
}

// panel is the part of a dashboard's panel that this program needs. Rows hold panels.
type panel struct {
	ID      int     `json:"id"`
	Type    string  `json:"type"`
	Title   string  `json:"title"`
	Panels  []panel `json:"panels"`
	Targets []struct {
		Expr string `json:"expr"`
	} `json:"targets"`
}

// variables replaces Grafana variables, which stand for durations and for regular expressions.
var variables = strings.NewReplacer("$__rate_interval", "5m", "$__range", "1h", "$__interval", "1m", "$instance", ".+", "$namespace", ".+")

func (l *linter) dashboard(path string) (all []error) {
	data, err := os.ReadFile(path)
	if err != nil {
		return []error{err}
	}
	var d struct {
		UID        string  `json:"uid"`
		Title      string  `json:"title"`
		Panels     []panel `json:"panels"`
		Templating struct {
			List []struct {
				Name  string `json:"name"`
				Type  string `json:"type"`
				Query string `json:"query"`
			} `json:"list"`
		} `json:"templating"`
	}
	if err := json.Unmarshal(data, &d); err != nil {
		return []error{err}
	}
	if d.UID == "" || d.Title == "" || len(d.Panels) == 0 {
		all = append(all, errors.New("uid, title or panels are missing"))
	}
	label := regexp.MustCompile(`^label_values\(([^,]+),`)
	for _, v := range d.Templating.List {
		if m := label.FindStringSubmatch(v.Query); v.Type == "query" && (m == nil || l.expr(variables.Replace(m[1])) != nil) {
			all = append(all, fmt.Errorf("variable %s: the query %q is not understood", v.Name, v.Query))
		}
	}
	seen := map[int]bool{}
	var walk func([]panel)
	walk = func(list []panel) {
		for _, p := range list {
			if seen[p.ID] {
				all = append(all, fmt.Errorf("panel %q: the id %d is taken", p.Title, p.ID))
			}
			seen[p.ID] = true
			if p.Type != "row" && len(p.Targets) == 0 {
				all = append(all, fmt.Errorf("panel %q shows nothing", p.Title))
			}
			for _, t := range p.Targets {
				text := variables.Replace(t.Expr)
				if err := l.expr(text); err != nil {
					all = append(all, fmt.Errorf("panel %q: %w", p.Title, err))
				} else if strings.Contains(text, "$") {
					all = append(all, fmt.Errorf("panel %q: unknown variable in %s", p.Title, t.Expr))
				}
			}
			walk(p.Panels)
		}
	}
	walk(d.Panels)
	return all
}
