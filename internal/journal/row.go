package journal

import (
	"fmt"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/vm"
)

// Row is all that a journal knows of one VM.
type Row struct {
	Record vm.Record `json:"record"`
	Intent *Intent   `json:"intent,omitempty"` // nil: no operation is unsettled
}

// Refuse is the DataLoss error about a journal that is not the one that it should be: what was found, and the choice.
func Refuse(format string, args ...any) error {
	return errdefs.DataLossf("%s: it is damaged, or an older one was put in its place. No VM was touched. "+
		"`cocoond recover --rebuild` makes it anew from the records in the folders of the VMs; "+
		"`cocoond --older-journal` goes on from what it says, and keeps aside the VMs that it does not know", fmt.Sprintf(format, args...))
}
