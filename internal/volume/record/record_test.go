package record

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"reflect"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/testkit/diff"
	"cocoonstack.io/cocoon/internal/vm"
	"cocoonstack.io/cocoon/internal/volume"
)

// kind is that of the records in these tests.
const kind = "file"

var now = time.Now().UTC().Round(0)

// FuzzRecord checks that a record is refused as DataLoss, or has only values that a store can have written: it fits the limits, and is
// the same after it is written and read again.
func FuzzRecord(f *testing.F) {
	id, user := vm.NewID(), vm.NewID()
	for _, v := range []any{
		volume.Volume{},
		volume.Volume{ID: id, Name: "a", Kind: kind, Size: volume.MinSize, CreatedAt: now, Labels: map[string]string{"k": "v"}, From: string(user)},
		volume.Volume{ID: id, Name: "a", Owner: vm.Owner{Namespace: "n"}, Kind: kind, Size: volume.MaxSize, Attachments: []volume.Attachment{{VM: user, Since: now}}},
		volume.Volume{ID: id, Name: "a", Kind: kind, Size: 1 << 30, Attachments: []volume.Attachment{{VM: user, Mode: volume.Mode{ReadOnly: true}}, {VM: id, Mode: volume.Mode{ReadOnly: true}}}},
		volume.Volume{ID: id, Name: "a", Kind: kind, Size: 1 << 30, Attachments: []volume.Attachment{{VM: user, Mode: volume.Mode{Shared: true}}, {VM: id, Mode: volume.Mode{Shared: true, ReadOnly: true}}}},
		volume.Volume{ID: id, Name: "a", Kind: kind, Size: 1 << 30, Attachments: []volume.Attachment{{VM: user}, {VM: user}}},
		volume.Volume{ID: "x", Name: "../a", Kind: "lvm", Size: -1},
		volume.Snapshot{ID: id, Name: "a", Kind: kind, Size: volume.MinSize, Volume: user, Source: "b", CreatedAt: now},
	} {
		text, err := json.Marshal(v)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(text)
	}
	f.Add([]byte(`{"id":1}`))
	f.Add([]byte(`null`))
	f.Fuzz(func(t *testing.T, text []byte) {
		if v, err := Volume(text, kind); err == nil {
			checkParsed(t, v.Named(), v.Size)
			again(t, v, Volume)
			writers, alone := 0, 0
			for _, a := range v.Attachments {
				if !a.ReadOnly {
					writers++
				}
				if !a.Shared {
					alone++
				}
			}
			if len(v.Attachments) > 1 && writers > 0 && alone > 0 {
				t.Errorf("attached as %+v", v.Attachments)
			}
		} else if !errdefs.Is(err, errdefs.DataLoss) {
			t.Error(err)
		}
		if s, err := Snapshot(text, kind); err == nil {
			checkParsed(t, s.Named(), s.Size)
			again(t, s, Snapshot)
		} else if !errdefs.Is(err, errdefs.DataLoss) {
			t.Error(err)
		}
	})
}

func checkParsed(t *testing.T, n vm.Named, size int64) {
	t.Helper()
	if !n.ID.Valid() || vm.ValidateName(n.Name) != nil || size < volume.MinSize || size > volume.MaxSize || size%volume.Block != 0 {
		t.Errorf("accepted %+v with %d bytes", n, size)
	}
}

func again[R any](t *testing.T, rec R, parse func([]byte, string) (R, error)) {
	t.Helper()
	text, err := json.MarshalIndent(rec, "", "  ")
	if err != nil {
		t.Fatal(err)
	}
	got, err := parse(text, kind)
	if err != nil {
		t.Fatalf("written and read again: %v\n%s", err, text)
	}
	if other, err := json.MarshalIndent(got, "", "  "); err != nil || !reflect.DeepEqual(text, other) {
		t.Errorf("written and read again: %s, %v; want %s", other, err, text)
	}
}

// TestLargestRecord: whatever the contract allows can be written and read again.
func TestLargestRecord(t *testing.T) {
	v := volume.Volume{ID: vm.NewID(), Name: "a", Kind: kind, Size: volume.MaxSize, From: string(vm.NewID()), CreatedAt: now, Labels: map[string]string{}}
	for n := range volume.MaxLabels / 3 {
		v.Labels[string([]byte{1 + byte(n)%127, 1 + byte(n>>7)%127, 1 + byte(n>>14)})] = ""
	}
	for range MaxAttachments {
		v.Attachments = append(v.Attachments, volume.Attachment{VM: vm.NewID(), Mode: volume.Mode{ReadOnly: true, Shared: true}, Since: now})
	}
	path := t.TempDir() + "/volume.json"
	if err := Write(path, v); err != nil {
		t.Fatal(err)
	}
	text, err := Read(path)
	if err != nil {
		t.Fatal(err)
	}
	if got, err := Volume(text, kind); err != nil || !reflect.DeepEqual(got, v) {
		t.Errorf("%d bytes of record: %v", len(text), err)
	}
	if _, err := Admit(v, vm.NewID(), volume.Mode{ReadOnly: true}); !errdefs.Is(err, errdefs.ResourceExhausted) {
		t.Errorf("one reader more: %v", err)
	}
}

func TestFull(t *testing.T) {
	for _, no := range []error{unix.ENOSPC, unix.EDQUOT, unix.EFBIG} {
		if err := Full(fmt.Errorf("write: %w", &os.PathError{Err: no})); !errdefs.Is(err, errdefs.ResourceExhausted) || !errors.Is(err, no) {
			t.Errorf("%v: %v", no, err)
		}
	}
	if err := Full(unix.EIO); errdefs.ClassOf(err) != errdefs.Internal {
		t.Error(err)
	}
	if err := Full(errdefs.NotFoundf("x")); !errdefs.IsNotFound(err) {
		t.Error(err)
	}
}

// The record of an earlier release, which knows no shared volumes, is read as it is.
func TestRecordOfEarlierRelease(t *testing.T) {
	id, one, two := vm.NewID(), vm.NewID(), vm.NewID()
	text := fmt.Sprintf(`{"id": %q, "name": "a", "kind": "file", "size": 1048576, "attachments": [
		{"vm": %q, "read_only": true, "since": "2026-01-02T03:04:05Z"}, {"vm": %q, "read_only": true, "since": "2026-01-02T03:04:05Z"}],
		"created_at": "2026-01-02T03:04:05Z"}`, id, one, two)
	got, err := Volume([]byte(text), kind)
	if err != nil {
		t.Fatal(err)
	}
	at := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	reads := volume.Mode{ReadOnly: true}
	want := volume.Volume{ID: id, Name: "a", Kind: kind, Size: 1 << 20, CreatedAt: at, Attachments: []volume.Attachment{{VM: one, Mode: reads, Since: at}, {VM: two, Mode: reads, Since: at}}}
	if d := diff.Of(want, got); d != "" {
		t.Error(d)
	}
	again(t, got, Volume)
}
