package main

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"cocoonstack.io/cocoon/internal/testkit/need"
)

// Another program reads the boot loader where UEFI looks for it.
func TestBootLoader(t *testing.T) {
	loader := bytes.Repeat([]byte("loader "), 30000)
	fs, err := bootLoader(loader, efiSize)
	if err != nil || len(fs) != efiSize {
		t.Fatal(len(fs), err)
	}
	for what, tc := range map[string]struct{ loader, size int }{"nothing": {0, efiSize}, "a large one": {efiSize, efiSize}, "no room": {1, fatData * sector}} {
		if _, err := bootLoader(make([]byte, tc.loader), tc.size); err == nil {
			t.Errorf("%s fits", what)
		}
	}
	if _, err := exec.LookPath("mcopy"); err != nil {
		need.Missing(t, "mtools are missing; run `make setup`")
	}
	dir := t.TempDir()
	image, out := filepath.Join(dir, "efi.img"), filepath.Join(dir, "out")
	if err := os.WriteFile(image, fs, 0o600); err != nil {
		t.Fatal(err)
	}
	if text, err := exec.CommandContext(t.Context(), "mcopy", "-i", image, "::/EFI/BOOT/BOOTX64.EFI", out).CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, text)
	}
	if got, err := os.ReadFile(out); err != nil || !bytes.Equal(got, loader) {
		t.Errorf("%d bytes, %v; want %d", len(got), err, len(loader))
	}
	if text, err := exec.CommandContext(t.Context(), "mdir", "-b", "-/", "-i", image, "::/").CombinedOutput(); err != nil || bytes.Count(text, []byte("\n")) != 3 {
		t.Errorf("%v: %s", err, text)
	}
}
