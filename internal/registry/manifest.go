package registry

import (
	"errors"
	"io"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"

	v1 "github.com/opencontainers/image-spec/specs-go/v1"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/registry/access"
	"cocoonstack.io/cocoon/internal/registry/content"
	"cocoonstack.io/cocoon/internal/registry/reference"
)

func (g *Registry) manifest(r *request) error {
	ref, err := reference.Parse(r.route.Rest)
	switch {
	case err == nil:
	case strings.Contains(r.route.Rest, ":"):
		return named(content.DigestInvalid, err)
	case r.Method == http.MethodPut:
		return named(content.ManifestInvalid, err)
	default: // it cannot exist
		return &failure{status: http.StatusNotFound, code: content.ManifestUnknown, err: err}
	}
	switch r.Method {
	case http.MethodPut:
		return g.putManifest(r, ref)
	case http.MethodDelete:
		if err := g.content.RemoveManifest(r.Context(), r.route.Name, ref); err != nil {
			return err
		}
		r.w.WriteHeader(http.StatusAccepted)
		return nil
	default:
		return g.getManifest(r, ref)
	}
}

func (g *Registry) getManifest(r *request, ref reference.Reference) error {
	d, data, doc, err := g.content.Manifest(r.Context(), r.route.Name, ref)
	if err != nil {
		return err
	}
	h := r.w.Header()
	h.Set("Docker-Content-Digest", d.String())
	h.Set("ETag", strconv.Quote(d.String()))
	if match := r.Header.Get("If-None-Match"); match != "" && match == h.Get("ETag") {
		r.w.WriteHeader(http.StatusNotModified)
		return nil
	}
	return r.bytes(http.StatusOK, doc.MediaType, data)
}

func (g *Registry) putManifest(r *request, ref reference.Reference) error {
	tooLarge := &failure{status: http.StatusRequestEntityTooLarge, code: content.SizeInvalid, err: errdefs.Invalidf("a manifest has at most %d bytes", content.MaxManifest)}
	if r.ContentLength > content.MaxManifest {
		return tooLarge
	}
	data, err := io.ReadAll(http.MaxBytesReader(r.w, r.Body, content.MaxManifest))
	if _, ok := errors.AsType[*http.MaxBytesError](err); ok {
		return tooLarge
	}
	if err != nil {
		return named(content.ManifestInvalid, errdefs.Unavailablef("the body of the request broke off: %w", err))
	}
	d, doc, err := g.content.PutManifest(r.Context(), r.route.Name, ref, r.Header.Get("Content-Type"), data)
	if err != nil {
		return err
	}
	h := r.w.Header()
	if doc.Subject != nil {
		h.Set("OCI-Subject", doc.Subject.Digest.String())
	}
	h.Set("Location", r.location("manifests/%s", d))
	h.Set("Docker-Content-Digest", d.String())
	h.Set("Content-Length", "0")
	r.w.WriteHeader(http.StatusCreated)
	return nil
}

const maxPage = 10000

// page limits sorted names to the page that the query asks for and links to the next page.
func (r *request) page(names []string) ([]string, error) {
	q := r.URL.Query()
	if last := q.Get("last"); last != "" {
		i, found := slices.BinarySearch(names, last)
		if found {
			i++
		}
		names = names[i:]
	}
	n := maxPage
	if text := q.Get("n"); text != "" {
		var err error
		if n, err = strconv.Atoi(text); err != nil || n < 0 {
			return nil, errdefs.Invalidf("n=%q is not a number of entries", text)
		}
		n = min(n, maxPage)
	}
	if len(names) <= n {
		return names, nil
	}
	names = names[:n]
	if n > 0 {
		next := url.Values{"n": {strconv.Itoa(n)}, "last": {names[n-1]}}
		r.w.Header().Set("Link", "<"+r.URL.EscapedPath()+"?"+next.Encode()+`>; rel="next"`)
	}
	return names, nil
}

func (g *Registry) tags(r *request) error {
	tags, err := g.content.Tags(r.Context(), r.route.Name)
	if err != nil {
		return err
	}
	if tags, err = r.page(tags); err != nil {
		return err
	}
	return r.json(http.StatusOK, "application/json", map[string]any{"name": r.route.Name, "tags": tags})
}

// catalog lists the repositories that the sender may pull from.
func (g *Registry) catalog(r *request) error {
	all, err := g.content.Repositories(r.Context())
	if err != nil {
		return err
	}
	all = slices.DeleteFunc(all, func(repo string) bool { return !r.who.Allows(access.Pull, repo) })
	if all, err = r.page(all); err != nil {
		return err
	}
	return r.json(http.StatusOK, "application/json", map[string]any{"repositories": all})
}

func (g *Registry) referrers(r *request) error {
	d, err := parseDigest(r.route.Rest)
	if err != nil {
		return err
	}
	kind := r.URL.Query().Get("artifactType")
	all, err := g.content.Referrers(r.Context(), r.route.Name, d, kind)
	if err != nil {
		return err
	}
	if kind != "" {
		r.w.Header().Set("OCI-Filters-Applied", "artifactType")
	}
	index := v1.Index{MediaType: v1.MediaTypeImageIndex, Manifests: all}
	index.SchemaVersion = 2
	return r.json(http.StatusOK, v1.MediaTypeImageIndex, index)
}
