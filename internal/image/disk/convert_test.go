package disk_test

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/image/disk"
	"cocoonstack.io/cocoon/internal/qcow2"
	"cocoonstack.io/cocoon/internal/testkit/need"
	"cocoonstack.io/cocoon/internal/vm"
)

// convertible lists the formats of other hypervisors, and how qemu-img makes them.
var convertible = []struct {
	name   string
	format vm.DiskFormat
	opts   string
}{
	{"vmdk", disk.FormatVMDK, ""},
	{"vmdk stream", disk.FormatVMDK, "subformat=streamOptimized"},
	{"vhdx", disk.FormatVHDX, ""},
	{"vhdx fixed", disk.FormatVHDX, "subformat=fixed"},
	{"vhd", disk.FormatVHD, "subformat=dynamic,force_size=on"},
}

const foreignSize = 5 << 20

// foreign makes a disk with content in the format of another hypervisor.
func foreign(t testing.TB, format vm.DiskFormat, opts string) []byte {
	t.Helper()
	dir := t.TempDir()
	raw, out := filepath.Join(dir, "raw"), filepath.Join(dir, "out")
	content := append(bytes.Repeat([]byte("0123456789abcde\n"), 1<<16), make([]byte, foreignSize-1<<20)...)
	if err := os.WriteFile(raw, content, 0o600); err != nil {
		t.Fatal(err)
	}
	args := []string{"convert", "-f", "raw", "-O", string(format)}
	if opts != "" {
		args = append(args, "-o", opts)
	}
	if msg, err := exec.Command(need.Tool(t, "qemu-img"), append(args, raw, out)...).CombinedOutput(); err != nil {
		t.Fatalf("qemu-img: %v %s", err, msg)
	}
	data, err := os.ReadFile(out)
	if err != nil {
		t.Fatal(err)
	}
	return data
}

func TestStatement48_ForeignDisksOfQEMU(t *testing.T) {
	for _, c := range convertible {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			data := foreign(t, c.format, c.opts)
			if got, err := disk.Recognise(data[:min(len(data), disk.HeadSize)]); err != nil || got != c.format {
				t.Fatalf("recognised as %q, %v", got, err)
			}
			virtual, err := disk.Check(c.format, bytes.NewReader(data), int64(len(data)))
			if err != nil || virtual != foreignSize {
				t.Fatalf("size %d, %v", virtual, err)
			}
			if _, err := disk.Check(c.format, bytes.NewReader(data), 600); !errdefs.Is(err, errdefs.DataLoss) && !errdefs.IsInvalid(err) {
				t.Errorf("cut: %v", err)
			}
			out := convert(t, c.format, data, 1<<30)
			if err := check(out); err != nil {
				t.Errorf("what came out is not sound: %v", err)
			}
			if q, err := qcow2.Parse(out[:disk.HeadSize]); err != nil || q.VirtualSize != foreignSize {
				t.Errorf("what came out is %+v, %v", q, err)
			}
		})
	}
}

func files(t *testing.T, data []byte) (in, out, said *os.File) {
	t.Helper()
	dir := t.TempDir()
	open := func(name string) *os.File {
		f, err := os.OpenFile(filepath.Join(dir, name), os.O_CREATE|os.O_RDWR, 0o600)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { f.Close() })
		return f
	}
	in, out, said = open("in"), open("out"), open("said")
	if _, err := in.Write(data); err != nil {
		t.Fatal(err)
	}
	return in, out, said
}

func convert(t *testing.T, format vm.DiskFormat, data []byte, limit int64) []byte {
	t.Helper()
	in, out, said := files(t, data)
	if err := (disk.Converter{}).Convert(t.Context(), format, in, out, said, limit); err != nil {
		t.Fatal(err)
	}
	result, err := os.ReadFile(out.Name())
	if err != nil {
		t.Fatal(err)
	}
	if fi, err := out.Stat(); err != nil || fi.Mode().Perm() != 0o600 {
		t.Errorf("the output is %v, %v", fi.Mode(), err)
	}
	return result
}

