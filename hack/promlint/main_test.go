package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

const metrics = "../../docs/metrics.md"

func TestWhatIsShipped(t *testing.T) {
	if err := run(metrics, []string{"../../deploy/monitoring/rules.yaml", "../../deploy/monitoring/dashboard.json"}); err != nil {
		t.Error(err)
	}
}

func TestWhatIsWrongIsFound(t *testing.T) {
	rule := func(expr string) string {
		return "groups: [{name: g, rules: [{alert: A, expr: '" + expr + "', labels: {severity: x}, annotations: {summary: s, description: d}}]}]"
	}
	dashboard := func(panels string) string { return `{"uid":"u","title":"t","panels":[` + panels + `]}` }
	for name, c := range map[string]struct{ file, text, says string }{
		"fine":           {"a.yaml", rule("up == 0"), ""},
		"no rules":       {"a.yaml", "groups: [{name: g, rules: [{alert: A}]}]", "expr"},
		"bad expression": {"a.yaml", rule("sum(up"), "unclosed"},
		"no such metric": {"a.yaml", rule("rate(vk_cocoon_vms[5m]) > 0"), "no such metric: vk_cocoon_vms"},
		"bad template":   {"a.yaml", strings.Replace(rule("up"), "summary: s", "summary: '{{ nothing }}'", 1), "nothing"},
		"no description": {"a.yaml", strings.Replace(rule("up"), ", description: d", "", 1), "missing"},
		"stray key":      {"a.yaml", "groups: []\nrules: []", "rules"},
		"no JSON":        {"a.json", "{", "JSON"},
		"empty":          {"a.json", "{}", "missing"},
		"bad panel":      {"a.json", dashboard(`{"id":1,"targets":[{"expr":"rate(up)"}]}`), "range vector"},
		"histogram":      {"a.json", dashboard(`{"id":1,"targets":[{"expr":"vk_cocoon_vm_boot_duration_seconds"}]}`), "no such metric"},
		"same id":        {"a.json", dashboard(`{"id":1,"targets":[{"expr":"up"}]},{"id":1,"targets":[{"expr":"up"}]}`), "taken"},
		"empty panel":    {"a.json", dashboard(`{"id":1}`), "shows nothing"},
	} {
		t.Run(name, func(t *testing.T) {
			path := filepath.Join(t.TempDir(), c.file)
			if err := os.WriteFile(path, []byte(c.text), 0o600); err != nil {
				t.Fatal(err)
			}
			err := run(metrics, []string{path})
			if (err == nil) != (c.says == "") || err != nil && !strings.Contains(err.Error(), c.says) {
				t.Errorf("%v, want %q", err, c.says)
			}
		})
	}
}
