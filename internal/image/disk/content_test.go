package disk_test

import (
	"bytes"
	"encoding/binary"
	"errors"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/image/disk"
	"cocoonstack.io/cocoon/internal/qcow2"
	"cocoonstack.io/cocoon/internal/sparse"
	"cocoonstack.io/cocoon/internal/testkit/need"
	"cocoonstack.io/cocoon/internal/vm"
)

// guestDisk is a disk with text, random bytes, zeros that were written, and holes, of an odd number of sectors.
func guestDisk() []byte {
	b := make([]byte, 9<<20+512)
	copy(b, bytes.Repeat([]byte("0123456789abcde\n"), 1<<15))
	copy(b[len(b)-512:], "the end")
	random := rand.NewChaCha8([32]byte{1})
	_, _ = random.Read(b[5<<20 : 5<<20+300<<10])
	for at := 6 << 20; at < 7<<20; at += 8 << 10 { // every second subcluster
		copy(b[at:], "a part of a cluster")
	}
	return b
}

// skipping reads all of r, and asks for holes first.
func skipping(r sparse.Holed) (got []byte, skipped int64, err error) {
	buf := make([]byte, 70<<10)
	for {
		n, err := r.Skip()
		if err != nil {
			return got, skipped, err
		}
		got, skipped = append(got, make([]byte, n)...), skipped+n
		read, err := r.Read(buf)
		got = append(got, buf[:read]...)
		if errors.Is(err, io.EOF) {
			return got, skipped, nil
		}
		if err != nil {
			return got, skipped, err
		}
	}
}

func open(t *testing.T, path string, format vm.DiskFormat) sparse.Holed {
	t.Helper()
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { f.Close() })
	r, size, err := disk.Content(format, f)
	if err != nil || size != int64(len(guestDisk())) {
		t.Fatalf("it has %d bytes, %v", size, err)
	}
	return r
}

// What QEMU writes reads as what a guest would see, whatever the form.
func TestContentOfImagesOfQEMU(t *testing.T) {
	need.Tool(t, "qemu-img")
	raw, want := filepath.Join(t.TempDir(), "raw"), guestDisk()
	if err := os.WriteFile(raw, want, 0o600); err != nil {
		t.Fatal(err)
	}
	for _, opts := range []string{
		"", "-o compat=0.10", "-c", "-c -o compression_type=zstd", "-o extended_l2=on,cluster_size=256k", "-c -o extended_l2=on,cluster_size=64k", "-o cluster_size=512",
		"-o cluster_size=2M", "-c -o cluster_size=2M", "-o preallocation=metadata", "-S 0",
	} {
		t.Run(opts, func(t *testing.T) {
			path := filepath.Join(t.TempDir(), "qcow2")
			if msg, err := exec.Command("qemu-img", append(append([]string{"convert", "-O", "qcow2"}, strings.Fields(opts)...), raw, path)...).CombinedOutput(); err != nil {
				t.Fatalf("%s", msg)
			}
			if got, err := io.ReadAll(open(t, path, vm.DiskQCOW2)); err != nil || !bytes.Equal(got, want) {
				t.Errorf("it reads %d bytes, %v", len(got), err)
			}
			got, skipped, err := skipping(open(t, path, vm.DiskQCOW2))
			if err != nil || !bytes.Equal(got, want) {
				t.Errorf("with skipped holes, it reads %d bytes, %v", len(got), err)
			}
			if opts == "" && skipped < 6<<20 {
				t.Errorf("only %d bytes are holes", skipped)
			}
		})
	}
	if got, err := io.ReadAll(open(t, raw, vm.DiskRaw)); err != nil || !bytes.Equal(got, want) {
		t.Errorf("the raw disk reads as %d bytes, %v", len(got), err)
	}
}

// small is a qcow2 image of two clusters of 512 bytes: header, reference counts, L1 and L2 table, data.
func small(l2 ...uint64) []byte {
	be, b := binary.BigEndian, make([]byte, 6<<9)
	copy(b, qcow2.Magic)
	be.PutUint32(b[4:], 2)
	be.PutUint32(b[20:], 9)
	be.PutUint64(b[24:], 2<<9)
	be.PutUint32(b[36:], 1)
	be.PutUint64(b[40:], 2<<9)
	be.PutUint64(b[48:], 1<<9)
	be.PutUint32(b[56:], 1)
	be.PutUint64(b[2<<9:], 3<<9)
	for n, e := range l2 {
		be.PutUint64(b[3<<9+8*n:], e)
	}
	copy(b[4<<9:], bytes.Repeat([]byte("data"), 256))
	return b
}

func content(b []byte) ([]byte, error) {
	q, err := qcow2.Parse(b)
	if err != nil {
		return nil, err
	}
	r, err := q.Content(bytes.NewReader(b), int64(len(b)), disk.Inflate())
	if err != nil {
		return nil, err
	}
	return io.ReadAll(io.LimitReader(r, 1<<20))
}

// Tables are not trusted, also when nobody has checked them before.
func TestHostileTables(t *testing.T) {
	got, err := content(small(4<<9, 5<<9))
	if err != nil || !bytes.Equal(got, bytes.Repeat([]byte("data"), 256)) {
		t.Fatalf("got %q, %v", got, err)
	}
	for name, entry := range map[string]uint64{
		"data outside": 9 << 9, "data far outside": 1 << 55, "compressed outside": 1<<62 | 1<<40, "not compressed": 1<<62 | 4<<9,
	} {
		if got, err := content(small(entry)); !errdefs.Is(err, errdefs.DataLoss) {
			t.Errorf("%s: got %q, %v", name, got, err)
		}
	}
	cut := small(4<<9, 5<<9)
	if got, err := content(cut[:3<<9]); !errdefs.Is(err, errdefs.DataLoss) {
		t.Errorf("cut: got %q, %v", got, err)
	}
}

// FuzzContent: whatever the image says, its content is VirtualSize bytes or an error, and skipping reads the same as reading.
func FuzzContent(f *testing.F) {
	f.Add(small(4<<9, 5<<9))
	f.Add(small(1<<62|4<<9, 1))
	f.Fuzz(func(t *testing.T, b []byte) {
		q, err := qcow2.Parse(b)
		if err != nil || q.VirtualSize > 1<<20 {
			return
		}
		r, err := q.Content(bytes.NewReader(b), int64(len(b)), disk.Inflate())
		if err != nil {
			return
		}
		read, err := io.ReadAll(r)
		if err == nil && int64(len(read)) != q.VirtualSize {
			t.Fatalf("%d of %d bytes without an error", len(read), q.VirtualSize)
		}
		again, err2 := q.Content(bytes.NewReader(b), int64(len(b)), disk.Inflate())
		if err2 != nil {
			t.Fatal(err2)
		}
		if skipped, _, serr := skipping(again); (serr == nil) != (err == nil) || serr == nil && !bytes.Equal(skipped, read) {
			t.Fatalf("skipping reads %d bytes, %v; reading %d, %v", len(skipped), serr, len(read), err)
		}
	})
}
