package config

import (
	"context"
	"crypto/ed25519"
	"crypto/rand"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"io"
	"io/fs"
	"os"
	"path/filepath"

	"cocoonstack.io/cocoon/internal/atomicfile"
	"cocoonstack.io/cocoon/internal/errdefs"
)

// maxKeyFile bounds a file with a key, in bytes.
const maxKeyFile = 64 << 10

// KeyPath returns where the operator's key is in dir.
func KeyPath(dir string) string { return filepath.Join(dir, "operator.ed25519") }

// LoadKey reads a private key: PKCS #8 in PEM. Errors: NotFound, FailedPrecondition if others can read the file, InvalidArgument.
func LoadKey(path string) (ed25519.PrivateKey, error) {
	info, err := os.Stat(path)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil, errdefs.NotFoundf("there is no key %s; `capsulectl adopt` makes one, and `capsulectl key show` too", path)
	case err != nil:
		return nil, errdefs.New(errdefs.Internal, "read the key: %w", err)
	case info.Mode().Perm()&0o077 != 0:
		return nil, errdefs.Preconditionf("others may read the key %s; run: chmod 600 %s", path, path)
	}
	der, err := readPEM(path, "PRIVATE KEY")
	if err != nil {
		return nil, err
	}
	parsed, err := x509.ParsePKCS8PrivateKey(der)
	if err != nil {
		return nil, errdefs.New(errdefs.InvalidArgument, "the key %s: %w", path, err)
	}
	key, ok := parsed.(ed25519.PrivateKey)
	if !ok {
		return nil, errdefs.Invalidf("the key %s is not Ed25519", path)
	}
	return key, nil
}

func readPEM(path, kind string) ([]byte, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, errdefs.New(errdefs.InvalidArgument, "read the key: %w", err)
	}
	defer f.Close()
	data, err := io.ReadAll(io.LimitReader(f, maxKeyFile))
	if err != nil {
		return nil, errdefs.New(errdefs.InvalidArgument, "read the key: %w", err)
	}
	block, _ := pem.Decode(data)
	if block == nil || block.Type != kind {
		return nil, errdefs.Invalidf("%s has no block %q of PEM", path, kind)
	}
	return block.Bytes, nil
}

// EnsureKey reads the key at path, or makes it if there is none.
func EnsureKey(ctx context.Context, path string) (ed25519.PrivateKey, error) {
	l, err := lock(ctx, filepath.Dir(path))
	if err != nil {
		return nil, err
	}
	defer l.Close()
	key, err := LoadKey(path)
	if !errdefs.IsNotFound(err) {
		return key, err
	}
	if _, key, err = ed25519.GenerateKey(rand.Reader); err != nil {
		return nil, errdefs.New(errdefs.Internal, "make a key: %w", err)
	}
	der, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		return nil, errdefs.New(errdefs.Internal, "make a key: %w", err)
	}
	if err := atomicfile.WriteFile(path, pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: der}), 0o600); err != nil {
		return nil, errdefs.New(errdefs.Internal, "keep the key: %w", err)
	}
	return key, nil
}

// PublicPEM returns the public half of key in the form that LoadPublic reads.
func PublicPEM(key ed25519.PrivateKey) ([]byte, error) {
	der, err := x509.MarshalPKIXPublicKey(key.Public())
	if err != nil {
		return nil, errdefs.New(errdefs.Internal, "write the public key: %w", err)
	}
	return pem.EncodeToMemory(&pem.Block{Type: "PUBLIC KEY", Bytes: der}), nil
}

// LoadPublic reads a public key: SubjectPublicKeyInfo in PEM, as `key show` prints it. Errors: InvalidArgument.
func LoadPublic(path string) (ed25519.PublicKey, error) {
	der, err := readPEM(path, "PUBLIC KEY")
	if err != nil {
		return nil, err
	}
	parsed, err := x509.ParsePKIXPublicKey(der)
	if err != nil {
		return nil, errdefs.New(errdefs.InvalidArgument, "the key %s: %w", path, err)
	}
	key, ok := parsed.(ed25519.PublicKey)
	if !ok {
		return nil, errdefs.Invalidf("the key %s is not Ed25519", path)
	}
	return key, nil
}
