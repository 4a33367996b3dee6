package reach

import (
	"net/netip"
	"os"
	"testing"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/testkit/netns"
)

func TestMain(m *testing.M) { os.Exit(netns.Main(m)) }

func TestForbidden(t *testing.T) {
	netns.Own(t)
	for addr, forbidden := range map[string]bool{
		"127.0.0.1": true, "127.8.8.8": true, "::1": true, "::ffff:127.0.0.1": true, "0.0.0.0": true, "::": true, "::ffff:0.0.0.0": true,
		"169.254.169.254": true, "::ffff:169.254.1.1": true, "fe80::1": true, "fe80::1%own0": true, "fd00:ec2::254": true, "168.63.129.16": true,
		"224.0.0.1": true, "ff02::1": true, "255.255.255.255": true, "::ffff:255.255.255.255": true,
		"64:ff9b::a9fe:a9fe": true, "64:ff9b::a4d:1": true, "2002:a4d:1::": true, "64:ff9b::a4d:3": false,
		"10.77.0.1": true, "10.77.0.2": true, "::ffff:10.77.0.2": true, "fd77::1": true, "10.78.0.9": true,
		"10.77.0.3": false, "fd77::2": false, "203.0.113.9": false, "240.0.0.1": false, "192.0.0.1": false, "192.0.0.192": true, "2001:db8::9": false, "::ffff:10.77.0.3": false,
	} {
		if err := Forbidden(netip.MustParseAddr(addr)); (err != nil) != forbidden || forbidden && !errdefs.IsFailedPrecondition(err) {
			t.Errorf("%s: %v", addr, err)
		}
	}
	for _, bad := range []string{"", "10.77.0.3", "host:80"} {
		if err := Fence("tcp", bad, nil); !errdefs.IsFailedPrecondition(err) {
			t.Errorf("%q: %v", bad, err)
		}
	}
}
