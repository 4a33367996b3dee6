package kubevirt

import (
	"reflect"
	"strings"

	"k8s.io/apimachinery/pkg/util/validation/field"
	v1 "kubevirt.io/api/core/v1"
	"kubevirt.io/api/instancetype/v1beta1"
)

// Outcome is what becomes of a field of a VirtualMachineInstance that is set.
type Outcome string

// The outcomes. A field that a newer version of the API adds has none, and a test fails until somebody decides.
const (
	Honoured Outcome = "honoured"
	Warned   Outcome = "accepted with a warning"
	Refused  Outcome = "refused"
)

// Rule says what becomes of a field and of all fields in it that have no rule of their own.
type Rule struct {
	Outcome Outcome
	Why     string // "" if honoured without a condition
}

// rulebook has the rules for the fields of a type, by their paths in JSON; [] stands for any element of a list.
type rulebook map[string]Rule

// keptState is how long what the firmware writes is there.
const keptState = "as long as the machine, which then stays on its node; for an instance without a machine, as long as the instance"

// rules are the rules for the fields of a VirtualMachineInstanceSpec.
var rules = rulebook{
	"priorityClassName":             {Outcome: Honoured},
	"nodeSelector":                  {Outcome: Honoured},
	"affinity":                      {Outcome: Honoured},
	"schedulerName":                 {Outcome: Honoured},
	"serviceAccountName":            {Honoured, "for the pod; its token is in the guest with a volume serviceAccount"},
	"tolerations":                   {Outcome: Honoured},
	"topologySpreadConstraints":     {Outcome: Honoured},
	"terminationGracePeriodSeconds": {Honoured, "at least one second"},
	"hostname":                      {Outcome: Honoured},
	"subdomain":                     {Outcome: Honoured},
	"evictionStrategy":              {Honoured, "a drain shuts the VM down with None and LiveMigrateIfPossible, and waits with LiveMigrate and External, because nodes do not migrate VMs"},
	"startStrategy":                 {Outcome: Honoured},
	"architecture":                  {Honoured, "amd64 only"},
	"dnsPolicy":                     {Warned, "a guest that boots itself has the name servers of its network"},
	"dnsConfig":                     {Warned, "a guest that boots itself has the name servers of its network"},
	"accessCredentials[].sshPublicKey.source.secret":                    {Honoured, "with cloud-init at the next start; with the agent at once"},
	"accessCredentials[].sshPublicKey.propagationMethod.noCloud":        {Honoured, "with a volume cloudInitNoCloud"},
	"accessCredentials[].sshPublicKey.propagationMethod.configDrive":    {Honoured, "with a volume cloudInitConfigDrive"},
	"accessCredentials[].sshPublicKey.propagationMethod.qemuGuestAgent": {Honoured, "the keys of the Secrets are the only ones of the users, and change with the Secrets"},
	"accessCredentials[].userPassword":                                  {Honoured, "set by qemu-guest-agent, and again when the Secret changes"},
	"resourceClaims":                                                    {Refused, "a VM cannot have devices of its node"},
	"utilityVolumes":                                                    {Refused, "volumes cannot be added to a VM"},

	"domain.resources.requests":                       {Honoured, "cpu and memory"},
	"domain.resources.limits":                         {Honoured, "cpu and memory"},
	"domain.resources.overcommitGuestOverhead":        {Honoured, "pods of VMs request no memory beyond the guest's"},
	"domain.cpu.cores":                                {Outcome: Honoured},
	"domain.cpu.sockets":                              {Outcome: Honoured},
	"domain.cpu.threads":                              {Outcome: Honoured},
	"domain.cpu.maxSockets":                           {Honoured, "not with a CPU request or limit of its own; without it, no CPUs can be added to the running VM"},
	"domain.cpu.model":                                {Honoured, "as QEMU on the node knows it, such as Skylake-Server; host-model and host-passthrough are the same. With KVM, the VM starts only if the CPU of its node is of the model"},
	"domain.cpu.features":                             {Honoured, "as QEMU on the node knows them; policies require, optional, disable and force, which is optional"},
	"domain.cpu.dedicatedCpuPlacement":                {Refused, "a VM cannot have CPUs of its own"},
	"domain.cpu.isolateEmulatorThread":                {Refused, "a VM cannot have CPUs of its own"},
	"domain.cpu.numa":                                 {Refused, "a VM has one NUMA node"},
	"domain.cpu.realtime":                             {Refused, "a VM cannot have CPUs of its own"},
	"domain.memory.guest":                             {Outcome: Honoured},
	"domain.memory.maxGuest":                          {Honoured, "without it, no memory can be added to the running VM"},
	"domain.memory.hugepages.pageSize":                {Honoured, "2Mi or 1Gi; the node must have set them aside. A VM with huge pages is not hibernated"},
	"domain.memory.reservedOverhead":                  {Warned, "pods of VMs request no memory beyond the guest's"},
	"domain.machine.type":                             {Honoured, "q35 and its versions; the node chooses the version"},
	"domain.firmware.uuid":                            {Honoured, "without it the guest sees the UID of its VirtualMachine"},
	"domain.firmware.serial":                          {Honoured, "at most 64 printable ASCII characters"},
	"domain.firmware.bootloader.bios":                 {Outcome: Honoured},
	"domain.firmware.bootloader.bios.useSerial":       {Honoured, "the firmware always uses the serial console"},
	"domain.firmware.bootloader.efi":                  {Honoured, "if the node has OVMF"},
	"domain.firmware.bootloader.efi.secureBoot":       {Honoured, "if the node has OVMF with Microsoft's keys; it is the default, and needs features.smm"},
	"domain.firmware.bootloader.efi.persistent":       {Honoured, keptState},
	"domain.firmware.kernelBoot":                      {Honoured, "as files of a container image; the guest then needs no disk, has no Secure Boot, and is not hibernated"},
	"domain.firmware.kernelBoot.kernelArgs":           {Honoured, "at most 2047 printable ASCII characters"},
	"domain.firmware.kernelBoot.container.kernelPath": {Honoured, "required; symbolic links lead nowhere out of the image"},
	"domain.firmware.kernelBoot.container.initrdPath": {Honoured, "with kernelPath only"},
	"domain.firmware.acpi":                            {Refused, "the guest has the ACPI tables of its machine only"},
	"domain.clock.utc":                                {Outcome: Honoured},
	"domain.clock.utc.offsetSeconds":                  {Honoured, "less than a day"},
	"domain.clock.timezone":                           {Honoured, "the local time when the VM starts, as with a hardware clock; the guest itself changes to summer time"},
	"domain.clock.timer":                              {Warned, "the guest has the timers of its machine"},
	"domain.clock.timer.hpet":                         {Outcome: Honoured},
	"domain.clock.timer.hpet.tickPolicy":              {Warned, "QEMU has no policy for it"},
	"domain.clock.timer.kvm":                          {Outcome: Honoured},
	"domain.clock.timer.hyperv":                       {Honoured, "with KVM; without, it has no effect"},
	"domain.clock.timer.rtc":                          {Outcome: Honoured},
	"domain.clock.timer.rtc.present":                  {Honoured, "true only"},
	"domain.features.hyperv":                          {Honoured, "with KVM; without, it has no effect. What a feature needs comes with it"},
	"domain.features.smm":                             {Honoured, "enabled only"},
	"domain.features.kvm":                             {Outcome: Honoured},
	"domain.features.pvspinlock":                      {Outcome: Honoured},
	"domain.features.acpi":                            {Honoured, "enabled only"},
	"domain.features.apic":                            {Warned, "the guest always has an APIC"},
	"domain.features":                                 {Refused, "the features of the machine are fixed"},
	"domain.ioThreadsPolicy":                          {Warned, "the node decides about threads"},
	"domain.ioThreads":                                {Warned, "the node decides about threads"},
	"domain.chassis":                                  {Honoured, "at most 64 printable ASCII characters"},
	"domain.launchSecurity":                           {Refused, "nodes have no encrypted VMs"},
	"domain.rebootPolicy":                             {Honoured, "Reboot only"},

	"domain.devices.useVirtioTransitional":                       {Refused, "devices are modern virtio"},
	"domain.devices.disableHotplug":                              {Outcome: Honoured},
	"domain.devices.disks[].name":                                {Outcome: Honoured},
	"domain.devices.disks[].disk":                                {Outcome: Honoured},
	"domain.devices.disks[].disk.bus":                            {Honoured, "virtio, sata (at most 6 disks), scsi and usb (at most 15); a disk without a bus is on virtio"},
	"domain.devices.disks[].disk.readonly":                       {Honoured, "not on sata"},
	"domain.devices.disks[].disk.pciAddress":                     {Refused, "the node decides about addresses of devices"},
	"domain.devices.disks[].lun":                                 {Refused, "SCSI commands of a guest reach no device of its node: most volumes are files or logical volumes, and on a device of the operator they could change more than its bytes; use disk with the bus scsi"},
	"domain.devices.disks[].cdrom":                               {Honoured, "on sata, unless it says scsi or usb"},
	"domain.devices.disks[].cdrom.readonly":                      {Honoured, "true only"},
	"domain.devices.disks[].cdrom.tray":                          {Honoured, "closed only"},
	"domain.devices.disks[].bootOrder":                           {Honoured, "for the disk from which the guest boots: its containerDisk, or else the claim or hostDisk with the lowest order"},
	"domain.devices.disks[].serial":                              {Honoured, "at most 20 letters, digits, '_', '.', '+' and '-'; unique in the VM, and not beginning with cocoon- or vol-"},
	"domain.devices.disks[].dedicatedIOThread":                   {Warned, "the node decides about threads"},
	"domain.devices.disks[].cache":                               {Warned, "the node decides about caches"},
	"domain.devices.disks[].io":                                  {Warned, "the node decides about I/O"},
	"domain.devices.disks[].tag":                                 {Warned, "tags of devices are not in the guest's metadata"},
	"domain.devices.disks[].blockSize.custom":                    {Honoured, "not for a CD-ROM; 512 logically on sata"},
	"domain.devices.disks[].blockSize.custom.discardGranularity": {Refused, "the node decides about discarding"},
	"domain.devices.disks[].blockSize.matchVolume":               {Refused, "blocks of volumes have 512 bytes; use custom"},
	"domain.devices.disks[].shareable":                           {Honoured, "for a claim from which the guest does not boot, on virtio, scsi or sata, with the cache none or without cache; several VMs have one claim only if all say true. Its VM is not hibernated, and VirtualMachineSnapshots leave it out"},
	"domain.devices.disks[].errorPolicy":                         {Warned, "a guest waits if its node has no space, and sees all other errors"},
	"domain.devices.disks[].changedBlockTracking":                {Refused, "changed blocks are not tracked"},
	"domain.devices.watchdog.name":                               {Outcome: Honoured},
	"domain.devices.watchdog.i6300esb":                           {Outcome: Honoured},
	"domain.devices.watchdog.diag288":                            {Refused, "it is a device of s390x; use i6300esb"},
	"domain.devices.inputs":                                      {Refused, "a VM with graphics has a keyboard and a mouse, and no other input devices"},
	"domain.devices.autoattachPodInterface":                      {Honoured, "true only"},
	"domain.devices.autoattachGraphicsDevice":                    {Honoured, "as in KubeVirt, a VM has graphics unless this is false"},
	"domain.devices.autoattachSerialConsole":                     {Honoured, "true only"},
	"domain.devices.logSerialConsole":                            {Honoured, "true only; kubectl logs shows it"},
	"domain.devices.autoattachMemBalloon":                        {Warned, "a VM always has a balloon"},
	"domain.devices.autoattachInputDevice":                       {Honoured, "false only"},
	"domain.devices.autoattachVSOCK":                             {Honoured, "if the node's operator allows it (vsock, by default off) and the node has /dev/vhost-vsock; such a VM is not hibernated"},
	"domain.devices.rng":                                         {Honoured, "a VM always has one"},
	"domain.devices.blockMultiQueue":                             {Warned, "the node decides about queues"},
	"domain.devices.networkInterfaceMultiqueue":                  {Warned, "the node decides about queues"},
	"domain.devices.gpus":                                        {Refused, "a VM cannot have devices of its node"},
	"domain.devices.hostDevices":                                 {Refused, "a VM cannot have devices of its node"},
	"domain.devices.downwardMetrics":                             {Refused, "metrics of the host are not in the guest"},
	"domain.devices.panicDevices":                                {Honoured, "one, isa or pvpanic; a guest that panics has crashed, and its VM ends"},
	"domain.devices.filesystems":                                 {Refused, "a guest that boots itself shares no folder with its node"},
	"domain.devices.clientPassthrough":                           {Refused, "a VM has no USB"},
	"domain.devices.sound":                                       {Refused, "a VM has no sound"},
	"domain.devices.tpm":                                         {Honoured, "if the node has swtpm; a VM with a TPM is not hibernated"},
	"domain.devices.tpm.persistent":                              {Honoured, keptState},
	"domain.devices.video":                                       {Honoured, "vga only; needs graphics"},

	"domain.devices.interfaces[].name":         {Outcome: Honoured},
	"domain.devices.interfaces[].model":        {Honoured, "virtio, e1000, e1000e or rtl8139"},
	"domain.devices.interfaces[].bridge":       {Honoured, "the guest has the address itself"},
	"domain.devices.interfaces[].masquerade":   {Honoured, "on the network of pods only; the guest has 10.0.2.2 and fd10:0:2::2, or the second address of vmNetworkCIDR and vmIPv6NetworkCIDR"},
	"domain.devices.interfaces[].ports":        {Honoured, "with masquerade; without, all ports of the guest can be reached"},
	"domain.devices.interfaces[].portRanges":   {Honoured, "with masquerade; without, all ports of the guest can be reached"},
	"domain.devices.interfaces[].slirp":        {Refused, "use masquerade or bridge"},
	"domain.devices.interfaces[].sriov":        {Refused, "use masquerade or bridge"},
	"domain.devices.interfaces[].macvtap":      {Refused, "use masquerade or bridge"},
	"domain.devices.interfaces[].passt":        {Refused, "use masquerade or bridge"},
	"domain.devices.interfaces[].passtBinding": {Refused, "use masquerade or bridge"},
	"domain.devices.interfaces[].binding":      {Refused, "use masquerade or bridge"},
	"domain.devices.interfaces[].macAddress":   {Honoured, "if the network of the node has no other machines on its link; without it, the node gives the VM an address, which stays as long as its name"},
	"domain.devices.interfaces[].bootOrder":    {Refused, "VirtualMachines do not boot from a network"},
	"domain.devices.interfaces[].pciAddress":   {Refused, "the node decides about addresses of devices"},
	"domain.devices.interfaces[].dhcpOptions":  {Refused, "the node's network decides about them"},
	"domain.devices.interfaces[].tag":          {Warned, "tags of devices are not in the guest's metadata"},
	"domain.devices.interfaces[].acpiIndex":    {Refused, "the node decides about addresses of devices"},
	"domain.devices.interfaces[].state":        {Honoured, "up, down and absent, also while the guest runs"},

	"volumes[].name":                                      {Outcome: Honoured},
	"volumes[].containerDisk.image":                       {Outcome: Honoured},
	"volumes[].containerDisk.imagePullSecret":             {Outcome: Honoured},
	"volumes[].containerDisk.imagePullPolicy":             {Outcome: Honoured},
	"volumes[].containerDisk.path":                        {Refused, "the disk is the one file below /disk of the image"},
	"volumes[].cloudInitNoCloud":                          {Outcome: Honoured},
	"volumes[].cloudInitNoCloud.secretRef":                {Honoured, "its key userdata"},
	"volumes[].cloudInitNoCloud.userData":                 {Outcome: Honoured},
	"volumes[].cloudInitNoCloud.userDataBase64":           {Outcome: Honoured},
	"volumes[].cloudInitNoCloud.networkData":              {Outcome: Honoured},
	"volumes[].cloudInitNoCloud.networkDataBase64":        {Outcome: Honoured},
	"volumes[].cloudInitNoCloud.networkDataSecretRef":     {Honoured, "its key networkdata"},
	"volumes[].cloudInitConfigDrive":                      {Outcome: Honoured},
	"volumes[].cloudInitConfigDrive.secretRef":            {Honoured, "its key userdata"},
	"volumes[].cloudInitConfigDrive.userData":             {Outcome: Honoured},
	"volumes[].cloudInitConfigDrive.userDataBase64":       {Outcome: Honoured},
	"volumes[].cloudInitConfigDrive.networkData":          {Outcome: Honoured},
	"volumes[].cloudInitConfigDrive.networkDataBase64":    {Outcome: Honoured},
	"volumes[].cloudInitConfigDrive.networkDataSecretRef": {Honoured, "its key networkdata"},
	"volumes[].emptyDisk":                                 {Honoured, "a volume of the default storage class, which goes with the instance"},
	"volumes[].persistentVolumeClaim":                     {Honoured, "as a disk; without a containerDisk the guest boots from one that is not hotpluggable"},
	"volumes[].persistentVolumeClaim.hotpluggable":        {Honoured, "with true, virtctl removevolume can remove the volume from the machine"},
	"volumes[].dataVolume":                                {Honoured, "its claim, which has its name, as persistentVolumeClaim"},
	"volumes[].configMap":                                 {Honoured, "as a read-only disk with its files as they are when the VM starts"},
	"volumes[].configMap.optional":                        {Outcome: Honoured},
	"volumes[].configMap.volumeLabel":                     {Honoured, "at most 16 letters, digits, '.', '_' and '-'; cfgdata without it"},
	"volumes[].secret":                                    {Outcome: Honoured},
	"volumes[].downwardAPI":                               {Outcome: Honoured},
	"volumes[].serviceAccount":                            {Outcome: Honoured},
	"volumes[].secret.secretName":                         {Honoured, "as a read-only disk with its files as they are when the VM starts"},
	"volumes[].secret.optional":                           {Outcome: Honoured},
	"volumes[].secret.volumeLabel":                        {Honoured, "at most 16 letters, digits, '.', '_' and '-'; cfgdata without it"},
	"volumes[].downwardAPI.fields":                        {Honoured, "as a read-only disk; a field of the pod (fieldRef) only"},
	"volumes[].downwardAPI.volumeLabel":                   {Honoured, "at most 16 letters, digits, '.', '_' and '-'; cfgdata without it"},
	"volumes[].serviceAccount.serviceAccountName":         {Honoured, "as a read-only disk cfgdata with token, ca.crt and namespace; the token is not renewed while the VM runs, and ends with it"},
	"volumes[].ephemeral":                                 {Honoured, "a copy of the volume of the claim, which goes with the instance; the driver of the claim must be able to copy volumes"},
	"volumes[].sysprep":                                   {Honoured, "as a read-only disk unattendCD with its files; make it a cdrom"},
	"volumes[].memoryDump":                                {Warned, "it is no disk; `virtctl memory-dump` writes to the claim, and the status of the machine names it"},
	"volumes[].hostDisk":                                  {Honoured, "below a folder that the node's operator lists (hostPaths, by default none), as a raw disk that is in no snapshot; without symbolic links"},
	"volumes[].hostDisk.type":                             {Honoured, "Disk or DiskOrCreate, which makes a sparse file and never changes one that is there"},
	"volumes[].hostDisk.capacity":                         {Honoured, "with DiskOrCreate, and only then"},
	"volumes[].hostDisk.shared":                           {Honoured, "two running VMs have one file only if both say true"},
	"volumes[]":                                           {Refused, "volumes are containerDisk, dataVolume, persistentVolumeClaim, ephemeral, emptyDisk, hostDisk, cloud-init, configMap, secret, downwardAPI, serviceAccount and sysprep"},

	"networks[].name":                  {Outcome: Honoured},
	"networks[].pod":                   {Outcome: Honoured},
	"networks[].pod.vmNetworkCIDR":     {Honoured, "with masquerade; without, the guest has the address of its pod"},
	"networks[].pod.vmIPv6NetworkCIDR": {Honoured, "with masquerade; without, the guest has the address of its pod"},
	"networks[].multus.networkName":    {Honoured, "the name of a network of the node; a namespace before it makes no difference"},
	"networks[].multus.default":        {Outcome: Honoured},
	"networks[].resourceClaim":         {Refused, "a VM cannot have devices of its node"},

	"livenessProbe":       {Outcome: Honoured},
	"readinessProbe":      {Outcome: Honoured},
	"livenessProbe.exec":  {Honoured, "by the guest's qemu-guest-agent"},
	"readinessProbe.exec": {Honoured, "by the guest's qemu-guest-agent"},
}

