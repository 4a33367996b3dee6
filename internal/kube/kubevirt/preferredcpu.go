package kubevirt

import (
	v1 "kubevirt.io/api/core/v1"
	"kubevirt.io/api/instancetype/v1beta1"

	"k8s.io/apimachinery/pkg/util/validation/field"
)

// preferCPU applies what a preference says of the CPUs, the clock and the hypervisor. What the machine says itself counts.
func (u *unfolding) preferCPU(p *v1beta1.VirtualMachinePreferenceSpec, at *field.Path) {
	d := &u.spec.Domain
	if c := p.CPU; c != nil && (d.CPU == nil || len(d.CPU.Features) == 0) {
		var features []v1.CPUFeature
		for i, f := range c.PreferredCPUFeatures {
			if f.Policy == policyForbid {
				u.ignore(at.Child("cpu", "preferredCPUFeatures").Index(i).Child("policy"), noForbid)
			} else {
				features = append(features, f)
			}
		}
		if d.CPU == nil && len(features) > 0 {
			d.CPU = &v1.CPU{}
		}
		if len(features) > 0 {
			d.CPU.Features = features
		}
	}
	u.preferClock(p.Clock, at.Child("clock"))
	f := p.Features
	if f == nil {
		return
	}
	if d.Features == nil {
		d.Features = &v1.Features{}
	}
	fill(&d.Features.Hyperv, f.PreferredHyperv)
	fill(&d.Features.KVM, f.PreferredKvm)
	fill(&d.Features.Pvspinlock, f.PreferredPvspinlock)
	if f.PreferredSmm != nil {
		if on(f.PreferredSmm) {
			fill(&d.Features.SMM, f.PreferredSmm)
		} else {
			u.ignore(at.Child("features", "preferredSmm", "enabled"), "a machine has SMM")
		}
	}
	if *d.Features == (v1.Features{}) {
		d.Features = nil
	}
}

// preferClock applies what a preference says of the clock. Of its timers, it leaves out what no machine has.
func (u *unfolding) preferClock(p *v1beta1.ClockPreferences, at *field.Path) {
	if p == nil {
		return
	}
	c := v1.Clock{}
	if u.spec.Domain.Clock != nil {
		c = *u.spec.Domain.Clock
	}
	if o := p.PreferredClockOffset; o != nil && c.UTC == nil && c.Timezone == nil {
		c.ClockOffset = *o.DeepCopy()
	}
	if t := p.PreferredTimer.DeepCopy(); t != nil && c.Timer == nil {
		t.PIT = nil
		if t.HPET != nil {
			t.HPET.TickPolicy = ""
			t.HPET = orNil(t.HPET)
		}
		if t.RTC != nil && t.RTC.Enabled != nil && !*t.RTC.Enabled {
			t.RTC.Enabled = nil
			u.ignore(at.Child("preferredTimer", "rtc", "present"), "a machine has a hardware clock")
			t.RTC = orNil(t.RTC)
		}
		c.Timer = orNil(t)
	}
	if c != (v1.Clock{}) {
		u.spec.Domain.Clock = &c
	}
}

// orNil returns p, or nil if it says nothing.
func orNil[T comparable](p *T) *T {
	var zero T
	if *p == zero {
		return nil
	}
	return p
}

// fill sets what a machine leaves open to a copy of what is preferred.
func fill[T any](into **T, preferred *T) {
	if *into == nil && preferred != nil {
		value := *preferred
		*into = &value
	}
}
