package local

import (
	"context"
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"reflect"
	"slices"

	"cocoonstack.io/cocoon/internal/atomicfile"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/image"
)

const (
	grantsFile    = "grants.json" // in data/<sha256>/: removed with the content
	grantsVersion = 1
	keyFile       = "grants.key"
	keySize       = 32
	maxKeys       = 100 // per repository: credentials that change every hour must not make the file grow forever
)

type grants struct {
	Version int                    `json:"version"`
	Of      map[string]image.Grant `json:"of"`
}

// Fingerprint is a keyed hash of a secret. It is useless on another host, and nobody without this host's key can test
// passwords against it.
func (s *Store) Fingerprint(ctx context.Context, parts ...string) (string, error) {
	if err := s.Open(ctx); err != nil {
		return "", err
	}
	key, err := s.key()
	if err != nil {
		return "", fmt.Errorf("read the key of image grants: %w", err)
	}
	text, err := json.Marshal(parts)
	if err != nil {
		return "", fmt.Errorf("encode credentials: %w", err)
	}
	mac := hmac.New(sha256.New, key)
	mac.Write(text)
	return hex.EncodeToString(mac.Sum(nil)), nil
}

// key reads the host's key. It creates a new one if it is missing or damaged: all fingerprints are then invalid, and
// registries are asked again.
func (s *Store) key() ([]byte, error) {
	path := s.path(keyFile)
	if key, err := os.ReadFile(path); err == nil && len(key) == keySize {
		return key, nil
	}
	unlock, err := s.lock(exclusive)
	if err != nil {
		return nil, err
	}
	defer unlock()
	key, err := os.ReadFile(path)
	if err == nil && len(key) == keySize {
		return key, nil
	}
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	key = make([]byte, keySize)
	_, _ = rand.Read(key) // never fails
	return key, full(atomicfile.WriteFile(path, key, 0o600))
}

// Grants returns who may have the content of id, by repository or URL.
func (s *Store) Grants(ctx context.Context, id string) (map[string]image.Grant, error) {
	if err := s.Open(ctx); err != nil {
		return nil, err
	}
	hex, ok := hexOf(id)
	if !ok {
		return nil, notFound(id)
	}
	return s.grants(hex)
}

// grants reads the file. A damaged file grants nothing: registries are then asked again.
func (s *Store) grants(hex string) (map[string]image.Grant, error) {
	path := s.path("data", hex, grantsFile)
	data, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return map[string]image.Grant{}, nil
	}
	if err != nil {
		return nil, fmt.Errorf("read the grants of image %s: %w", digest(hex), err)
	}
	var g grants
	if err := json.Unmarshal(data, &g); err != nil || g.Version != grantsVersion || g.Of == nil {
		s.cfg.Log.Warn("image grants unreadable; asking the registries again", "image", digest(hex), "err", err)
		return map[string]image.Grant{}, nil
	}
	return g.Of, nil
}

// Grant adds to the grants of the content of id, for one repository or URL. It is durable when it returns.
// Errors: NotFound when the store no longer has the content.
func (s *Store) Grant(ctx context.Context, id, repo string, more image.Grant) error {
	if err := s.Open(ctx); err != nil {
		return err
	}
	hex, ok := hexOf(id)
	if !ok {
		return notFound(id)
	}
	unlock, err := s.lock(exclusive)
	if err != nil {
		return err
	}
	defer unlock()
	if _, err := s.load(hex); err != nil {
		return err
	}
	all, err := s.grants(hex)
	if err != nil {
		return err
	}
	was := all[repo]
	now := merged(was, more)
	if reflect.DeepEqual(now, was) {
		return nil
	}
	all = maps.Clone(all)
	all[repo] = now
	data, err := json.Marshal(grants{Version: grantsVersion, Of: all})
	if err != nil {
		return fmt.Errorf("encode the grants of image %s: %w", id, err)
	}
	return full(atomicfile.WriteFile(filepath.Join(s.path("data", hex), grantsFile), append(data, '\n'), 0o600))
}

// merged returns a grant with what more adds to it.
func merged(g, more image.Grant) image.Grant {
	out := image.Grant{Public: g.Public || more.Public, Keys: slices.Clone(g.Keys), Namespaces: slices.Concat(g.Namespaces, more.Namespaces)}
	for _, k := range more.Keys {
		if !slices.Contains(out.Keys, k) {
			out.Keys = append(out.Keys, k)
		}
	}
	if n := len(out.Keys) - maxKeys; n > 0 {
		out.Keys = slices.Delete(out.Keys, 0, n)
	}
	slices.Sort(out.Namespaces)
	out.Namespaces = slices.Compact(out.Namespaces)
	return out
}

// Imported reports whether the operator imported the content by hand: under the name key, or, if key is empty, under any
// name of the content of id. A name whose origin cannot be read does not count.
func (s *Store) Imported(ctx context.Context, key, id string) (bool, error) {
	if err := s.Open(ctx); err != nil {
		return false, err
	}
	if key != "" {
		return s.imported(key)
	}
	hex, ok := hexOf(id)
	if !ok {
		return false, notFound(id)
	}
	all, err := s.names()
	if err != nil {
		return false, err
	}
	for _, n := range all {
		if n.hex != hex {
			continue
		}
		if yes, err := s.imported(n.name); yes || err != nil {
			return yes, err
		}
	}
	return false, nil
}

func (s *Store) imported(key string) (bool, error) {
	if err := CheckKey(key); err != nil {
		return false, err
	}
	if _, err := s.readName(key); err != nil {
		if errdefs.IsNotFound(err) {
			err = nil
		}
		return false, err
	}
	_, err := os.Lstat(s.originPath(key))
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return false, fmt.Errorf("look for the origin of image %s: %w", key, err)
	}
	return err != nil, nil
}
