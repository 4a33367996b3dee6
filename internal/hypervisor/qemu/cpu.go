package qemu

import (
	"context"
	"fmt"
	"slices"
	"strings"

	"cocoonstack.io/cocoon/internal/hypervisor/jail"
	_ "time/tzdata" // for the clocks of guests, on a host without time zones

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/hypervisor/qemu/qmp"
	"cocoonstack.io/cocoon/internal/vm"
)

// cpuFacts are the models and features of CPUs that one QEMU binary knows.
type cpuFacts struct{ models, features map[string]bool }

func askCPUs(ctx context.Context, bin string) (*cpuFacts, error) {
	out, err := jail.Output(ctx, bin, "-cpu", "help")
	if err != nil {
		return nil, fmt.Errorf("ask %s: %w", bin, err)
	}
	return parseCPUs(out), nil
}

// parseCPUs reads a list of models, one a line, and after it one of features. Before the models, older versions have the word x86.
func parseCPUs(help string) *cpuFacts {
	f := &cpuFacts{map[string]bool{}, map[string]bool{}}
	models, features, _ := strings.Cut(help, "Recognized CPUID flags:")
	for line := range strings.Lines(models) {
		if words := strings.Fields(strings.TrimPrefix(line, "x86 ")); len(words) > 0 && !strings.HasSuffix(strings.TrimSpace(line), ":") {
			f.models[words[0]] = true
		}
	}
	for _, name := range strings.Fields(features) {
		f.features[name] = true
	}
	return f
}

// propertyOf is QEMU's name of a feature; libvirt, whose names KubeVirt has, writes some with an underscore.
func propertyOf(feature string) string { return strings.ReplaceAll(feature, "_", "-") }

// check refuses what this QEMU does not know. One that lists nothing refuses it itself.
func (f *cpuFacts) check(c vm.CPU) error {
	if c.Model != "" && len(f.models) > 0 && !f.models[c.Model] {
		return errdefs.Invalidf("QEMU knows no CPU of the model %q; `qemu-system-x86_64 -cpu help` lists the models", c.Model)
	}
	for _, x := range c.Features {
		if len(f.features) > 0 && !f.features[propertyOf(x.Name)] {
			return errdefs.Invalidf("QEMU knows no CPU feature %q; `qemu-system-x86_64 -cpu help` lists the features", x.Name)
		}
	}
	return nil
}

// cpuArg returns the option for the CPUs of a guest. Hyper-V's interface is KVM's.
func cpuArg(c vm.CPU, accel vm.Accel) string {
	model := map[bool]string{false: "max", true: "host"}[accel == vm.AccelKVM]
	if c.Model != "" {
		model = c.Model
	}
	args := []string{model}
	for _, f := range c.Features {
		args = append(args, propertyOf(f.Name)+"="+map[bool]string{false: "on", true: "off"}[f.Policy == vm.FeatureDisable])
	}
	if c.HideKVM {
		args = append(args, "kvm=off")
	}
	if accel != vm.AccelKVM {
		return strings.Join(args, ",")
	}
	for _, name := range c.HyperV.All() {
		args = append(args, "hv-"+name+"=on")
	}
	if n := c.HyperV.Spinlocks; n > 0 {
		args = append(args, fmt.Sprintf("hv-spinlocks=%#x", n))
	}
	if id := c.HyperV.VendorID; id != "" {
		args = append(args, "hv-vendor-id="+id)
	}
	return strings.Join(args, ",")
}

// look checks that a guest that boots has the CPUs that it needs.
func (l *launch) look(ctx context.Context, c *qmp.Client) error {
	if _, err := status(ctx, c); err != nil {
		return err
	}
	want := l.Plan.CPU
	if want.Model == "" && len(want.Features) == 0 {
		return nil
	}
	var cpus []struct {
		Path string `json:"qom-path"`
	}
	if err := c.Execute(ctx, "query-cpus-fast", nil, &cpus); err != nil {
		return err
	}
	var lacks []string
	if len(cpus) > 0 { // all are alike
		if err := c.Execute(ctx, "qom-get", props{"path": cpus[0].Path, "property": "unavailable-features"}, &lacks); err != nil {
			return err
		}
	}
	return lacking(want, lacks, l.accel)
}

// lacking says which of the features that the guest needs the accelerator cannot give. Emulation has no CPU of any newer model whole, so there
// only the features count that the machine names.
func lacking(want vm.CPU, lacks []string, accel vm.Accel) error {
	if want.Model != "" && accel == vm.AccelKVM {
		own := slices.DeleteFunc(slices.Clone(lacks), func(name string) bool {
			return slices.ContainsFunc(want.Features, func(f vm.CPUFeature) bool { return propertyOf(f.Name) == name })
		})
		if len(own) > 0 {
			return errdefs.Preconditionf("the CPU of this node is not of the model %s: it lacks %s; choose another model, or another node", want.Model, strings.Join(own[:min(len(own), 10)], ", "))
		}
	}
	for _, f := range want.Features {
		if (f.Policy == "" || f.Policy == vm.FeatureRequire) && slices.Contains(lacks, propertyOf(f.Name)) {
			return errdefs.Preconditionf("the accelerator %s of this node cannot give the guest the CPU feature %s; make it optional, or choose another node", accel, f.Name)
		}
	}
	return nil
}

// clock sets the hardware clock of the guest, which is east seconds ahead of UTC.
func (c *command) clock(clock vm.Clock, east int) {
	if clock == (vm.Clock{}) || clock == (vm.Clock{NoHPET: true}) {
		return
	}
	rtc := "base=utc"
	if east != 0 {
		sign := "-" // POSIX counts to the west
		if east < 0 {
			sign, east = "+", -east
		}
		rtc, c.timezone = "base=localtime", fmt.Sprintf("UTC%s%02d:%02d:%02d", sign, east/3600, east/60%60, east%60)
	}
	if clock.Guest {
		rtc += ",clock=vm"
	}
	if clock.CatchUp {
		rtc += ",driftfix=slew"
	}
	c.add("-rtc", rtc)
}

// env is the environment of the process.
func (c *command) env() []string {
	env := []string{"LANG=C"}
	if c.timezone != "" {
		env = append(env, "TZ="+c.timezone)
	}
	return env
}

// panics gives the guest a device by which its kernel says that it has panicked.
func (c *command) panics(p vm.Panic) {
	switch p {
	case vm.PanicISA:
		c.device(props{"driver": "pvpanic", "id": "panic0"})
	case vm.PanicPCI:
		c.device(props{"driver": "pvpanic-pci", "id": "panic0"}.at(slotBasic, 5))
	}
}
