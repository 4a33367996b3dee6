package qemu

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/hypervisor"
	"cocoonstack.io/cocoon/internal/vm"
)

// hugePages is the folder in which Linux tells of its huge pages (Documentation/admin-guide/mm/hugetlbpage.rst).
const hugePages = "/sys/kernel/mm/hugepages/hugepages-2048kB"

// enoughHugePages returns ResourceExhausted if the node has fewer free huge pages than the guest needs. at is hugePages. QEMU would say that it
// cannot allocate memory.
func enoughHugePages(at string, p hypervisor.Plan) error {
	if !p.Huge {
		return nil
	}
	count := func(name string) (int64, error) {
		text, err := os.ReadFile(filepath.Join(at, name))
		if err != nil {
			return 0, err
		}
		return strconv.ParseInt(strings.TrimSpace(string(text)), 10, 64)
	}
	free, err := count("free_hugepages")
	reserved, also := count("resv_hugepages")
	switch err := errors.Join(err, also); {
	case errors.Is(err, fs.ErrNotExist):
		return errdefs.Unsupportedf("VM %s needs huge pages of 2 MiB, which the kernel of this node does not have", p.Name)
	case err != nil:
		return errdefs.Unavailablef("count the huge pages of this node: %w", err)
	}
	if free, need := max(free-reserved, 0), p.Memory/vm.HugePage; free < need {
		return errdefs.Exhaustedf("VM %s needs %d huge pages of 2 MiB, and this node has %d that are free; set more aside with `sysctl vm.nr_hugepages`", p.Name, need, free)
	}
	return nil
}
