package kubevirt

import (
	"reflect"
	"slices"
	"strings"
	"testing"

	apiequality "k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/util/validation/field"
	v1 "kubevirt.io/api/core/v1"
	"kubevirt.io/api/instancetype/v1beta1"
	"sigs.k8s.io/yaml"
)

// plain is a machine that leaves all to its instancetype and its preference.
const plain = `
runStrategy: Always
instancetype: {name: small}
preference: {name: linux}
template:
  spec:
    domain:
      devices:
        disks: [{name: root, disk: {}}, {name: cd, cdrom: {}}]
        interfaces: [{name: default, bridge: {}}]
    networks: [{name: default, pod: {}}]
    volumes: [{name: root, containerDisk: {image: a}}, {name: cd, configMap: {name: c}}]
`

func machineOf(t testing.TB, text string) *v1.VirtualMachine {
	t.Helper()
	vm := &v1.VirtualMachine{}
	if err := yaml.UnmarshalStrict([]byte(text), &vm.Spec); err != nil {
		t.Fatal(err)
	}
	return vm
}

func instancetypeOf(t testing.TB, text string) *Part[v1beta1.VirtualMachineInstancetypeSpec] {
	t.Helper()
	p := Unknown(KindClusterInstancetype, "small")
	p.unknown = false
	if err := yaml.UnmarshalStrict([]byte(text), &p.Spec); err != nil {
		t.Fatal(err)
	}
	return p
}

func preferenceOf(t testing.TB, text string) *Part[v1beta1.VirtualMachinePreferenceSpec] {
	t.Helper()
	p := &Part[v1beta1.VirtualMachinePreferenceSpec]{Kind: KindPreference, Name: "linux"}
	if err := yaml.UnmarshalStrict([]byte(text), &p.Spec); err != nil {
		t.Fatal(err)
	}
	return p
}

// goodInstancetypes have one honoured field each, with a value that Cocoon has.
var goodInstancetypes = map[string]string{
	"nodeSelector":              "nodeSelector: {zone: a}",
	"schedulerName":             "schedulerName: other",
	"cpu.guest":                 "cpu: {guest: 4}",
	"cpu.model":                 "cpu: {model: host-passthrough}",
	"cpu.maxSockets":            "cpu: {maxSockets: 4}",
	"memory.guest":              "memory: {guest: 2Gi}",
	"memory.maxGuest":           "memory: {maxGuest: 8Gi}",
	"memory.hugepages.pageSize": "memory: {hugepages: {pageSize: 2Mi}}",
	"memory.overcommitPercent":  "memory: {overcommitPercent: 25}",
	"annotations":               "annotations: {a: b}",
	"cpu.dedicatedCPUPlacement": "",
	"cpu.isolateEmulatorThread": "",
}

