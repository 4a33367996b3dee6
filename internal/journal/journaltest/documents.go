package journaltest

import (
	"bytes"
	"cmp"
	"context"
	"slices"
	"sync"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/journal"
)

// Documents is a journal.Documents in memory.
type Documents struct {
	mu  sync.Mutex
	all map[journal.Table]map[string][]byte
}

var _ journal.Documents = (*Documents)(nil)

// NewDocuments returns documents in memory.
func NewDocuments() *Documents {
	return &Documents{all: map[journal.Table]map[string][]byte{}}
}

// Get implements journal.Documents.
func (d *Documents) Get(_ context.Context, t journal.Table, name string) ([]byte, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	data, ok := d.all[t][name]
	if !ok {
		return nil, errdefs.NotFoundf("there is no %q in %s", name, t)
	}
	return bytes.Clone(data), nil
}

// List implements journal.Documents.
func (d *Documents) List(_ context.Context, t journal.Table) ([]journal.Document, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	var all []journal.Document
	for name, data := range d.all[t] {
		all = append(all, journal.Document{Name: name, Data: bytes.Clone(data)})
	}
	slices.SortFunc(all, func(a, b journal.Document) int { return cmp.Compare(a.Name, b.Name) })
	return all, nil
}

// Write implements journal.Documents.
func (d *Documents) Write(_ context.Context, changes ...journal.Change) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, c := range changes {
		if _, ok := d.all[c.Table][c.Name]; ok && c.New {
			return errdefs.Existsf("it exists already")
		}
	}
	for _, c := range changes {
		if c.Data == nil {
			delete(d.all[c.Table], c.Name)
			continue
		}
		if d.all[c.Table] == nil {
			d.all[c.Table] = map[string][]byte{}
		}
		d.all[c.Table][c.Name] = bytes.Clone(c.Data)
	}
	return nil
}

// Close implements journal.Documents.
func (d *Documents) Close() error { return nil }
