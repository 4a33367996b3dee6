package jail

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/hypervisor"
)

// Sysfs is where Linux tells of its memory.
const Sysfs = "/sys"

// EnoughHugePages returns ResourceExhausted if the node has fewer free huge pages than the guest needs. sys is where sysfs is. A hypervisor would say that
// it cannot allocate memory.
func EnoughHugePages(sys string, p hypervisor.Plan) error {
	if p.Huge == 0 {
		return nil
	}
	count := func(name string) (int64, error) {
		text, err := os.ReadFile(filepath.Join(p.Huge.Dir(sys), name))
		if err != nil {
			return 0, err
		}
		return strconv.ParseInt(strings.TrimSpace(string(text)), 10, 64)
	}
	free, err := count("free_hugepages")
	reserved, also := count("resv_hugepages")
	switch err := errors.Join(err, also); {
	case errors.Is(err, fs.ErrNotExist):
		return errdefs.Unsupportedf("VM %s needs huge pages of %s, which the kernel of this node does not have", p.Name, p.Huge)
	case err != nil:
		return errdefs.Unavailablef("count the huge pages of this node: %w", err)
	}
	if free, need := max(free-reserved, 0), p.Memory/int64(p.Huge); free < need {
		return errdefs.Exhaustedf("VM %s needs %d huge pages of %s, and this node has %d that are free; write how many it has to %s", p.Name, need, p.Huge, free, filepath.Join(p.Huge.Dir(sys), "nr_hugepages"))
	}
	return nil
}