// Each field of an instancetype, set alone, has the outcome that the table says: it is refused at its path, warned of and not applied,
// or applied.
func TestInstancetypeOutcomes(t *testing.T) {
	vm := machineOf(t, plain)
	vm.Spec.Preference = nil
	before, _, _ := Unfold(vm, Base{Instancetype: instancetypeOf(t, "")})
	each(reflect.TypeFor[v1beta1.VirtualMachineInstancetypeSpec](), "", reflect.Value.Interface, func(path string, whole any) {
		p := Unknown(KindClusterInstancetype, "small")
		p.Spec = whole.(v1beta1.VirtualMachineInstancetypeSpec)
		if p.Spec.CPU.Guest == 0 {
			p.Spec.CPU.Guest = 1
		}
		if p.Spec.Memory.Guest.IsZero() {
			p.Spec.Memory.Guest = resource.MustParse("1Gi")
		}
		good := ""
		r, _ := instancetypeRules.of(path)
		if r.Outcome == Honoured {
			value, ok := goodInstancetypes[path]
			if good = value; !ok {
				t.Errorf("%s is honoured: add a value to goodInstancetypes", path)
			}
			p = instancetypeOf(t, good)
		}
		after, errs, warnings := Unfold(vm, Base{Instancetype: p})
		judged(t, path, r, "spec.instancetype[small].", errs, warnings, before, after, good)
	})
	for text, want := range map[string]string{
		"cpu: {model: 'a,b=c'}":                            "spec.instancetype[small].cpu.model: Invalid",
		"cpu: {dedicatedCPUPlacement: true}":               "spec.instancetype[small].cpu.dedicatedCPUPlacement: Forbidden",
		"cpu: {isolateEmulatorThread: true}":               "spec.instancetype[small].cpu.isolateEmulatorThread: Forbidden",
		"cpu: {guest: 256}":                                "spec.instancetype[small].cpu.guest: Invalid",
		"memory: {guest: 1Gi, hugepages: {pageSize: 4Mi}}": "spec.instancetype[small].memory.hugepages.pageSize: Invalid",
		"memory: {guest: 16Mi}":                            "spec.instancetype[small].memory.guest: Invalid",
		"annotations: {" + hooks + ": x}":                  "spec.template.metadata.annotations[" + hooks + "]: Forbidden",
	} {
		if errs, _ := CheckMachine(vm, Base{Instancetype: instancetypeOf(t, text)}); len(errs) != 1 || !strings.Contains(errs.ToAggregate().Error(), want) {
			t.Errorf("%s: %v; want %s", text, errs, want)
		}
	}
	ok := "cpu: {guest: 2, model: host-model, dedicatedCPUPlacement: false, isolateEmulatorThread: false}"
	if errs, warnings := CheckMachine(vm, Base{Instancetype: instancetypeOf(t, ok)}); len(errs) > 0 || len(warnings) > 0 {
		t.Errorf("%v %q", errs, warnings)
	}
}

// judged checks the outcome of the field at path: before and after are the machine without and with it.
func judged(t *testing.T, path string, r Rule, prefix string, errs field.ErrorList, warnings []string, before, after *v1.VirtualMachine, good string) {
	t.Helper()
	same := apiequality.Semantic.DeepEqual(before.Spec.Template, after.Spec.Template)
	switch r.Outcome {
	case Refused:
		if !slices.Contains(forbidden(errs, r.Why), prefix+path) {
			t.Errorf("%s is not refused: %v", path, errs)
		}
	case Warned:
		if len(errs) > 0 || !same || !slices.ContainsFunc(warnings, func(w string) bool { return strings.HasPrefix(index.Replace(w), prefix+path+" has no effect: ") }) {
			t.Errorf("%s is warned of, but: %v %q, applied: %v", path, errs, warnings, !same)
		}
	case Honoured:
		if len(errs) > 0 || len(warnings) > 0 || same != (good == "") {
			t.Errorf("%s is honoured, but with %q: %v %q, applied: %v", path, good, errs, warnings, !same)
		}
	}
}

