// Package hypervisors compares the hypervisors with each other, on one machine with KVM (`make bench-hypervisors`).
package hypervisors
