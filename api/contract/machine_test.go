package contract

import (
	"errors"
	"maps"
	"reflect"
	"strings"
	"testing"

	"cocoonstack.io/cocoon/internal/testkit/diff"
)

func TestMachineSetsAndClears(t *testing.T) {
	want := Machine{
		Firmware:    FirmwareUEFI,
		SMBIOS:      SMBIOS{Serial: `a "b", c`, Chassis: Chassis{Manufacturer: "m", Version: "v", Serial: "s", Asset: "a", SKU: "k"}},
		Graphics:    true,
		Hardware:    Hardware{Growth: Growth{MaxSockets: 4, MaxMemory: 1 << 30, CPUShare: 100}, OfNode: OfNode{VSOCK: true, Kernel: &Kernel{Volume: "boot", Path: "/k", Initrd: "/i", Args: "a=b"}, HostDisks: map[string]HostDisk{"data": {Capacity: 1 << 30, Shared: true}}}},
		DiskRate:    DiskRate{Bytes: 100 << 20, Ops: 1001},
		FileDisks:   map[string]string{"cfg": "cidata", "keys": "KEYS_1"},
		Logins:      Logins{Keys: map[string][]string{"team": {"debian", "Jörg Ø"}}, Passwords: []string{"words"}},
		NetworkData: Source{Kind: SourceSecret, Name: "net", Key: "networkData"},
	}
	m := map[string]string{"other": "kept"}
	want.Apply(m)
	if len(m) != 10 {
		t.Errorf("%v", m)
	}
	got, err := ParseMachine(m)
	if d := diff.Of(want, got); d != "" || err != nil {
		t.Errorf("read back: %s, %v", d, err)
	}
	Machine{}.Apply(m)
	if !maps.Equal(m, map[string]string{"other": "kept"}) {
		t.Errorf("left %v", m)
	}
}

func TestMachineRules(t *testing.T) {
	bad := map[string][]string{
		KeyFirmware:  {"UEFI", "coreboot"},
		KeySMBIOS:    {"serial", "[]", `{"uuid": "x"}`, `{"serial": 1}`, `{} {}`, `{"chassis": {"colour": "red"}}`},
		KeyGraphics:  {"yes", "vga"},
		KeyFileDisks: {"cfg", "cfg=", "cfg=a,cfg=b", "cfg=a,", "Cfg=a", "cfg=a b", "cfg=" + strings.Repeat("x", 17), "../cfg=a"},
		KeyLogins: {
			"team", `["a"]`, `{"keys": {"team": []}}`, `{"keys": {"team": [""]}}`, `{"keys": {"../x/team": ["a"]}}`, `{"passwords": [""]}`, `{"passwords": "words"}`, `{"words": {}}`,
			`{"keys": {"team": [` + strings.Repeat(`"a", `, 64) + `"b"]}}`,
		},
		KeyDiskBandwidth: {"fast", "0", "-1Mi", "1.5", "100M/s", " 1Mi", "99999999999E"},
		KeyDiskIOPS:      {"many", "0", "-5", "1k", "1.5", "99999999999999999999"},
		KeyNetworkData:   {"net", "secret/", "secret/../x/net", "file/net", "secret/net/a/b"},
	}
	for key, values := range bad {
		for _, v := range values {
			got, err := ParseMachine(map[string]string{key: v})
			list, _ := errors.AsType[Errors](err)
			if !reflect.DeepEqual(got, Machine{}) || len(list) != 1 || list[0].Key != key || list[0].Value != v {
				t.Errorf("%s: %s: %+v, %v", key, v, got, err)
			}
		}
	}
}

// FuzzMachine: any annotations can be read, and the values that were read survive a write and a second read.
func FuzzMachine(f *testing.F) {
	f.Add("uefi", `{"serial": "1"}`, "secret/a/b", "a=b,c=d", `{"keys": {"a": ["b"]}, "passwords": ["c"]}`, "100M", "1000")
	f.Add("x", `{"serial": "\ud800"`, "secret//", ",=", `{"passwords": []}`, "1500m", "+1")
	f.Fuzz(func(t *testing.T, firmware, smbios, source, disks, logins, bandwidth, iops string) {
		m, _ := ParseMachine(map[string]string{
			KeyFirmware: firmware, KeySMBIOS: smbios, KeyNetworkData: source, KeyFileDisks: disks, KeyLogins: logins, KeyDiskBandwidth: bandwidth, KeyDiskIOPS: iops,
		})
		out := map[string]string{}
		m.Apply(out)
		again, err := ParseMachine(out)
		if err != nil || !reflect.DeepEqual(again, m) {
			t.Fatalf("%+v became %+v, %v", m, again, err)
		}
	})
}