// of returns the rule of the field, or of the nearest field around it that has one.
func (b rulebook) of(path string) (Rule, bool) {
	for {
		if r, ok := b[path]; ok {
			return r, true
		}
		short := strings.TrimSuffix(path, "[]")
		if short == path {
			i := strings.LastIndexByte(path, '.')
			if i < 0 {
				return Rule{}, false
			}
			short = path[:i]
		}
		path = short
	}
}

// judge returns an error for each field of v that the rules refuse, and a sentence for each that has no effect. v is a struct, and at its
// path in its object.
func (b rulebook) judge(v any, at *field.Path) (errs field.ErrorList, warnings []string) {
	walk(reflect.ValueOf(v).Elem(), "", at, func(path string, at *field.Path) {
		switch r, known := b.of(path); {
		case !known:
			errs = append(errs, field.Forbidden(at, "this version of Cocoon does not know the field"))
		case r.Outcome == Refused:
			errs = append(errs, field.Forbidden(at, r.Why))
		case r.Outcome == Warned:
			warnings = append(warnings, ineffective(at, r.Why))
		}
	})
	return errs, warnings
}

// ineffective is the warning of a field that has no effect.
func ineffective(at *field.Path, why string) string { return at.String() + " has no effect: " + why }

// own reports whether t is a type of KubeVirt, whose fields have rules. Types of Kubernetes count as one field.
func own(t reflect.Type) bool {
	return t.PkgPath() == reflect.TypeFor[v1.VirtualMachineInstanceSpec]().PkgPath() || t.PkgPath() == reflect.TypeFor[v1beta1.VirtualMachineInstancetypeSpec]().PkgPath()
}