func TestConversionIsLimited(t *testing.T) {
	data := foreign(t, disk.FormatVMDK, "")
	in, out, said := files(t, data)
	if err := (disk.Converter{}).Convert(t.Context(), disk.FormatVMDK, in, out, said, 64<<10); !errdefs.Is(err, errdefs.ResourceExhausted) && !errdefs.IsInvalid(err) {
		t.Errorf("past the limit: %v", err)
	}
	if fi, _ := out.Stat(); fi.Size() > 64<<10 {
		t.Errorf("it wrote %d bytes", fi.Size())
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := (disk.Converter{}).Convert(ctx, disk.FormatVMDK, in, out, said, 1<<30); !errors.Is(err, context.Canceled) {
		t.Errorf("cancelled: %v", err)
	}
	if err := (disk.Converter{Path: "/nonexistent"}).Convert(t.Context(), disk.FormatVMDK, in, out, said, 1<<30); err == nil {
		t.Error("no qemu-img and no error")
	}
}

// TestConversionRunsUnprivileged checks the sandbox from the inside, with a stand-in for qemu-img.
func TestConversionRunsUnprivileged(t *testing.T) {
	need.Root(t)
	dir := t.TempDir()
	script := filepath.Join(dir, "qemu-img")
	body := "#!/bin/sh\n{ id -u; grep -E 'CapEff|CapBnd|NoNewPrivs' /proc/self/status; grep -c : /proc/self/net/dev; ulimit -v; } >/proc/self/fd/4\n"
	if err := os.WriteFile(script, []byte(body), 0o755); err != nil { //nolint:gosec // another user runs it
		t.Fatal(err)
	}
	for d := dir; d != "/" && d != os.TempDir(); d = filepath.Dir(d) {
		if err := os.Chmod(d, 0o755); err != nil { //nolint:gosec // another user looks through it
			t.Fatal(err)
		}
	}
	in, out, said := files(t, []byte("x"))
	if err := (disk.Converter{Path: script, UID: 65533}).Convert(t.Context(), disk.FormatVMDK, in, out, said, 1<<30); err != nil {
		t.Fatal(err)
	}
	got, err := os.ReadFile(out.Name())
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"65533\n", "CapEff:\t0000000000000000", "CapBnd:\t0000000000000000", "NoNewPrivs:\t1", "\n1\n2097152\n"} {
		if !strings.Contains(string(got), want) {
			t.Errorf("inside it is not %q:\n%s", want, got)
		}
	}
}

// vmdk is the smallest accepted disk, with a descriptor.
func vmdk(descriptor string) []byte {
	b := make([]byte, 64<<10)
	le := binary.LittleEndian
	copy(b, "KDMV")
	le.PutUint32(b[4:], 1)
	le.PutUint64(b[12:], 2048)
	le.PutUint64(b[20:], 128)
	le.PutUint64(b[28:], 1)
	le.PutUint64(b[36:], 20)
	le.PutUint32(b[44:], 512)
	le.PutUint64(b[56:], 26)
	copy(b[512:], descriptor)
	return b
}

const plainVMDK = "# Disk DescriptorFile\nversion=1\nCID=12345678\nparentCID=ffffffff\ncreateType=\"monolithicSparse\"\nRW 2048 SPARSE \"x.vmdk\"\n"

// vhdx is the smallest disk whose header is accepted.
func vhdx() []byte {
	b := make([]byte, 3<<20)
	le := binary.LittleEndian
	copy(b, "vhdxfile")
	copy(b[64<<10:], "head")
	le.PutUint64(b[64<<10+8:], 1)
	copy(b[192<<10:], "regi")
	le.PutUint32(b[192<<10+8:], 1)
	copy(b[192<<10+16:], "\x06\xa2\x7c\x8b\x90\x47\x9a\x4b\xb8\xfe\x57\x5f\x05\x0f\x88\x6e")
	le.PutUint64(b[192<<10+32:], 1<<20)
	le.PutUint32(b[192<<10+40:], 1<<20)
	m := b[1<<20:]
	copy(m, "metadata")
	le.PutUint16(m[10:], 2)
	for i, id := range []string{"\x37\x67\xa1\xca\x36\xfa\x43\x4d\xb3\xb6\x33\xf0\xaa\x44\xe7\x6b", "\x24\x42\xa5\x2f\x1b\xcd\x76\x48\xb2\x11\x5d\xbe\xd8\x3b\xf4\xb8"} {
		e := m[32+32*i:]
		copy(e, id)
		le.PutUint32(e[16:], uint32(64<<10+8*i))
		le.PutUint32(e[20:], 8)
	}
	le.PutUint32(m[64<<10:], 8<<20)
	le.PutUint64(m[64<<10+8:], 1<<30)
	return b
}

func vhd() []byte {
	b := make([]byte, 4096)
	be := binary.BigEndian
	copy(b, "conectix")
	be.PutUint64(b[48:], 1<<30)
	be.PutUint32(b[60:], 3)
	copy(b[len(b)-512:], b[:512])
	return b
}

