package stickyvm

import (
	"crypto/sha256"
	"encoding/base32"
	"strings"
)

// vmName is the name of the VM of a pod that sets no VM name, as in api/contract. This module does not import that package. The
// tests of both read the same file.
func vmName(namespace, pod string) string {
	const most, readable = 63, 41
	name := oldVMName(namespace, pod)
	if strings.Contains(namespace, "-") {
		name = "vk--" + namespace + "." + pod
	}
	if len(name) <= most {
		return name
	}
	sum := sha256.Sum256([]byte(namespace + "/" + pod))
	text := namespace + "." + pod
	text = strings.TrimRight(text[:min(len(text), readable)], ".-")
	return "vk---" + text + "-" + strings.ToLower(base32.StdEncoding.EncodeToString(sum[:]))[:16]
}

// oldVMName is the name in earlier releases.
func oldVMName(namespace, pod string) string { return "vk-" + namespace + "-" + pod }
