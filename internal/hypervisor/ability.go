package hypervisor

import (
	"context"

	"cocoonstack.io/cocoon/internal/vm"
)

// Ability is the name of something that guests of a driver can have, or that can be done with them. Users see it.
type Ability string

// EarlyClones is the ability to run a clone before its memory is here, on this node.
const EarlyClones Ability = "early-clones"

// InstanceTeller is the ability of a Driver to list the abilities of its instances. No VM need run for that.
type InstanceTeller interface {
	// Blank returns an instance of no VM, which has the type of all others. None of its methods may be called.
	Blank() Instance
}

// abilities are all there are. Each is an ability of instances, of a driver, or a plan that a driver does not refuse.
var abilities = []struct {
	name     Ability
	text     string
	instance func(Instance) bool
	driver   func(Driver) bool
	asks     func(*Plan)
}{
	{name: "disk-images", text: "boot an image that has a system of its own, by firmware", asks: func(p *Plan) { p.Boot = vm.Boot{} }},
	{name: "emulation", text: "run without KVM", asks: func(p *Plan) { p.Accel = vm.AccelTCG }},
	{name: "pause", text: "stand still and go on", instance: has[Pauser]},
	{name: "save", text: "save, clone, hibernate, wake and restore a VM that runs", instance: has[Snapshotter]},
	{name: EarlyClones, text: "run a clone before its memory is here, on this node", driver: LoadsLate},
	{name: "plug-disks", text: "give a running VM volumes and containers, and take them away", instance: has[DiskPlugger]},
	{name: "plug-nics", text: "give a running VM network interfaces, and take them away", instance: has[NICPlugger]},
	{name: "grow-disks", text: "grow a volume of a running VM", instance: has[DiskGrower]},
	{name: "resize", text: "give a running VM more CPUs and memory", instance: has[Resizer]},
	{name: "links", text: "set the link of an interface down and up", instance: has[Linker]},
	{name: "reset", text: "reset a guest that boots by firmware", instance: has[Resetter]},
	{name: "dump", text: "dump the memory of a guest", instance: has[MemoryDumper]},
	{name: "screen", text: "a screen, a keyboard and a mouse", instance: has[Displayer]},
	{name: "vsock", text: "a virtio socket that programs of the node reach", instance: has[SocketTeller]},
	{name: "folders", text: "folders of the node", asks: func(p *Plan) { p.Shares = []Share{{Tag: vm.SharedTag, Path: "/x", Live: true}} }},
	{name: "huge-pages", text: "memory of huge pages, of a disk image", asks: func(p *Plan) { p.Boot, p.Huge = vm.Boot{}, vm.HugePages2M }},
	{name: "tpm", text: "a TPM", asks: func(p *Plan) { p.TPM = vm.TPMEphemeral }},
	{name: "secure-boot", text: "UEFI that starts only what is signed", asks: func(p *Plan) { p.Boot, p.UEFI = vm.Boot{Firmware: vm.FirmwareUEFI}, vm.UEFI{SecureBoot: true} }},
	{name: "cpu-models", text: "another CPU model than the host's", asks: func(p *Plan) { p.CPU.Model = "qemu64" }},
	{name: "watchdog", text: "a watchdog", asks: func(p *Plan) { p.Watchdog = vm.WatchdogReset }},
	{name: "cdrom", text: "a drive for CD-ROMs", asks: func(p *Plan) { p.Drive = &Drive{} }},
}

func has[T any](i Instance) bool {
	_, ok := As[T](i)
	return ok
}

// AllAbilities returns the abilities that there are.
func AllAbilities() (all []Ability) {
	for _, a := range abilities {
		all = append(all, a.name)
	}
	return all
}

// Text says what a is.
func (a Ability) Text() string {
	for _, x := range abilities {
		if x.name == a {
			return x.text
		}
	}
	return ""
}

// Abilities returns what d can do on this host, in the order of AllAbilities. A driver without Checker is taken to refuse no plan.
func Abilities(ctx context.Context, d Driver) (out []Ability) {
	var blank Instance
	if t, ok := As[InstanceTeller](d); ok {
		blank = t.Blank()
	}
	for _, a := range abilities {
		var can bool
		switch {
		case a.instance != nil:
			can = blank != nil && a.instance(blank)
		case a.driver != nil:
			can = a.driver(d)
		default:
			c, checks := As[Checker](d)
			can = !checks || c.Check(ctx, asking(a.asks)) == nil
		}
		if can {
			out = append(out, a.name)
		}
	}
	return out
}

// asking returns the smallest plan, with what asks adds.
func asking(asks func(*Plan)) Plan {
	const memory = 256 << 20
	p := Plan{ID: "ability", Name: "ability", Dir: "/", CPUs: 1, Memory: memory, Boot: vm.Boot{Kernel: "/kernel"}}
	asks(&p)
	return p
}

// InstanceAbilities returns the abilities of i, in the order of AllAbilities, without those of its driver alone.
func InstanceAbilities(i Instance) (out []Ability) {
	for _, a := range abilities {
		if a.instance != nil && a.instance(i) {
			out = append(out, a.name)
		}
	}
	return out
}
