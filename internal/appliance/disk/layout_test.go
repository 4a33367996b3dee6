package disk

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/journal/journaltest"
)

// An installation has the partitions that the build of the image has, and data in the rest.
func TestPlan(t *testing.T) {
	const mib = 2048 // sectors
	for _, tt := range []struct{ size, slot, data int64 }{
		{MinimumSize, 2048, (16384 - 1 - 256 - 2*2048) * mib},
		{20*gibibyte + mebibyte/2, 2048, (20480 - 1 - 256 - 2*2048) * mib},
		{16 * gibibyte, 64, (16384 - 1 - 256 - 2*64) * mib},
		{8 << 40, 2048, (2<<20 - 1 - 1 - 256 - 2*2048) * mib}, // a table ends a sector before 2 TiB
	} {
		l, err := Plan(tt.size, tt.slot)
		if err != nil {
			t.Fatal(err)
		}
		slot := uint32(tt.slot * mib)
		want := Layout{{0xef, 2048, 256 * mib}, {0x83, 2048 + 256*mib, slot}, {0x83, 2048 + 256*mib + slot, slot}, {0x8e, 2048 + 256*mib + 2*slot, uint32(tt.data)}}
		if l != want {
			t.Errorf("%d bytes, slots of %d MiB: %+v, want %+v", tt.size, tt.slot, l, want)
		}
		record := l.Record(Signature)
		if id, entries, err := ReadTable(bytes.NewReader(record[:])); err != nil || id != Signature || entries != [4]Entry(l) {
			t.Errorf("the record has %x %+v, %v", id, entries, err)
		}
	}
	for _, tt := range []struct{ size, slot int64 }{{MinimumSize - 1, 2048}, {MinimumSize, 8192}, {MinimumSize, 0}, {MinimumSize, 1 << 20}, {0, 64}} {
		if _, err := Plan(tt.size, tt.slot); !errdefs.IsInvalid(err) {
			t.Errorf("%+v: %v", tt, err)
		}
	}
}

func TestGrown(t *testing.T) {
	const gib = gibibyte / SectorSize
	l, err := Plan(MinimumSize, 2048)
	if err != nil {
		t.Fatal(err)
	}
	had := l[3]
	for _, tt := range []struct {
		size int64
		more int64
	}{
		{MinimumSize, 0},
		{MinimumSize + 63*mebibyte, 0},
		{MinimumSize + 64*mebibyte, 64 * sectorsPerMiB},
		{2*MinimumSize + 1000, 16 * gib},
		{4 << 40, maxSectors/sectorsPerMiB*sectorsPerMiB - 16*gib},
	} {
		now, err := grown(l, tt.size)
		if want := (Entry{had.Kind, had.Start, had.Size + uint32(tt.more)}); err != nil || now != want {
			t.Errorf("%d bytes: %+v, %v, want %+v", tt.size, now, err, want)
		}
	}
	for name, change := range map[string]func(*Layout){
		"another type":      func(l *Layout) { l[3].Kind = 0x83 },
		"no last partition": func(l *Layout) { l[3] = Entry{} },
		"it is not last":    func(l *Layout) { l[1].Start = had.Start + had.Size },
		"a smaller disk":    func(l *Layout) { l[3].Size++ },
	} {
		x := l
		change(&x)
		if now, err := grown(x, MinimumSize); !errdefs.IsFailedPrecondition(err) {
			t.Errorf("%s: %+v, %v", name, now, err)
		}
	}
}

func TestGrowth(t *testing.T) {
	const extent = 4 * mebibyte
	down := func(n int64) int64 { return n / 100 * 95 / extent * extent }
	for name, tt := range map[string]struct {
		v          volumes
		perm, thin int64
	}{
		"nothing is free":  {volumes{10 * gibibyte, extent, 0, map[string]int64{permVolume: 3 * gibibyte, pool: 7 * gibibyte}}, 3 * gibibyte, 7 * gibibyte},
		"much more":        {volumes{100 * gibibyte, extent, 98 * gibibyte, map[string]int64{permVolume: gibibyte, pool: gibibyte}}, 25 * gibibyte, down(75 * gibibyte)},
		"less than wished": {volumes{100 * gibibyte, extent, gibibyte, map[string]int64{permVolume: 2 * gibibyte, pool: 97 * gibibyte}}, 3 * gibibyte, 97 * gibibyte},
		"no pool yet":      {volumes{8 * gibibyte, extent, 6 * gibibyte, map[string]int64{permVolume: 2 * gibibyte}}, 2 * gibibyte, down(6 * gibibyte)},
	} {
		perm, thin, err := growth(tt.v)
		if err != nil || perm != tt.perm || thin != tt.thin {
			t.Errorf("%s: %d, %d, %v, want %d, %d", name, perm, thin, err, tt.perm, tt.thin)
		}
	}
	// What has grown once does not grow again.
	v := volumes{64 * gibibyte, extent, 62 * gibibyte, map[string]int64{permVolume: gibibyte, pool: gibibyte}}
	perm, thin, err := growth(v)
	if err != nil {
		t.Fatal(err)
	}
	v.sizes = map[string]int64{permVolume: perm, pool: thin}
	v.free = v.size - perm - thin
	if perm2, thin2, err := growth(v); err != nil || perm2 != perm || thin2 != thin {
		t.Errorf("a second time: %d, %d, %v, not %d, %d", perm2, thin2, err, perm, thin)
	}
}

