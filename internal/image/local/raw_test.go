package local_test

import (
	"bytes"
	"compress/flate"
	"context"
	"encoding/binary"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/image"
	"cocoonstack.io/cocoon/internal/image/local"
	"cocoonstack.io/cocoon/internal/sparse"
	"cocoonstack.io/cocoon/internal/testkit/need"
	"cocoonstack.io/cocoon/internal/vm"
)

// qcow2Of is a disk as a qcow2 image that qemu-img makes with the options.
func qcow2Of(t *testing.T, disk []byte, opts string) []byte {
	t.Helper()
	tool := need.Tool(t, "qemu-img")
	raw, out := filepath.Join(t.TempDir(), "raw"), filepath.Join(t.TempDir(), "out")
	if err := os.WriteFile(raw, disk, 0o600); err != nil {
		t.Fatal(err)
	}
	args := append(append([]string{"convert", "-f", "raw", "-O", "qcow2"}, strings.Fields(opts)...), raw, out)
	if msg, err := exec.Command(tool, args...).CombinedOutput(); err != nil {
		t.Fatalf("%v %s", err, msg)
	}
	data, err := os.ReadFile(out)
	if err != nil {
		t.Fatal(err)
	}
	return data
}

func rawFileOf(dir string, img image.Image) string {
	return filepath.Join(dir, "data", strings.TrimPrefix(img.ID, "sha256:"), "disk.raw")
}

// A VM whose disks must be raw gets those of a qcow2 image. The image is converted once, and what that made goes with it.
func TestQCOW2BecomesRaw(t *testing.T) {
	want := diskOf("of a qcow2")
	for name, opts := range map[string]string{
		"plain": "", "compressed": "-c", "compressed by zstd": "-c -o compression_type=zstd", "small clusters": "-c -o cluster_size=512", "large clusters": "-c -o cluster_size=2M", "extended": "-o extended_l2=on",
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			dir := t.TempDir()
			s := open(t, dir)
			img, err := s.Import(t.Context(), "disk", bytes.NewReader(qcow2Of(t, want, opts)), nil)
			if err != nil {
				t.Fatal(err)
			}
			prepare := func(storage int64) string {
				t.Helper()
				root, err := s.Prepare(t.Context(), img, image.Layout{Dir: t.TempDir(), Storage: storage, Raw: true})
				if err != nil {
					t.Fatal(err)
				}
				d := root.Disks[0]
				if len(root.Disks) != 1 || d.Format != vm.DiskRaw || d.Backing != nil || d.ReadOnly || d.Role != vm.RoleCOW || d.Serial != image.SerialDisk {
					t.Errorf("disks: %+v", root.Disks)
				}
				got, err := os.ReadFile(d.Path)
				if err != nil || int64(len(got)) != max(storage, diskSize) || !bytes.Equal(got[:diskSize], want) || !sparse.IsZero(got[diskSize:]) {
					t.Errorf("the disk has other content: %d bytes, %v", len(got), err)
				}
				if info, err := os.Stat(d.Path); err != nil || sparse.Occupied(info) > 1<<20 {
					t.Errorf("it has no holes: %d bytes on disk, %v", sparse.Occupied(info), err)
				}
				return d.Path
			}
			prepare(0)
			first, err := os.Stat(rawFileOf(dir, img))
			if err != nil {
				t.Fatal(err)
			}
			own := prepare(2 * diskSize)
			second, err := os.Stat(rawFileOf(dir, img))
			if vms, _ := os.Stat(own); err != nil || !os.SameFile(first, second) || os.SameFile(second, vms) {
				t.Errorf("it was converted again, or the VM has the file of the image: %v", err)
			}
			var out bytes.Buffer
			if err := s.Export(t.Context(), "disk", &out); err != nil || idOf(out.Bytes()) != img.ID {
				t.Errorf("the image has another id after that: %v", err)
			}
			if err := s.Remove(t.Context(), "disk", nil); err != nil || len(entries(t, dir, "data")) != 0 || len(leftovers(t, dir)) != 0 {
				t.Errorf("left of the image: %v %v, %v", entries(t, dir, "data"), leftovers(t, dir), err)
			}
		})
	}
}

// VMs that start at once do not meet a disk that is half converted.
func TestRawAtOnce(t *testing.T) {
	dir := t.TempDir()
	want := diskOf("of many")
	img, err := open(t, dir).Import(t.Context(), "disk", bytes.NewReader(qcow2Of(t, want, "-c")), nil)
	if err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	for range 2 { // processes
		s := open(t, dir)
		for range 4 {
			vmDir := t.TempDir()
			wg.Go(func() {
				root, err := s.Prepare(t.Context(), img, image.Layout{Dir: vmDir, Raw: true})
				if err != nil {
					t.Error(err)
					return
				}
				if got, err := os.ReadFile(root.Disks[0].Path); err != nil || !bytes.Equal(got, want) {
					t.Errorf("%d bytes, %v", len(got), err)
				}
			})
		}
	}
	wg.Wait()
	if left := leftovers(t, dir); len(left) > 0 {
		t.Errorf("left in tmp: %v", left)
	}
}

