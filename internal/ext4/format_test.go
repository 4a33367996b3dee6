package ext4_test

import (
	"bytes"
	"errors"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/ext4"
	"cocoonstack.io/cocoon/internal/testkit/need"
)

// recorder counts what is written to a file, and fails from a point on.
type recorder struct {
	*os.File
	writes, bytes int
	most          int // writes that succeed; 0: all
}

var errPower = errors.New("the power is off")

func (r *recorder) WriteAt(p []byte, off int64) (int, error) {
	if r.writes++; r.most > 0 && r.writes > r.most {
		return 0, errPower
	}
	r.bytes += len(p)
	return r.File.WriteAt(p, off)
}

func disk(t *testing.T, size int64) *recorder {
	t.Helper()
	f := file(t)
	if err := f.Truncate(size); err != nil {
		t.Fatal(err)
	}
	return &recorder{File: f}
}

func empty(size int64) ext4.Empty {
	return ext4.Empty{Size: size, ID: [16]byte{0xfe, 1, 2, 15: 9}, Mode: 0o2777, GID: 2000, Now: time.Unix(1_800_000_000, 0)}
}

func TestFormatIsSound(t *testing.T) {
	const group = 128 << 20
	for _, size := range []int64{
		ext4.MinFormat, 17<<20 + 5000, 64 << 20, group - 4096, group, group + 4096, group + 4<<20, 255 << 20, 256 << 20, 1 << 30, 3*group + 2110*1024,
		16 * group, 16*group + 1<<20, 16*group + 3<<20, 17 * group, 10 << 30, 27*group + 4096, 100 << 30,
	} {
		d := disk(t, size)
		begin := time.Now()
		if err := ext4.Format(d, empty(size)); err != nil {
			t.Fatalf("%d: %v", size, err)
		}
		t.Logf("%d MiB: %d writes, %d KiB, %v", size>>20, d.writes, d.bytes>>10, time.Since(begin))
		if size <= 10<<30 && d.bytes > 256<<10 {
			t.Errorf("%d: %d bytes are written", size, d.bytes)
		}
		sound(t, d.File)
		out, err := exec.Command("/usr/sbin/debugfs", "-R", "ls -l /", d.Name()).CombinedOutput()
		if err != nil || strings.Contains(string(out), "lost+found") || !strings.Contains(string(out), "42777") {
			t.Errorf("%d: the root folder: %s, %v", size, out, err)
		}
	}
}

func TestFormatRefusesSizes(t *testing.T) {
	for _, size := range []int64{-1, 0, ext4.MinFormat - 1, ext4.MaxFormat + 1} {
		d := disk(t, 0)
		if err := ext4.Format(d, empty(size)); !errdefs.IsInvalid(err) || d.writes > 0 {
			t.Errorf("%d: %v, %d writes", size, err, d.writes)
		}
	}
}

// TestSizeFor: the kernel lets files have what was asked for.
func TestSizeFor(t *testing.T) {
	need.Root(t)
	if _, err := os.Stat("/dev/loop-control"); err != nil {
		need.Missing(t, "loop devices")
	}
	for _, room := range []int64{0, 1, 10 << 20, 100 << 20, 250 << 20, 1 << 30, 5 << 30, 90 << 30} {
		size, err := ext4.SizeFor(room)
		if err != nil || size%ext4.BlockSize != 0 {
			t.Fatalf("%d: %d, %v", room, size, err)
		}
		d := disk(t, size)
		if err := ext4.Format(d, empty(size)); err != nil {
			t.Fatal(err)
		}
		dir := t.TempDir()
		if out, err := exec.CommandContext(t.Context(), need.Tool(t, "mount"), "-o", "loop,noinit_itable", d.Name(), dir).CombinedOutput(); err != nil {
			t.Fatalf("%v: %s", err, out)
		}
		var fs unix.Statfs_t
		err = unix.Statfs(dir, &fs)
		if err := errors.Join(err, unix.Unmount(dir, 0)); err != nil {
			t.Fatal(err)
		}
		if free := int64(fs.Bavail) * fs.Bsize; free < room || size > ext4.MinFormat && free > room+room/20+ext4.BlockSize {
			t.Errorf("%d bytes are asked for, and %d of %d are free", room, free, size)
		}
	}
	for _, room := range []int64{-1, ext4.MaxFormat - 1, ext4.MaxFormat + 1, 1 << 62} {
		if _, err := ext4.SizeFor(room); !errdefs.IsInvalid(err) {
			t.Errorf("%d: %v", room, err)
		}
	}
}

// A power failure never leaves half a file system that looks finished.
func TestFormatIsInterrupted(t *testing.T) {
	whole := disk(t, 3<<30)
	if err := ext4.Format(whole, empty(3<<30)); err != nil {
		t.Fatal(err)
	}
	for most := 1; most < whole.writes; most++ {
		d := disk(t, 3<<30)
		d.most = most
		if err := ext4.Format(d, empty(3<<30)); !errors.Is(err, errPower) {
			t.Fatal(err)
		}
		head := make([]byte, 4096)
		if _, err := d.ReadAt(head, 0); err != nil {
			t.Fatal(err)
		}
		if !ext4.Unfinished(head) {
			t.Fatalf("after %d writes of %d the file system seems to be finished", most, whole.writes)
		}
		if d.most = 0; most%5 == 0 {
			if err := ext4.Format(d, empty(3<<30)); err != nil {
				t.Fatal(err)
			}
			sound(t, d.File)
		}
	}
	head := make([]byte, 4096)
	if _, err := whole.ReadAt(head, 0); err != nil || ext4.Unfinished(head) || !bytes.Equal(head[:1024], make([]byte, 1024)) {
		t.Errorf("the finished file system has a mark: %v", err)
	}
}
