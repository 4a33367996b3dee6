package vm

import (
	"strings"
	"testing"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/testkit/diff"
)

func onNetworks(list string) (out []NICSpec) {
	for name := range strings.FieldsSeq(list) {
		out = append(out, NICSpec{Network: name})
	}
	return out
}

func places(s Spec) (out []int) {
	for i := range s.NICs {
		out = append(out, s.Place(i))
	}
	return out
}

// An interface keeps its place while others come and go, and a guest that boots has places for the last of them.
func TestPlaces(t *testing.T) {
	s := Spec{NICs: onNetworks("a b c"), Hardware: &Hardware{NICs: []NICModel{"", NICE1000, NICE1000E}}}
	has := func(what string, s Spec, width, boot int, want ...int) {
		t.Helper()
		if d := diff.Of(want, places(s)); d != "" || s.Width() != width || s.BootNICs != boot {
			t.Errorf("%s: width %d, booted with %d\n%s", what, s.Width(), s.BootNICs, d)
		}
	}
	has("at first", s, 3, 0, 0, 1, 2)
	less := s.WithoutNIC(1, true)
	has("one less", less, 3, 3, 0, 2)
	if d := diff.Of([]NICModel{"", NICE1000E}, less.Hardware.NICs); d != "" {
		t.Errorf("models of the rest:\n%s", d)
	}
	has("its source is as it was", s, 3, 0, 0, 1, 2)
	place, err := less.FreePlace()
	if place != 1 || err != nil {
		t.Errorf("the free place: %d, %v", place, err)
	}
	more := less.WithNIC(NICSpec{Network: "d", Place: place}, true)
	has("another one in its place", more, 3, 3, 0, 2, 1)
	if d := diff.Of([]NICModel{"", NICE1000E, NICVirtio}, more.Hardware.NICs); d != "" {
		t.Errorf("models with the new one:\n%s", d)
	}
	if place, err = more.FreePlace(); place != 3 || err != nil {
		t.Errorf("the next free place: %d, %v", place, err)
	}
	again := more.WithNIC(NICSpec{Network: "e", Place: 3}, true)
	has("one more", again, 3, 3, 0, 2, 1, 3)
	has("booted", again.Booted(), 4, 0, 0, 2, 1, 3)
	has("created", again.Created(), 4, 0, 0, 1, 2, 3)
	has("taken from a stopped one", again.Booted().WithoutNIC(1, false), 4, 0, 0, 1, 3)
	if again.SameNICs(more) || !more.SameNICs(more.Clone()) || more.SameNICs(less.WithNIC(NICSpec{Network: "x", Place: 1}, true)) {
		t.Error("the same interfaces are those on the same networks in the same places")
	}
	full := Spec{NICs: onNetworks("a b c d e f g h i")}
	if _, err := full.FreePlace(); !errdefs.Is(err, errdefs.ResourceExhausted) {
		t.Errorf("no place is left: %v", err)
	}
	if _, err := (Spec{}).FreePlace(); !errdefs.IsFailedPrecondition(err) {
		t.Errorf("no interface: %v", err)
	}
}

// The record of a guest that does not have its own addresses yet stays in step with its interfaces.
func TestRecordOfInterfaces(t *testing.T) {
	r := Record{Spec: Spec{NICs: onNetworks("a b")}, NICs: []NIC{{Network: "a", MAC: "1"}, {Network: "b", MAC: "2"}}, Resume: &Resume{Clone: true, MACs: []string{"1", "2"}}}
	next := r.WithNIC(NICSpec{Network: "c", Place: 2}, NIC{Network: "c", MAC: "3"}, true).Unsettled(2)
	if !next.Itself() || len(next.Plugged()) != 2 || len(r.Resume.MACs) != 2 {
		t.Errorf("one that is moving: %+v, its source %+v", next, r)
	}
	next = next.Settled(2)
	if d := diff.Of([]NIC{{Network: "a", MAC: "1"}, {Network: "b", MAC: "2"}, {Network: "c", MAC: "3"}}, next.Plugged()); d != "" {
		t.Error(d)
	}
	gone := next.WithoutNIC(1, true)
	if d := diff.Of([]NIC{{Network: "a", MAC: "1"}, {Network: "c", MAC: "3", Place: 2}}, gone.NICs); d != "" || !gone.Itself() || len(gone.Moving) > 0 {
		t.Errorf("%+v\n%s", gone, d)
	}
	for ref, want := range map[string]int{"c": 1, "3": 1} {
		if i, err := gone.Spec.NICOn(ref, gone.NICs); i != want || err != nil {
			t.Errorf("%s: %d, %v", ref, i, err)
		}
	}
	if _, err := gone.Spec.NICOn("1", gone.NICs); !errdefs.IsInvalid(err) {
		t.Errorf("the first: %v", err)
	}
	for _, ref := range []string{"a", "b", ""} {
		if _, err := gone.Spec.NICOn(ref, gone.NICs); !errdefs.IsNotFound(err) {
			t.Errorf("%q: %v", ref, err)
		}
	}
}

// A guest that resumes elsewhere has each interface on the network that it was on.
func TestInOrderOf(t *testing.T) {
	has := func(list string) (out []NIC) {
		for _, n := range onNetworks(list) {
			out = append(out, NIC{Network: n.Network})
		}
		return out
	}
	for _, x := range []struct{ want, has, is string }{
		{"a b c", "a c b", "a c b"}, {"x b c", "a c b", "x c b"}, {"a b c", "a b c", "a b c"}, {"a b c", "a b d", "a b c"}, {"a b", "a b c", "a b"}, {"a b b", "a b b", "a b b"}, {"", "", ""},
	} {
		if d := diff.Of(onNetworks(x.is), InOrderOf(onNetworks(x.want), has(x.has))); d != "" {
			t.Errorf("%s of %s:\n%s", x.want, x.has, d)
		}
	}
}
