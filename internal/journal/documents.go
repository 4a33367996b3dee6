package journal

import "context"

// Documents stores what a door has been told to keep, such as the workloads of an appliance, as documents with a name. It does not
// interpret them. All methods are safe for concurrent use.
type Documents interface {
	// Get returns a document. Errors: NotFound.
	Get(ctx context.Context, t Table, name string) ([]byte, error)

	// List returns all documents of a table, sorted by name.
	List(ctx context.Context, t Table) ([]Document, error)

	// Write makes all changes, or none of them. They survive a power cut when it returns.
	// Errors: AlreadyExists if a document exists that a change says is new.
	Write(ctx context.Context, changes ...Change) error

	// Close flushes and closes.
	Close() error
}

// Table is a set of documents. Its documents have different names.
type Table string

// The tables. Their names are those of the documented system.
const (
	Workloads Table = "workloads"
	Volumes   Table = "volumes"
	OSState   Table = "os_state"
	Identity  Table = "capsule_identity"
	Keys      Table = "authorized_keys"
	Audit     Table = "audit"
	Events    Table = "events"
)

// Tables returns all tables.
func Tables() []Table { return []Table{Workloads, Volumes, OSState, Identity, Keys, Audit, Events} }

// Document is a document with its name.
type Document struct {
	Name string
	Data []byte
}

// Change stores or removes a document.
type Change struct {
	Table Table
	Name  string
	Data  []byte // nil removes the document; it is no error if there is none
	New   bool   // it must not exist
}
