// Package runtimeclass holds the RuntimeClass of VM pods on nodes that keep their kubelet, for programs that install it. It installs
// nothing.
package runtimeclass

import _ "embed"

// Cocoon is the RuntimeClass.
//
//go:embed cocoon.yaml
var Cocoon []byte