// goodPreferences are goodInstancetypes for preferences; "" has no effect on a machine whose default is the same.
var goodPreferences = map[string]string{
	"clock.preferredClockOffset.utc":                     "clock: {preferredClockOffset: {utc: {}}}",
	"clock.preferredClockOffset.utc.offsetSeconds":       "clock: {preferredClockOffset: {utc: {offsetSeconds: 3600}}}",
	"clock.preferredClockOffset.timezone":                "clock: {preferredClockOffset: {timezone: Europe/Berlin}}",
	"clock.preferredTimer.hpet.present":                  "clock: {preferredTimer: {hpet: {present: false}}}",
	"clock.preferredTimer.kvm.present":                   "clock: {preferredTimer: {kvm: {present: false}}}",
	"clock.preferredTimer.rtc.tickPolicy":                "clock: {preferredTimer: {rtc: {tickPolicy: catchup}}}",
	"clock.preferredTimer.rtc.present":                   "clock: {preferredTimer: {rtc: {present: true}}}",
	"clock.preferredTimer.rtc.track":                     "clock: {preferredTimer: {rtc: {track: guest}}}",
	"clock.preferredTimer.hyperv.present":                "clock: {preferredTimer: {hyperv: {present: true}}}",
	"cpu.preferredCPUFeatures[].name":                    "cpu: {preferredCPUFeatures: [{name: avx2}]}",
	"cpu.preferredCPUFeatures[].policy":                  "cpu: {preferredCPUFeatures: [{name: avx2, policy: optional}]}",
	"devices.preferredPanicDeviceModel":                  "",
	"devices.preferredTPM.enabled":                       "devices: {preferredTPM: {enabled: true}}",
	"devices.preferredTPM.persistent":                    "devices: {preferredTPM: {persistent: true}}",
	"features.preferredKvm.hidden":                       "features: {preferredKvm: {hidden: true}}",
	"features.preferredPvspinlock.enabled":               "features: {preferredPvspinlock: {enabled: false}}",
	"features.preferredSmm.enabled":                      "features: {preferredSmm: {enabled: true}}",
	"features.preferredHyperv.spinlocks.spinlocks":       "features: {preferredHyperv: {spinlocks: {spinlocks: 8191}}}",
	"features.preferredHyperv.vendorid.vendorid":         "features: {preferredHyperv: {vendorid: {vendorid: cocoon}}}",
	"features.preferredHyperv.relaxed.enabled":           "features: {preferredHyperv: {relaxed: {enabled: true}}}",
	"features.preferredHyperv.vapic.enabled":             "features: {preferredHyperv: {vapic: {enabled: true}}}",
	"features.preferredHyperv.spinlocks.enabled":         "features: {preferredHyperv: {spinlocks: {enabled: true}}}",
	"features.preferredHyperv.vpindex.enabled":           "features: {preferredHyperv: {vpindex: {enabled: true}}}",
	"features.preferredHyperv.runtime.enabled":           "features: {preferredHyperv: {runtime: {enabled: true}}}",
	"features.preferredHyperv.synic.enabled":             "features: {preferredHyperv: {synic: {enabled: true}}}",
	"features.preferredHyperv.synictimer.enabled":        "features: {preferredHyperv: {synictimer: {enabled: true}}}",
	"features.preferredHyperv.reset.enabled":             "features: {preferredHyperv: {reset: {enabled: true}}}",
	"features.preferredHyperv.vendorid.enabled":          "features: {preferredHyperv: {vendorid: {enabled: true}}}",
	"features.preferredHyperv.frequencies.enabled":       "features: {preferredHyperv: {frequencies: {enabled: true}}}",
	"features.preferredHyperv.reenlightenment.enabled":   "features: {preferredHyperv: {reenlightenment: {enabled: true}}}",
	"features.preferredHyperv.tlbflush.enabled":          "features: {preferredHyperv: {tlbflush: {enabled: true}}}",
	"features.preferredHyperv.ipi.enabled":               "features: {preferredHyperv: {ipi: {enabled: true}}}",
	"features.preferredHyperv.evmcs.enabled":             "features: {preferredHyperv: {evmcs: {enabled: true}}}",
	"features.preferredHyperv.synictimer.direct.enabled": "features: {preferredHyperv: {synictimer: {direct: {enabled: true}}}}",
	"features.preferredHyperv.tlbflush.direct.enabled":   "features: {preferredHyperv: {tlbflush: {direct: {enabled: true}}}}",
	"features.preferredHyperv.tlbflush.extended.enabled": "features: {preferredHyperv: {tlbflush: {extended: {enabled: true}}}}",
	"cpu.preferredCPUTopology":                           "cpu: {preferredCPUTopology: cores}",
	"cpu.spreadOptions.across":                           "cpu: {preferredCPUTopology: spread, spreadOptions: {across: CoresThreads}}",
	"cpu.spreadOptions.ratio":                            "cpu: {preferredCPUTopology: spread, spreadOptions: {ratio: 4}}",
	"preferSpreadSocketToCoreRatio":                      "{preferSpreadSocketToCoreRatio: 4, cpu: {preferredCPUTopology: spread}}",
	"devices.preferredAutoattachGraphicsDevice":          "devices: {preferredAutoattachGraphicsDevice: false}",
	"devices.preferredVideoType":                         "devices: {preferredVideoType: vga}",
	"devices.preferredAutoattachPodInterface":            "devices: {preferredAutoattachPodInterface: true}",
	"devices.preferredAutoattachSerialConsole":           "devices: {preferredAutoattachSerialConsole: true}",
	"devices.preferredAutoattachInputDevice":             "devices: {preferredAutoattachInputDevice: false}",
	"devices.preferredDisableHotplug":                    "devices: {preferredDisableHotplug: true}",
	"devices.preferredDiskBus":                           "devices: {preferredDiskBus: virtio}",
	"devices.preferredCdromBus":                          "devices: {preferredCdromBus: scsi}",
	"devices.preferredInterfaceModel":                    "devices: {preferredInterfaceModel: virtio}",
	"devices.preferredRng":                               "devices: {preferredRng: {}}",
	"features.preferredAcpi.enabled":                     "features: {preferredAcpi: {enabled: true}}",
	"firmware.preferredUseBios":                          "firmware: {preferredUseBios: true}",
	"firmware.preferredUseBiosSerial":                    "firmware: {preferredUseBios: true, preferredUseBiosSerial: true}",
	"firmware.preferredUseEfi":                           "firmware: {preferredUseEfi: true}",
	"firmware.preferredUseSecureBoot":                    "{features: {preferredSmm: {}}, firmware: {preferredUseEfi: true, preferredUseSecureBoot: true}}",
	"firmware.preferredEfi.secureBoot":                   "{features: {preferredSmm: {}}, firmware: {preferredEfi: {secureBoot: true}}}",
	"firmware.preferredEfi.persistent":                   "firmware: {preferredEfi: {secureBoot: false, persistent: true}}",
	"machine.preferredMachineType":                       "machine: {preferredMachineType: pc-q35-rhel9.4.0}",
	"preferredSubdomain":                                 "preferredSubdomain: web",
	"preferredTerminationGracePeriodSeconds":             "preferredTerminationGracePeriodSeconds: 7",
	"preferredArchitecture":                              "preferredArchitecture: amd64",
	"annotations":                                        "annotations: {a: b}",
	"requirements.cpu.guest":                             "",
	"requirements.memory.guest":                          "",
	"requirements.architecture":                          "",
}

