package vm

import (
	"cmp"
	"crypto/rand"
	"encoding/base32"
	"errors"
	"fmt"
	"net"
	"regexp"
	"strings"
	"time"

	"cocoonstack.io/cocoon/internal/errdefs"
)

// Limits and defaults of a Spec. Sizes are bytes.
const (
	MaxNameLength    = 63
	MinPrefixLength  = 3 // shortest id prefix that Match accepts as a reference
	MaxCPUs          = 255
	MinMemory        = 96 << 20 // with less, our guest kernel with the agent does not boot
	MaxMemory        = 16 << 40
	MinStorage       = 16 << 20
	MaxStorage       = 64 << 40
	DefaultCPUs      = 2
	DefaultMemory    = 1 << 30
	DefaultStorage   = 10 << 30
	DefaultStopGrace = 30 * time.Second
)

var (
	idRE   = regexp.MustCompile(`^[a-z2-7]{26}$`)
	nameRE = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9._-]*$`)
	hostRE = regexp.MustCompile(`^[A-Za-z0-9]([A-Za-z0-9-]*[A-Za-z0-9])?$`)
	envRE  = regexp.MustCompile(`^[^=\x00]+$`)
	b32    = base32.NewEncoding("abcdefghijklmnopqrstuvwxyz234567").WithPadding(base32.NoPadding)
)

// NewID returns a new random ID of 128 bits.
func NewID() ID {
	var b [16]byte
	_, _ = rand.Read(b[:]) // never fails: crypto/rand aborts the process instead
	return ID(b32.EncodeToString(b[:]))
}

// Valid reports whether id has the form of an ID from NewID.
func (id ID) Valid() bool { return idRE.MatchString(string(id)) }

// ValidateName returns an InvalidArgument error unless name can name a VM:
// at most 63 characters of [A-Za-z0-9._-], the first a letter or digit.
func ValidateName(name string) error { return VMs.ValidateName(name) }

// ValidateName returns an InvalidArgument error unless name can name an object of kind k. The rule is that of VMs.
func (k Kind) ValidateName(name string) error {
	switch {
	case name == "":
		return errdefs.Invalidf("a %s needs a name", k.Noun)
	case len(name) > MaxNameLength:
		return errdefs.Invalidf("%s name %q has %d characters; at most %d are allowed", k.Noun, name, len(name), MaxNameLength)
	case !nameRE.MatchString(name):
		return errdefs.Invalidf("%s name %q must start with a letter or digit and hold only letters, digits, '.', '_' and '-'", k.Noun, name)
	}
	return nil
}

// Default returns s with every empty field set to its default.
func (s Spec) Default() Spec {
	s.CPUs = cmp.Or(s.CPUs, DefaultCPUs)
	s.Memory = cmp.Or(s.Memory, DefaultMemory)
	s.Storage = cmp.Or(s.Storage, DefaultStorage)
	s.Accel = cmp.Or(s.Accel, AccelAuto)
	s.Hostname = cmp.Or(s.Hostname, hostname(s.Name))
	s.StopGrace = cmp.Or(s.StopGrace, DefaultStopGrace)
	if len(s.Containers) > 0 {
		s.Restart = cmp.Or(s.Restart, RestartAlways)
		for _, c := range s.Containers {
			if c.Kind == ContainerApp && s.Image == "" {
				s.Image = c.Image
			}
		}
	}
	if s.IsWindows() {
		s = s.forWindows()
	}
	return s
}

// hostname turns a VM name into a host name: characters that a DNS label may not hold become dashes.
func hostname(name string) string {
	h := strings.Map(func(r rune) rune {
		if r == '.' || r == '_' {
			return '-'
		}
		return r
	}, name)
	return strings.Trim(h, "-")
}

// Validate returns the first thing that makes s impossible, as an InvalidArgument error. s must have its defaults set.
func (s Spec) Validate() error {
	if err := ValidateName(s.Name); err != nil {
		return err
	}
	switch {
	case s.Image == "" && !s.Sandbox:
		return errdefs.Invalidf("VM %s: an image is needed", s.Name)
	case s.CPUs < 1 || s.CPUs > MaxCPUs:
		return errdefs.Invalidf("VM %s: invalid number of CPUs %d; use 1 to %d", s.Name, s.CPUs, MaxCPUs)
	case s.Memory < MinMemory || s.Memory > MaxMemory:
		return errdefs.Invalidf("VM %s: invalid memory size of %d bytes; use at least %d (96 MiB)", s.Name, s.Memory, MinMemory)
	case s.Storage < MinStorage || s.Storage > MaxStorage:
		return errdefs.Invalidf("VM %s: invalid storage size of %d bytes; use %d (16 MiB) to %d", s.Name, s.Storage, MinStorage, int64(MaxStorage))
	case s.Accel != AccelAuto && s.Accel != AccelKVM && s.Accel != AccelTCG:
		return errdefs.Invalidf("VM %s: invalid accelerator %q; use auto, kvm or tcg", s.Name, s.Accel)
	case s.Firmware != "" && s.Firmware != FirmwareBIOS && s.Firmware != FirmwareUEFI:
		return errdefs.Invalidf("VM %s: invalid firmware %q; use bios or uefi", s.Name, s.Firmware)
	case s.StopGrace < 0:
		return errdefs.Invalidf("VM %s: the stop grace period is negative", s.Name)
	case len(s.Process.FileKeys) > 0:
		return errdefs.Invalidf("VM %s: its process cannot have environment variables from files of volumes; only containers can", s.Name)
	}
	for _, e := range s.Process.Env {
		if !envRE.MatchString(e.Name) {
			return errdefs.Invalidf("VM %s: invalid environment variable name %q", s.Name, e.Name)
		}
	}
	for _, n := range s.NICs {
		if err := errors.Join(n.Pod.validate(), n.Bandwidth.validate()); err != nil {
			return fmt.Errorf("VM %s: %w", s.Name, err)
		}
		if n.MAC == "" {
			continue
		}
		if err := ValidateMAC(n.MAC); err != nil {
			return fmt.Errorf("VM %s: %w", s.Name, err)
		}
	}
	for _, check := range []func() error{s.validateSandbox, s.validateNames, func() error { return validatePorts(s.NICs) }, s.ValidateMasquerade, s.Process.validate, s.ValidateVolumes, s.validateHostDisks, s.validateBootVolume, s.ValidateContainers, s.ValidateSysctls, s.SMBIOS.Validate, s.DiskRate.Validate, s.validateHardware} {
		if err := check(); err != nil {
			return fmt.Errorf("VM %s: %w", s.Name, err)
		}
	}
	return nil
}

// ValidateMAC returns an InvalidArgument error unless text is the hardware address of one interface: unicast, 48 bits, not zero.
func ValidateMAC(text string) error {
	hw, err := net.ParseMAC(text)
	if err != nil || len(hw) != 6 || hw[0]&1 != 0 || [6]byte(hw) == [6]byte{} {
		return errdefs.Invalidf("%q is not a unicast MAC address", text)
	}
	return nil
}
