package xfs

import (
	"encoding/binary"
	"os"
	"path/filepath"
	"testing"
	"unsafe"

	"cocoonstack.io/cocoon/internal/errdefs"
)

func TestGrowthOf(t *testing.T) {
	if n := unsafe.Sizeof(growth{}); n != 16 {
		t.Errorf("struct xfs_growfs_data has %d bytes", n)
	}
	geometry := func(block uint32, blocks uint64) (has [geometrySize]byte) {
		binary.NativeEndian.PutUint32(has[blockSizeAt:], block)
		binary.NativeEndian.PutUint32(has[inodesAt:], 25)
		binary.NativeEndian.PutUint64(has[blocksAt:], blocks)
		return has
	}
	for _, c := range []struct {
		has  [geometrySize]byte
		size int64
		want growth
		more bool
	}{
		{geometry(4096, 100), 101 * 4096, growth{blocks: 101, inodes: 25}, true},
		{geometry(4096, 100), 101*4096 - 1, growth{blocks: 100, inodes: 25}, false},
		{geometry(4096, 100), 99 * 4096, growth{blocks: 99, inodes: 25}, false}, // never smaller
		{geometry(512, 1<<33), 1 << 50, growth{blocks: 1 << 41, inodes: 25}, true},
		{geometry(0, 0), 1 << 30, growth{}, false},
		{geometry(4096, 100), -1, growth{}, false},
	} {
		if g, more := growthOf(c.has, c.size); more != c.more || g != c.want {
			t.Errorf("%d bytes: %+v, %v, want %+v, %v", c.size, g, more, c.want, c.more)
		}
	}
}

func TestGrowOfOthers(t *testing.T) {
	dir, err := os.Open("/proc")
	if err != nil {
		t.Fatal(err)
	}
	defer dir.Close()
	if err := Grow(dir, os.DevNull); !errdefs.Is(err, errdefs.Unsupported) {
		t.Errorf("a folder of procfs: %v", err)
	}
	if err := Grow(dir, filepath.Join(t.TempDir(), "none")); err == nil {
		t.Error("a disk that is not there")
	}
}
