package ipam

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"cocoonstack.io/cocoon/internal/atomicfile"
	"cocoonstack.io/cocoon/internal/errdefs"
)

// Parse reads a lease file: a JSON array of objects with mac, ip and expiry. Null and an empty file mean no leases; unknown
// keys are ignored. Anything else is a DataLoss error.
func Parse(b []byte) ([]Lease, error) {
	if len(b) == 0 {
		return nil, nil
	}
	var leases []Lease
	if err := json.Unmarshal(b, &leases); err != nil {
		return nil, errdefs.New(errdefs.DataLoss, "the leases are not a JSON array of mac, ip and expiry: %w", err)
	}
	for i, l := range leases {
		hw, err := net.ParseMAC(l.MAC)
		if err != nil || len(hw) != 6 || !l.IP.Is4() || l.Index < 0 {
			return nil, errdefs.DataLossf("lease %d is invalid: MAC %q, IP %q", i, l.MAC, l.IP)
		}
		leases[i].MAC = hw.String()
	}
	return leases, nil
}

// formatter is the inverse of Parse, with one lease per line. No leases are [], not null. It keeps the lines of the leases that it formatted last. Few leases change from one write of a file to the next, and
// encoding a thousand took longer than the rest of the write.
type formatter struct{ lines map[string]*formatted } // by MAC

type formatted struct {
	lease Lease
	line  []byte
}

func (f *formatter) format(leases []Lease) ([]byte, error) {
	if f.lines == nil || len(f.lines) > 2*len(leases) { // most lines belong to leases that are gone
		f.lines = make(map[string]*formatted, len(leases))
	}
	const width = 192 // approximate bytes per line
	out := append(make([]byte, 0, width*(len(leases)+1)), '[')
	for i := range leases {
		if i > 0 {
			out = append(out, ',')
		}
		l := &leases[i]
		last := f.lines[l.MAC]
		if last == nil || last.lease != *l {
			line, err := json.Marshal(l)
			if err != nil {
				return nil, fmt.Errorf("format leases: %w", err)
			}
			last = &formatted{*l, append(line, '\n')}
			f.lines[l.MAC] = last
		}
		out = append(out, last.line...)
	}
	return append(out, "]\n"...), nil
}

// File is the durable copy of a pool. Concurrent writers share one write. It is safe for concurrent use.
type File struct {
	path string

	mu      sync.Mutex
	of      *Pool  // the pool that was last written, nil if none
	written uint64 // its version
	formatter
}

// NewFile returns the lease file at path, which need not exist.
func NewFile(path string) *File { return &File{path: path} }

// Read returns the leases in the file, none if there is no file.
func (f *File) Read() ([]Lease, error) {
	b, err := os.ReadFile(f.path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("read leases: %w", err)
	}
	leases, err := Parse(b)
	if err != nil {
		return nil, fmt.Errorf("lease file %s: %w", f.path, err)
	}
	return leases, nil
}

// Sweep removes what a daemon has left that was killed while it wrote the file.
func (f *File) Sweep() error {
	f.mu.Lock()
	defer f.mu.Unlock()
	return atomicfile.Sweep(f.path)
}

// SetAside moves an unusable file out of the way and returns its new path.
func (f *File) SetAside(now time.Time) (string, error) {
	to := f.path + ".damaged-" + now.UTC().Format("20060102T150405")
	if err := atomicfile.Rename(f.path, to); err != nil {
		return "", fmt.Errorf("set the damaged lease file aside: %w", err)
	}
	return to, nil
}

// Sync returns when the file durably holds p as it was at the call, or newer. Concurrent calls share a write: they wait for the
// write in progress, and the next write serves all of them.
func (f *File) Sync(p *Pool) error {
	want := p.Version()
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.of == p && f.written >= want {
		return nil
	}
	leases, version := p.Snapshot()
	if err := f.write(leases); err != nil {
		return err
	}
	f.of, f.written = p, version
	return nil
}

// Release removes a lease directly from the file, if there is no pool. It does nothing if the lease belongs to another tap.
func (f *File) Release(mac, tap string) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	leases, err := f.Read()
	if err != nil {
		return err
	}
	rest := slices.DeleteFunc(slices.Clone(leases), func(l Lease) bool { return l.MAC == mac && l.Tap == tap })
	if len(rest) == len(leases) {
		return nil
	}
	f.of = nil
	return f.write(rest)
}

func (f *File) write(leases []Lease) error {
	b, err := f.format(leases)
	if err == nil && f.of == nil { // a daemon that has just started needs no disk space for unchanged content
		if there, err := os.ReadFile(f.path); err == nil && bytes.Equal(there, b) {
			return nil
		}
	}
	if err != nil {
		return err
	}
	if err := os.MkdirAll(filepath.Dir(f.path), 0o755); err != nil {
		return fmt.Errorf("write leases: %w", err)
	}
	if err := atomicfile.WriteFile(f.path, b, 0o644); err != nil {
		return fmt.Errorf("write leases: %w", err)
	}
	return nil
}
