// Command origin serves images for the demo and the end-to-end tests: a web server with files and an OCI
// registry, in memory, on loopback. It is not a product and stores nothing.
package main

import (
	"crypto/subtle"
	"errors"
	"flag"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/google/go-containerregistry/pkg/authn"
	"github.com/google/go-containerregistry/pkg/name"
	"github.com/google/go-containerregistry/pkg/registry"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/remote"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
)

func main() {
	if err := run(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "origin:", err)
		os.Exit(1)
	}
}

func run(args []string) error {
	f := flag.NewFlagSet("origin", flag.ContinueOnError)
	listen := f.String("listen", "127.0.0.1:0", "loopback host:port")
	addr := f.String("addr-file", "", "file to write host:port to, once it answers")
	dir := f.String("dir", "", "folder served below /files/")
	user := f.String("user", "", "the registry wants this user; the password is in the environment variable ORIGIN_PASSWORD")
	images := map[string]string{}
	f.Func("image", "REPO:TAG=FILE: an image the registry has, from a tar of docker save or of an OCI layout (repeatable)", func(s string) error {
		ref, file, ok := strings.Cut(s, "=")
		if !ok {
			return errors.New("REPO:TAG=FILE is expected")
		}
		images[ref] = file
		return nil
	})
	if err := f.Parse(args); err != nil {
		return err
	}
	l, err := net.Listen("tcp", *listen)
	if err != nil {
		return err
	}
	mux := http.NewServeMux()
	if *dir != "" {
		mux.Handle("/files/", http.StripPrefix("/files/", http.FileServer(http.Dir(*dir))))
	}
	mux.Handle("/v2/", guarded(registry.New(registry.Logger(log.New(io.Discard, "", 0))), *user, os.Getenv("ORIGIN_PASSWORD")))
	srv := &http.Server{Handler: mux, ReadHeaderTimeout: 10 * time.Second}
	served := make(chan error, 1)
	go func() { served <- srv.Serve(l) }()
	for ref, file := range images {
		if err := push(l.Addr().String()+"/"+ref, file, *user, os.Getenv("ORIGIN_PASSWORD")); err != nil {
			return fmt.Errorf("push %s: %w", ref, err)
		}
	}
	if *addr != "" {
		tmp := *addr + ".new"
		if err := errors.Join(os.WriteFile(tmp, []byte(l.Addr().String()), 0o600), os.Rename(tmp, *addr)); err != nil {
			return err
		}
	}
	return <-served
}

// guarded requires a password if user is set.
func guarded(h http.Handler, user, password string) http.Handler {
	if user == "" {
		return h
	}
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		u, p, ok := r.BasicAuth()
		if !ok || u != user || subtle.ConstantTimeCompare([]byte(p), []byte(password)) != 1 {
			w.Header().Set("WWW-Authenticate", `Basic realm="origin"`)
			http.Error(w, `{"errors":[{"code":"UNAUTHORIZED","message":"authentication required"}]}`, http.StatusUnauthorized)
			return
		}
		h.ServeHTTP(w, r)
	})
}

func push(ref, file, user, password string) error {
	dst, err := name.ParseReference(ref, name.Insecure)
	if err != nil {
		return err
	}
	img, done, err := open(file)
	if err != nil {
		return err
	}
	defer done()
	auth := authn.Anonymous
	if user != "" {
		auth = &authn.Basic{Username: user, Password: password}
	}
	return remote.Write(dst, img, remote.WithAuth(auth))
}

// open reads an image from a tar of docker save, or, if it is not one, from an OCI layout.
func open(file string) (v1.Image, func(), error) {
	if img, err := tarball.ImageFromPath(file, nil); err == nil {
		return img, func() {}, nil
	}
	dir, err := os.MkdirTemp("", "cocoon-origin-")
	if err != nil {
		return nil, nil, err
	}
	done := func() { _ = os.RemoveAll(dir) }
	img, err := fromLayout(file, dir)
	if err != nil {
		done()
		return nil, nil, err
	}
	return img, done, nil
}

func fromLayout(file, dir string) (v1.Image, error) {
	if err := unpack(file, dir); err != nil {
		return nil, err
	}
	index, err := layout.ImageIndexFromPath(dir)
	if err != nil {
		return nil, err
	}
	m, err := index.IndexManifest()
	if err != nil {
		return nil, err
	}
	if len(m.Manifests) != 1 {
		return nil, fmt.Errorf("%s holds %d images, one is expected", filepath.Base(file), len(m.Manifests))
	}
	return index.Image(m.Manifests[0].Digest)
}
