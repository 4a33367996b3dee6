package main

import (
	"archive/tar"
	"bytes"
	"encoding/binary"
	"errors"
	"io"
	"os"
	"path/filepath"
	"slices"
	"testing"
)

// The disk has GRUB where a BIOS and GRUB look for it, and one partition that is an archive with what GRUB starts.
func TestDisk(t *testing.T) {
	dir := t.TempDir()
	boot := bytes.Repeat([]byte{0xb0}, sector)
	core := bytes.Repeat([]byte{0xc0}, 3*sector+7)
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
	if !bytes.Equal(disk[sector:sector+len(core)], core) {
		t.Error("the core image is not in the second sector")
	}
	start, length := binary.LittleEndian.Uint32(disk[partTable+8:]), binary.LittleEndian.Uint32(disk[partTable+12:])
	efi, end := binary.LittleEndian.Uint32(disk[partTable+24:]), binary.LittleEndian.Uint32(disk[partTable+28:])
	if start != partStart || start+length != efi || int(efi+end)*sector != len(disk) || disk[partTable] != 0x80 || disk[partTable+20] != 0xef || !bytes.Equal(disk[partTable+32:510], make([]byte, 32)) {
		t.Errorf("partition table %x", disk[partTable:510])
	}
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
	if _, err := layOut(boot, make([]byte, grubLimit), nil, nil); err == nil {
		t.Error("a core image as long as the gap before the partition fits")
	}
	if _, err := layOut(boot[1:], core, nil, nil); err == nil {
		t.Error("a first sector of 511 bytes is one")
	}
}