// A preference only prefers: each field of it, set alone, is applied, or warned of and not applied, and none is refused.
func TestPreferenceOutcomes(t *testing.T) {
	vm := machineOf(t, plain)
	of := instancetypeOf(t, "cpu: {guest: 8}")
	before, _, _ := Unfold(vm, Base{Instancetype: of})
	each(reflect.TypeFor[v1beta1.VirtualMachinePreferenceSpec](), "", reflect.Value.Interface, func(path string, whole any) {
		p, good := &Part[v1beta1.VirtualMachinePreferenceSpec]{Name: "linux", Spec: whole.(v1beta1.VirtualMachinePreferenceSpec)}, ""
		r, _ := preferenceRules.of(path)
		if r.Outcome == Honoured {
			value, ok := goodPreferences[path]
			if good = value; !ok {
				t.Errorf("%s is honoured: add a value to goodPreferences", path)
			}
			p = preferenceOf(t, good)
		}
		if r.Outcome == Refused {
			t.Errorf("%s is refused; a preference only prefers", path)
		}
		after, errs, warnings := Unfold(vm, Base{Instancetype: of, Preference: p})
		judged(t, path, r, "spec.preference[linux].", errs, warnings, before, after, good)
		if errs, _ := CheckMachine(vm, Base{Instancetype: of, Preference: p}); len(errs) > 0 {
			t.Errorf("with %s the machine is refused: %v", path, errs)
		}
	})
	// What Cocoon does not have of an honoured field is warned of, and the machine keeps its default.
	for text, want := range map[string]string{
		"devices: {preferredVideoType: virtio}":                      "devices.preferredVideoType",
		"devices: {preferredAutoattachPodInterface: false}":          "devices.preferredAutoattachPodInterface",
		"devices: {preferredAutoattachSerialConsole: false}":         "devices.preferredAutoattachSerialConsole",
		"devices: {preferredAutoattachInputDevice: true}":            "devices.preferredAutoattachInputDevice",
		"devices: {preferredInterfaceModel: ne2k_pci}":               "devices.preferredInterfaceModel",
		"features: {preferredAcpi: {enabled: false}}":                "features.preferredAcpi.enabled",
		"machine: {preferredMachineType: pc-i440fx-7.2}":             "machine.preferredMachineType",
		"features: {preferredSmm: {enabled: false}}":                 "features.preferredSmm.enabled",
		"clock: {preferredTimer: {rtc: {present: false}}}":           "clock.preferredTimer.rtc.present",
		"cpu: {preferredCPUFeatures: [{name: vmx, policy: forbid}]}": "cpu.preferredCPUFeatures[0].policy",
		"devices: {preferredPanicDeviceModel: hyperv}":               "devices.preferredPanicDeviceModel",
		"preferredArchitecture: arm64":                               "preferredArchitecture",
	} {
		after, errs, warnings := Unfold(vm, Base{Instancetype: of, Preference: preferenceOf(t, text)})
		if len(errs) > 0 || len(warnings) != 1 || !strings.HasPrefix(warnings[0], "spec.preference[linux]."+want+" has no effect: ") || !apiequality.Semantic.DeepEqual(before.Spec.Template, after.Spec.Template) {
			t.Errorf("%s: %v %q %v", text, errs, warnings, after.Spec.Template.Spec)
		}
	}
	// UEFI is honoured without Secure Boot if the machine has no SMM.
	for text, want := range map[string]string{
		"firmware: {preferredEfi: {}}":                                             "secureBoot",
		"firmware: {preferredEfi: {secureBoot: true}}":                             "secureBoot",
		"firmware: {preferredEfi: {secureBoot: false, persistent: true}}":          "",
		"firmware: {preferredUseEfi: true, preferredUseSecureBoot: true}":          "secureBoot",
		"firmware: {preferredUseBios: false, preferredEfi: {secureBoot: false}}":   "",
		"firmware: {preferredEfi: {secureBoot: false}, preferredUseBios: false}":   "",
		"{firmware: {preferredUseEfi: true}, features: {preferredSmm: {}}}":        "",
		"{firmware: {preferredUseEfi: true}, features: {preferredAcpi: {}}}":       "",
		"{firmware: {preferredUseEfi: true}, cpu: {preferredCPUTopology: spread}}": "",
	} {
		base := Base{Instancetype: of, Preference: preferenceOf(t, text)}
		after, _, warnings := Unfold(vm, base)
		errs, _ := CheckMachine(vm, base)
		if f := after.Spec.Template.Spec.Domain.Firmware; len(errs) > 0 || f == nil || f.Bootloader.EFI == nil || *f.Bootloader.EFI.SecureBoot || !strings.Contains(strings.Join(warnings, " "), want) || (want == "") != (len(warnings) == 0) {
			t.Errorf("%s: %v %q %+v", text, errs, warnings, f)
		}
	}
}

