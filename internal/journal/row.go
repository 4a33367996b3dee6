package journal

import (
	"fmt"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/vm"
)

// Row is everything that a journal stores about one VM.
type Row struct {
	Record vm.Record `json:"record"`
	Intent *Intent   `json:"intent,omitempty"` // nil: no operation is unsettled
}

// Refuse returns the DataLoss error for a journal that is stale or damaged: it states what was found, and the
// operator's options.
func Refuse(format string, args ...any) error {
	return errdefs.DataLossf("%s: it is damaged, or an older one was put in its place. No VM was touched. "+
		"`cocoond recover --rebuild` rebuilds it from the records in the folders of the VMs; "+
		"`cocoond --older-journal` uses it as it is, and leaves alone the VMs that it does not know", fmt.Sprintf(format, args...))
}
