package vm

import (
	"regexp"
	"slices"
	"strings"
	"time"

	"cocoonstack.io/cocoon/internal/errdefs"
)

// CPU says what a guest sees of its CPUs and of their hypervisor. The zero value is all that the accelerator can give.
type CPU struct {
	Model    string       `json:"model,omitempty"`    // as the hypervisor names it; "": the host's
	Features []CPUFeature `json:"features,omitempty"` // beside those of the model
	HideKVM  bool         `json:"hide_kvm,omitempty"` // the guest does not find KVM
	HyperV   HyperV       `json:"hyperv,omitzero"`
}

// CPUFeature is a feature of a CPU, such as avx2.
type CPUFeature struct {
	Name   string        `json:"name"`
	Policy FeaturePolicy `json:"policy,omitempty"`
}

// FeaturePolicy says whether a CPU has a feature. "" is FeatureRequire.
type FeaturePolicy string

// The policies of features.
const (
	FeatureRequire  FeaturePolicy = "require"  // the VM does not start without it
	FeatureOptional FeaturePolicy = "optional" // if the accelerator can give it
	FeatureDisable  FeaturePolicy = "disable"
)

// HyperV is what a guest sees of Hyper-V's interface, which Windows uses. It needs KVM, and has no effect without.
type HyperV struct {
	Features  []string `json:"features,omitempty"`  // as HyperVFeatures has them; what one needs comes with it
	Spinlocks int      `json:"spinlocks,omitempty"` // attempts before the guest tells the hypervisor; 0: it never does
	VendorID  string   `json:"vendor_id,omitempty"` // at most 12 characters; "": Hyper-V's own
}

// HyperVFeatures are the parts of Hyper-V's interface that a guest can have, with those that each of them needs.
var HyperVFeatures = map[string][]string{
	"evmcs": {"vapic"}, "frequencies": nil, "ipi": {"vpindex"}, "reenlightenment": nil, "relaxed": nil, "reset": nil, "runtime": nil,
	"stimer": {"synic", "time"}, "stimer-direct": {"stimer"}, "synic": {"vpindex"}, "time": nil, "tlbflush": {"vpindex"},
	"tlbflush-direct": {"tlbflush", "vapic"}, "tlbflush-ext": {"tlbflush"}, "vapic": nil, "vpindex": nil,
}

// Limits of CPU.
const (
	maxCPUFeatures  = 128
	minSpinlocks    = 4096
	maxVendorID     = 12
	maxClockOffset  = 24 * 60 * 60 // seconds
	maxTimezoneName = 64
)

