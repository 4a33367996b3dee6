// Package capsulev1 is the API of an appliance: capsule.v1, generated from the protocol files of this folder.
//
// It is the API of the system described by the seed document "Capsule". Names and numbers of its services, methods, messages and
// fields are the documented ones, so that programs of others work. What Cocoon adds has field numbers from 100 on.
package capsulev1
