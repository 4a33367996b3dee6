package disk

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"
	"time"
	"unicode"

	"golang.org/x/sys/unix"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/proc"
	"cocoonstack.io/cocoon/internal/vm"
)

// Converter converts disks of other formats to qcow2 with qemu-img. A hostile disk can affect nothing but qemu-img's
// output: qemu-img runs without network and capabilities, with its own user id if we are root, and with limited memory,
// time and output. It dies with us.
type Converter struct {
	Path string // of qemu-img; "" searches for it
	UID  uint32 // user and group id for qemu-img when we are root
}

// DefaultConverterUID is below the ids that the processes of VMs get.
const DefaultConverterUID = 0x6fffffff

// Limits of one conversion.
const (
	convertMemory = 2 << 30     // bytes of address space; threads reserve much of it without using it
	convertCPU    = 2 * 60 * 60 // seconds
	convertTime   = 2 * time.Hour
	convertSays   = 300 // characters of its output that are passed on
)

// Check checks that a disk to be converted is complete and has no parent, and returns its size for the guest.
func Check(format vm.DiskFormat, r io.ReaderAt, size int64) (virtual int64, err error) {
	switch format {
	case FormatVMDK:
		return CheckVMDK(r, size)
	case FormatVHDX:
		return CheckVHDX(r, size)
	case FormatVHD:
		return CheckVHD(r, size)
	case vm.DiskRaw, vm.DiskQCOW2: // these are not converted
	}
	return 0, errdefs.Invalidf("cannot convert disks of the format %q", format)
}

// Convert writes the disk in, which passed Check, to out as qcow2 of at most limit bytes. scratch is an empty file for the
// output of qemu-img. in and out are regular files of ours; none of them is synced.
// Errors: InvalidArgument when qemu-img cannot read the disk, ResourceExhausted beyond limit, FailedPrecondition without
// qemu-img.
func (c Converter) Convert(ctx context.Context, format vm.DiskFormat, in, out, scratch *os.File, limit int64) error {
	tool, err := c.find()
	if err != nil {
		return err
	}
	s := proc.Spec{
		Path: tool, Args: []string{
			"qemu-img", "convert", "-q", "-O", "qcow2",
			// The format is given, never guessed, and there is no backing file, whatever the disk says.
			fmt.Sprintf(`json:{"driver":%q,"backing":null,"file":{"driver":"file","filename":"/proc/self/fd/3","locking":"off"}}`, format),
			"/proc/self/fd/4",
		},
		Env: []string{"LC_ALL=C", "PATH=/usr/bin:/bin"}, Files: []*os.File{in, out}, Out: scratch,
	}
	if os.Geteuid() == 0 {
		uid := cmp.Or(c.UID, DefaultConverterUID)
		s.User, s.Isolated = &proc.User{UID: uid, GID: uid}, true
		// qemu-img opens the files again by their descriptors, so it must own them.
		for _, f := range []*os.File{in, out} {
			if err := f.Chown(int(uid), int(uid)); err != nil {
				return fmt.Errorf("convert the disk: %w", err)
			}
		}
	}
	ctx, cancel := context.WithTimeoutCause(ctx, convertTime, errdefs.Exhaustedf("converting the disk took longer than %s", convertTime))
	defer cancel()
	exit, err := proc.Run(ctx, s, proc.Limits{Memory: convertMemory, CPU: convertCPU, FileSize: uint64(limit)})
	if cause := context.Cause(ctx); err != nil && errdefs.Is(cause, errdefs.ResourceExhausted) {
		return cause
	}
	if err != nil {
		return fmt.Errorf("convert the disk: %w", err)
	}
	if s.User != nil {
		if err := errors.Join(in.Chown(0, 0), out.Chown(0, 0)); err != nil {
			return fmt.Errorf("convert the disk: %w", err)
		}
	}
	return verdict(exit, scratch, limit)
}

func verdict(exit proc.Exit, scratch *os.File, limit int64) error {
	switch {
	case exit == proc.Exit{}:
		return nil
	case exit.Signal == int(unix.SIGXFSZ):
		return errdefs.Exhaustedf("the converted disk is larger than the limit of %d bytes", limit)
	case exit.Signal == int(unix.SIGXCPU):
		return errdefs.Exhaustedf("converting the disk took more than %d seconds of CPU time", convertCPU)
	case exit.Signal != 0:
		return errdefs.Invalidf("the disk cannot be converted: signal %d ended qemu-img", exit.Signal)
	}
	buf := make([]byte, 4*convertSays)
	n, _ := scratch.ReadAt(buf, 0)
	return errdefs.Invalidf("the disk cannot be converted: %s", printable(string(buf[:n])))
}

// printable returns the output of qemu-img in one line. Parts of it come from the disk.
func printable(said string) string {
	line, _, _ := strings.Cut(strings.TrimSpace(said), "\n")
	line = strings.Map(func(r rune) rune {
		if !unicode.IsPrint(r) || r == unicode.ReplacementChar {
			return '.'
		}
		return r
	}, line)
	if i := strings.LastIndex(line, "}': "); i >= 0 { // qemu-img's name of our descriptor
		line = line[i+len("}': "):]
	}
	if len(line) > convertSays {
		line = line[:convertSays] + "…"
	}
	return strings.TrimPrefix(line, "qemu-img: ")
}

func (c Converter) find() (string, error) {
	if c.Path != "" {
		return c.Path, nil
	}
	p, err := exec.LookPath("qemu-img")
	if err != nil {
		return "", errdefs.Preconditionf("qemu-img is missing; it converts VMware and Hyper-V disks; install it with `apt-get install qemu-utils`")
	}
	return p, nil
}