var (
	cpuModelRE   = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$`)
	cpuFeatureRE = regexp.MustCompile(`^[a-z0-9][a-z0-9._-]{0,63}$`)
	vendorIDRE   = regexp.MustCompile(`^[A-Za-z0-9 ._-]*$`)
	timezoneRE   = regexp.MustCompile(`^[A-Za-z0-9_+-]+(/[A-Za-z0-9_+-]+)*$`)
)

func (c CPU) empty() bool {
	return c.Model == "" && len(c.Features) == 0 && !c.HideKVM && len(c.HyperV.Features) == 0 && c.HyperV.Spinlocks == 0 && c.HyperV.VendorID == ""
}

// Validate returns an InvalidArgument error unless c is well formed. Which models and features exist is known to the hypervisor.
func (c CPU) Validate() error {
	if c.Model != "" && !cpuModelRE.MatchString(c.Model) {
		return errdefs.Invalidf("invalid model %q of its CPUs; use at most 64 letters, digits, '.', '_' and '-'", c.Model)
	}
	if len(c.Features) > maxCPUFeatures {
		return errdefs.Invalidf("its CPUs have %d features of their own; at most %d are possible", len(c.Features), maxCPUFeatures)
	}
	for i, f := range c.Features {
		switch {
		case !cpuFeatureRE.MatchString(f.Name):
			return errdefs.Invalidf("invalid feature %q of its CPUs; use lower-case letters, digits, '.', '_' and '-'", f.Name)
		case !slices.Contains([]FeaturePolicy{"", FeatureRequire, FeatureOptional, FeatureDisable}, f.Policy):
			return errdefs.Invalidf("feature %s of its CPUs: invalid policy %q; use require, optional or disable", f.Name, f.Policy)
		case slices.ContainsFunc(c.Features[:i], func(o CPUFeature) bool { return o.Name == f.Name }):
			return errdefs.Invalidf("feature %s of its CPUs is there twice", f.Name)
		}
	}
	h := c.HyperV
	for i, name := range h.Features {
		if _, ok := HyperVFeatures[name]; !ok || slices.Contains(h.Features[:i], name) {
			return errdefs.Invalidf("feature %q of Hyper-V is unknown, or is there twice", name)
		}
	}
	if h.Spinlocks != 0 && (h.Spinlocks < minSpinlocks || int64(h.Spinlocks) > 1<<32-1) {
		return errdefs.Invalidf("invalid number %d of Hyper-V's attempts for a spinlock; use at least %d", h.Spinlocks, minSpinlocks)
	}
	if len(h.VendorID) > maxVendorID || !vendorIDRE.MatchString(h.VendorID) {
		return errdefs.Invalidf("invalid vendor %q of Hyper-V; use at most %d letters, digits, ' ', '.', '_' and '-'", h.VendorID, maxVendorID)
	}
	return nil
}

// All returns the features of h with those that they need, sorted.
func (h HyperV) All() (all []string) {
	var add func([]string)
	add = func(names []string) {
		for _, name := range names {
			if !slices.Contains(all, name) {
				all = append(all, name)
				add(HyperVFeatures[name])
			}
		}
	}
	add(h.Features)
	slices.Sort(all)
	return all
}

func (c CPU) clone() CPU {
	c.Features, c.HyperV.Features = cloneSlice(c.Features), cloneSlice(c.HyperV.Features)
	return c
}

// Clock is the hardware clock of a machine, and its timers. The zero value shows UTC.
type Clock struct {
	Timezone string `json:"timezone,omitempty"` // whose local time the clock shows when the VM starts, such as Europe/Berlin
	Offset   int    `json:"offset,omitempty"`   // seconds ahead of UTC, instead of a zone; negative to the west
	Local    bool   `json:"local,omitempty"`    // the clock shows the local time of the node, instead of that of a zone
	CatchUp  bool   `json:"catch_up,omitempty"` // ticks that the guest has missed are delivered later
	Guest    bool   `json:"guest,omitempty"`    // the clock stands while the guest is paused
	NoHPET   bool   `json:"no_hpet,omitempty"`
}

// Validate returns an InvalidArgument error if no clock is like c. Whether the zone exists is known where there are time zones.
func (c Clock) Validate() error {
	switch {
	case c.Timezone != "" && c.Offset != 0 || c.Local && (c.Timezone != "" || c.Offset != 0):
		return errdefs.Invalidf("its clock has two of a time zone, an offset and the node's local time; use one of them")
	case len(c.Timezone) > maxTimezoneName || c.Timezone != "" && !timezoneRE.MatchString(c.Timezone) || strings.EqualFold(c.Timezone, "local"):
		return errdefs.Invalidf("invalid time zone %q of its clock; use a name like Europe/Berlin", c.Timezone)
	case c.Offset <= -maxClockOffset || c.Offset >= maxClockOffset:
		return errdefs.Invalidf("invalid offset of %d seconds of its clock; use less than a day", c.Offset)
	}
	return nil
}

// East returns how many seconds the clock is ahead of UTC at t.
func (c Clock) East(t time.Time) (int, error) {
	if c.Local {
		_, east := t.Local().Zone()
		return east, nil
	}
	if c.Timezone == "" {
		return c.Offset, nil
	}
	zone, err := time.LoadLocation(c.Timezone)
	if err != nil {
		return 0, errdefs.Invalidf("unknown time zone %q of its clock; use a name like Europe/Berlin", c.Timezone)
	}
	_, east := t.In(zone).Zone()
	return east, nil
}

// Panic is the device by which a guest says that its kernel has panicked; then the VM ends. "" is no device.
type Panic string

// The devices for panics.
const (
	PanicISA Panic = "isa"
	PanicPCI Panic = "pci"
)

func (p Panic) validate() error {
	if !slices.Contains([]Panic{"", PanicISA, PanicPCI}, p) {
		return errdefs.Invalidf("invalid panic device %q; use isa or pci", p)
	}
	return nil
}
