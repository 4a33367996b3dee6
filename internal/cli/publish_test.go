package cli

import (
	"testing"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/testkit/diff"
	"cocoonstack.io/cocoon/internal/vm"
)

func TestParsePorts(t *testing.T) {
	got, err := parsePorts([]string{"8080:80", "192.0.2.7:8443:443/TCP", "5353:53/udp"})
	if err != nil {
		t.Fatal(err)
	}
	want := []vm.PortMapping{
		{Protocol: vm.TCP, HostPort: 8080, GuestPort: 80},
		{Protocol: vm.TCP, HostIP: "192.0.2.7", HostPort: 8443, GuestPort: 443},
		{Protocol: vm.UDP, HostPort: 5353, GuestPort: 53},
	}
	if d := diff.Of(want, got); d != "" {
		t.Error(d)
	}
	for _, bad := range []string{"", "80", "80:", ":80", "0:80", "80:0", "65536:80", "80:65536", "-1:80", "a:80", "1:2:3:4", "[fd00::1]:80:80"} {
		if p, err := parsePorts([]string{bad}); !errdefs.IsInvalid(err) {
			t.Errorf("%q: %v, %v", bad, p, err)
		}
	}
}