// What the machine says itself is stronger than a preference.
func TestPreferencesYield(t *testing.T) {
	vm := machineOf(t, `
runStrategy: Always
template:
  metadata: {annotations: {a: mine}}
  spec:
    architecture: amd64
    subdomain: mine
    terminationGracePeriodSeconds: 3
    domain:
      memory: {guest: 1Gi}
      machine: {type: q35}
      clock: {utc: {}}
      features: {acpi: {enabled: true}}
      firmware: {bootloader: {bios: {useSerial: true}}, serial: s}
      devices:
        autoattachGraphicsDevice: false
        rng: {}
        disks: [{name: root, disk: {bus: virtio}}, {name: cd, cdrom: {}}]
        interfaces: [{name: default, model: virtio}]
`)
	all := ""
	for _, text := range []string{
		"preferredSubdomain: x", "preferredTerminationGracePeriodSeconds: 9", "annotations: {a: b}", "machine: {preferredMachineType: pc-q35-9}", "clock: {preferredClockOffset: {utc: {}}}",
		"firmware: {preferredEfi: {secureBoot: false}, preferredUseBiosSerial: false}", "devices: {preferredDiskBus: virtio, preferredInterfaceModel: virtio, preferredRng: {}}",
	} {
		all += text + "\n"
	}
	after, errs, warnings := Unfold(vm, Base{Preference: preferenceOf(t, all)})
	if len(errs) > 0 || len(warnings) > 0 || !apiequality.Semantic.DeepEqual(vm.Spec.Template, after.Spec.Template) {
		t.Errorf("%v %q %+v", errs, warnings, after.Spec.Template)
	}
}

