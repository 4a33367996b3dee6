package compress

import (
	"bytes"
	"encoding/binary"
	"errors"
	"hash/crc32"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/iotest"

	"github.com/klauspost/compress/gzip"
	"github.com/klauspost/compress/zstd"

	"cocoonstack.io/cocoon/internal/errdefs"
)

var text = []byte(strings.Repeat("all work and no play makes a dull image\n", 5000))

func gz(t testing.TB, p []byte) []byte {
	var out bytes.Buffer
	w := gzip.NewWriter(&out)
	if _, err := w.Write(p); err != nil {
		t.Fatal(err)
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return out.Bytes()
}

func zst(t testing.TB, p []byte) []byte {
	w, err := zstd.NewWriter(nil)
	if err != nil {
		t.Fatal(err)
	}
	defer w.Close()
	return w.EncodeAll(p, nil)
}

// xzOf makes an .xz stream of one block that stores p uncompressed. check is CRC32, dict the encoded dictionary size.
func xzOf(p []byte, dict byte) []byte {
	flags := []byte{0, 1}
	out := append([]byte("\xfd7zXZ\x00"), flags...)
	out = binary.LittleEndian.AppendUint32(out, crc32.ChecksumIEEE(flags))
	head := []byte{2, 0, 0x21, 1, dict, 0, 0, 0}
	head = binary.LittleEndian.AppendUint32(head, crc32.ChecksumIEEE(head))
	var data []byte
	for rest := p; len(rest) > 0; {
		n := min(len(rest), 1<<16)
		control := byte(2)
		if len(data) == 0 {
			control = 1 // with a new dictionary
		}
		data = append(data, control, byte((n-1)>>8), byte(n-1))
		data, rest = append(data, rest[:n]...), rest[n:]
	}
	data = append(data, 0)
	unpadded := len(head) + len(data) + 4
	out = append(append(out, head...), data...)
	for len(out)%4 != 0 {
		out = append(out, 0)
	}
	out = binary.LittleEndian.AppendUint32(out, crc32.ChecksumIEEE(p))
	index := binary.AppendUvarint(binary.AppendUvarint([]byte{0, 1}, uint64(unpadded)), uint64(len(p)))
	for len(index)%4 != 0 {
		index = append(index, 0)
	}
	index = binary.LittleEndian.AppendUint32(index, crc32.ChecksumIEEE(index))
	out = append(out, index...)
	tail := binary.LittleEndian.AppendUint32(nil, uint32(len(index)/4-1))
	tail = append(tail, flags...)
	out = binary.LittleEndian.AppendUint32(out, crc32.ChecksumIEEE(tail))
	return append(append(out, tail...), 'Y', 'Z')
}

const mib8 = 22 // a dictionary of 8 MiB

func TestContentIsRecognisedAndDecompressed(t *testing.T) {
	for _, tc := range []struct {
		name string
		in   []byte
		kind Kind
		want []byte
	}{
		{"plain", text, None, text},
		{"empty", nil, None, nil},
		{"one byte of a magic", []byte{0x1f}, None, []byte{0x1f}},
		{"gzip", gz(t, text), Gzip, text},
		{"gzip twice, one after the other", append(gz(t, text), gz(t, text)...), Gzip, append(bytes.Clone(text), text...)},
		{"gzip of gzip is undone once", gz(t, gz(t, text)), Gzip, gz(t, text)},
		{"zstd", zst(t, text), Zstd, text},
		{"xz", xzOf(text, mib8), XZ, text},
		{"xz twice, padded", append(append(xzOf(text, mib8), 0, 0, 0, 0), xzOf(text, mib8)...), XZ, append(bytes.Clone(text), text...)},
	} {
		t.Run(tc.name, func(t *testing.T) {
			for _, r := range []io.Reader{bytes.NewReader(tc.in), iotest.OneByteReader(bytes.NewReader(tc.in)), iotest.DataErrReader(bytes.NewReader(tc.in))} {
				z, kind, err := Reader(r)
				if err != nil {
					t.Fatal(err)
				}
				got, err := io.ReadAll(z)
				if err != nil || !bytes.Equal(got, tc.want) || kind != tc.kind {
					t.Errorf("kind %q, %d bytes, %v; want %q, %d bytes", kind, len(got), err, tc.kind, len(tc.want))
				}
				if n, err := r.Read(make([]byte, 1)); n != 0 || !errors.Is(err, io.EOF) {
					t.Errorf("the input was not read up to its end: %d, %v", n, err)
				}
				if err := errors.Join(z.Close(), z.Close()); err != nil {
					t.Error(err)
				}
			}
		})
	}
}

// mixed is the content of the files in testdata, packed by `xz`: text, noise, and what the x86 filter takes for calls.
func mixed() []byte {
	out := bytes.Clone(text[:1000])
	for i := range 1000 {
		out = append(out, byte(i*i>>3), byte(i*7), 0xe8, byte(i), byte(i>>8), 0, 0)
	}
	return out
}

func TestFilesOfXZ(t *testing.T) {
	files, err := filepath.Glob("testdata/*.xz")
	if err != nil || len(files) != 3 {
		t.Fatalf("%d files, %v", len(files), err)
	}
	for _, name := range files {
		in, err := os.ReadFile(name)
		if err != nil {
			t.Fatal(err)
		}
		z, kind, err := Reader(bytes.NewReader(in))
		if err != nil {
			t.Fatal(err)
		}
		if got, err := io.ReadAll(z); err != nil || kind != XZ || !bytes.Equal(got, mixed()) {
			t.Errorf("%s: %d bytes, %v", name, len(got), err)
		}
		if err := readAll(bytes.NewReader(in[:len(in)-1])); !errdefs.Is(err, errdefs.DataLoss) {
			t.Errorf("%s, one byte short: %v", name, err)
		}
	}
}

func readAll(in io.Reader) error {
	z, _, err := Reader(in)
	if err != nil {
		return err
	}
	defer z.Close()
	_, err = io.Copy(io.Discard, z)
	return err
}

func TestDamagedStreams(t *testing.T) {
	flip := func(p []byte) []byte {
		p = bytes.Clone(p)
		p[len(p)/2] ^= 0x55
		return p
	}
	// A zstd frame whose window is 2 GiB: its header says so, nothing follows.
	wide := []byte{0x28, 0xb5, 0x2f, 0xfd, 0x00, 21 << 3, 0x01, 0x00, 0x00}
	for _, tc := range []struct {
		name  string
		in    []byte
		class errdefs.Class
		words string
	}{
		{"gzip, truncated", gz(t, text)[:100], errdefs.DataLoss, "truncated"},
		{"gzip, only a magic", []byte{0x1f, 0x8b}, errdefs.DataLoss, "truncated"},
		{"gzip, damaged", flip(gz(t, text)), errdefs.DataLoss, "damaged"},
		{"gzip, rubbish behind", append(gz(t, text), "rubbish and more"...), errdefs.DataLoss, "damaged"},
		{"zstd, truncated", zst(t, text)[:20], errdefs.DataLoss, "truncated"},
		{"zstd, damaged", flip(zst(t, text)), errdefs.DataLoss, ""},
		{"zstd, absurd window", wide, errdefs.Unsupported, "smaller window"},
		{"xz, truncated", xzOf(text, mib8)[:500], errdefs.DataLoss, "truncated"},
		{"xz, damaged", flip(xzOf(text, mib8)), errdefs.DataLoss, "damaged"},
		{"xz, 4 GiB dictionary", xzOf(text, 40), errdefs.Unsupported, "smaller window"},
		{"xz, 192 MiB dictionary", xzOf(text, 31), errdefs.Unsupported, "smaller window"},
		{"xz, 4 GiB dictionary in the second stream", append(xzOf(text, mib8), xzOf(text, 40)...), errdefs.Unsupported, "smaller window"},
		{"xz, rubbish behind", append(xzOf(text, mib8), "rubbish and more"...), errdefs.DataLoss, "damaged"},
	} {
		err := readAll(bytes.NewReader(tc.in))
		if !errdefs.Is(err, tc.class) || !strings.Contains(err.Error(), tc.words) {
			t.Errorf("%s: %v (%v)", tc.name, err, errdefs.ClassOf(err))
		}
	}
}

func TestAnErrorOfTheSourceComesThrough(t *testing.T) {
	lost := errdefs.Unavailablef("the connection was lost")
	for name, in := range map[string][]byte{"plain": text, "gzip": gz(t, text), "zstd": zst(t, text), "xz": xzOf(text, mib8), "nothing": nil} {
		cut := io.MultiReader(bytes.NewReader(in[:len(in)*2/3]), iotest.ErrReader(lost))
		if err := readAll(cut); !errors.Is(err, lost) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func FuzzReader(f *testing.F) {
	f.Add([]byte("plain"))
	f.Add(gz(f, text))
	f.Add(zst(f, text))
	f.Add(xzOf(text[:1000], mib8))
	f.Add(append(xzOf(nil, 0), xzOf(text[:10], 40)...))
	f.Fuzz(func(_ *testing.T, in []byte) {
		z, _, err := Reader(bytes.NewReader(in))
		if err != nil {
			return
		}
		defer z.Close()
		_, _ = io.CopyN(io.Discard, z, 1<<20) // neither panics nor uses unlimited memory
	})
}

// FuzzXZBlock fuzzes the compressed bytes of a block. Other fuzzing does not get past the checksums of xz's headers.
func FuzzXZBlock(f *testing.F) {
	head := xzOf(nil, 10)[:24] // of stream and block
	for _, name := range []string{"testdata/lzma.xz", "testdata/x86.xz"} {
		in, err := os.ReadFile(name)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(in[24:])
	}
	f.Add([]byte{1, 0, 0, 'a', 0})
	f.Fuzz(func(_ *testing.T, block []byte) {
		z, _, err := Reader(io.MultiReader(bytes.NewReader(head), bytes.NewReader(block)))
		if err != nil {
			return
		}
		defer z.Close()
		_, _ = io.CopyN(io.Discard, z, 1<<20)
	})
}
