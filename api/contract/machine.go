package contract

import (
	"encoding/json"
	"strings"
)

// Firmware is what a guest that boots itself starts with. Empty means bios.
type Firmware string

// The kinds of firmware.
const (
	FirmwareBIOS Firmware = "bios"
	FirmwareUEFI Firmware = "uefi"
)

// SMBIOS is what the firmware tells a guest about its machine, beside the UUID, which KeyVirtletSystemUUID sets.
type SMBIOS struct {
	Serial  string  `json:"serial,omitempty"` // of the system
	Chassis Chassis `json:"chassis,omitzero"`
}

// Chassis is what a guest sees as the case of its machine. Its fields are those of KubeVirt.
type Chassis struct {
	Manufacturer string `json:"manufacturer,omitempty"`
	Version      string `json:"version,omitempty"`
	Serial       string `json:"serial,omitempty"`
	Asset        string `json:"asset,omitempty"`
	SKU          string `json:"sku,omitempty"`
}

// Machine is what a pod asks of the machine of its VM. The zero value asks for nothing.
type Machine struct {
	Firmware    Firmware
	SMBIOS      SMBIOS
	Graphics    bool              // a screen, a keyboard and a mouse, for a guest that boots itself
	FileDisks   map[string]string // labels of disks by the names of the pod's volumes: a guest that boots itself has their files on these disks
	NetworkData Source            // of the guest's network configuration, instead of the generated one; an empty key is networkdata
}

// NetworkDataKey is the key of Machine.NetworkData if it names none.
const NetworkDataKey = "networkdata"

// ParseMachine reads a Machine. It reads the good keys even if others are bad. Errors: Errors, with each bad key.
func ParseMachine(annotations map[string]string) (Machine, error) {
	r := &reader{from: annotations}
	m := Machine{
		Firmware:    oneOf(r, KeyFirmware, FirmwareBIOS, FirmwareUEFI),
		SMBIOS:      r.smbios(),
		Graphics:    r.flag(KeyGraphics),
		FileDisks:   r.ofVolumes(KeyFileDisks, diskLabel, "must be a list of NAME=LABEL by comma, each NAME once; a LABEL has at most 16 letters, digits, '.', '_' and '-'"),
		NetworkData: r.source(KeyNetworkData, true),
	}
	return m, r.errs.err()
}

func (r *reader) smbios() (b SMBIOS) {
	v := r.from[KeySMBIOS]
	if v == "" {
		return b
	}
	d := json.NewDecoder(strings.NewReader(v))
	d.DisallowUnknownFields()
	if err := d.Decode(&b); err != nil || d.More() {
		r.bad(KeySMBIOS, `must be JSON like {"serial": "…", "chassis": {"manufacturer": "…", "version": "…", "serial": "…", "asset": "…", "sku": "…"}}`)
		return SMBIOS{}
	}
	return b
}

// Apply writes m to annotations: keys of empty fields are removed.
func (m Machine) Apply(annotations map[string]string) {
	put(annotations, KeyFirmware, string(m.Firmware))
	text := ""
	if m.SMBIOS != (SMBIOS{}) {
		b, _ := json.Marshal(m.SMBIOS) // strings always marshal
		text = string(b)
	}
	put(annotations, KeySMBIOS, text)
	put(annotations, KeyGraphics, flagText(m.Graphics))
	put(annotations, KeyFileDisks, VolumesText(m.FileDisks))
	put(annotations, KeyNetworkData, m.NetworkData.String())
}
