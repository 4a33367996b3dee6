// Package vkcocoon holds the rights and limits of virtual nodes that have an identity of their own, for whom installs them. It
// installs nothing, and does not know the wide role of the service account.
package vkcocoon

import _ "embed"

// Rights are what a node may do beyond what the API server lets every node do.
//
//go:embed rbac.yaml
var Rights []byte

// Policies are what one node may not do to another.
//
//go:embed policy.yaml
var Policies []byte

// Bootstrap lets new nodes ask for a certificate, and nodes renew theirs.
//
//go:embed bootstrap.yaml
var Bootstrap []byte
