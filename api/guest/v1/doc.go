// Package guestv1 is the wire protocol between a node and the agent inside a VM, generated from guest.proto.
//
// It holds messages and stubs only; what the calls mean is said in internal/guest.
package guestv1