func TestStatement48_ForeignDisksThatAreRefused(t *testing.T) {
	le, be := binary.LittleEndian, binary.BigEndian
	type edit = func(b []byte) []byte
	text := func(old, repl string) edit {
		return func([]byte) []byte { return vmdk(strings.Replace(plainVMDK, old, repl, 1)) }
	}
	u32 := func(off int, v uint32) edit { return func(b []byte) []byte { le.PutUint32(b[off:], v); return b } }
	u64 := func(off int, v uint64) edit { return func(b []byte) []byte { le.PutUint64(b[off:], v); return b } }
	put := func(off int, s string) edit { return func(b []byte) []byte { copy(b[off:], s); return b } }
	cut := func(n int) edit { return func(b []byte) []byte { return b[:n] } }
	same := func(b []byte) []byte { return b }
	const ok = errdefs.Class(-1)
	for name, c := range map[string]struct {
		format vm.DiskFormat
		change edit
		class  errdefs.Class
		says   string
	}{
		"vmdk sound":           {disk.FormatVMDK, same, ok, ""},
		"vmdk no descriptor":   {disk.FormatVMDK, u64(28, 0), ok, ""},
		"vmdk parent":          {disk.FormatVMDK, text("parentCID=ffffffff", "parentCID=deadbeef"), errdefs.InvalidArgument, "parent"},
		"vmdk parent spaced":   {disk.FormatVMDK, text("parentCID=ffffffff", " PARENTCID = deadbeef"), errdefs.InvalidArgument, "parent"},
		"vmdk parent name":     {disk.FormatVMDK, text("version=1", "parentFileNameHint=\"/etc/shadow\""), errdefs.InvalidArgument, "parent"},
		"vmdk hidden parent":   {disk.FormatVMDK, put(5000, "parentFileNameHint=\"/etc/shadow\""), errdefs.InvalidArgument, "parent"},
		"vmdk flat":            {disk.FormatVMDK, text("SPARSE", "FLAT"), errdefs.InvalidArgument, "other files"},
		"vmdk path":            {disk.FormatVMDK, text("x.vmdk", "../x.vmdk"), errdefs.InvalidArgument, "other files"},
		"vmdk two extents":     {disk.FormatVMDK, text("RW", "RW 2048 SPARSE \"y.vmdk\"\nRW"), errdefs.InvalidArgument, "2 files"},
		"vmdk kind":            {disk.FormatVMDK, text("monolithicSparse", "twoGbMaxExtentFlat"), errdefs.InvalidArgument, "twoGbMaxExtentFlat"},
		"vmdk no capacity":     {disk.FormatVMDK, u64(12, 0), errdefs.InvalidArgument, "no data of its own"},
		"vmdk absurd":          {disk.FormatVMDK, u64(12, 1<<60), errdefs.InvalidArgument, "64 TiB"},
		"vmdk version":         {disk.FormatVMDK, u32(4, 9), errdefs.InvalidArgument, "version 9"},
		"vmdk grains":          {disk.FormatVMDK, u64(20, 1<<40), errdefs.InvalidArgument, "grain size"},
		"vmdk tables":          {disk.FormatVMDK, u32(44, 1<<31), errdefs.InvalidArgument, "grain tables"},
		"vmdk directory":       {disk.FormatVMDK, u64(56, 1<<50), errdefs.DataLoss, "truncated"},
		"vmdk long descriptor": {disk.FormatVMDK, u64(36, 1<<62), errdefs.InvalidArgument, "descriptor"},
		"vmdk descriptor out":  {disk.FormatVMDK, u64(28, 1<<30), errdefs.DataLoss, "truncated"},
		"vmdk footer missing":  {disk.FormatVMDK, u64(56, 1<<64-1), errdefs.DataLoss, "footer"},
		"vmdk cut":             {disk.FormatVMDK, cut(40), errdefs.DataLoss, "truncated"},
		"vhdx sound":           {disk.FormatVHDX, same, ok, ""},
		"vhdx parent":          {disk.FormatVHDX, u32(1<<20+64<<10+4, 2), errdefs.InvalidArgument, "parent"},
		"vhdx parent locator":  {disk.FormatVHDX, put(1<<20+32, "\x2d\x5f\xd3\xa8\x0b\xb3\x4d\x45\xab\xf7\xd3\xd8\x48\x34\xab\x0c"), errdefs.InvalidArgument, "parent"},
		"vhdx absurd":          {disk.FormatVHDX, u64(1<<20+64<<10+8, 1<<60), errdefs.InvalidArgument, "64 TiB"},
		"vhdx open log":        {disk.FormatVHDX, u64(64<<10+48, 7), errdefs.InvalidArgument, "log"},
		"vhdx no header":       {disk.FormatVHDX, u32(64<<10, 0), errdefs.InvalidArgument, "no header"},
		"vhdx no regions":      {disk.FormatVHDX, u32(192<<10, 0), errdefs.InvalidArgument, "metadata"},
		"vhdx many regions":    {disk.FormatVHDX, u32(192<<10+8, 1<<31), errdefs.InvalidArgument, "regions"},
		"vhdx region out":      {disk.FormatVHDX, u64(192<<10+32, 1<<40), errdefs.DataLoss, "truncated"},
		"vhdx region wraps":    {disk.FormatVHDX, u64(192<<10+32, 1<<64-1), errdefs.DataLoss, "truncated"},
		"vhdx blocks":          {disk.FormatVHDX, u32(1<<20+64<<10, 3), errdefs.InvalidArgument, "block size"},
		"vhdx item":            {disk.FormatVHDX, u32(1<<20+32+20, 1<<31), errdefs.InvalidArgument, "metadata"},
		"vhdx cut":             {disk.FormatVHDX, cut(100 << 10), errdefs.DataLoss, "truncated"},
		"vhd sound":            {disk.FormatVHD, same, ok, ""},
		"vhd parent":           {disk.FormatVHD, func(b []byte) []byte { be.PutUint32(b[60:], 4); return b }, errdefs.InvalidArgument, "parent"},
		"vhd parent at end":    {disk.FormatVHD, func(b []byte) []byte { be.PutUint32(b[len(b)-512+60:], 4); return b }, errdefs.InvalidArgument, "parent"},
		"vhd absurd":           {disk.FormatVHD, func(b []byte) []byte { be.PutUint64(b[48:], 1<<63); return b }, errdefs.InvalidArgument, "64 TiB"},
		"vhd cut":              {disk.FormatVHD, cut(2000), errdefs.DataLoss, "truncated"},
		"vhd kind":             {disk.FormatVHD, u32(60, 0x09000000), errdefs.InvalidArgument, "type 9"},
	} {
		t.Run(name, func(t *testing.T) {
			b := map[vm.DiskFormat]func() []byte{
				disk.FormatVMDK: func() []byte { return vmdk(plainVMDK) }, disk.FormatVHDX: vhdx, disk.FormatVHD: vhd,
			}[c.format]()
			b = c.change(b)
			_, err := disk.Check(c.format, bytes.NewReader(b), int64(len(b)))
			if c.class == ok {
				if err != nil {
					t.Error(err)
				}
				return
			}
			if !errdefs.Is(err, c.class) || !strings.Contains(err.Error(), c.says) {
				t.Errorf("got %v (%v), want %v about %q", err, errdefs.ClassOf(err), c.class, c.says)
			}
		})
	}
	if _, err := disk.Check(vm.DiskRaw, bytes.NewReader(nil), 0); !errdefs.IsInvalid(err) {
		t.Errorf("raw: %v", err)
	}
}

