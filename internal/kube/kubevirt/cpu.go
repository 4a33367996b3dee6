package kubevirt

import (
	"slices"
	"time"
	_ "time/tzdata" // the manager runs where there are no time zones

	"k8s.io/apimachinery/pkg/util/validation/field"
	v1 "kubevirt.io/api/core/v1"

	"cocoonstack.io/cocoon/api/contract"
	"cocoonstack.io/cocoon/internal/vm"
)

// Features of CPUs by which KVM tells the guest of its own.
const (
	featureClock  = "kvmclock"
	featureUnhalt = "kvm-pv-unhalt" // for spinlocks
)

// on reports whether a feature that is named is enabled, which is the default of one that is named.
func on(f *v1.FeatureState) bool { return f != nil && (f.Enabled == nil || *f.Enabled) }

// said is what a machine says of a flag; nil if it says nothing.
func said(f *v1.FeatureState) *bool {
	if f == nil {
		return nil
	}
	enabled := on(f)
	return &enabled
}

// guestCPU returns what the guest sees of its CPUs and of their hypervisor.
func guestCPU(d *v1.DomainSpec) (out contract.CPU) {
	if c := d.CPU; c != nil {
		if !slices.Contains(hostModels, c.Model) {
			out.Model = c.Model
		}
		for _, f := range c.Features {
			out.Features = append(out.Features, contract.CPUFeature{Name: f.Name, Policy: string(policies[f.Policy])})
		}
	}
	own := func(name string, enabled *bool) {
		if enabled == nil || slices.ContainsFunc(out.Features, func(f contract.CPUFeature) bool { return f.Name == name }) {
			return
		}
		policy := map[bool]vm.FeaturePolicy{false: vm.FeatureDisable, true: vm.FeatureOptional}[*enabled]
		out.Features = append(out.Features, contract.CPUFeature{Name: name, Policy: string(policy)})
	}
	if f := d.Features; f != nil {
		own(featureUnhalt, said(f.Pvspinlock))
		out.HideKVM = f.KVM != nil && f.KVM.Hidden
		out.HyperV = hyperV(f.Hyperv)
	}
	if t := timers(d); t.KVM != nil {
		own(featureClock, t.KVM.Enabled)
	}
	if t := timers(d).Hyperv; t != nil && (t.Enabled == nil || *t.Enabled) {
		out.HyperV.Features = append(out.HyperV.Features, "time")
	}
	slices.Sort(out.HyperV.Features)
	return out
}

var hostModels = []string{"", v1.CPUModeHostModel, v1.CPUModeHostPassthrough}

// noForbid is why no feature has the policy policyForbid.
const (
	policyForbid = "forbid"
	noForbid     = "a VM runs whatever other features the CPU of its node has; use disable"
)

// policies are those of features. A feature that is forced is given if the accelerator can give it.
var policies = map[string]vm.FeaturePolicy{
	"": "", "require": vm.FeatureRequire, "force": vm.FeatureOptional, "optional": vm.FeatureOptional, "disable": vm.FeatureDisable,
}

func hyperV(f *v1.FeatureHyperv) (out contract.HyperV) {
	if f == nil {
		return out
	}
	add := func(name string, s *v1.FeatureState) {
		if on(s) {
			out.Features = append(out.Features, name)
		}
	}
	for name, s := range map[string]*v1.FeatureState{
		"relaxed": f.Relaxed, "vapic": f.VAPIC, "vpindex": f.VPIndex, "runtime": f.Runtime, "synic": f.SyNIC, "reset": f.Reset,
		"frequencies": f.Frequencies, "reenlightenment": f.Reenlightenment, "ipi": f.IPI, "evmcs": f.EVMCS,
	} {
		add(name, s)
	}
	if t := f.SyNICTimer; t != nil && on(&t.FeatureState) {
		add("stimer", &t.FeatureState)
		add("stimer-direct", t.Direct)
	}
	if t := f.TLBFlush; t != nil && on(&t.FeatureState) {
		add("tlbflush", &t.FeatureState)
		add("tlbflush-direct", t.Direct)
		add("tlbflush-ext", t.Extended)
	}
	if s := f.Spinlocks; s != nil && on(&s.FeatureState) {
		out.Spinlocks = spinlocks
		if s.Retries != nil {
			out.Spinlocks = int(*s.Retries)
		}
	}
	if v := f.VendorID; v != nil && on(&v.FeatureState) {
		out.VendorID = v.VendorID
	}
	return out
}

// spinlocks is KubeVirt's default of the attempts for a spinlock.
const spinlocks = 4096

// timers returns those of the machine.
func timers(d *v1.DomainSpec) v1.Timer {
	if d.Clock == nil || d.Clock.Timer == nil {
		return v1.Timer{}
	}
	return *d.Clock.Timer
}