// hostile is a qcow2 image of at most 512 MiB with clusters of 64 KiB, each of which is what entry says. The file has 1 MiB, and data begins at 512 KiB.
func hostile(size int64, entry uint64, data []byte) []byte {
	const cluster = 64 << 10
	be, b := binary.BigEndian, make([]byte, 1<<20)
	copy(b, "QFI\xfb")
	be.PutUint32(b[4:], 2)
	be.PutUint32(b[20:], 16)
	be.PutUint64(b[24:], uint64(size))
	be.PutUint32(b[36:], 1)
	be.PutUint64(b[40:], cluster)
	be.PutUint64(b[48:], 3*cluster)
	be.PutUint32(b[56:], 1)
	be.PutUint64(b[cluster:], 2*cluster)
	for n := range 8192 {
		be.PutUint64(b[2*cluster+8*n:], entry)
	}
	copy(b[8*cluster:], data)
	return b
}

// deflated is a compressed cluster.
func deflated(t *testing.T) []byte {
	t.Helper()
	var b bytes.Buffer
	w, err := flate.NewWriter(&b, flate.BestCompression)
	if err == nil {
		_, err = w.Write(bytes.Repeat([]byte("data"), 16<<10))
	}
	if err := errors.Join(err, w.Close()); err != nil || b.Len() > 512 {
		t.Fatal(b.Len(), err)
	}
	return b.Bytes()
}

// A hostile image leaves nothing, neither in the store nor beside the VM. The error names the image.
func TestHostileQCOW2BecomesNothing(t *testing.T) {
	for name, tc := range map[string]struct {
		image []byte
		class errdefs.Class
	}{
		"compressed data that is none": {hostile(diskSize, 1<<62|8<<16, bytes.Repeat([]byte("data"), 16<<10)), errdefs.DataLoss},
		"larger than the disk":         {hostile(512<<20, 1<<62|8<<16, deflated(t)), errdefs.ResourceExhausted},
	} {
		t.Run(name, func(t *testing.T) {
			dir, vmDir := t.TempDir(), t.TempDir()
			s := open(t, dir)
			img, err := s.Import(t.Context(), "evil", bytes.NewReader(tc.image), nil)
			if err != nil {
				t.Fatal(err)
			}
			s.SetDisk(1<<30, 32<<20)
			_, err = s.Prepare(t.Context(), img, image.Layout{Dir: vmDir, Raw: true})
			if !errdefs.Is(err, tc.class) || !strings.Contains(err.Error(), "evil") {
				t.Errorf("%v is %v, want %v and the name", err, errdefs.ClassOf(err), tc.class)
			}
			if _, err := os.Stat(rawFileOf(dir, img)); !errors.Is(err, os.ErrNotExist) {
				t.Errorf("half of it is in the store: %v", err)
			}
			if files, _ := os.ReadDir(vmDir); len(files) > 0 || len(leftovers(t, dir)) > 0 {
				t.Errorf("left: %v %v", files, leftovers(t, dir))
			}
		})
	}
	// A disk of zeros is as large as it likes.
	s := open(t, t.TempDir())
	img, err := s.Import(t.Context(), "zeros", bytes.NewReader(hostile(512<<20, 1, nil)), nil)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := s.Prepare(ctx, img, image.Layout{Dir: t.TempDir(), Raw: true}); errdefs.ClassOf(err) != errdefs.Canceled {
		t.Errorf("with a cancelled context: %v", err)
	}
	if _, err := s.Prepare(t.Context(), img, image.Layout{Dir: t.TempDir(), Raw: true}); err != nil {
		t.Error(err)
	}
}

// A conversion that is killed leaves nothing, and the next one is whole.
func TestRawKilled(t *testing.T) {
	want := diskOf("of the one that was killed")
	data := qcow2Of(t, want, "-c")
	for _, pattern := range []string{"tmp/*", "tmp/*/disk.raw", "data/*/disk.raw"} {
		t.Run(pattern, func(t *testing.T) {
			t.Parallel()
			dir, vmDir := t.TempDir(), t.TempDir()
			img, err := open(t, dir).Import(t.Context(), "disk", bytes.NewReader(data), nil)
			if err != nil {
				t.Fatal(err)
			}
			p := start(t, dir, childRaw+"="+vmDir)
			p.until(t, func() bool { hits, _ := filepath.Glob(filepath.Join(dir, pattern)); return len(hits) > 0 })
			p.kill()
			if p.output.Len() > 0 {
				t.Errorf("it failed before: %s", p.output)
			}
			s := open(t, dir)
			root, err := s.Prepare(t.Context(), img, image.Layout{Dir: vmDir, Raw: true})
			if err != nil {
				t.Fatal(err)
			}
			if got, err := os.ReadFile(root.Disks[0].Path); err != nil || !bytes.Equal(got, want) {
				t.Errorf("%d bytes, %v", len(got), err)
			}
			if files, _ := os.ReadDir(vmDir); len(files) != 1 || files[0].Name() != local.RawFile || len(leftovers(t, dir)) > 0 {
				t.Errorf("left: %v %v", files, leftovers(t, dir))
			}
		})
	}
}
