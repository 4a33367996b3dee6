package chunked

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"runtime"
	"slices"

	"golang.org/x/sync/semaphore"
	"golang.org/x/sys/unix"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/ociclient"
	"cocoonstack.io/cocoon/internal/snapshot"
	"cocoonstack.io/cocoon/internal/snapshot/artifact"
	"cocoonstack.io/cocoon/internal/vm"
)

// Pull implements snapshot.Remote.
func (c *Client) Pull(ctx context.Context, ref, name string, auth snapshot.Auth, progress func(snapshot.Progress)) (snapshot.Snapshot, error) {
	var out snapshot.Snapshot
	err := c.session(ctx, ref, auth, ociclient.Pull, func(r ociclient.Ref, s *ociclient.Session) (err error) {
		p := &pull{c: c, s: s, m: &meter{s: s, tell: progress}, held: map[string]snapshot.Held{}, tables: map[string]*pages{}}
		if out, err = p.run(ctx, r, name); err != nil {
			return fmt.Errorf("pull %s: %w", r, full(err))
		}
		return nil
	})
	return out, err
}

// full classifies errors of a full disk and adds a remedy.
func full(err error) error {
	if errors.Is(err, unix.ENOSPC) || errors.Is(err, unix.EDQUOT) {
		return errdefs.As(errdefs.ResourceExhausted, fmt.Errorf("the disk is full; remove snapshots with `cocoon snapshot rm`: %w", err))
	}
	return err
}

// pull is the state of one pull.
type pull struct {
	c      *Client
	s      *ociclient.Session
	m      *meter
	files  []incoming
	dir    string
	open   map[string]*output
	tables map[string]*pages // of files with hashes of their pages
	local  map[string]place
	held   map[string]snapshot.Held // snapshots that chunks are borrowed from
	room   *semaphore.Weighted

	early bool   // what only the memory needs comes later
	later []task // that
}

func (p *pull) run(ctx context.Context, r ociclient.Ref, name string) (snapshot.Snapshot, error) {
	none := snapshot.Snapshot{}
	draft, record, err := p.begin(ctx, r, name)
	if err != nil {
		return none, err
	}
	defer p.end(draft)
	if err := p.fetch(ctx); err != nil {
		return none, err
	}
	return p.finish(ctx, r, draft, record)
}

// begin makes the draft of the snapshot, and checks that its files have room. After it, end has to be called.
func (p *pull) begin(ctx context.Context, r ociclient.Ref, name string) (snapshot.Draft, snapshot.Snapshot, error) {
	none := snapshot.Snapshot{}
	p.m.p.Total = -1
	p.m.phase("preparing")
	digest, manifest, config, record, err := p.describe(ctx, r)
	if err != nil {
		return nil, none, err
	}
	if p.files, err = plan(record, config, manifest); err != nil {
		return nil, none, err
	}
	name = cmp.Or(name, record.Name)
	if record, err = record.Heir(vm.Behalf(ctx)); err != nil {
		return nil, none, err
	}
	draft, err := p.c.store.Create(vm.OnBehalf(ctx, record.Owner), name)
	if err != nil {
		return nil, none, err
	}
	p.dir = draft.Dir()
	if err := p.enough(); err != nil {
		p.end(draft)
		return nil, none, err
	}
	record.Digest = digest
	return draft, record, nil
}

// end removes what is not needed after a pull, or after its failure.
func (p *pull) end(draft snapshot.Draft) {
	for _, t := range p.tables {
		t.close()
	}
	if err := draft.Discard(); err != nil {
		p.c.cfg.Log.Warn("draft not removed", "snapshot", draft.ID(), "err", err)
	}
}

// finish verifies and stores what was fetched.
func (p *pull) finish(ctx context.Context, r ociclient.Ref, draft snapshot.Draft, record snapshot.Snapshot) (snapshot.Snapshot, error) {
	p.m.phase("verifying")
	if err := p.check(ctx); err != nil {
		return snapshot.Snapshot{}, err
	}
	s, err := draft.Commit(ctx, record)
	if err != nil {
		return snapshot.Snapshot{}, err
	}
	p.remember(ctx, r, s)
	return s, nil
}