// clock returns the hardware clock of the machine.
func clock(d *v1.DomainSpec) (out contract.Clock) {
	if c := d.Clock; c != nil && c.Timezone != nil {
		out.Timezone = string(*c.Timezone)
	} else if c != nil && c.UTC != nil && c.UTC.OffsetSeconds != nil {
		out.Offset = *c.UTC.OffsetSeconds
	}
	t := timers(d)
	out.NoHPET = t.HPET != nil && t.HPET.Enabled != nil && !*t.HPET.Enabled
	if t.RTC != nil {
		out.CatchUp, out.Guest = t.RTC.TickPolicy == v1.RTCTickPolicyCatchup, t.RTC.Track == v1.TrackGuest
	}
	return out
}

// panicDevice returns the device for panics, which is isa if the machine does not say which.
func panicDevice(d *v1.Devices) string {
	if len(d.PanicDevices) == 0 {
		return ""
	}
	if m := d.PanicDevices[0].Model; m != nil && *m == v1.Pvpanic {
		return string(vm.PanicPCI)
	}
	return string(vm.PanicISA)
}

// cpu checks the values of what guestCPU, clock and panicDevice read.
func (c *check) cpu() {
	d, domain := &c.spec.Domain, c.at.Child("domain")
	if cpu := d.CPU; cpu != nil {
		if err := (vm.CPU{Model: guestCPU(d).Model}).Validate(); err != nil {
			c.invalid(domain.Child("cpu", "model"), cpu.Model, err.Error())
		}
		for i, f := range cpu.Features {
			at := domain.Child("cpu", "features").Index(i)
			if f.Policy == policyForbid {
				c.errs = append(c.errs, field.Forbidden(at.Child("policy"), noForbid))
			} else {
				only(c, at.Child("policy"), f.Policy, "", "require", "optional", "disable", "force")
			}
			if err := (vm.CPU{Features: []vm.CPUFeature{{Name: f.Name}}}).Validate(); err != nil {
				c.invalid(at.Child("name"), f.Name, err.Error())
			}
			if slices.ContainsFunc(cpu.Features[:i], func(o v1.CPUFeature) bool { return o.Name == f.Name }) {
				c.errs = append(c.errs, field.Duplicate(at.Child("name"), f.Name))
			}
		}
	}
	if f := d.Features; f != nil {
		if f.SMM != nil {
			c.flag(domain.Child("features", "smm", "enabled"), f.SMM.Enabled, false, "a machine has SMM")
		}
		h := hyperV(f.Hyperv)
		if err := (vm.CPU{HyperV: vm.HyperV{Spinlocks: h.Spinlocks}}).Validate(); err != nil {
			c.invalid(domain.Child("features", "hyperv", "spinlocks", "spinlocks"), h.Spinlocks, err.Error())
		}
		if err := (vm.CPU{HyperV: vm.HyperV{VendorID: h.VendorID}}).Validate(); err != nil {
			c.invalid(domain.Child("features", "hyperv", "vendorid", "vendorid"), h.VendorID, err.Error())
		}
	}
	c.clock(domain.Child("clock"))
	devices := domain.Child("devices", "panicDevices")
	if n := len(d.Devices.PanicDevices); n > 1 {
		c.errs = append(c.errs, field.TooMany(devices, n, 1))
	}
	for i, p := range d.Devices.PanicDevices {
		if p.Model != nil {
			only(c, devices.Index(i).Child("model"), *p.Model, "", v1.Isa, v1.Pvpanic)
		}
	}
}

func (c *check) clock(at *field.Path) {
	d := &c.spec.Domain
	if d.Clock == nil {
		return
	}
	if d.Clock.UTC != nil && d.Clock.Timezone != nil {
		c.errs = append(c.errs, field.Forbidden(at.Child("timezone"), "a clock has one offset; remove utc or timezone"))
	}
	asked := vm.Clock(clock(d))
	place, value := at.Child("utc", "offsetSeconds"), any(asked.Offset)
	if asked.Timezone != "" {
		place, value = at.Child("timezone"), asked.Timezone
	}
	err := asked.Validate()
	if err == nil {
		_, err = asked.East(time.Time{})
	}
	if err != nil {
		c.invalid(place, value, err.Error())
	}
	t := timers(d)
	if t.RTC != nil {
		rtc := at.Child("timer", "rtc")
		only(c, rtc.Child("tickPolicy"), t.RTC.TickPolicy, "", v1.RTCTickPolicyDelay, v1.RTCTickPolicyCatchup)
		only(c, rtc.Child("track"), t.RTC.Track, "", v1.TrackGuest, v1.TrackWall)
		c.flag(rtc.Child("present"), t.RTC.Enabled, false, "a machine has a hardware clock")
	}
	if t.HPET != nil {
		only(c, at.Child("timer", "hpet", "tickPolicy"), t.HPET.TickPolicy, "", v1.HPETTickPolicyDelay, v1.HPETTickPolicyCatchup, v1.HPETTickPolicyMerge, v1.HPETTickPolicyDiscard)
	}
}
