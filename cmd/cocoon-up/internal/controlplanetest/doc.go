// Package controlplanetest tests the built binary as its users run it. It
// imports no Kubernetes code, and so compiles in a second.
//
// Set COCOON_UP_BIN to a binary made by build.sh; without it the tests skip.
package controlplanetest
