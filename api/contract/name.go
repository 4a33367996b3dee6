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

// The beginnings of names that VMName makes. A namespace begins with a letter or digit, so that none begins as another does.
const (
	plainPrefix  = "vk-"   // vk-NAMESPACE-POD
	dashedPrefix = "vk--"  // vk--NAMESPACE.POD
	hashedPrefix = "vk---" // vk---READABLE-HASH
)

// VMName is the name of the VM of a pod that names none itself. No two pods have the same, and each is the name of a VM, of a
// Kubernetes object and of a repository in a registry:
//
//   - vk-NAMESPACE-POD where the namespace has no dash, so that it says where the pod's name begins;
//   - vk--NAMESPACE.POD where it has one: no namespace has a dot;
//   - vk---READABLE-HASH where that has more than 63 characters, with the beginning of NAMESPACE.POD and a hash of both.
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

// readable is the beginning of NAMESPACE.POD as a hashed name has it.
func readable(namespace, pod string) string {
	text := namespace + "." + pod
	return strings.TrimRight(text[:min(len(text), maxReadable)], ".-")
}

// OldVMName is the name that releases before owners gave the VM of a pod, and that other tools of this contract still write:
// vk-NAMESPACE-POD whatever the namespace. Pods of two namespaces may share one.
func OldVMName(namespace, pod string) string { return plainPrefix + namespace + "-" + pod }

// CanonicalVMName is what this release calls the VM that the namespace knows by name: itself, but for an OldVMName.
func CanonicalVMName(namespace, name string) string {
	if pod, ok := strings.CutPrefix(name, plainPrefix+namespace+"-"); ok {
		if canonical := VMName(namespace, pod); Pushable(canonical) { // no pod has another name
			return canonical
		}
	}
	return name
}

// Aliases are the names under which the VM that the namespace knows by name may run on a node, name first: one of an earlier
// release keeps its own.
func Aliases(namespace, name string) []string {
	if canonical := CanonicalVMName(namespace, name); canonical != name {
		return []string{name, canonical}
	}
	if pod, ok := strings.CutPrefix(name, dashedPrefix+namespace+"."); ok {
		return []string{name, OldVMName(namespace, pod)}
	}
	return []string{name}
}

// MayName reports whether a pod of the namespace may call a VM so: by any name that does not begin as VMName's do, and by one
// of those only if a pod of that namespace could have it.
func MayName(namespace, name string) bool { return mayName(namespace, "", name) }

// mayName is MayName for pods whose names begin so.
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

// MayNameOf reports whether name can be that of the VM of a pod of the set: one whose name is SET-SLOT.
func MayNameOf(namespace, set, name string) bool {
	return strings.HasPrefix(name, plainPrefix) && mayName(namespace, set+"-", name)
}

// maxSlot is the highest slot of a CocoonSet.
const maxSlot = 9999

// SlotOf is the slot in the name of an agent's VM in a set: that of the pod SET-SLOT, by VMName or OldVMName. It is -1 when the
// name is none of those, as a toolbox's.
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

// Repository is that of a VM's snapshots in a registry: below the namespace that the VM belongs to, by its canonical name.
func Repository(namespace, vmName string) string {
	return namespace + "/" + CanonicalVMName(namespace, vmName)
}

// OldRepository is where releases before owners kept the snapshots of that VM, "" for a VM that they could not make: a repository
// whose name says of no VM surely whose it is. What is there must say so itself.
func OldRepository(namespace, vmName string) string {
	if pod, ok := strings.CutPrefix(vmName, dashedPrefix+namespace+"."); ok {
		return OldVMName(namespace, pod)
	}
	if strings.HasPrefix(vmName, hashedPrefix) {
		return ""
	}
	return vmName
}
