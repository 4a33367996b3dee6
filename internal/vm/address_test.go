package vm

import (
	"reflect"
	"testing"
)

func TestProcessAddressed(t *testing.T) {
	p := Process{
		Entrypoint: []string{"/serve"}, Args: []string{"--at=" + OwnAddress + ":80"},
		Env: []EnvVar{{Name: "IP", Value: OwnAddress}, {Name: "IPS", Value: OwnAddresses}, {Name: "A", Value: "a"}},
	}
	for name, tc := range map[string]struct {
		nics     []NIC
		one, all string
	}{
		"both families": {[]NIC{{IP: "10.0.0.2", IPv6: "fd00::2"}, {IP: "10.1.0.2"}}, "10.0.0.2", "10.0.0.2,fd00::2"},
		"one family":    {[]NIC{{IP: "10.0.0.2"}}, "10.0.0.2", "10.0.0.2"},
		"only IPv6":     {[]NIC{{IPv6: "fd00::2"}}, "fd00::2", "fd00::2"},
		"none":          {},
	} {
		want := Process{
			Entrypoint: []string{"/serve"}, Args: []string{"--at=" + tc.one + ":80"},
			Env: []EnvVar{{Name: "IP", Value: tc.one}, {Name: "IPS", Value: tc.all}, {Name: "A", Value: "a"}},
		}
		if got := p.Addressed(tc.nics); !reflect.DeepEqual(got, want) {
			t.Errorf("%s: %+v, want %+v", name, got, want)
		}
	}
	if p.Env[0].Value != OwnAddress || p.Args[0] != "--at="+OwnAddress+":80" {
		t.Errorf("the process itself changed: %+v", p)
	}
}
