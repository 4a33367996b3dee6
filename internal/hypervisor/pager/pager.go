// Package pager gives a guest that already runs its memory, while that memory is still being loaded: it is the process that answers the page faults of
// another one by its userfaultfd.
//
// It has descriptors and nothing else. It loads nothing itself: package filling tells it which parts of a file are there. It starts and ends no VM: the
// driver that has started it sees its end, and its last word says what that means. It ends when all memory is there, which then is ordinary memory of the
// VM, or when the VM ends.
package pager

import (
	"cmp"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/sparse"
)

// Command is the first argument of a program that is a pager. Argument 0, its name, is free.
const Command = "answer-page-faults-1"

// Descriptors of the process, beside its standard error, a log.
const (
	FDFaults = 3 + iota // userfaultfd, non-blocking, with UFFD_FEATURE_EVENT_REMOVE
	FDMemory            // the file
	FDFeed              // stream socket of a filling.Writer
	FDVM                // pidfd of the process whose faults these are
)

// Whole is the last word of a pager when its VM needs it no longer.
const Whole = "all memory is there"

// Region is a part of the memory of the process.
type Region struct {
	Base   uint64 // address
	Size   int64
	Offset int64 // in the file
}

func (r Region) end() uint64 { return r.Base + uint64(r.Size) }

// CheckRegions refuses regions that are not exactly a file of size bytes, each page once.
func CheckRegions(all []Region, size int64) error {
	at := int64(0)
	for n, r := range all {
		if r.Size <= 0 || r.Size > size-at || r.Offset != at || r.Size%sparse.Block != 0 || r.Base%sparse.Block != 0 || r.Base > 1<<62 {
			return errdefs.Invalidf("region %d of the memory, %d bytes at %#x from byte %d of the file on, is not what follows byte %d of %d", n, r.Size, r.Base, r.Offset, at, size)
		}
		at += r.Size
	}
	sorted := slices.SortedFunc(slices.Values(all), func(a, b Region) int { return cmp.Compare(a.Base, b.Base) })
	for n, r := range sorted {
		if n > 0 && sorted[n-1].end() > r.Base {
			return errdefs.Invalidf("the memory has two regions at %#x", r.Base)
		}
	}
	if at != size {
		return errdefs.Invalidf("the regions of the memory have %d bytes, and the file has %d", at, size)
	}
	return nil
}

// Args returns the arguments of the process, after its name.
func Args(all []Region) []string {
	out := []string{Command}
	for _, r := range all {
		out = append(out, fmt.Sprintf("%x+%x@%x", r.Base, r.Size, r.Offset))
	}
	return out
}

func parseRegion(s string) (r Region, err error) {
	base, rest, _ := strings.Cut(s, "+")
	size, offset, _ := strings.Cut(rest, "@")
	if r.Base, err = strconv.ParseUint(base, 16, 64); err == nil {
		r.Size, err = strconv.ParseInt(size, 16, 64)
	}
	if err == nil {
		r.Offset, err = strconv.ParseInt(offset, 16, 64)
	}
	return r, err
}

// Is reports whether a program with these arguments, after its name, is a pager.
func Is(args []string) bool { return len(args) > 1 && args[0] == Command }

// Main runs a pager with these arguments, after its name, and returns its exit code. Its last word is in stderr.
func Main(args []string, stderr io.Writer) int {
	err := run(args[1:])
	if err != nil {
		fmt.Fprintln(stderr, err)
		return 1
	}
	fmt.Fprintln(stderr, Whole)
	return 0
}

func run(args []string) error {
	p := &pager{faults: FDFaults, memory: FDMemory, feed: FDFeed, vm: FDVM}
	size := int64(0)
	for _, a := range args {
		r, err := parseRegion(a)
		if err != nil {
			return fmt.Errorf("region %.80q: %w", a, err)
		}
		p.regions = append(p.regions, r)
		size += r.Size
	}
	if err := CheckRegions(p.regions, size); err != nil {
		return err
	}
	return p.run(size)
}
