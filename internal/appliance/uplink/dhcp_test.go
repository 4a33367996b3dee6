package uplink

import (
	"encoding/hex"
	"os"
	"path/filepath"
	"testing"

	"github.com/insomniacslk/dhcp/dhcpv4"
)

// Both slots ask for the same address.
func TestLeaseOptions(t *testing.T) {
	dir := t.TempDir()
	ask := func() *dhcpv4.DHCPv4 {
		t.Helper()
		wishes, err := leaseOptions(dir)
		if err != nil {
			t.Fatal(err)
		}
		d, err := dhcpv4.New(wishes...)
		if err != nil {
			t.Fatal(err)
		}
		return d
	}
	first := ask()
	id := first.Options.Get(dhcpv4.OptionClientIdentifier)
	if len(id) != 19 || id[0] != 0 {
		t.Errorf("the id is %x", id)
	}
	if first.RequestedIPAddress() != nil {
		t.Errorf("it asks for %s", first.RequestedIPAddress())
	}
	if err := os.WriteFile(filepath.Join(dir, addressFile), []byte("10.1.2.3\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	again := ask()
	if got := again.Options.Get(dhcpv4.OptionClientIdentifier); hex.EncodeToString(got) != hex.EncodeToString(id) {
		t.Errorf("another id: %x", got)
	}
	if got := again.RequestedIPAddress(); got.String() != "10.1.2.3" {
		t.Errorf("it asks for %s", got)
	}
	for _, broken := range []string{"", "zz", "00"} {
		if err := os.WriteFile(filepath.Join(dir, clientIDFile), []byte(broken), 0o600); err != nil {
			t.Fatal(err)
		}
		if got := ask().Options.Get(dhcpv4.OptionClientIdentifier); len(got) != 19 {
			t.Errorf("with the file %q: %x", broken, got)
		}
	}
}