// Each field of the template that an instancetype says, too, is refused at its path, as in KubeVirt, with all of them in one answer.
func TestConflicts(t *testing.T) {
	vm := machineOf(t, `
runStrategy: Always
instancetype: {name: small}
template:
  metadata: {annotations: {a: mine, same: same}}
  spec:
    nodeSelector: {}
    schedulerName: mine
    domain:
      devices: {}
      cpu: {sockets: 1, cores: 1, threads: 1, model: host-model}
      memory: {guest: 128Mi, maxGuest: 1Gi}
      resources: {requests: {cpu: 1, memory: 128Mi}, limits: {cpu: 1, memory: 128Mi}}
    volumes: [{name: root, containerDisk: {image: a}}]
`)
	p := instancetypeOf(t, "{cpu: {model: host-model}, memory: {maxGuest: 2Gi}, nodeSelector: {a: b}, schedulerName: x, annotations: {a: b, same: same}}")
	_, errs, _ := Unfold(vm, Base{Instancetype: p})
	var got []string
	for _, e := range errs {
		got = append(got, e.Field)
		if !strings.Contains(e.Detail, "the instancetype small") {
			t.Errorf("%v", e)
		}
	}
	slices.Sort(got)
	want := []string{
		"spec.template.metadata.annotations[a]", "spec.template.spec.domain.cpu.cores", "spec.template.spec.domain.cpu.model", "spec.template.spec.domain.cpu.sockets",
		"spec.template.spec.domain.cpu.threads", "spec.template.spec.domain.memory.guest", "spec.template.spec.domain.memory.maxGuest", "spec.template.spec.domain.resources.limits.cpu",
		"spec.template.spec.domain.resources.limits.memory", "spec.template.spec.domain.resources.requests.cpu", "spec.template.spec.domain.resources.requests.memory",
		"spec.template.spec.nodeSelector", "spec.template.spec.schedulerName",
	}
	if !slices.Equal(got, want) {
		t.Errorf("%q", got)
	}
	// A machine whose instancetype replaces its memory has no conflict with it.
	vm.Spec.Template.Spec.Domain.CPU, vm.Spec.Template.Spec.Domain.Resources = nil, v1.ResourceRequirements{}
	after, errs, _ := Unfold(vm, Base{Instancetype: instancetypeOf(t, "memory: {guest: 3Gi}"), Replaces: true})
	if g := after.Spec.Template.Spec.Domain.Memory.Guest; len(errs) > 0 || g.String() != "3Gi" {
		t.Errorf("%v %v", errs, g)
	}
	if g := vm.Spec.Template.Spec.Domain.Memory.Guest; g.String() != "128Mi" {
		t.Errorf("the machine itself has %v now", g)
	}
}

