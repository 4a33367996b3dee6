// Command actor is process 1 of the small machine in which the test of the boot control writes: it does to a boot partition what the word actor.do= of the
// kernel's command line says, as an update does it, and switches the machine off.
package main

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"cocoonstack.io/cocoon/internal/appliance/bootctl"
)

const dir = "/boot"

func main() {
	if err := run(); err != nil {
		fmt.Println("actor: error:", err)
	} else {
		fmt.Println("actor: done")
	}
	unix.Sync()
	_ = unix.Reboot(unix.LINUX_REBOOT_CMD_POWER_OFF)
}

func run() error {
	for _, d := range []string{"/proc", "/dev", dir} {
		if err := os.MkdirAll(d, 0o755); err != nil {
			return err
		}
	}
	if err := errors.Join(unix.Mount("proc", "/proc", "proc", 0, ""), unix.Mount("dev", "/dev", "devtmpfs", 0, "")); err != nil {
		return err
	}
	modules, err := filepath.Glob("/modules/*.ko")
	if err != nil {
		return err
	}
	slices.Sort(modules)
	for _, path := range modules {
		f, err := os.Open(path)
		if err != nil {
			return err
		}
		if err := unix.FinitModule(int(f.Fd()), "", 0); err != nil {
			fmt.Println("actor:", path, err)
		}
		_ = f.Close()
	}
	cmdline, err := os.ReadFile("/proc/cmdline")
	if err != nil {
		return err
	}
	// As pid1 mounts it.
	if err := unix.Mount("/dev/vda1", dir, "vfat", unix.MS_NOATIME, "fmask=0077,dmask=0077"); err != nil {
		return fmt.Errorf("mount the boot partition: %w", err)
	}
	control := bootctl.New(filepath.Join(dir, "EFI/BOOT/grubenv"), bootctl.ParseBoot(string(cmdline)))
	for word := range strings.FieldsSeq(string(cmdline)) {
		if do, ok := strings.CutPrefix(word, "actor.do="); ok {
			what, arg, _ := strings.Cut(do, ",")
			if err := act(control, what, arg); err != nil {
				return fmt.Errorf("%s: %w", what, err)
			}
		}
	}
	return unix.Unmount(dir, 0)
}

// act does one thing. The argument of update is SLOT,ID: what is on /new becomes its boot files.
func act(c *bootctl.Control, what, arg string) error {
	switch what {
	case "update":
		slot, id, _ := strings.Cut(arg, ",")
		if err := c.Vacate(bootctl.Slot(slot)); err != nil {
			return err
		}
		old, err := filepath.Glob(filepath.Join(dir, "*_"+slot+"-*"))
		if err != nil {
			return err
		}
		for _, path := range old {
			if err := os.Remove(path); err != nil {
				return err
			}
		}
		for _, name := range []string{"vmlinuz", "initramfs"} {
			if err := place("/new/"+name+"-"+id, filepath.Join(dir, name+"_"+slot+"-"+id)); err != nil {
				return err
			}
		}
		return c.Arm(bootctl.Slot(slot), 2, id)
	case "good":
		return c.MarkGood()
	case "bad":
		return c.MarkBad()
	}
	return fmt.Errorf("nobody knows what that is")
}

// place writes a new file, durable with its name.
func place(from, to string) error {
	b, err := os.ReadFile(from)
	if err != nil {
		return err
	}
	f, err := os.OpenFile(to, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	if _, err := f.Write(b); err != nil {
		return err
	}
	if err := errors.Join(f.Sync(), f.Close()); err != nil {
		return err
	}
	d, err := os.Open(filepath.Dir(to))
	if err != nil {
		return err
	}
	return errors.Join(d.Sync(), d.Close())
}
