package lvm

import (
	"encoding/json"
	"errors"
	"maps"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/vm"
	"cocoonstack.io/cocoon/internal/volume"
	"cocoonstack.io/cocoon/internal/volume/record"
)

func TestCheck(t *testing.T) {
	for _, bad := range []string{"", "vg", "/", "vg/", "/pool", "vg/pool/x", "-vg/pool", "vg/..", "./pool", "vg/a b", "vg/" + strings.Repeat("x", 128), "vg/é"} {
		if err := Check(bad); !errdefs.IsInvalid(err) {
			t.Errorf("%q: %v", bad, err)
		}
	}
	for _, good := range []string{"vg/pool", "vg0/thin-pool_1.a+b", "_/+"} {
		if err := Check(good); err != nil {
			t.Error(err)
		}
	}
	for _, limits := range [][2]int{{0, 90}, {91, 90}, {50, 101}} {
		if err := CheckLimits(limits[0], limits[1]); !errdefs.IsInvalid(err) {
			t.Errorf("%v: %v", limits, err)
		}
	}
	if _, err := New(t.Context(), Config{Dir: "x", Pool: "vg/pool"}); !errdefs.IsInvalid(err) {
		t.Errorf("a relative folder: %v", err)
	}
}

func TestDeviceName(t *testing.T) {
	for in, want := range map[[2]string]string{{"vg", "cocoon-a"}: "vg-cocoon--a", {"a-b", "c--d"}: "a--b-c----d"} {
		if got := deviceName(in[0], in[1]); got != want {
			t.Errorf("%v is %s, want %s", in, got, want)
		}
	}
}

// TestReport reads what lvm2 2.03.16 wrote.
func TestReport(t *testing.T) {
	text, err := os.ReadFile("testdata/lvs.json")
	if err != nil {
		t.Fatal(err)
	}
	all, extent, err := parseReport(text)
	if err != nil || extent != 4096 {
		t.Fatalf("extents of %d bytes, %v", extent, err)
	}
	if got := slices.Sorted(maps.Keys(all)); !slices.Equal(got, []string{"[lvol0_pmspare]", "cocoon-a", "cocoon-a2", "pool"}) {
		t.Errorf("there are %v", got)
	}
	if got, want := all["cocoon-a"], (logical{"cocoon-a", 3 << 20, true, []string{"cocoon"}, "pool", []string{"thin", "sparse"}}); !reflect.DeepEqual(got, want) {
		t.Errorf("it is %+v, want %+v", got, want)
	}
	if got := all["cocoon-a2"]; got.active || got.size != 1<<20 {
		t.Errorf("it is %+v", got)
	}
	for _, bad := range []string{
		"", "x", `{"report":[{"lv":[{"lv_name":"a"}]}]}`, `{"report":[{"lv":[{"lv_name":"a","lv_size":"-1","vg_extent_size":"4"}]}]}`,
		`{"report":[{"lv":[{"lv_name":"a","lv_size":"1","vg_extent_size":"4"},{"lv_name":"a","lv_size":"1","vg_extent_size":"4"}]}]}`,
		`{"report":[{"lv":[{"lv_name":"a","lv_size":"1.5g","vg_extent_size":"4"}]}]}`,
	} {
		if all, _, err := parseReport([]byte(bad)); err == nil {
			t.Errorf("%s is %+v", bad, all)
		}
	}
}

// FuzzReport checks that a report is refused, or has only values that a volume group can have.
func FuzzReport(f *testing.F) {
	text, err := os.ReadFile("testdata/lvs.json")
	if err != nil {
		f.Fatal(err)
	}
	f.Add(text)
	f.Add([]byte(`{"report":[{"lv":[]}]}`))
	f.Add([]byte(`{"report":[{"lv":[{"lv_name":"a","lv_size":"9223372036854775808","vg_extent_size":"0"}]}]}`))
	f.Fuzz(func(t *testing.T, text []byte) {
		all, extent, err := parseReport(text)
		if err != nil {
			if all != nil {
				t.Error("a report and an error")
			}
			return
		}
		for name, l := range all {
			if name != l.name || name == "" || l.size < 0 || extent <= 0 {
				t.Errorf("%q is %+v with extents of %d bytes", name, l, extent)
			}
		}
	})
}