func TestTopology(t *testing.T) {
	for text, want := range map[string]map[uint32]string{
		"{}": {1: "1 1 1", 6: "6 1 1"},
		"cpu: {preferredCPUTopology: preferThreads}":                                                           {1: "1 1 1", 6: "1 1 6"},
		"cpu: {preferredCPUTopology: preferCores}":                                                             {6: "1 6 1"},
		"cpu: {preferredCPUTopology: any}":                                                                     {6: "6 1 1"},
		"cpu: {preferredCPUTopology: spread}":                                                                  {1: "1 1 1", 6: "3 2 1", 7: "refused"},
		"{preferSpreadSocketToCoreRatio: 3, cpu: {preferredCPUTopology: preferSpread}}":                        {6: "2 3 1", 8: "refused"},
		"cpu: {preferredCPUTopology: spread, spreadOptions: {across: CoresThreads, ratio: 2}}":                 {6: "1 3 2", 5: "refused"},
		"cpu: {preferredCPUTopology: spread, spreadOptions: {across: SocketsCoresThreads, ratio: 3}}":          {12: "2 3 2", 6: "1 3 2", 8: "refused", 1: "1 1 1"},
		"cpu: {preferredCPUTopology: spread, spreadOptions: {across: SocketsCoresThreads, ratio: 0}}":          {8: "2 2 2"},
		"cpu: {preferredCPUTopology: spread, spreadOptions: {across: SocketsCoresThreads, ratio: 4294967295}}": {8: "refused"},
	} {
		for n, topology := range want {
			p := instancetypeOf(t, "")
			p.Spec.CPU.Guest = n
			after, errs, _ := Unfold(machineOf(t, plain), Base{Instancetype: p, Preference: preferenceOf(t, text)})
			c := after.Spec.Template.Spec.Domain.CPU
			got := strings.Join([]string{itoa(c.Sockets), itoa(c.Cores), itoa(c.Threads)}, " ")
			if len(errs) > 0 {
				got = "refused"
				if errs[0].Field != "spec.instancetype[small].cpu.guest" {
					t.Errorf("%s: %v", text, errs)
				}
			}
			if got != topology {
				t.Errorf("%d CPUs, %s: %s; want %s", n, text, got, topology)
			}
		}
	}
}

func itoa(n uint32) string { return resource.NewQuantity(int64(n), resource.DecimalSI).String() }

func TestRequirements(t *testing.T) {
	alone := strings.NewReplacer("instancetype: {name: small}\n", "", "domain:\n", "domain:\n      cpu: {cores: 2}\n      memory: {guest: 1Gi}\n").Replace(plain)
	for _, c := range []struct {
		machine, instancetype, requirements string
		want                                string // in the error; "": met
	}{
		{plain, "{cpu: {guest: 2}}", "{cpu: {guest: 2}, memory: {guest: 1Gi}, architecture: amd64}", ""},
		{plain, "{cpu: {guest: 2}}", "{cpu: {guest: 3}}", `spec.instancetype: Invalid value: "2": the preference linux requires at least 3 CPUs`},
		{plain, "{memory: {guest: 1Gi}}", "{memory: {guest: 2Gi}}", `spec.instancetype: Invalid value: "1Gi": the preference linux requires at least 2Gi of memory`},
		{plain, "{}", "{architecture: arm64}", "spec.template.spec.architecture: Invalid"},
		{alone, "", "{cpu: {guest: 2}, memory: {guest: 1Gi}}", ""},
		{alone, "", "{cpu: {guest: 3}}", "spec.template.spec.domain.cpu: Invalid"},
		{alone, "", "{memory: {guest: 1025Mi}}", "spec.template.spec.domain.memory: Invalid"},
	} {
		base := Base{Preference: preferenceOf(t, "requirements: "+c.requirements)}
		if c.instancetype != "" {
			base.Instancetype = instancetypeOf(t, c.instancetype)
		}
		errs, _ := CheckMachine(machineOf(t, c.machine), base)
		if c.want == "" && len(errs) > 0 || c.want != "" && (len(errs) != 1 || !strings.Contains(errs[0].Error(), c.want)) {
			t.Errorf("%s %s: %v; want %s", c.instancetype, c.requirements, errs, c.want)
		}
	}
}

