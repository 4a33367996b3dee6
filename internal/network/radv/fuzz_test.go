package radv

import (
	"net"
	"net/netip"
	"slices"
	"testing"

	"github.com/mdlayher/ndp"
)

// FuzzMessage reads neighbour and router messages as Serve's socket does: any guest may send any bytes. A message that was read
// can be written again, with the same content.
func FuzzMessage(f *testing.F) {
	mac := net.HardwareAddr{0x52, 0x54, 0, 0, 0, 1}
	own, router := Address(LinkLocal, mac), netip.MustParseAddr("fe80::1")
	link := &ndp.LinkLayerAddress{Direction: ndp.Source, Addr: mac}
	nonce := ndp.NewNonce()
	for _, m := range []ndp.Message{
		&ndp.RouterSolicitation{}, &ndp.RouterSolicitation{Options: []ndp.Option{link}},
		&ndp.NeighborSolicitation{TargetAddress: own, Options: []ndp.Option{nonce}}, // duplicate address detection
		&ndp.NeighborSolicitation{TargetAddress: router, Options: []ndp.Option{link}},
		&ndp.NeighborAdvertisement{Override: true, Solicited: true, TargetAddress: own, Options: []ndp.Option{&ndp.LinkLayerAddress{Direction: ndp.Target, Addr: mac}}},
		Config{Router: router, Prefix: netip.MustParsePrefix("fd00:1::/64"), MTU: 1400, DNS: []netip.Addr{netip.MustParseAddr("fd00:1::1")}, Search: []string{"pods.example"}}.message(mac),
	} {
		raw, err := ndp.MarshalMessage(m)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(raw)
	}
	f.Add([]byte{133, 0, 0, 0})
	f.Add([]byte{133, 0, 0, 0, 0, 0, 0, 0, 1, 0})
	f.Add([]byte{133, 0, 0, 0, 0, 0, 0, 0, 1, 255, 0, 0, 0, 0, 0, 0})
	f.Fuzz(func(t *testing.T, packet []byte) {
		m, err := ndp.ParseMessage(packet)
		if err != nil {
			return
		}
		said, err := ndp.MarshalMessage(m)
		if err != nil {
			return // a message that only others may send
		}
		again, err := ndp.ParseMessage(said)
		if err != nil {
			t.Fatalf("%+v is not read again: %v", m, err)
		}
		if twice, err := ndp.MarshalMessage(again); err != nil || !slices.Equal(twice, said) {
			t.Errorf("%x became %x: %v", said, twice, err)
		}
	})
}

// FuzzAddress treats any address as a guest's: if MAC accepts it, Address makes the same address from that MAC.
func FuzzAddress(f *testing.F) {
	for _, s := range []string{"fe80::1", "fe80::3656:78ff:fe9a:bcde", "fd00:1::3656:78ff:fe9a:bcde", "10.0.0.1", "::"} {
		f.Add(netip.MustParseAddr(s).AsSlice())
	}
	f.Fuzz(func(t *testing.T, raw []byte) {
		a, ok := netip.AddrFromSlice(raw)
		if !ok {
			return
		}
		mac, ok := MAC(a)
		if ok && (len(mac) != 6 || Address(LinkLocal, mac) != a || !a.IsLinkLocalUnicast()) {
			t.Errorf("%s is made of %s?", a, mac)
		}
	})
}
