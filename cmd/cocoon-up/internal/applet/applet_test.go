package applet

import (
	"slices"
	"testing"
)

func TestResolve(t *testing.T) {
	for _, tt := range []struct {
		name    string
		argv    []string
		program string
		args    []string
	}{
		{"nothing", nil, "", nil},
		{"no argument", []string{"cocoon-up"}, "", nil},
		{"first argument", []string{"/opt/cocoon-up", "control-plane", "--config", "f"}, ControlPlane, []string{"--config", "f"}},
		{"kubectl as argument", []string{"cocoon-up", "kubectl", "get", "pods"}, Kubectl, []string{"get", "pods"}},
		{"kubelet as argument", []string{"cocoon-up", "kubelet", "--v=2"}, Kubelet, []string{"--v=2"}},
		{"kubectl as name", []string{"/usr/bin/kubectl", "version"}, Kubectl, []string{"version"}},
		{"kubectl without arguments", []string{"kubectl"}, Kubectl, nil},
		{"scheduler as name", []string{"/usr/bin/cocoon-scheduler", "--v=2"}, Scheduler, []string{"--v=2"}},
		{"another name", []string{"kubectl-1.37", "version"}, Version, nil},
	} {
		t.Run(tt.name, func(t *testing.T) {
			program, args := Resolve(tt.argv)
			if program != tt.program || !slices.Equal(args, tt.args) {
				t.Errorf("Resolve(%q) = %q, %q; want %q, %q", tt.argv, program, args, tt.program, tt.args)
			}
		})
	}
}
