package main

import (
	"bytes"
	"compress/gzip"
	"debug/elf"
	"encoding/binary"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/klauspost/compress/zstd"
	"github.com/pierrec/lz4/v4"
)

// bzImage wraps payload as the kernel's build does.
func bzImage(payload []byte) []byte {
	image := make([]byte, 1024)
	image[offSetupSects] = 1
	copy(image[offMagic:], "HdrS")
	binary.LittleEndian.PutUint32(image[offPayload:], 0)
	binary.LittleEndian.PutUint32(image[offPayloadLength:], uint32(len(payload)))
	return append(image, payload...)
}

func lz4ed(t testing.TB, data []byte) []byte {
	t.Helper()
	var b bytes.Buffer
	w := lz4.NewWriter(&b)
	if err := w.Apply(lz4.LegacyOption(true)); err != nil {
		t.Fatal(err)
	}
	if _, err := w.Write(data); err != nil {
		t.Fatal(err)
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return binary.LittleEndian.AppendUint32(b.Bytes(), uint32(len(data)))
}

func zstded(t testing.TB, data []byte) []byte {
	t.Helper()
	w, err := zstd.NewWriter(nil)
	if err != nil {
		t.Fatal(err)
	}
	return w.EncodeAll(data, nil)
}

// module returns an ELF file with the section .modinfo, as a kernel module has it.
func module(depends string) []byte {
	info := "license=GPL\x00depends=" + depends + "\x00"
	const names = "\x00.modinfo\x00.shstrtab\x00"
	var b bytes.Buffer
	put := func(v any) { _ = binary.Write(&b, binary.LittleEndian, v) }
	const end = 64 // of the header; the sections' contents follow, and then their table
	put(elf.Header64{
		Ident: [elf.EI_NIDENT]byte{0x7f, 'E', 'L', 'F', byte(elf.ELFCLASS64), byte(elf.ELFDATA2LSB), byte(elf.EV_CURRENT)},
		Type:  uint16(elf.ET_REL), Machine: uint16(elf.EM_X86_64), Version: 1, Shoff: uint64(end + len(info) + len(names)),
		Ehsize: end, Shentsize: 64, Shnum: 3, Shstrndx: 2,
	})
	b.WriteString(info + names)
	put(elf.Section64{})
	put(elf.Section64{Name: 1, Type: uint32(elf.SHT_PROGBITS), Off: end, Size: uint64(len(info))})
	put(elf.Section64{Name: 10, Type: uint32(elf.SHT_STRTAB), Off: uint64(end + len(info)), Size: uint64(len(names))})
	return b.Bytes()
}

// Kernel packages differ: modules are compressed or not, and some are part of the kernel.
func TestCollect(t *testing.T) {
	tree, out := t.TempDir(), filepath.Join(t.TempDir(), "modules")
	files := map[string][]byte{
		"modules.builtin": []byte("kernel/drivers/virtio/virtio_pci.ko\nkernel/drivers/block/virtio_blk.ko\nkernel/drivers/char/virtio_console.ko\n" +
			"kernel/drivers/virtio/virtio_balloon.ko\nkernel/drivers/acpi/button.ko\n"),
		"kernel/virtio_net.ko":     append(module("net-failover,virtio_pci"), "sig\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x03"+signMagic...),
		"kernel/net-failover.ko":   module("failover"),
		"kernel/failover.ko.zst":   zstded(t, module("")),
		"kernel/overlay.ko.zst":    zstded(t, module("")),
		"kernel/virtio-rng.ko.zst": zstded(t, module("virtio_blk")),
		"kernel/unwanted.ko.zst":   []byte("damaged"),
		"kernel/nfsv4.ko":          module("failover,sunrpc"),
		"kernel/sunrpc.ko.zst":     zstded(t, module("")),
	}
	for name, data := range files {
		path := filepath.Join(tree, "usr/lib/modules/6.8.0-1-generic", name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, data, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	if err := collect(tree, out, wanted, optional, rare); err != nil {
		t.Fatal(err)
	}
	list, err := os.ReadFile(filepath.Join(out, "modules.dep"))
	if want := "failover\nnet_failover failover\nnfsv4 failover sunrpc\noverlay\nsunrpc\nvirtio_net failover net_failover\nvirtio_rng\n"; err != nil || string(list) != want {
		t.Errorf("modules.dep is %q, %v", list, err)
	}
	for name, want := range map[string][]byte{"virtio_net": module("net-failover,virtio_pci"), "failover": module(""), "virtio_rng": module("virtio_blk")} {
		if got, err := os.ReadFile(filepath.Join(out, name+".ko")); err != nil || !bytes.Equal(got, want) {
			t.Errorf("%s has %d bytes, not %d: %v", name, len(got), len(want), err)
		}
	}
	for name, want := range map[string][]byte{"nfsv4": module("failover,sunrpc"), "sunrpc": module("")} { // few guests load them
		packed, err := os.ReadFile(filepath.Join(out, name+".ko.gz"))
		if err != nil {
			t.Fatal(err)
		}
		z, err := gzip.NewReader(bytes.NewReader(packed))
		if err != nil {
			t.Fatal(err)
		}
		if got, err := io.ReadAll(z); err != nil || !bytes.Equal(got, want) {
			t.Errorf("%s has %d bytes, not %d: %v", name, len(got), len(want), err)
		}
	}
	if err := collect(t.TempDir(), out, wanted, optional, rare); err == nil || !strings.Contains(err.Error(), "no module virtio_pci") {
		t.Errorf("an empty package: %v", err)
	}
}

func TestExtract(t *testing.T) {
	kernel := append([]byte("\x7fELF"), bytes.Repeat([]byte("kernel "), 1000)...)
	got, err := extract(bzImage(lz4ed(t, kernel)))
	if err != nil || !bytes.Equal(got, kernel) {
		t.Fatalf("%d bytes, %v", len(got), err)
	}
	got, err = extract(bzImage(binary.LittleEndian.AppendUint32(zstded(t, kernel), uint32(len(kernel)))))
	if err != nil || !bytes.Equal(got, kernel) {
		t.Fatalf("Zstandard: %d bytes, %v", len(got), err)
	}
	for name, c := range map[string]struct {
		image []byte
		says  string
	}{
		"empty":      {nil, "not a bzImage"},
		"LZO":        {bzImage([]byte("\x89LZO\x00\x00\x00\x00")), "unknown way"},
		"no kernel":  {bzImage(lz4ed(t, []byte("something"))), "not ELF"},
		"truncated":  {bzImage(lz4ed(t, kernel))[:1030], "outside of the file"},
		"huge claim": {bzImage([]byte("\x02\x21\x4c\x18\xff\xff\xff\xff")), "claims"},
	} {
		if _, err := extract(c.image); err == nil || !strings.Contains(err.Error(), c.says) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func FuzzExtract(f *testing.F) {
	f.Add(bzImage(lz4ed(f, []byte("\x7fELF small"))))
	f.Add(bzImage([]byte("\x02\x21\x4c\x18")))
	f.Fuzz(func(t *testing.T, image []byte) {
		if len(image) >= 4 && binary.LittleEndian.Uint32(image[len(image)-4:]) > 1<<20 {
			t.Skip("only the time that a large claim takes")
		}
		_, _ = extract(image)
	})
}

func TestUnsign(t *testing.T) {
	body := []byte("\x7fELF module")
	trailer := append([]byte("signature"), make([]byte, 8)...)
	trailer = binary.BigEndian.AppendUint32(trailer, uint32(len("signature")))
	signed := slices.Concat(body, trailer, []byte(signMagic))
	if got := unsign(signed); !bytes.Equal(got, body) {
		t.Errorf("got %q", got)
	}
	for _, odd := range [][]byte{body, []byte(signMagic), append(binary.BigEndian.AppendUint32(make([]byte, 8), 1<<31-1), signMagic...)} {
		if got := unsign(odd); !bytes.Equal(got, odd) {
			t.Errorf("%q became %q", odd, got)
		}
	}
}

func TestInitramfs(t *testing.T) {
	dir := t.TempDir()
	for name, text := range map[string]string{"agent": "agent!!", "check": "check", "modules/a.ko": "module"} {
		path := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	out := filepath.Join(dir, "out")
	if err := run([]string{"initramfs", dir + "/agent", dir + "/modules", dir + "/check", out}); err != nil {
		t.Fatal(err)
	}
	data, err := os.ReadFile(out)
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for off := 0; ; {
		var field [13]uint64
		if string(data[off:off+6]) != "070701" {
			t.Fatalf("no header at %d", off)
		}
		for i := range field {
			for _, c := range data[off+6+8*i : off+14+8*i] {
				field[i] = field[i]<<4 | uint64(bytes.IndexByte([]byte("0123456789abcdef"), c))
			}
		}
		name := string(data[off+110 : off+110+int(field[11])-1])
		names = append(names, name)
		off = (off + 110 + int(field[11]) + 3) &^ 3
		if content := string(data[off : off+int(field[6])]); name == "init" && (content != "agent!!" || field[1] != 0o100755) {
			t.Errorf("init is %q, mode %o", content, field[1])
		}
		off = (off + int(field[6]) + 3) &^ 3
		if name == "TRAILER!!!" {
			break
		}
	}
	if !slices.Contains(names, "modules/a.ko") || !slices.Contains(names, "e2fsck.gz") || !slices.Contains(names, "dev/console") {
		t.Errorf("names %v", names)
	}
	if err := run(nil); err == nil {
		t.Error("no arguments were fine")
	}
}
