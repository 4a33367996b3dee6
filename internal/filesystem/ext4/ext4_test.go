package ext4

import (
	"encoding/binary"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"cocoonstack.io/cocoon/internal/errdefs"
)

func TestSmaller(t *testing.T) {
	mkfs, err := exec.LookPath("mkfs.ext4")
	if err != nil {
		if mkfs = "/usr/sbin/mkfs.ext4"; exec.Command(mkfs, "-V").Run() != nil {
			t.Skip("e2fsprogs is needed")
		}
	}
	const size = 64 << 20
	for _, features := range []string{"64bit", "^64bit"} {
		dev := filepath.Join(t.TempDir(), "disk")
		if err := os.WriteFile(dev, nil, 0o600); err != nil {
			t.Fatal(err)
		}
		if err := os.Truncate(dev, size); err != nil {
			t.Fatal(err)
		}
		if out, err := exec.Command(mkfs, "-q", "-F", "-b", "4096", "-O", features, dev).CombinedOutput(); err != nil {
			t.Fatalf("%v: %s", err, out)
		}
		for grown, want := range map[int64]bool{size: false, size + 4095: false, size + 4096: true, size << 8: true} {
			if err := os.Truncate(dev, grown); err != nil {
				t.Fatal(err)
			}
			if got, err := Smaller(dev); err != nil || got != want {
				t.Errorf("%s, %d bytes: %v, %v", features, grown, got, err)
			}
		}
	}
	if _, err := Smaller(filepath.Join(t.TempDir(), "none")); err == nil {
		t.Error("a disk that is not there")
	}
}

func FuzzSizeIn(f *testing.F) {
	super := make([]byte, superSize)
	binary.LittleEndian.PutUint16(super[magic:], 0xef53)
	f.Add(super)
	f.Add(make([]byte, superSize))
	f.Add([]byte("short"))
	f.Fuzz(func(t *testing.T, super []byte) {
		if _, block := sizeIn(super); block > 64<<10 {
			t.Errorf("blocks of %d bytes", block)
		}
		if _, err := stateIn(super); err != nil && !errdefs.Is(err, errdefs.DataLoss) {
			t.Errorf("unclassified: %v", err)
		}
	})
}

func TestStateOf(t *testing.T) {
	for name, c := range map[string]struct {
		state             uint16
		compat, incompat  uint32
		errors            uint32
		damaged, replayed bool
	}{
		"clean":                      {state: 1, compat: 4},
		"clean without a journal":    {state: 1},
		"in use":                     {state: 1, compat: 4, incompat: 4, replayed: true},
		"in use, not valid":          {state: 0, compat: 4, incompat: 4, replayed: true},
		"in use without a journal":   {state: 0, damaged: true},
		"with errors":                {state: 2, compat: 4, damaged: true},
		"valid with errors":          {state: 3, compat: 4, damaged: true},
		"with counted errors":        {state: 1, compat: 4, errors: 1, damaged: true},
		"in use with errors":         {state: 3, compat: 4, incompat: 4, damaged: true, replayed: true},
		"with files to remove":       {state: 5, compat: 4},
		"with 64 bits and a journal": {state: 1, compat: 4, incompat: 0x80},
	} {
		super := make([]byte, superSize)
		le := binary.LittleEndian
		le.PutUint16(super[magic:], 0xef53)
		le.PutUint16(super[state:], c.state)
		le.PutUint32(super[compat:], c.compat)
		le.PutUint32(super[incompat:], c.incompat)
		le.PutUint32(super[errorCount:], c.errors)
		dev := filepath.Join(t.TempDir(), "disk")
		if err := os.WriteFile(dev, append(make([]byte, superAt), super...), 0o600); err != nil {
			t.Fatal(err)
		}
		if got, err := StateOf(dev); err != nil || got != (State{Damaged: c.damaged, Replay: c.replayed}) {
			t.Errorf("%s: %+v, %v", name, got, err)
		}
	}
	dev := filepath.Join(t.TempDir(), "zeros")
	if err := os.WriteFile(dev, make([]byte, superAt+superSize), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := StateOf(dev); !errdefs.Is(err, errdefs.DataLoss) {
		t.Errorf("zeros: %v", err)
	}
}

func TestDiskSize(t *testing.T) {
	dir, err := os.Open(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	defer dir.Close()
	var st unix.Stat_t
	if err := unix.Fstat(int(dir.Fd()), &st); err != nil {
		t.Fatal(err)
	}
	sys := t.TempDir()
	if _, err := diskSize(sys, dir); err == nil {
		t.Error("the size of a disk that is not there")
	}
	of := filepath.Join(sys, fmt.Sprintf("%d:%d", unix.Major(st.Dev), unix.Minor(st.Dev)))
	if err := os.Mkdir(of, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(of, "size"), []byte("2048\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if size, err := diskSize(sys, dir); err != nil || size != 1<<20 {
		t.Errorf("%d bytes, %v", size, err)
	}
}

func TestGrowLeavesWhatIsNoDisk(t *testing.T) {
	dir, err := os.Open("/proc")
	if err != nil {
		t.Fatal(err)
	}
	defer dir.Close()
	if err := Grow(dir); err == nil || errdefs.IsUnavailable(err) {
		t.Errorf("grown: %v", err)
	}
}
