// Command pack makes the parts of Cocoon OS that no tool of the distribution makes the same way each time.
//
//	pack initramfs DIR OUT                       the tree DIR as an initramfs, compressed with gzip
//	pack sbom VERSION EPOCH PACKAGES OUT         the list of packages with versions and licences, in SPDX's form; EPOCH in seconds
//	pack grubenv ID OUT                          the boot environment of an installation with boot files of that id
//	pack key OUT                                 a key that signs bundles, unless OUT exists
//	pack public KEY OUT                          the public half of a key
//	pack bundle KEY VERSION MINVERSION DIR OUT   the bundle of DIR's vmlinuz, initramfs and rootfs.sqsh; MINVERSION may be empty
//
// It neither downloads nor builds disks: os/build.sh does.
package main

import (
	"errors"
	"fmt"
	"os"

	"cocoonstack.io/cocoon/internal/appliance/bootctl"
)

func main() {
	if err := run(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "pack:", err)
		os.Exit(1)
	}
}

func run(args []string) error {
	switch {
	case len(args) == 3 && args[0] == "initramfs":
		return packInitramfs(args[1], args[2])
	case len(args) == 5 && args[0] == "sbom":
		return writeSBOM(args[1], args[2], args[3], args[4])
	case len(args) == 3 && args[0] == "grubenv":
		block, err := bootctl.NewBlock(args[1])
		if err != nil {
			return err
		}
		return os.WriteFile(args[2], block, 0o644)
	case len(args) == 2 && args[0] == "key":
		return makeKey(args[1])
	case len(args) == 3 && args[0] == "public":
		return writePublic(args[1], args[2])
	case len(args) == 6 && args[0] == "bundle":
		return packBundle(args[1], args[2], args[3], args[4], args[5])
	}
	return errors.New("usage: pack initramfs DIR OUT | sbom VERSION EPOCH PACKAGES OUT | grubenv ID OUT | key OUT | public KEY OUT | bundle KEY VERSION MINVERSION DIR OUT")
}
