package volume

import (
	"maps"
	"slices"
	"unicode/utf8"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/vm"
)

// Named is what references to v are matched against.
func (v Volume) Named() vm.Named { return vm.Named{ID: v.ID, Name: v.Name, Owner: v.Owner} }

// Clone returns a copy of v that shares no memory with it.
func (v Volume) Clone() Volume {
	v.Attachments, v.Labels = slices.Clone(v.Attachments), maps.Clone(v.Labels)
	return v
}

// Named is what references to s are matched against.
func (s Snapshot) Named() vm.Named { return vm.Named{ID: s.ID, Name: s.Name, Owner: s.Owner} }

// Clone returns a copy of s that shares no memory with it.
func (s Snapshot) Clone() Snapshot {
	s.Labels = maps.Clone(s.Labels)
	return s
}

// RoundSize returns size, in bytes, rounded up to a multiple of Block. Errors: InvalidArgument unless a volume can have that size.
func RoundSize(size int64) (int64, error) {
	if size < MinSize || size > MaxSize {
		return 0, errdefs.Invalidf("invalid volume size of %d bytes; use %d (1 MiB) to %d (64 TiB)", size, MinSize, int64(MaxSize))
	}
	return (size + Block - 1) / Block * Block, nil
}

// Validate returns an InvalidArgument error unless the name, if there is one, and the labels of s fit an object of kind k. It ignores
// the size.
func (s Spec) Validate(k vm.Kind) error {
	if s.Name != "" {
		if err := k.ValidateName(s.Name); err != nil {
			return err
		}
	}
	if s.For != "" && !vm.ID(s.For).Valid() {
		return errdefs.Invalidf("it cannot be made for %.100q, which is no id", s.For)
	}
	return ValidateLabels(s.Labels)
}

// ValidateLabels returns an InvalidArgument error unless labels fit in a record: keys that are not empty, text in UTF-8, at most
// MaxLabels bytes.
func ValidateLabels(labels map[string]string) error {
	size := 0
	for k, v := range labels {
		switch size += len(k) + len(v); {
		case k == "":
			return errdefs.Invalidf("a label has an empty key; use KEY=VALUE")
		case !utf8.ValidString(k) || !utf8.ValidString(v):
			return errdefs.Invalidf("label %.100q is not text in UTF-8", k)
		case size > MaxLabels:
			return errdefs.Invalidf("the labels have more than %d bytes; use fewer or shorter ones", MaxLabels)
		}
	}
	return nil
}

// Wrapper is a Store around another one. As looks through it.
type Wrapper interface {
	Unwrap() Store
}

// As returns the ability T of s: a Maker, Snapshotter, Cloner or Carrier. false: s does not have it.
func As[T any](s Store) (T, bool) {
	for {
		if t, ok := s.(T); ok {
			return t, true
		}
		w, ok := s.(Wrapper)
		if !ok {
			var none T
			return none, false
		}
		s = w.Unwrap()
	}
}
