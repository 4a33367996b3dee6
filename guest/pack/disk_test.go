package main

import (
	"archive/tar"
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"cocoonstack.io/cocoon/internal/testkit/need"
)

// The disk has GRUB where a BIOS and GRUB look for it, a GPT, and a partition that is an archive with what GRUB starts.
func TestDisk(t *testing.T) {
	dir := t.TempDir()
	boot := bytes.Repeat([]byte{0xb0}, sector)
	core := bytes.Repeat([]byte{0xc0}, 3*sector+7)
	binary.LittleEndian.PutUint64(boot[coreAt:], 1)
	binary.LittleEndian.PutUint64(core[restAt:], 2)
	for name, data := range map[string][]byte{
		"boot.img": boot, "core.img": core, "bootx64.efi": bytes.Repeat([]byte("efi"), 1000), "vmlinuz": bytes.Repeat([]byte("kernel"), 1<<18), "busybox": []byte("box"),
		"modules/modules.dep": []byte("b a\nc a b\n"), "modules/a.ko": nil, "modules/b.ko": []byte("b!"), "modules/c.ko": nil,
	} {
		path := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, data, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	out := filepath.Join(dir, "disk.img")
	if err := run([]string{"disk", dir + "/vmlinuz", dir + "/modules", dir + "/busybox", dir, out}); err != nil {
		t.Fatal(err)
	}
	disk, err := os.ReadFile(out)
	if err != nil {
		t.Fatal(err)
	}
	if len(disk)%(1<<20) != 0 || disk[0] != 0xb0 || disk[510] != 0x55 || disk[511] != 0xaa || disk[bootDisk] != 0x90 {
		t.Errorf("%d bytes, first sector %x", len(disk), disk[:sector])
	}
	binary.LittleEndian.PutUint64(core[restAt:], gptFirst+1)
	if at := binary.LittleEndian.Uint64(disk[coreAt:]); at != gptFirst || !bytes.Equal(disk[at*sector:][:len(core)], core) {
		t.Errorf("the core image, which knows its place, is not in sector %d", at)
	}
	table := dumped(t, out)
	for _, want := range []string{
		"label: gpt", "first-lba: 34", fmt.Sprintf("last-lba: %d", len(disk)/sector-34),
		"1 : start=34, size=2014, type=21686148-6449-6E6F-744E-656564454649, uuid=6F636F43-6E6F-4000-8000-000000000001, name=bios",
		"2 : start=2048, size=4096, type=0FC63DAF-8483-4772-8E79-3D69D8477DE4, uuid=6F636F43-6E6F-4000-8000-000000000002, name=system",
		"3 : start=6144, size=2048, type=C12A7328-F81F-11D2-BA4B-00A0C93EC93B, uuid=6F636F43-6E6F-4000-8000-000000000003, name=efi",
	} {
		if !strings.Contains(table, want) {
			t.Errorf("its table\n%s has no %q", table, want)
		}
	}
	const start = partStart
	found := map[string][]byte{}
	for r := tar.NewReader(bytes.NewReader(disk[start*sector:])); ; {
		h, err := r.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		if found[h.Name], err = io.ReadAll(r); err != nil {
			t.Fatal(err)
		}
	}
	if len(found["vmlinuz"]) != 6<<18 || !bytes.Contains(found["grub.cfg"], []byte("linux /vmlinuz ")) {
		t.Errorf("the partition has a kernel of %d bytes, and the menu %q", len(found["vmlinuz"]), found["grub.cfg"])
	}
	for _, want := range []string{"a\nb\nc\n", "b!", "#!/bin/busybox sh", "respawn"} {
		if !bytes.Contains(found["initrd"], []byte(want)) {
			t.Errorf("the initramfs lacks %q", want)
		}
	}
	again := filepath.Join(dir, "again.img")
	if err := run([]string{"disk", dir + "/vmlinuz", dir + "/modules", dir + "/busybox", dir, again}); err != nil {
		t.Fatal(err)
	}
	if second, err := os.ReadFile(again); err != nil || !slices.Equal(disk, second) {
		t.Errorf("the same files give another disk, %v", err)
	}
	binary.LittleEndian.PutUint64(core[restAt:], 2)
	if _, err := layOut(boot, append(core, make([]byte, grubLimit)...), nil, nil); err == nil {
		t.Error("a core image longer than the gap before the partition fits")
	}
	if _, err := layOut(boot, core[:sector-1], nil, nil); err == nil {
		t.Error("a core image of 511 bytes is one")
	}
	if _, err := layOut(boot, make([]byte, sector), nil, nil); err == nil {
		t.Error("a core image is changed whose rest is elsewhere")
	}
	if _, err := layOut(boot[1:], core, nil, nil); err == nil {
		t.Error("a first sector of 511 bytes is one")
	}
}

// dumped is the partition table as another program reads it: the first, and the same from the second if the first is damaged.
func dumped(t *testing.T, path string) string {
	t.Helper()
	if _, err := exec.LookPath("sfdisk"); err != nil {
		need.Missing(t, "sfdisk is missing; run `make setup`")
	}
	text, err := exec.CommandContext(t.Context(), "sfdisk", "--dump", path).Output()
	if err != nil {
		t.Fatal(err)
	}
	disk, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	clear(disk[sector : 3*sector])
	damaged := filepath.Join(t.TempDir(), filepath.Base(path))
	if err := os.WriteFile(damaged, disk, 0o600); err != nil {
		t.Fatal(err)
	}
	again, err := exec.CommandContext(t.Context(), "sfdisk", "--dump", damaged).Output()
	_, rest, _ := strings.Cut(string(text), "\n\n")
	if _, second, _ := strings.Cut(strings.ReplaceAll(string(again), damaged, path), "\n\n"); err != nil || second != rest {
		t.Errorf("the second table says\n%s%v, and the first\n%s", again, err, text)
	}
	return strings.ReplaceAll(strings.Join(strings.Fields(strings.ReplaceAll(string(text), "\"", "")), " "), "= ", "=")
}