// describe reads the metadata, before any data.
func (p *pull) describe(ctx context.Context, r ociclient.Ref) (digest string, m ociclient.Manifest, config artifact.Config, record snapshot.Snapshot, err error) {
	if digest, m, err = p.s.Image(ctx, r.Identifier(), runtime.GOARCH); err != nil {
		return digest, m, config, record, err
	}
	if err = checkManifest(m); err != nil {
		return digest, m, config, record, err
	}
	raw, err := p.small(ctx, m.Config)
	if err != nil {
		return digest, m, config, record, fmt.Errorf("its configuration: %w", err)
	}
	if config, err = artifact.ParseConfig(raw); err != nil {
		return digest, m, config, record, err
	}
	at := slices.IndexFunc(m.Layers, isRecord)
	if at < 0 {
		return digest, m, config, record, artifact.Foreign(config.Hypervisor)
	}
	l := m.Layers[at]
	if l.Size > maxRecord {
		return digest, m, config, record, errdefs.Invalidf("its record has %d bytes; at most %d are allowed", l.Size, maxRecord)
	}
	if raw, err = p.small(ctx, l); err != nil {
		return digest, m, config, record, fmt.Errorf("its record: %w", err)
	}
	record, err = parseRecord(raw, config, p.c.cfg.Hypervisors)
	if err == nil && record.Owner.Operator() && p.c.cfg.OwnerOf != nil {
		record.Owner = p.c.cfg.OwnerOf(record.Labels)
	}
	return digest, m, config, record, err
}

// small reads a blob whose size was validated before.
func (p *pull) small(ctx context.Context, d ociclient.Descriptor) ([]byte, error) {
	b := p.blob(ctx, d)
	defer b.Close()
	return io.ReadAll(b)
}

// blob reads a blob that the manifest names. A registry that does not have it has lost data.
func (p *pull) blob(ctx context.Context, d ociclient.Descriptor) io.ReadCloser {
	return required{p.s.Blob(ctx, d.Digest, d.Size)}
}

// required is a blob that must exist.
type required struct{ io.ReadCloser }

func (n required) Read(b []byte) (int, error) {
	k, err := n.ReadCloser.Read(b)
	if errdefs.IsNotFound(err) {
		err = errdefs.As(errdefs.DataLoss, err)
	}
	return k, err
}

// enough refuses a pull for which the disk has no room.
func (p *pull) enough() error {
	var need, total int64
	for _, f := range p.files {
		total += f.data()
	}
	p.m.total(total)
	var st unix.Statfs_t
	if err := unix.Statfs(p.dir, &st); err != nil {
		return nil //nolint:nilerr // then the disk will tell
	}
	if need = total; need > int64(st.Bavail)*st.Bsize { //nolint:gosec // of a file system
		return errdefs.Exhaustedf("the snapshot needs %d MiB and the disk has %d MiB left; remove snapshots with `cocoon snapshot rm`", need>>20, int64(st.Bavail)*st.Bsize>>20) //nolint:gosec // likewise
	}
	return nil
}

// tasks creates the files, empty and with their final size, and lists the blobs that fill them, each once.
func (p *pull) tasks() ([]task, error) {
	var out []task
	at := map[string]int{}
	for i := range p.files {
		f := &p.files[i]
		made, err := os.OpenFile(filepath.Join(p.dir, f.name), os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600)
		if err != nil {
			return nil, err
		}
		w := &output{File: made}
		p.open[f.name] = w
		if err := w.Truncate(f.size); err != nil {
			return nil, err
		}
		if len(f.layers) > 0 {
			out = append(out, task{whole: f})
		}
		if w.pages, err = p.table(f); err != nil {
			return nil, err
		}
		for _, c := range f.chunks {
			n, ok := at[c.layer.Digest]
			if ok && out[n].length != c.length {
				return nil, errdefs.Invalidf("the layer %s has two lengths, %d and %d", c.layer.Digest, out[n].length, c.length)
			}
			if !ok {
				n, at[c.layer.Digest] = len(out), len(out)
				out = append(out, task{layer: c.layer, length: c.length})
			}
			for _, r := range c.parts {
				out[n].targets = append(out[n].targets, target{w, r})
			}
		}
	}
	return out, nil
}

