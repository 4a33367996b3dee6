package vm

import (
	"encoding/json"
	"fmt"
	"path/filepath"

	"cocoonstack.io/cocoon/internal/errdefs"
)

// HugePages is the size in bytes of the huge pages of which the memory of a guest consists. 0: it consists of other pages.
type HugePages int64

// The huge pages of x86-64.
const (
	HugePages2M HugePages = 2 << 20
	HugePages1G HugePages = 1 << 30
)

// AllHugePages are the sizes that there are, the smallest first.
var AllHugePages = []HugePages{HugePages2M, HugePages1G}

// String returns the size as users write it: 2Mi or 1Gi. "" is 0.
func (p HugePages) String() string {
	switch p {
	case 0:
		return ""
	case HugePages1G:
		return "1Gi"
	default:
		return "2Mi"
	}
}

// Dir is the folder below sys, where sysfs is, in which Linux tells of pages of the size (Documentation/admin-guide/mm/hugetlbpage.rst).
func (p HugePages) Dir(sys string) string {
	return filepath.Join(sys, "kernel/mm/hugepages", fmt.Sprintf("hugepages-%dkB", p>>10))
}

// ParseHugePages reads what String returns.
// Errors: InvalidArgument.
func ParseHugePages(s string) (HugePages, error) {
	for _, p := range append([]HugePages{0}, AllHugePages...) {
		if s == p.String() {
			return p, nil
		}
	}
	return 0, errdefs.Invalidf("huge pages of %q are unknown; they have 2Mi or 1Gi", s)
}

// UnmarshalJSON also reads records of earlier releases, where true means pages of 2 MiB.
func (p *HugePages) UnmarshalJSON(text []byte) error {
	if string(text) == "true" {
		*p = HugePages2M
		return nil
	}
	return json.Unmarshal(text, (*int64)(p))
}

// HugePages returns the size of the huge pages of which the memory of the guest consists; 0: there are none.
func (s Spec) HugePages() HugePages {
	if s.Hardware == nil {
		return 0
	}
	return s.Hardware.HugePages
}

// validateHugePages checks that the memory of the guest consists of whole pages.
func (s Spec) validateHugePages() error {
	p := s.HugePages()
	if p == 0 {
		return nil
	}
	if p != HugePages2M && p != HugePages1G {
		return errdefs.Invalidf("there are no huge pages of %d bytes; they have 2Mi or 1Gi", p)
	}
	if s.Memory%int64(p) != 0 {
		return errdefs.Invalidf("its memory of %d bytes is no multiple of a huge page of %s; give it another size", s.Memory, p)
	}
	return nil
}