const (
	poolState = "1 61/512 4/4800 - rw discard_passdown queue_if_no_space - 128 "
	poolTable = "253:0 253:1 128 0 0 "
)

// TestKernel reads what the device mapper of Linux 6.1 says.
func TestKernel(t *testing.T) {
	pool := func(state, table string) (filled, error) {
		return parsePool(target{kind: "thin-pool", params: state}, target{kind: "thin-pool", params: table})
	}
	good := filled{used: 4 * 64 << 10, size: 4800 * 64 << 10, metaUsed: 61 * 4096, metaSize: 512 * 4096}
	for name, c := range map[string]struct {
		state, table string
		change       func(*filled)
	}{
		"good":        {poolState, poolTable, func(*filled) {}},
		"no zeros":    {poolState, "253:0 253:1 128 0 1 skip_block_zeroing ", func(f *filled) { f.unsafe = true }},
		"full":        {strings.Replace(poolState, " rw ", " out_of_data_space ", 1), poolTable, func(f *filled) { f.fault = "it is full" }},
		"read only":   {strings.Replace(poolState, " rw ", " ro ", 1), poolTable, func(f *filled) { f.fault = "it is ro" }},
		"needs check": {strings.Replace(poolState, "space - ", "space needs_check ", 1), poolTable, func(f *filled) { f.fault = "its metadata need a check (lvconvert --repair)" }},
		"failed":      {"Fail", poolTable, func(f *filled) { *f = filled{fault: "it has failed (Fail)"} }},
	} {
		want := good
		c.change(&want)
		if got, err := pool(c.state, c.table); err != nil || got != want {
			t.Errorf("%s: %+v, %v; want %+v", name, got, err, want)
		}
	}
	for _, bad := range [][2]string{{poolState, ""}, {strings.Replace(poolState, "4/4800", "9/8", 1), poolTable}, {poolState, "1 2 0 4 0"}, {strings.Replace(poolState, "61/512", "x", 1), poolTable}} {
		if got, err := pool(bad[0], bad[1]); err == nil {
			t.Errorf("%q is %+v", bad, got)
		}
	}
	if _, err := parsePool(target{kind: "linear"}, target{kind: "linear"}); !errdefs.IsFailedPrecondition(err) {
		t.Errorf("no pool: %v", err)
	}
	for params, want := range map[string]int64{"512 511": 256 << 10, "0 -": 0, "Fail": -1, "": -1, "-5 1": -1} {
		got, err := parseThin(target{kind: "thin", params: params})
		if (err != nil) != (want < 0) || err == nil && got != want {
			t.Errorf("%q is %d, %v", params, got, err)
		}
	}
	if _, err := parseThin(target{kind: "linear", params: "512 511"}); err == nil {
		t.Error("another device")
	}
}

// FuzzKernel checks that no state of a pool or a volume has impossible figures.
func FuzzKernel(f *testing.F) {
	f.Add(poolState, poolTable)
	f.Add("Fail", "1 2 3 4 5 6")
	f.Add("0 0/0 9223372036854775807/9223372036854775807 - ro a b c", "1 2 9223372036854775807 4 5")
	f.Fuzz(func(t *testing.T, state, table string) {
		got, err := parsePool(target{kind: "thin-pool", params: state}, target{kind: "thin-pool", params: table})
		if err == nil && (got.used < 0 || got.used > got.size || got.metaUsed < 0 || got.metaUsed > got.metaSize) {
			t.Errorf("%q, %q: %+v", state, table, got)
		}
		if n, err := parseThin(target{kind: "thin", params: state}); err == nil && n < 0 {
			t.Errorf("%q: %d", state, n)
		}
	})
}

