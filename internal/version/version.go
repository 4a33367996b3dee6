// Package version tells which build of Cocoon this is. It is set by the linker and does not guess.
package version

// Version is the git description of the build, "unknown" when built without it.
var Version = "unknown"
