package main

import (
	"bytes"
	"encoding/binary"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

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

func compress(t testing.TB, data []byte) []byte {
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

func TestExtract(t *testing.T) {
	kernel := append([]byte("\x7fELF"), bytes.Repeat([]byte("kernel "), 1000)...)
	got, err := extract(bzImage(compress(t, kernel)))
	if err != nil || !bytes.Equal(got, kernel) {
		t.Fatalf("%d bytes, %v", len(got), err)
	}
	for name, c := range map[string]struct {
		image []byte
		says  string
	}{
		"empty":      {nil, "not a bzImage"},
		"gzip":       {bzImage([]byte("\x1f\x8b\x08\x00\x00\x00\x00\x00")), "not LZ4"},
		"no kernel":  {bzImage(compress(t, []byte("something"))), "not ELF"},
		"truncated":  {bzImage(compress(t, kernel))[:1030], "outside of the file"},
		"huge claim": {bzImage([]byte("\x02\x21\x4c\x18\xff\xff\xff\xff")), "claims"},
	} {
		if _, err := extract(c.image); err == nil || !strings.Contains(err.Error(), c.says) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func FuzzExtract(f *testing.F) {
	f.Add(bzImage(compress(f, []byte("\x7fELF small"))))
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
	for name, text := range map[string]string{"agent": "agent!!", "modules/a.ko": "module"} {
		path := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	out := filepath.Join(dir, "out")
	if err := run([]string{"initramfs", dir + "/agent", dir + "/modules", out}); err != nil {
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
	if !slices.Contains(names, "modules/a.ko") || !slices.Contains(names, "dev/console") {
		t.Errorf("names %v", names)
	}
	if err := run(nil); err == nil {
		t.Error("no arguments were fine")
	}
}