// FuzzRecord checks that a record is refused as DataLoss, or names only logical volumes that can be ours, whatever it says of the volume.
func FuzzRecord(f *testing.F) {
	id := vm.NewID()
	lv := prefix + string(id)
	for _, r := range []recorded[volume.Volume]{
		{state: state{Gone: []string{lv}}},
		{Object: volume.Volume{ID: id, Name: "a", Kind: Kind, Size: volume.MinSize}, state: state{LV: lv, Allocated: 5}},
		{Object: volume.Volume{ID: id, Name: "a", Kind: Kind, Size: volume.MinSize}, state: state{LV: lv, Gone: []string{"pool"}}},
		{Object: volume.Volume{ID: id, Name: "a", Kind: Kind, Size: volume.MinSize}, state: state{LV: "../" + lv}},
	} {
		text, err := json.Marshal(r)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(text)
	}
	x := newTable(vm.Volumes, "/none", record.Volume)
	f.Fuzz(func(t *testing.T, text []byte) {
		rec, err := x.decode(text, id)
		if err != nil {
			if !errdefs.Is(err, errdefs.DataLoss) {
				t.Error(err)
			}
			return
		}
		for _, lv := range append(slices.Clone(rec.Gone), rec.LV) {
			if lv != "" && !ours(lv) {
				t.Errorf("it names %q", lv)
			}
		}
		if rec.LV != "" && (rec.Object.ID != id || slices.Contains(rec.Gone, rec.LV)) {
			t.Errorf("accepted %+v", rec)
		}
	})
}

// program puts a program called lvm into the PATH.
func program(t *testing.T, script string) {
	t.Helper()
	dir := t.TempDir()
	if script != "" {
		if err := os.WriteFile(filepath.Join(dir, "lvm"), []byte("#!/bin/sh\n"+script), 0o700); err != nil { //nolint:gosec // a program
			t.Fatal(err)
		}
	}
	t.Setenv("PATH", dir)
}

// TestCommandFails: what an lvm says is in the error, in one line, and a missing one has a remedy.
func TestCommandFails(t *testing.T) {
	r, err := newRunner(t.Context(), filepath.Join(t.TempDir(), "commands"))
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	program(t, "echo out; echo '  WARNING: not that' >&2; echo '  Volume group \"x\" not found' >&2; echo '  no' >&2; exit 5")
	if out, err := r.run(t.Context(), "lvs", "x"); err == nil || err.Error() != `lvm lvs: exit status 5: Volume group "x" not found; no` || out != nil {
		t.Errorf("%s, %v", out, err)
	}
	program(t, "")
	if _, err := r.run(t.Context(), "lvs"); !errdefs.IsUnavailable(err) || !strings.Contains(err.Error(), "install lvm2") {
		t.Errorf("without the program: %v", err)
	}
	program(t, `echo "$@"; echo "$LC_ALL"`)
	if out, err := r.run(t.Context(), "lvs", "-o", "a b"); err != nil || string(out) != "lvs --config devices{scan_lvs=0} -q -o a b\nC\n" {
		t.Errorf("%s, %v", out, err)
	}
}

// TestCommandKeepsTheLock: the lock of a process that ends lasts until its lvm has ended too.
func TestCommandKeepsTheLock(t *testing.T) {
	dir := t.TempDir()
	path, begun, end := filepath.Join(dir, "commands"), filepath.Join(dir, "begun"), filepath.Join(dir, "end")
	if err := errors.Join(unix.Mkfifo(begun, 0o600), unix.Mkfifo(end, 0o600)); err != nil {
		t.Fatal(err)
	}
	r, err := newRunner(t.Context(), path)
	if err != nil {
		t.Fatal(err)
	}
	program(t, "echo >"+begun+"; read -r line <"+end)
	ended := make(chan error, 1)
	go func() { _, err := r.run(t.Context(), "lvs"); ended <- err }()
	if _, err := os.ReadFile(begun); err != nil {
		t.Fatal(err)
	}
	null, err := os.Open(os.DevNull)
	if err != nil {
		t.Fatal(err)
	}
	defer null.Close()
	defer r.Close()
	if err := unix.Dup3(int(null.Fd()), int(r.lock.Fd()), unix.O_CLOEXEC); err != nil { // closes the lock, as the end of the process does
		t.Fatal(err)
	}
	other, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer other.Close()
	if err := unix.Flock(int(other.Fd()), unix.LOCK_EX|unix.LOCK_NB); !errors.Is(err, unix.EWOULDBLOCK) {
		t.Errorf("while an lvm runs: %v", err)
	}
	if err := os.WriteFile(end, []byte("x\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := <-ended; err != nil {
		t.Error(err)
	}
	next, err := newRunner(t.Context(), path)
	if err != nil {
		t.Fatal(err)
	}
	next.Close()
}
