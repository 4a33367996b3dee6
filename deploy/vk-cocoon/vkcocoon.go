// Package vkcocoon holds the rights and limits of virtual nodes with their own identity, for programs that install them. It
// installs nothing, and does not contain the wide role of the service account.
package vkcocoon

import _ "embed"

// Rights are a node's permissions in addition to those that the API server gives every node.
//
//go:embed rbac.yaml
var Rights []byte

// NetworkPolicies lets nodes read what they need to enforce network policies.
//
//go:embed policies/rbac.yaml
var NetworkPolicies []byte

// Volumes lets nodes serve PersistentVolumeClaims.
//
//go:embed volumes/rbac.yaml
var Volumes []byte

// VolumePolicies limit each node to its own volumes.
//
//go:embed volumes/policy.yaml
var VolumePolicies []byte

// StorageClass is the storage class of the nodes' volumes, with their CSIDriver.
//
//go:embed volumes/class.yaml
var StorageClass []byte

// Policies prevent one node from acting on another.
//
//go:embed policy.yaml
var Policies []byte

// Bootstrap lets new nodes request a certificate, and lets nodes renew theirs.
//
//go:embed bootstrap.yaml
var Bootstrap []byte
