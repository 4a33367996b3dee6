package engine

import "cocoonstack.io/cocoon/internal/journal"

// operations are all operations that the journal may have unfinished. A new one is a file of its own and a line here.
var operations = []recoverable{
	createOperation,
	launchOperation,
	startOperation,
	stopOperation,
	restartOperation,
	removeOperation,
	saveOperation,
	cloneOperation,
	hibernateOperation,
	wakeOperation,
	restoreOperation,
	adoptOperation,
	additionOperation,
	departureOperation,
	bootContainerOperation,
	resizeOperation,
	growOperation,
	attachOperation,
	detachOperation,
	dumpOperation,
	attachNICOperation,
	detachNICOperation,
}

// operationOf returns the operation of an intent; nil: this Cocoon does not know it.
func operationOf(in journal.Intent) recoverable {
	for _, o := range operations {
		if o.id() == in.Op {
			return o
		}
	}
	return nil
}