// jsonName returns the name of f in JSON; "" for a struct whose fields are in its parent.
func jsonName(f reflect.StructField) string {
	name, _, _ := strings.Cut(f.Tag.Get("json"), ",")
	return name
}

// walk calls visit for each field in v that is set and has no fields of its own, with its path in rules and in the object. A struct
// behind a pointer is such a field if nothing in it is set: {} has a meaning there.
func walk(v reflect.Value, path string, at *field.Path, visit func(path string, at *field.Path)) (found bool) {
	switch v.Kind() { //nolint:exhaustive // all other kinds have no fields
	case reflect.Pointer:
		if v.IsNil() {
			return false
		}
		if e := v.Elem(); e.Kind() != reflect.Struct || !own(e.Type()) || !walk(e, path, at, visit) {
			visit(path, at)
		}
		return true
	case reflect.Slice:
		if e := v.Type().Elem(); e.Kind() != reflect.Struct || !own(e) {
			break
		}
		for i := range v.Len() {
			walk(v.Index(i), path+"[]", at.Index(i), visit)
		}
		return v.Len() > 0
	case reflect.Struct:
		if !own(v.Type()) {
			break
		}
		for i := range v.NumField() {
			name := jsonName(v.Type().Field(i))
			if name == "" {
				found = walk(v.Field(i), path, at, visit) || found
				continue
			}
			found = walk(v.Field(i), join(path, name), child(at, name), visit) || found
		}
		return found
	}
	if v.IsZero() || v.Kind() == reflect.Slice && v.Len() == 0 {
		return false
	}
	visit(path, at)
	return true
}

func join(path, name string) string {
	if path == "" {
		return name
	}
	return path + "." + name
}

func child(at *field.Path, name string) *field.Path {
	if at == nil {
		return field.NewPath(name)
	}
	return at.Child(name)
}