func TestReferences(t *testing.T) {
	for text, want := range map[string]string{
		"{name: a}": "",
		"{name: a, kind: virtualmachineinstancetypes}":               "",
		"{name: a, kind: VirtualMachineClusterInstancetype}":         "",
		"{name: a, kind: VirtualMachinePreference}":                  "spec.instancetype.kind: Unsupported",
		"{kind: VirtualMachineInstancetype}":                         "spec.instancetype.name: Required",
		"{name: a, inferFromVolume: root}":                           "spec.instancetype.name: Forbidden",
		"{kind: VirtualMachineInstancetype, inferFromVolume: root}":  "spec.instancetype.kind: Forbidden",
		"{inferFromVolume: root, inferFromVolumeFailurePolicy: Bad}": "spec.instancetype.inferFromVolumeFailurePolicy: Unsupported",
	} {
		vm := machineOf(t, plain)
		vm.Spec.Instancetype, vm.Spec.Preference = &v1.InstancetypeMatcher{}, nil
		if err := yaml.UnmarshalStrict([]byte(text), vm.Spec.Instancetype); err != nil {
			t.Fatal(err)
		}
		errs, _ := CheckMachine(vm, Base{Instancetype: instancetypeOf(t, "")})
		if want == "" && len(errs) > 0 || want != "" && (len(errs) != 1 || !strings.Contains(errs[0].Error(), want)) {
			t.Errorf("%s: %v; want %s", text, errs, want)
		}
	}
	vm := machineOf(t, plain)
	vm.Spec.Preference = &v1.PreferenceMatcher{Kind: "VirtualMachineInstancetype", Name: "a"}
	if errs, _ := CheckMachine(vm, Base{Instancetype: instancetypeOf(t, "")}); len(errs) != 1 || errs[0].Field != "spec.preference.kind" {
		t.Errorf("%v", errs)
	}
}

// An overcommitted pod requests less than its guest has.
func TestOvercommit(t *testing.T) {
	vm := machineOf(t, plain)
	after, errs, _ := Unfold(vm, Base{Instancetype: instancetypeOf(t, "memory: {guest: 2Gi, overcommitPercent: 25}")})
	vmi := &v1.VirtualMachineInstance{Spec: after.Spec.Template.Spec}
	r := Pod(vmi).Spec.Containers[0].Resources
	if len(errs) > 0 || r.Requests.Memory().String() != "1536Mi" || r.Limits.Memory().String() != "2Gi" {
		t.Errorf("%v %v", errs, r)
	}
}

// Whatever the API server or a ControllerRevision holds, unfolding it does not panic, and what is refused has a path.
func FuzzUnfold(f *testing.F) {
	f.Add([]byte(plain), []byte("{cpu: {guest: 4}, memory: {guest: 1Gi, overcommitPercent: 15}}"), []byte("cpu: {preferredCPUTopology: spread, spreadOptions: {ratio: 0, across: x}}"))
	f.Add([]byte("template: {}"), []byte("{cpu: {guest: 4294967295, model: x}, memory: {guest: -1, overcommitPercent: -1}, gpus: [{}], annotations: {a: b}}"),
		[]byte("{preferSpreadSocketToCoreRatio: 4294967295, cpu: {preferredCPUTopology: spread}, firmware: {preferredEfi: {}}, requirements: {cpu: {guest: 1}, memory: {guest: 1Gi}, architecture: x}}"))
	f.Fuzz(func(t *testing.T, machine, instancetype, preference []byte) {
		vm := &v1.VirtualMachine{}
		base := Base{Instancetype: &Part[v1beta1.VirtualMachineInstancetypeSpec]{Name: "a"}, Preference: &Part[v1beta1.VirtualMachinePreferenceSpec]{Name: "b"}}
		if yaml.Unmarshal(machine, &vm.Spec) != nil || yaml.Unmarshal(instancetype, &base.Instancetype.Spec) != nil || yaml.Unmarshal(preference, &base.Preference.Spec) != nil {
			return
		}
		errs, warnings := CheckMachine(vm, base)
		for _, e := range errs {
			if !strings.HasPrefix(e.Field, "spec.") {
				t.Errorf("an error without a path: %v", e)
			}
		}
		for _, w := range warnings {
			if !strings.HasPrefix(w, "spec.") {
				t.Errorf("a warning without a path: %s", w)
			}
		}
		if vm.Spec.Template == nil || len(errs) > 0 {
			return
		}
		whole, _, _ := Unfold(vm, base)
		if again, _ := CheckMachine(whole, Base{}); len(again) > 0 { // what virtctl expand shows can be created
			t.Errorf("the unfolded machine is refused: %v", again)
		}
	})
}
