package vm

import (
	"slices"
	"testing"

	"cocoonstack.io/cocoon/internal/errdefs"
)

func TestValidatePorts(t *testing.T) {
	good := PortMapping{Protocol: TCP, HostPort: 80, GuestPort: 8080}
	with := func(change func(*PortMapping)) PortMapping {
		p := good
		change(&p)
		return p
	}
	for name, tc := range map[string]struct {
		ports []PortMapping
		ok    bool
	}{
		"none":             {nil, true},
		"one":              {[]PortMapping{good}, true},
		"two protocols":    {[]PortMapping{good, with(func(p *PortMapping) { p.Protocol = UDP })}, true},
		"two addresses":    {[]PortMapping{with(func(p *PortMapping) { p.HostIP = "192.0.2.1" }), with(func(p *PortMapping) { p.HostIP = "192.0.2.2" })}, true},
		"twice":            {[]PortMapping{good, with(func(p *PortMapping) { p.GuestPort = 1 })}, false},
		"one of all":       {[]PortMapping{good, with(func(p *PortMapping) { p.HostIP = "192.0.2.1" })}, false},
		"no protocol":      {[]PortMapping{with(func(p *PortMapping) { p.Protocol = "" })}, false},
		"other protocol":   {[]PortMapping{with(func(p *PortMapping) { p.Protocol = "icmp" })}, false},
		"no host port":     {[]PortMapping{with(func(p *PortMapping) { p.HostPort = 0 })}, false},
		"no guest port":    {[]PortMapping{with(func(p *PortMapping) { p.GuestPort = 0 })}, false},
		"loopback":         {[]PortMapping{with(func(p *PortMapping) { p.HostIP = "127.0.0.1" })}, false},
		"unspecified":      {[]PortMapping{with(func(p *PortMapping) { p.HostIP = "0.0.0.0" })}, false},
		"group":            {[]PortMapping{with(func(p *PortMapping) { p.HostIP = "224.0.0.1" })}, false},
		"IPv6":             {[]PortMapping{with(func(p *PortMapping) { p.HostIP = "fd00::1" })}, false},
		"mapped":           {[]PortMapping{with(func(p *PortMapping) { p.HostIP = "::ffff:192.0.2.1" })}, false},
		"name":             {[]PortMapping{with(func(p *PortMapping) { p.HostIP = "localhost" })}, false},
		"more than enough": {slices.Repeat([]PortMapping{good}, maxPorts+1), false},
	} {
		t.Run(name, func(t *testing.T) {
			err := validatePorts([]NICSpec{{Ports: tc.ports}})
			if tc.ok != (err == nil) || err != nil && !errdefs.IsInvalid(err) {
				t.Errorf("validatePorts = %v", err)
			}
		})
	}
	if err := validatePorts([]NICSpec{{Ports: []PortMapping{good}}, {Ports: []PortMapping{good}}}); !errdefs.IsInvalid(err) {
		t.Errorf("on two interfaces: %v", err)
	}
}