// FuzzVMDK and its siblings: for any bytes, the check ends, its error has a class, and no accepted disk claims too much.
func FuzzVMDK(f *testing.F) {
	f.Add(vmdk(plainVMDK))
	f.Add(vmdk(strings.Replace(plainVMDK, "ffffffff", "deadbeef", 1)))
	f.Add([]byte("KDMV"))
	fuzz(f, disk.FormatVMDK)
}

func FuzzVHDX(f *testing.F) {
	f.Add(vhdx())
	f.Add([]byte("vhdxfile"))
	fuzz(f, disk.FormatVHDX)
}

func FuzzVHD(f *testing.F) {
	f.Add(vhd())
	f.Add([]byte("conectix"))
	fuzz(f, disk.FormatVHD)
}

func fuzz(f *testing.F, format vm.DiskFormat) {
	f.Fuzz(func(t *testing.T, b []byte) {
		size, err := disk.Check(format, bytes.NewReader(b), int64(len(b)))
		if err != nil && !errdefs.IsInvalid(err) && !errdefs.Is(err, errdefs.DataLoss) {
			t.Errorf("%v (%v)", err, errdefs.ClassOf(err))
		}
		if err == nil && (size <= 0 || size > qcow2.MaxVirtualSize) {
			t.Errorf("accepted with %d bytes", size)
		}
	})
}

func check(b []byte) error {
	q, err := qcow2.Parse(b[:min(len(b), qcow2.HeadSize)])
	if err != nil {
		return err
	}
	return q.Check(bytes.NewReader(b), int64(len(b)))
}
