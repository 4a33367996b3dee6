package vm

import (
	"regexp"
	"time"

	"cocoonstack.io/cocoon/internal/errdefs"
)

// KeptFirmware is what UEFI and a TPM of a VM that is removed have kept. The next VM of the owner with the same name and key gets it.
type KeptFirmware struct {
	Owner Owner     `json:"owner"`
	VM    string    `json:"vm"`
	Key   string    `json:"key"`
	Since time.Time `json:"since"` // when it was kept
}

// firmwareKey matches keys. The UID of a Kubernetes object is one.
var firmwareKey = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$`)

// KeepsFirmware returns the key under which what the firmware of s keeps outlives the VM; "" if it does not.
func (s Spec) KeepsFirmware() string {
	if s.Hardware == nil {
		return ""
	}
	return s.Hardware.Keep
}

// validateKeep returns an InvalidArgument error if nothing could be kept under the key of h.
func (h *Hardware) validateKeep() error {
	switch {
	case h.Keep == "":
		return nil
	case !firmwareKey.MatchString(h.Keep):
		return errdefs.Invalidf("invalid key %q for the state of its firmware; use at most 63 letters, digits, '.', '_' and '-', the first a letter or digit", h.Keep)
	case !h.UEFI.Persistent && h.TPM != TPMPersistent:
		return errdefs.Invalidf("it has a key for the state of its firmware, but neither UEFI nor its TPM keeps any; make one of them persistent, or leave out the key")
	}
	return nil
}
