// Package controlplanetest tests the built binary as users run it. It
// imports no Kubernetes code, so it compiles in a second.
//
// Set COCOON_UP_BIN to a binary made by build.sh. Without it, the tests skip.
package controlplanetest
