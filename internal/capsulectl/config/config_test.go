package config

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"cocoonstack.io/cocoon/internal/errdefs"
)

// documented is a file as the documented program writes it.
const documented = `contexts:
  lab:
    addr: 192.0.2.7:50000
    capsule_id: 3d1f6f0e-2a43-4f0c-9d0b-6a55c2a3d001
    key_path: /home/a/.config/capsule/operator.ed25519
    tls_fingerprint_sha256: ba78
current: lab
`

func TestDocumentedFile(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "capsule")
	if c, err := Load(dir); err != nil || len(c.Contexts) != 0 {
		t.Errorf("without a file: %+v, %v", c, err)
	}
	if err := os.MkdirAll(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(dir, "config.yaml")
	if err := os.WriteFile(path, []byte(documented), 0o600); err != nil {
		t.Fatal(err)
	}
	want := Context{"192.0.2.7:50000", "3d1f6f0e-2a43-4f0c-9d0b-6a55c2a3d001", "ba78", "/home/a/.config/capsule/operator.ed25519"}
	c, err := Load(dir)
	if err != nil || c.Current != "lab" || c.Contexts["lab"] != want {
		t.Fatalf("%+v, %v", c, err)
	}
	if err := Update(t.Context(), dir, func(c *Config) error { c.Contexts["other"] = Context{Addr: "h:1"}; return nil }); err != nil {
		t.Fatal(err)
	}
	if err := Update(t.Context(), dir, func(c *Config) error { c.Current = "lost"; return errdefs.NotFoundf("no") }); !errdefs.IsNotFound(err) {
		t.Error(err)
	}
	c, err = Load(dir)
	if err != nil || c.Current != "lab" || c.Contexts["lab"] != want || c.Contexts["other"].Addr != "h:1" {
		t.Errorf("%+v, %v", c, err)
	}
	if info, err := os.Stat(path); err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("%v, %v", info, err)
	}
	for target, want := range map[string]string{"": "lab", "lab": "lab", "192.0.2.7": "lab", "192.0.2.7:50000": "lab", "h:1": "other", "h": "", "none": ""} {
		name, _, err := c.Resolve(target)
		if name != want || (want == "") != errdefs.IsNotFound(err) {
			t.Errorf("%q: %q, %v", target, name, err)
		}
	}
	c.Current = "lost"
	if _, _, err := c.Resolve(""); !errdefs.IsNotFound(err) || !strings.Contains(err.Error(), "current context") {
		t.Error(err)
	}
	if err := os.WriteFile(path, []byte("a: ["), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := Load(dir); !errdefs.IsInvalid(err) {
		t.Error(err)
	}
}

func TestDir(t *testing.T) {
	env := map[string]string{}
	get := func(k string) string { return env[k] }
	if _, err := Dir(get); !errdefs.IsInvalid(err) {
		t.Error(err)
	}
	env["HOME"] = "/h"
	if dir, err := Dir(get); err != nil || dir != "/h/.config/capsule" {
		t.Errorf("%q, %v", dir, err)
	}
	env["CAPSULE_CONFIG_DIR"] = "/x"
	if dir, err := Dir(get); err != nil || dir != "/x" {
		t.Errorf("%q, %v", dir, err)
	}
}

func TestWithPort(t *testing.T) {
	for in, want := range map[string]string{"h": "h:50000", "h:1": "h:1", "::1": "[::1]:50000", "[::1]": "[::1]:50000", "[::1]:5": "[::1]:5", "": ""} {
		if got := WithPort(in); got != want {
			t.Errorf("%q: %q, want %q", in, got, want)
		}
	}
}

func TestKey(t *testing.T) {
	path := filepath.Join(t.TempDir(), "new", "operator.ed25519")
	if _, err := LoadKey(path); !errdefs.IsNotFound(err) {
		t.Error(err)
	}
	key, err := EnsureKey(t.Context(), path)
	if err != nil {
		t.Fatal(err)
	}
	again, err := EnsureKey(t.Context(), path)
	if err != nil || !key.Equal(again) {
		t.Errorf("another key, or %v", err)
	}
	text, err := PublicPEM(key)
	if err != nil {
		t.Fatal(err)
	}
	public := filepath.Join(t.TempDir(), "pub")
	if err := os.WriteFile(public, append([]byte("# kid: x\n"), text...), 0o644); err != nil {
		t.Fatal(err)
	}
	if got, err := LoadPublic(public); err != nil || !got.Equal(key.Public()) {
		t.Errorf("%v", err)
	}
	for _, wrong := range []string{path, public + "x"} {
		if _, err := LoadPublic(wrong); !errdefs.IsInvalid(err) {
			t.Errorf("%s: %v", wrong, err)
		}
	}
	if err := os.Chmod(path, 0o644); err != nil {
		t.Fatal(err)
	}
	if _, err := LoadKey(path); !errdefs.IsFailedPrecondition(err) || !strings.Contains(err.Error(), "chmod 600") {
		t.Error(err)
	}
}
