package main

import (
	"bytes"
	"compress/gzip"
	"crypto/ed25519"
	"crypto/x509"
	"encoding/json"
	"encoding/pem"
	"errors"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"cocoonstack.io/cocoon/internal/appliance/bootctl"
	"cocoonstack.io/cocoon/internal/appliance/bundle"
	"cocoonstack.io/cocoon/internal/testkit/diff"
	"cocoonstack.io/cocoon/internal/testkit/need"
)

func write(t *testing.T, path, text string, mode os.FileMode) {
	t.Helper()
	if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o755), os.WriteFile(path, []byte(text), mode), os.Chmod(path, mode)); err != nil {
		t.Fatal(err)
	}
}

func read(t *testing.T, path string) []byte {
	t.Helper()
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// The same tree gives the same archive, whenever and by whomever it was made, and another program reads it.
func TestInitramfs(t *testing.T) {
	busybox := need.Tool(t, "busybox")
	dir := t.TempDir()
	var archives [][]byte
	for i, name := range []string{"one", "two"} {
		tree := filepath.Join(dir, name)
		write(t, filepath.Join(tree, "init"), "#!/bin/sh\n", 0o755)
		write(t, filepath.Join(tree, "bin/busybox"), "abc", 0o755)
		if err := os.Symlink("busybox", filepath.Join(tree, "bin/sh")); err != nil {
			t.Fatal(err)
		}
		at := time.Unix(int64(1000*(i+1)), 0)
		if err := os.Chtimes(filepath.Join(tree, "init"), at, at); err != nil {
			t.Fatal(err)
		}
		out := filepath.Join(dir, name+".gz")
		if err := run([]string{"initramfs", tree, out}); err != nil {
			t.Fatal(err)
		}
		archives = append(archives, read(t, out))
	}
	if !bytes.Equal(archives[0], archives[1]) {
		t.Error("the archives differ")
	}
	z, err := gzip.NewReader(bytes.NewReader(archives[0]))
	if err != nil {
		t.Fatal(err)
	}
	list := exec.CommandContext(t.Context(), busybox, "cpio", "-t")
	list.Stdin = z
	names, err := list.Output()
	if d := diff.Of("bin\nbin/busybox\nbin/sh\ninit\ndev/console\n", string(names)); err != nil || d != "" {
		t.Errorf("%v, %s", err, d)
	}
}

func TestSBOM(t *testing.T) {
	dir := t.TempDir()
	in, out := filepath.Join(dir, "packages.tsv"), filepath.Join(dir, "sbom.json")
	write(t, in, "lvm2\t2.03.16-2\tamd64\tlvm2\tGPL-2;LGPL-2.1\nlibstdc++6\t12\tamd64\tgcc-12\t\n", 0o644)
	if err := run([]string{"sbom", "v1", "0", in, out}); err != nil {
		t.Fatal(err)
	}
	var d sbomDocument
	if err := json.Unmarshal(read(t, out), &d); err != nil {
		t.Fatal(err)
	}
	if len(d.Packages) != 3 || d.Packages[1].LicenseComments != "GPL-2, LGPL-2.1" || d.Packages[2].SPDXID != "SPDXRef-libstdc--6" || d.CreationInfo.Created != "1970-01-01T00:00:00Z" {
		t.Errorf("got %+v", d)
	}
	write(t, in, "lvm2 2.03\n", 0o644)
	if run([]string{"sbom", "v1", "0", in, out}) == nil || run([]string{"sbom", "v1", "now", in, out}) == nil {
		t.Error("a line or a time that is none passed")
	}
}

func TestEnvironment(t *testing.T) {
	out := filepath.Join(t.TempDir(), "grubenv")
	if err := run([]string{"grubenv", "v1", out}); err != nil {
		t.Fatal(err)
	}
	got, err := bootctl.New(out, bootctl.Boot{}).Read()
	if want := (bootctl.State{Good: bootctl.A, Files: bootctl.Files{A: "v1", B: "v1"}}); err != nil || got != want {
		t.Errorf("got %+v, %v", got, err)
	}
	if run([]string{"grubenv", "V 1", out}) == nil {
		t.Error("an id that is none passed")
	}
}

// A bundle is verified with the public half of the key that signed it. A key is made once.
func TestBundle(t *testing.T) {
	dir := t.TempDir()
	key, public, out := filepath.Join(dir, "key.pem"), filepath.Join(dir, "public.pem"), filepath.Join(dir, "bundle.tar")
	for _, name := range []string{bundle.Kernel, bundle.Initramfs, bundle.Root} {
		write(t, filepath.Join(dir, name), "content of "+name, 0o644)
	}
	for _, args := range [][]string{{"key", key}, {"public", key, public}, {"bundle", key, "v2", "v1", dir, out}} {
		if err := run(args); err != nil {
			t.Fatalf("%q: %v", args, err)
		}
	}
	first := read(t, key)
	if err := run([]string{"key", key}); err != nil || !bytes.Equal(first, read(t, key)) {
		t.Errorf("the key changed, %v", err)
	}
	if st, err := os.Stat(key); err != nil || st.Mode().Perm() != 0o600 {
		t.Errorf("the key has the mode %v, %v", st.Mode(), err)
	}
	block, _ := pem.Decode(read(t, public))
	parsed, err := x509.ParsePKIXPublicKey(block.Bytes)
	if err != nil {
		t.Fatal(err)
	}
	f, err := os.Open(out)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	r, err := bundle.Open(f, []ed25519.PublicKey{parsed.(ed25519.PublicKey)})
	if err != nil {
		t.Fatal(err)
	}
	if m := r.Manifest(); m.Version != "v2" || m.MinVersion != "v1" {
		t.Errorf("got %+v", m)
	}
	for {
		file, in, err := r.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		text, err := io.ReadAll(in)
		if err != nil || file.Name != bundle.Version && string(text) != "content of "+file.Name {
			t.Errorf("%s: %q, %v", file.Name, text, err)
		}
	}
	if run([]string{"bundle", public, "v2", "", dir, out}) == nil || run([]string{"nothing"}) == nil || run([]string{"bundle", key, "v2", "", filepath.Join(dir, "none"), out}) == nil {
		t.Error("what cannot work passed")
	}
	if !strings.HasPrefix(string(first), "-----BEGIN PRIVATE KEY-----") {
		t.Error("the key is no PEM")
	}
}