// table returns an empty table for the pages of a file; nil: the file needs none.
func (p *pull) table(f *incoming) (*pages, error) {
	if !f.paged() || f.pages == "" && (f.name != snapshot.FileMemory || p.c.index.dir == "") {
		return nil, nil
	}
	t, err := newPages(p.dir, f.size)
	if err == nil {
		p.tables[f.name] = t
	}
	return t, err
}

// check compares the pages of the written files with their checksums. Blobs are verified by their digests: this finds a
// manifest that was made from wrong ranges of them.
func (p *pull) check(ctx context.Context) error {
	for _, f := range p.files {
		if f.pages == "" {
			continue
		}
		got, err := p.tables[f.name].sum(ctx)
		if err != nil {
			return err
		}
		if got != f.pages {
			return errdefs.DataLossf("the pages of %s have the checksum %s instead of %s", f.name, got, clipped(f.pages))
		}
	}
	return nil
}

// borrow finds the chunks that local snapshots have, and holds those snapshots so that they are not removed.
func (p *pull) borrow(ctx context.Context, tasks []task) error {
	wanted := map[string]bool{}
	for _, t := range tasks {
		wanted[t.layer.Digest] = t.whole == nil
	}
	p.local = p.c.index.places(ctx, p.c.store, wanted)
	for digest, at := range p.local {
		if p.held[at.snapshot] != nil {
			continue
		}
		h, err := p.c.store.Hold(vm.OnBehalf(ctx, vm.Owner{}), at.snapshot)
		if ctx.Err() != nil {
			return ctx.Err()
		}
		if err != nil {
			delete(p.local, digest)
			continue
		}
		p.held[at.snapshot] = h
	}
	return nil
}

// remember indexes the chunks of a pulled snapshot, so that a later push reads nothing, and a push of a later snapshot
// sends only what differs.
func (p *pull) remember(ctx context.Context, r ociclient.Ref, s snapshot.Snapshot) {
	if p.c.index.dir == "" {
		return
	}
	h, err := p.c.store.Hold(ctx, s.ID)
	if err != nil {
		return
	}
	defer h.Release()
	for _, f := range p.files {
		if len(f.chunks) == 0 {
			continue
		}
		info, err := os.Stat(filepath.Join(h.Dir(), f.name))
		if err != nil {
			continue
		}
		d := document{Codec: codecVersion, Average: sizingOf(f.size).average, Pages: f.pages}
		for _, c := range f.chunks {
			one := chunk{Length: c.length, Digest: c.layer.Digest, Size: c.layer.Size, Compressed: compressed(c.layer), Ranges: c.parts}
			if len(c.parts) == 1 && c.parts[0].Length == c.length {
				one.Offset, one.Ranges = c.parts[0].Offset, nil
			}
			d.Chunks = append(d.Chunks, one)
		}
		if d.native() {
			err = p.c.index.save(identityOf(info), d)
		}
		if t := p.tables[f.name]; t != nil && f.name == snapshot.FileMemory && err == nil {
			err = p.c.index.saveBase(keyOf(s, r, f.size), identityOf(info).String(), d, t)
		}
		if err != nil {
			p.c.cfg.Log.Warn("chunk index not written", "snapshot", s.Name, "err", err)
		}
	}
}

// keyOf returns the key of the base of a snapshot in a repository.
func keyOf(s snapshot.Snapshot, r ociclient.Ref, size int64) baseKey {
	return baseKey{Namespace: s.Owner.Namespace, Repository: r.Host + "/" + r.Repository, Size: size, vm: s.Source.VMID}
}
