package registry

import (
	"errors"
	"net/http"
	"strconv"
	"time"

	"github.com/opencontainers/go-digest"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/registry/access"
	"cocoonstack.io/cocoon/internal/registry/content"
	"cocoonstack.io/cocoon/internal/registry/reference"
)

const octets = "application/octet-stream"

func parseDigest(s string) (digest.Digest, error) {
	d, err := reference.Digest(s)
	if err != nil {
		return "", named(content.DigestInvalid, err)
	}
	return d, nil
}

func (g *Registry) blob(r *request) error {
	d, err := parseDigest(r.route.Rest)
	if err != nil {
		return err
	}
	switch r.Method {
	case http.MethodPut: // not in the specification: earlier clients push this way
		if err := g.content.PutBlob(r.Context(), r.route.Name, d, r.Body, r.ContentLength); err != nil {
			return err
		}
		return r.stored(d)
	case http.MethodDelete:
		if err := g.content.RemoveBlob(r.Context(), r.route.Name, d); err != nil {
			return err
		}
		r.w.WriteHeader(http.StatusAccepted)
		return nil
	default:
		return g.sendBlob(r, d)
	}
}

func (g *Registry) sendBlob(r *request, d digest.Digest) error {
	f, info, err := g.content.OpenBlob(r.Context(), r.route.Name, d)
	if err != nil {
		return err
	}
	defer f.Close()
	if g.cfg.VerifyReads {
		f = g.content.Verifying(r.Context(), f, d, info)
	}
	h := r.w.Header()
	h.Set("Docker-Content-Digest", d.String())
	h.Set("Content-Type", octets)
	h.Set("ETag", strconv.Quote(d.String()))
	h.Set("Cache-Control", "private, max-age=31536000, immutable")
	http.ServeContent(r.w, r.Request, "", time.Time{}, f) // Range, If-Range, If-None-Match
	return r.w.err
}

// stored answers that a blob exists.
func (r *request) stored(d digest.Digest) error {
	h := r.w.Header()
	h.Set("Location", r.location("blobs/%s", d))
	h.Set("Docker-Content-Digest", d.String())
	h.Set("Content-Length", "0")
	r.w.WriteHeader(http.StatusCreated)
	return nil
}

// uploads begins an upload, completes it in one request, or finds that the blob exists.
func (g *Registry) uploads(r *request) error {
	q := r.URL.Query()
	if text := q.Get("mount"); text != "" {
		d, err := parseDigest(text)
		if err != nil {
			return err
		}
		if done, err := g.mount(r, q.Get("from"), d); done || err != nil {
			return err
		}
	}
	if text := q.Get("digest"); text != "" {
		d, err := parseDigest(text)
		if err != nil {
			return err
		}
		if err := g.content.PutBlob(r.Context(), r.route.Name, d, r.Body, r.ContentLength); err != nil {
			return err
		}
		return r.stored(d)
	}
	u, err := g.content.Begin(r.route.Name, r.who.Name)
	if err != nil {
		return err
	}
	return r.accepted(u)
}

// mount adds another repository's blob to this one. If that is impossible or not allowed, the client must upload.
func (g *Registry) mount(r *request, from string, d digest.Digest) (done bool, err error) {
	if from == "" {
		from = r.route.Name // it may already be in this repository
	}
	if err := reference.Name(from); err != nil {
		return false, named(content.NameInvalid, err)
	}
	if !r.who.Allows(access.Pull, from) {
		return false, nil
	}
	err = g.content.Mount(r.Context(), from, r.route.Name, d)
	if errdefs.IsNotFound(err) {
		return false, nil
	}
	if err != nil {
		return false, err
	}
	return true, r.stored(d)
}

// accepted reports the progress of an upload.
func (r *request) accepted(u *content.Upload) error {
	r.progress(u)
	status := http.StatusAccepted
	if r.Method == http.MethodGet {
		status = http.StatusNoContent
	}
	r.w.WriteHeader(status)
	return nil
}

func (r *request) progress(u *content.Upload) {
	h := r.w.Header()
	h.Set("Location", r.location("blobs/uploads/%s", u.ID))
	h.Set("Docker-Upload-UUID", u.ID)
	h.Set("Range", "0-"+strconv.FormatInt(max(u.Size()-1, 0), 10))
	if r.Method != http.MethodGet {
		h.Set("Content-Length", "0")
	}
}

func (g *Registry) upload(r *request) error {
	u, err := g.content.Upload(r.route.Name, r.route.Rest)
	if err != nil {
		return err
	}
	switch r.Method {
	case http.MethodGet:
		return r.accepted(u)
	case http.MethodDelete:
		if err := u.Cancel(); err != nil {
			return err
		}
		r.w.WriteHeader(http.StatusNoContent)
		return nil
	case http.MethodPatch:
		if err := r.chunk(u); err != nil {
			return err
		}
		return r.accepted(u)
	default:
		return r.finish(u)
	}
}

// chunk appends the request's body.
func (r *request) chunk(u *content.Upload) error {
	start, length := int64(-1), r.ContentLength
	if text := r.Header.Get("Content-Range"); text != "" {
		from, to, err := reference.ContentRange(text)
		if err != nil {
			return named(content.BlobUploadInvalid, err)
		}
		if length >= 0 && to-from+1 != length {
			return named(content.SizeInvalid, errdefs.Invalidf("the Content-Range %s has %d bytes, the body %d", text, to-from+1, length))
		}
		start, length = from, to-from+1
	}
	err := u.Append(r.Context(), r.Body, start, length)
	if errors.Is(err, content.ErrRange) {
		r.progress(u) // the offset to resume from
	}
	return err
}

func (r *request) finish(u *content.Upload) error {
	d, err := parseDigest(r.URL.Query().Get("digest"))
	if err != nil {
		return err
	}
	if r.ContentLength != 0 {
		if err := r.chunk(u); err != nil {
			return err
		}
	}
	if err := u.Finish(r.Context(), d); err != nil {
		return err
	}
	return r.stored(d)
}
