package up

import (
	"os"
	"testing"

	"sigs.k8s.io/yaml"
)

// There is one scheduler: either the part, with its credentials, or the control plane's own.
func TestOneScheduler(t *testing.T) {
	in := &instance{layout: layout{t.TempDir()}, settings: Settings{With: []string{partScheduler}, SchedulerPort: 1234}}
	if err := os.MkdirAll(in.join("etc"), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := in.part(partScheduler).prepare(); err != nil {
		t.Fatal(err)
	}
	data, err := os.ReadFile(in.config("scheduler.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	var c struct {
		Kind             string
		ClientConnection struct{ Kubeconfig string }
		Profiles         []struct{ SchedulerName string }
	}
	if err := yaml.Unmarshal(data, &c); err != nil {
		t.Fatal(err)
	}
	if c.Kind != "KubeSchedulerConfiguration" || c.ClientConnection.Kubeconfig != in.config("scheduler.kubeconfig") || len(c.Profiles) == 0 || c.Profiles[0].SchedulerName != "default-scheduler" {
		t.Errorf("configuration %+v", c)
	}
	for _, s := range []Settings{in.settings, {}} {
		if got := controlPlaneConfig(in.layout, pki{}, s)["externalScheduler"]; got != s.with(partScheduler) {
			t.Errorf("with %q the control plane is told %v", s.With, got)
		}
	}
}
