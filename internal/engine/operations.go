package engine

import "cocoonstack.io/cocoon/internal/journal"

// Names of operations, and words of their steps. The journal stores them: their meaning never changes.
const (
	opCreate    = "create"
	opLaunch    = "launch"
	opStart     = "start"
	opStop      = "stop"
	opRestart   = "restart"
	opRemove    = "remove"
	opSave      = "save"
	opClone     = "clone"
	opHibernate = "hibernate"
	opWake      = "wake"
	opRestore   = "restore"
	opAdopt     = "adopt"

	stepAdopt    = "adopt"
	stepDisks    = "disks"
	stepNetwork  = "network"
	stepLaunch   = "launch"
	stepShutdown = "shutdown"
	stepKill     = "kill"
	stepSave     = "save"
	stepUndo     = "undo"
	stepAnswer   = "answer"
	stepClean    = "clean"
)

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
