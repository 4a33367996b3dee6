package contract

import (
	"crypto/sha256"
	"encoding/base32"
	"strconv"
	"strings"
)

// Lengths of names of VMs.
const (
	maxVMName   = 63
	hashLength  = 16 // characters, 80 bits of SHA-256
	maxReadable = maxVMName - len(hashedPrefix) - 1 - hashLength
)

// The prefixes of names that VMName makes. A namespace starts with a letter or digit, so the three prefixes are unambiguous.
const (
	plainPrefix  = "vk-"   // vk-NAMESPACE-POD
	dashedPrefix = "vk--"  // vk--NAMESPACE.POD
	hashedPrefix = "vk---" // vk---READABLE-HASH
)

// VMName is the name of the VM of a pod that sets no VM name. The name is unique per pod, and is valid as the name of a VM, of a
// Kubernetes object and of a registry repository:
//
//   - vk-NAMESPACE-POD if the namespace has no dash: the first dash after it starts the pod's name;
//   - vk--NAMESPACE.POD if the namespace has a dash: no namespace has a dot;
//   - vk---READABLE-HASH if that is longer than 63 characters, with the beginning of NAMESPACE.POD and a hash of both.
//
// Preconditions: namespace and pod are names that Kubernetes allows.
func VMName(namespace, pod string) string {
	name := plainPrefix + namespace + "-" + pod
	if strings.Contains(namespace, "-") {
		name = dashedPrefix + namespace + "." + pod
	}
	if len(name) <= maxVMName {
		return name
	}
	sum := sha256.Sum256([]byte(namespace + "/" + pod))
	hash := strings.ToLower(base32.StdEncoding.EncodeToString(sum[:]))[:hashLength]
	return hashedPrefix + readable(namespace, pod) + "-" + hash
}

// readable is the beginning of NAMESPACE.POD, for a hashed name.
func readable(namespace, pod string) string {
	text := namespace + "." + pod
	return strings.TrimRight(text[:min(len(text), maxReadable)], ".-")
}

// OldVMName is the name that releases from before owners gave the VM of a pod, and that other tools of this contract still write:
// vk-NAMESPACE-POD for every namespace. Pods of two namespaces may share such a name.
func OldVMName(namespace, pod string) string { return plainPrefix + namespace + "-" + pod }

// CanonicalVMName is this release's name of the VM that the namespace knows by name. Only an OldVMName is changed.
func CanonicalVMName(namespace, name string) string {
	if pod, ok := strings.CutPrefix(name, plainPrefix+namespace+"-"); ok {
		if canonical := VMName(namespace, pod); Pushable(canonical) { // no other pod has this name
			return canonical
		}
	}
	return name
}

// Aliases are the names under which the VM that the namespace knows by name may run on a node. The first is name itself: a VM of
// an earlier release keeps its name.
func Aliases(namespace, name string) []string {
	if canonical := CanonicalVMName(namespace, name); canonical != name {
		return []string{name, canonical}
	}
	if pod, ok := strings.CutPrefix(name, dashedPrefix+namespace+"."); ok {
		return []string{name, OldVMName(namespace, pod)}
	}
	return []string{name}
}

// MayName reports whether a pod of the namespace may use this VM name. Names without a prefix of VMName are allowed. A name with
// such a prefix is allowed only if a pod of that namespace could have it.
func MayName(namespace, name string) bool { return mayName(namespace, "", name) }

// mayName is MayName for pods whose names start with podPrefix.
func mayName(namespace, podPrefix, name string) bool {
	if rest, ok := strings.CutPrefix(name, hashedPrefix); ok {
		if len(rest) <= hashLength || rest[len(rest)-hashLength-1] != '-' {
			return false
		}
		begins, text := namespace+"."+podPrefix, rest[:len(rest)-hashLength-1]
		return text != "" && (strings.HasPrefix(text, begins) || strings.HasPrefix(begins, text) && len(text) >= len(readable(namespace, podPrefix)))
	}
	if rest, ok := strings.CutPrefix(name, dashedPrefix); ok {
		return strings.HasPrefix(rest, namespace+"."+podPrefix)
	}
	return !strings.HasPrefix(name, plainPrefix) || strings.HasPrefix(name, plainPrefix+namespace+"-"+podPrefix)
}

// MayNameOf reports whether name can be the name of the VM of a pod of the set, that is a pod named SET-SLOT.
func MayNameOf(namespace, set, name string) bool {
	return strings.HasPrefix(name, plainPrefix) && mayName(namespace, set+"-", name)
}

// maxSlot is the highest slot of a CocoonSet.
const maxSlot = 9999

// SlotOf is the slot in the name of an agent's VM in a set, whose pod is SET-SLOT. The name may be a VMName or an OldVMName. It
// returns -1 for any other name, such as a toolbox's.
func SlotOf(namespace, set, vmName string) int {
	if !MayNameOf(namespace, set, vmName) {
		return -1
	}
	if strings.HasPrefix(vmName, hashedPrefix) {
		for slot := range maxSlot + 1 {
			if VMName(namespace, set+"-"+strconv.Itoa(slot)) == vmName {
				return slot
			}
		}
		return -1
	}
	sep := "-"
	if strings.HasPrefix(vmName, dashedPrefix) {
		sep = "."
	}
	rest := strings.TrimPrefix(strings.TrimPrefix(vmName, dashedPrefix), plainPrefix)
	slot := strings.TrimPrefix(rest, namespace+sep+set+"-")
	n, err := strconv.ParseUint(slot, 10, 31)
	if err != nil || len(slot) > 1 && slot[0] == '0' {
		return -1
	}
	return int(n)
}

// Repository is the registry repository of a VM's snapshots: the VM's canonical name, below its namespace.
func Repository(namespace, vmName string) string {
	return namespace + "/" + CanonicalVMName(namespace, vmName)
}

// OldRepository is where releases from before owners kept the snapshots of that VM, or "" for a VM that they could not make. The
// name of such a repository does not prove which VM it belongs to. The snapshots in it must say so themselves.
func OldRepository(namespace, vmName string) string {
	if pod, ok := strings.CutPrefix(vmName, dashedPrefix+namespace+"."); ok {
		return OldVMName(namespace, pod)
	}
	if strings.HasPrefix(vmName, hashedPrefix) {
		return ""
	}
	return vmName
}
