//go:build vm

package qemu

import (
	"bytes"
	"context"
	"image/png"
	"testing"

	"cocoonstack.io/cocoon/internal/hypervisor"
	"cocoonstack.io/cocoon/internal/testkit/need"
	"cocoonstack.io/cocoon/internal/vm"
)

// TestScreenOfFirmware: either firmware writes to the screen and to the serial console, and QEMU listens for viewers nowhere.
func TestScreenOfFirmware(t *testing.T) {
	a := needGuest(t)
	d := testDriver(t)
	for firmware, says := range map[vm.Firmware]string{vm.FirmwareBIOS: "SeaBIOS", vm.FirmwareUEFI: "BdsDxe"} {
		t.Run(string(firmware), func(t *testing.T) {
			if code, _ := d.ovmf(false); firmware == vm.FirmwareUEFI && code == "" {
				need.Missing(t, "OVMF; run `apt-get install ovmf`")
			}
			p := a.firmware(t)
			p.Boot.Firmware, p.Graphics = firmware, true
			i, err := d.Launch(t.Context(), p)
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { _ = i.Kill(context.Background()); _ = i.Close() })
			logged(t, i, says)
			screen, _ := hypervisor.As[hypervisor.Displayer](i)
			await(t, "the screen has two colours", func() bool {
				picture, err := screen.Screenshot(t.Context(), false)
				if err != nil {
					t.Fatal(err)
				}
				shown, err := png.Decode(bytes.NewReader(picture))
				if err != nil {
					t.Fatal(err)
				}
				size := shown.Bounds()
				for x := range size.Dx() {
					for y := range size.Dy() {
						if shown.At(x, y) != shown.At(0, 0) {
							return true
						}
					}
				}
				return false
			})
			c, err := i.(*instance).connected(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			var servers []struct {
				Server []any `json:"server"`
			}
			if err := c.Execute(t.Context(), "query-vnc-servers", nil, &servers); err != nil || len(servers) != 1 || len(servers[0].Server) > 0 {
				t.Errorf("QEMU listens: %+v, %v", servers, err)
			}
		})
	}
}
