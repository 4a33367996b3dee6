// Package assets finds the files that belong to an installation: guest kernel, demo image, sibling binaries.
//
// It only looks; `make build` and packages put them there.
package assets

import (
	"os"
	"path/filepath"
)

// Path returns the path of the file name: beside the running binary (as `make build` leaves it) or in ../lib/cocoon of
// it (as packages do). If it is in neither, Path returns the first one, so that a message can name what is missing.
func Path(name string) string {
	exe, err := os.Executable()
	if err != nil {
		return name
	}
	if real, err := filepath.EvalSymlinks(exe); err == nil {
		exe = real
	}
	here := filepath.Dir(exe)
	beside, installed := filepath.Join(here, name), filepath.Join(here, "..", "lib", "cocoon", name)
	if !Exists(beside) && Exists(installed) {
		return installed
	}
	return beside
}

// Exists reports whether path is a regular file.
func Exists(path string) bool {
	fi, err := os.Stat(path)
	return err == nil && fi.Mode().IsRegular()
}
