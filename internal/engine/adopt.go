package engine

import (
	"context"

	"cocoonstack.io/cocoon/internal/journal"
)

// adoption puts a VM back on record that the journal did not know: it is begun with the record from the VM's folder,
// and recovery ends it.
type adoption struct{ *machine }

var adoptOperation = operation[*adoption]{
	name: opAdopt, told: true, recall: recallAdoption,
	steps: []step[*adoption]{{word: stepAdopt, recover: (*adoption).recover}},
}

func recallAdoption(m *machine, _ journal.Intent) (*adoption, error) { return &adoption{m}, nil }

func (a *adoption) recover(ctx context.Context) (next string, err error) {
	return "", a.adoptAndSettle(ctx)
}