// grownDisk is a machine whose disk has grown to 32 GiB, and whose LVM is told. It stops at the step that is given.
type grownDisk struct {
	t     *testing.T
	dir   string
	g     *Grower
	steps []string
	fails string
	v     volumes
	had   Entry
}

var errCut = errors.New("the power is cut")

func newGrownDisk(t *testing.T) *grownDisk {
	t.Helper()
	sysBlock, dev := machineWith(t, map[string]uint32{"vda": Signature}, typeLVM)
	l, err := Plan(MinimumSize, 2048)
	if err != nil {
		t.Fatal(err)
	}
	record := l.Record(Signature)
	if err := os.WriteFile(filepath.Join(dev, "vda"), record[:], 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(sysBlock, "vda", "size"), []byte(strconv.FormatInt(2*MinimumSize/SectorSize, 10)+"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	d := &grownDisk{t: t, dir: dev, v: volumes{size: 11 * gibibyte, extent: 4 * mebibyte, sizes: map[string]int64{permVolume: 3 * gibibyte, pool: 7 * gibibyte}}}
	d.g = &Grower{
		Root: Root{Signature, 2}, Group: Group{Run: d.run, Log: slog.New(slog.DiscardHandler)}, Documents: journaltest.NewDocuments(),
		SysBlock: sysBlock, Dev: dev, Log: slog.New(slog.DiscardHandler),
	}
	d.had = l[3]
	return d
}

func (d *grownDisk) run(_ context.Context, program string, args ...string) ([]byte, error) {
	words := strings.Join(append([]string{program}, args...), " ")
	used := d.v.sizes[permVolume] + d.v.sizes[pool]
	n := func(n int64) string { return strconv.FormatInt(n, 10) }
	switch {
	case strings.HasPrefix(words, "lvm vgs"):
		return []byte(`{"report":[{"vg":[{"vg_name":"capsule","vg_size":"` + n(d.v.size) + `","vg_extent_size":"` + n(d.v.extent) + `","vg_free":"` + n(d.v.size-used) + `"}]}]}`), nil
	case strings.HasPrefix(words, "lvm lvs"):
		return []byte(`{"report":[{"lv":[{"lv_name":"lv_perm","lv_size":"` + n(d.v.sizes[permVolume]) + `"},{"lv_name":"thinpool","lv_size":"` + n(d.v.sizes[pool]) + `"}]}]}`), nil
	}
	d.steps = append(d.steps, strings.Join(append([]string{program}, args[:min(1, len(args))]...), " "))
	if d.fails != "" && strings.Contains(words, d.fails) {
		return nil, errCut
	}
	switch {
	case strings.HasPrefix(words, "lvm pvresize"):
		if d.entry() == d.had {
			d.t.Error("LVM is told before the partition has grown")
		}
		d.v.size = 28 * gibibyte
	case strings.HasPrefix(words, "lvm lvextend"):
		to, err := strconv.ParseInt(strings.TrimSuffix(args[3], "b"), 10, 64)
		if err != nil {
			d.t.Fatal(err)
		}
		d.v.sizes[strings.TrimPrefix(args[4], "capsule/")] = to
	}
	return nil, nil
}

func (d *grownDisk) entry() Entry {
	_, entries, err := tableOf(filepath.Join(d.dir, "vda"))
	if err != nil {
		d.t.Fatal(err)
	}
	return entries[DataPartition-1]
}

// Wherever growing stops, the next start finishes it. Without somebody who asks, nothing grows.
func TestGrow(t *testing.T) {
	d := newGrownDisk(t)
	before := d.entry()
	if device, size, room, err := d.g.Disk(); err != nil || filepath.Base(device) != "vda" || size != 2*MinimumSize || room != MinimumSize {
		t.Errorf("%s, %d, %d, %v", device, size, room, err)
	}
	if err := d.g.Resume(t.Context()); err != nil || d.entry() != before || len(d.steps) != 0 {
		t.Errorf("it grew by itself: %q, %v", d.steps, err)
	}
	for _, fails := range []string{"lvm pvresize", "capsule/lv_perm", "resize2fs", "capsule/thinpool", ""} {
		t.Run("cut at "+fails, func(t *testing.T) {
			d := newGrownDisk(t)
			d.fails = fails
			_, err := d.g.Grow(t.Context())
			if errors.Is(err, errCut) != (fails != "") {
				t.Fatal(err)
			}
			if fails == "capsule/thinpool" && d.v.sizes[permVolume] != 7*gibibyte {
				t.Errorf("/perm has %d", d.v.sizes[permVolume])
			}
			d.fails = ""
			if err := d.g.Resume(t.Context()); err != nil {
				t.Fatal(err)
			}
			if got := d.entry(); got.Size != before.Size+uint32(MinimumSize/SectorSize) || got.Start != before.Start || got.Kind != before.Kind {
				t.Errorf("the partition is %+v", got)
			}
			if d.v.sizes[permVolume] != 7*gibibyte || d.v.sizes[pool] <= 18*gibibyte {
				t.Errorf("the volumes are %v", d.v.sizes)
			}
			if _, _, room, err := d.g.Disk(); err != nil || room != 0 {
				t.Errorf("there is still room: %d, %v", room, err)
			}
			had := len(d.steps)
			if err := d.g.Resume(t.Context()); err != nil || len(d.steps) != had {
				t.Errorf("it grows again: %q, %v", d.steps[had:], err)
			}
		})
	}
}

// A disk that is not laid out as ours is refused, now and at the next start.
func TestGrowForeignDisk(t *testing.T) {
	d := newGrownDisk(t)
	path := filepath.Join(d.dir, "vda")
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	binary.LittleEndian.PutUint32(b[tables+8:], 30<<30/SectorSize) // the first partition is behind the last one
	if err := os.WriteFile(path, b, 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := d.g.Grow(t.Context()); !errdefs.IsFailedPrecondition(err) {
		t.Error(err)
	}
	if err := d.g.Resume(t.Context()); err != nil || len(d.steps) != 0 {
		t.Errorf("%q, %v", d.steps, err)
	}
	if now, err := os.ReadFile(path); err != nil || !bytes.Equal(now, b) {
		t.Errorf("the table changed, or %v", err)
	}
}

// lossy is a disk that keeps nothing.
type lossy struct{ *bytes.Reader }

func (lossy) WriteAt(p []byte, _ int64) (int, error) { return len(p), nil }

func TestTableIsReadBack(t *testing.T) {
	l, err := Plan(MinimumSize, 2048)
	if err != nil {
		t.Fatal(err)
	}
	record := l.Record(Signature)
	more := l[3]
	more.Size++
	if err := setSize(lossy{bytes.NewReader(record[:])}, more); !errdefs.Is(err, errdefs.DataLoss) {
		t.Error(err)
	}
	if err := setSize(lossy{bytes.NewReader(nil)}, more); !errors.Is(err, io.EOF) {
		t.Error(err)
	}
}

// FuzzTable reads any first sector: no partition grows over another one or the end of the disk.
func FuzzTable(f *testing.F) {
	l, err := Plan(MinimumSize, 2048)
	if err != nil {
		f.Fatal(err)
	}
	record := l.Record(Signature)
	f.Add(record[:], 2*MinimumSize)
	f.Add(make([]byte, SectorSize), int64(0))
	f.Fuzz(func(t *testing.T, b []byte, size int64) {
		_, entries, err := ReadTable(bytes.NewReader(b))
		if err != nil || size < 0 || size > 1<<60 {
			return
		}
		now, err := grown(entries, size)
		if err != nil {
			return
		}
		if was := entries[DataPartition-1]; now.Start != was.Start || now.Kind != was.Kind || now.Size < was.Size || (int64(now.Start)+int64(now.Size))*SectorSize > size {
			t.Errorf("%+v became %+v on a disk of %d bytes", was, now, size)
		}
	})
}
