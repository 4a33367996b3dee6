package main

import (
	"crypto/ed25519"
	"crypto/rand"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"strings"

	"cocoonstack.io/cocoon/internal/appliance/bundle"
)

// makeKey writes a new key in PEM, that only its owner reads. If path exists, it does nothing.
func makeKey(path string) error {
	if _, err := os.Stat(path); !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	_, key, err := ed25519.GenerateKey(rand.Reader)
	if err != nil {
		return err
	}
	der, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		return err
	}
	return os.WriteFile(path, pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: der}), 0o600)
}

func readKey(path string) (ed25519.PrivateKey, error) {
	text, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	block, _ := pem.Decode(text)
	if block == nil {
		return nil, fmt.Errorf("%s is no PEM file", path)
	}
	key, err := x509.ParsePKCS8PrivateKey(block.Bytes)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	k, ok := key.(ed25519.PrivateKey)
	if !ok {
		return nil, fmt.Errorf("%s is no Ed25519 key", path)
	}
	return k, nil
}

func writePublic(path, out string) error {
	key, err := readKey(path)
	if err != nil {
		return err
	}
	der, err := x509.MarshalPKIXPublicKey(key.Public())
	if err != nil {
		return err
	}
	return os.WriteFile(out, pem.EncodeToMemory(&pem.Block{Type: "PUBLIC KEY", Bytes: der}), 0o644)
}

func packBundle(keyPath, version, minVersion, dir, out string) (err error) {
	key, err := readKey(keyPath)
	if err != nil {
		return err
	}
	sources := []bundle.Source{{Name: bundle.Version, Content: strings.NewReader(version + "\n")}}
	for _, name := range []string{bundle.Kernel, bundle.Initramfs, bundle.Root} {
		f, err := os.Open(filepath.Join(dir, name))
		if err != nil {
			return err
		}
		defer f.Close()
		sources = append(sources, bundle.Source{Name: name, Content: f})
	}
	f, err := os.Create(out)
	if err != nil {
		return err
	}
	defer func() { err = errors2(err, f.Close()) }()
	return bundle.Write(f, bundle.Manifest{Version: version, MinVersion: minVersion, Architecture: runtime.GOARCH}, sources, key)
}
