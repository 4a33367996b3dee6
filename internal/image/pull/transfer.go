package pull

import (
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"hash"
	"io"
	"strings"
	"sync"
	"time"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/image"
	"cocoonstack.io/cocoon/internal/image/compress"
	"cocoonstack.io/cocoon/internal/image/distribution"
	"cocoonstack.io/cocoon/internal/image/fetch"
	"cocoonstack.io/cocoon/internal/image/translate"
	"cocoonstack.io/cocoon/internal/ociname"
)

// transfer waits for a free slot and fetches.
func (p *Puller) transfer(ctx context.Context, d translate.Decision, r image.PullRequest, report func(image.Progress)) (got distribution.Pulled, err error) {
	report(image.Progress{Phase: image.PhaseResolve, Total: -1})
	select {
	case p.slots <- struct{}{}:
		defer func() { <-p.slots }()
	case <-ctx.Done():
		return distribution.Pulled{}, ctx.Err()
	}
	began := time.Now()
	if o := p.cfg.Observer; o != nil {
		o.Began()
		report = p.count(report)
		defer func() { o.Ended(string(d.Kind), time.Since(began), err) }()
	}
	if d.Ref != "" {
		got, err = p.fromRegistry(ctx, d, r, report)
	} else {
		got.Image, err = p.fromWeb(ctx, d, r.Force, report)
	}
	if err == nil {
		p.store.Touch(got.ID)
		p.log.Info("image pulled", "op", "pull", "image", d.Key, "url", d.Printable, "dur", time.Since(began))
	}
	return got, err
}

// count forwards reports and counts the bytes in them.
func (p *Puller) count(report func(image.Progress)) func(image.Progress) {
	var mu sync.Mutex // layers come in parallel
	var seen int64
	return func(pr image.Progress) {
		mu.Lock()
		if more := pr.Done - seen; pr.Phase == image.PhaseDownload && more > 0 {
			p.cfg.Observer.Received(more)
			seen = pr.Done
		}
		mu.Unlock()
		report(pr)
	}
}

func (p *Puller) fromRegistry(ctx context.Context, d translate.Decision, r image.PullRequest, report func(image.Progress)) (distribution.Pulled, error) {
	ref := d.Ref
	if d.Kind == translate.Mapped && d.Digest != "" { // the name requires a digest that the mapping leaves open
		repo, pinned, has := strings.Cut(ref, "@")
		if has && pinned != d.Digest {
			return distribution.Pulled{}, errdefs.DataLossf("digest mismatch: the mapping gives %s, the name requires %s", pinned, d.Digest)
		}
		repo, _ = ociname.SplitTag(repo)
		ref = repo + "@" + d.Digest
	}
	return p.from(ctx, d).registry.Pull(ctx, ref, d.Key, r.Auth, r.Force, report)
}

// fromWeb downloads d.URL, unless the store already has its newest version.
func (p *Puller) fromWeb(ctx context.Context, d translate.Decision, force bool, report func(image.Progress)) (image.Image, error) {
	req := fetch.Request{URL: d.URL, Profile: d.Transport, Digest: d.SHA256, Checksums: d.Checksums}
	o, have, err := p.store.Origin(ctx, d.Key)
	if err == nil && !force && current(d, o, have) {
		req.ETag, req.LastModified = o.ETag, o.LastModified
		if strings.Contains(d.URL, "?") { // the stored URL has no query, so only an ETag tells two queries apart
			req.LastModified = ""
		}
	}
	for {
		body, err := p.from(ctx, d).web.Get(ctx, req)
		if err != nil {
			return image.Image{}, err
		}
		if !body.NotModified() {
			defer body.Close()
			return p.keep(ctx, d, body, report)
		}
		body.Close()
		o.FetchedAt = time.Now().UTC()
		img, err := p.store.Link(ctx, d.Key, have.ID, o)
		if !errdefs.IsNotFound(err) {
			return img, err
		}
		req.ETag, req.LastModified = "", "" // the copy was removed meanwhile
	}
}

// current reports whether the copy have, with origin o, can be used if the server says that it has not changed.
func current(d translate.Decision, o image.Origin, have image.Image) bool {
	served := cmp.Or(o.Digest, have.ID)
	return o.URL == d.Printable && (d.Digest == "" || d.Digest == have.ID || d.Digest == served) && (d.SHA256 == "" || d.SHA256 == served)
}

// keep stores the content of body, if it is what the name requires.
func (p *Puller) keep(ctx context.Context, d translate.Decision, body *fetch.Body, report func(image.Progress)) (image.Image, error) {
	in := &counted{r: body, body: body, report: report}
	in.tell()
	plain, kind, err := compress.Reader(in)
	if err != nil {
		return image.Image{}, err
	}
	defer plain.Close()
	content := &content{r: plain, body: body}
	if d.Digest != "" && kind != compress.None {
		content.hash = sha256.New()
	}
	o := image.Origin{URL: d.Printable, ETag: body.ETag(), LastModified: body.LastModified(), FetchedAt: time.Now().UTC()}
	total := body.Size()
	if kind != compress.None {
		total = -1
	}
	img, err := p.store.Put(ctx, d.Key, content, image.Fetched{
		Origin: o, Total: total,
		Progress: func(phase string, done int64) {
			if phase != image.PhaseDownload { // we report that phase ourselves
				report(image.Progress{Phase: phase, Done: done, Total: -1})
			}
		},
		Accept: func(id string) error {
			if sums := []string{id, body.Sum(), content.sum()}; d.Digest != "" && sums[0] != d.Digest && sums[1] != d.Digest && sums[2] != d.Digest {
				return errdefs.DataLossf("digest mismatch: %s sent %s, expected %s", d.Printable, body.Sum(), d.Digest)
			}
			return nil
		},
	})
	if err != nil || body.Sum() == img.ID {
		return img, err
	}
	// The served bytes differ from the stored ones. Their digest is known only now; with it, a name with that digest finds
	// the image.
	o.Digest = body.Sum()
	return p.store.Link(ctx, d.Key, img.ID, o)
}

// counted reports how much was read.
type counted struct {
	r      io.Reader
	body   *fetch.Body
	done   int64
	report func(image.Progress)
}

func (c *counted) Read(b []byte) (int, error) {
	n, err := c.r.Read(b)
	c.done += int64(n)
	c.tell()
	return n, err
}

func (c *counted) tell() {
	c.report(image.Progress{Phase: image.PhaseDownload, Done: c.done, Total: c.body.Size()})
}

// content is the stream to store. It ends only after all served bytes were read and verified.
type content struct {
	r    io.Reader
	body *fetch.Body
	hash hash.Hash // nil: not needed
}

func (c *content) Read(b []byte) (int, error) {
	n, err := c.r.Read(b)
	if c.hash != nil {
		c.hash.Write(b[:n])
	}
	if errors.Is(err, io.EOF) {
		if late := c.body.Drain(); late != nil {
			return n, late
		}
	}
	return n, err
}

func (c *content) sum() string {
	if c.hash == nil {
		return ""
	}
	return "sha256:" + hex.EncodeToString(c.hash.Sum(nil))
}
