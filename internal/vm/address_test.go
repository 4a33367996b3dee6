package vm

import (
	"reflect"
	"slices"
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

func TestOneDefaultRoute(t *testing.T) {
	all := Route{To: "0.0.0.0/0", Via: "192.0.2.1"}
	six := Route{To: "::/0", Via: "fd00::1"}
	lab := Route{To: "10.9.0.0/16", Via: "192.0.2.1"}
	for name, tc := range map[string]struct{ nics, want []NIC }{
		"none":            {[]NIC{{IP: "10.0.0.2"}}, []NIC{{IP: "10.0.0.2"}}},
		"the first one's": {[]NIC{{Gateway: "10.0.0.1"}, {Gateway: "192.0.2.1"}}, []NIC{{Gateway: "10.0.0.1"}, {}}},
		"the second's":    {[]NIC{{}, {Gateway: "192.0.2.1"}, {Gateway: "192.0.2.1"}}, []NIC{{}, {Gateway: "192.0.2.1"}, {}}},
		"as a route":      {[]NIC{{Gateway: "10.0.0.1"}, {Routes: []Route{all, six, lab}}}, []NIC{{Gateway: "10.0.0.1"}, {Routes: []Route{six, lab}}}},
		"of one NIC":      {[]NIC{{Gateway: "10.0.0.1", Routes: []Route{six, all}}, {Routes: []Route{six}}}, []NIC{{Gateway: "10.0.0.1", Routes: []Route{six, all}}, {}}},
	} {
		before := slices.Clone(tc.nics)
		got := OneDefaultRoute(tc.nics)
		for i := range got {
			if len(got[i].Routes) == 0 {
				got[i].Routes = nil
			}
		}
		if !reflect.DeepEqual(got, tc.want) || !reflect.DeepEqual(tc.nics, before) {
			t.Errorf("%s: %+v, want %+v; the argument is %+v", name, got, tc.want, tc.nics)
		}
	}
}
