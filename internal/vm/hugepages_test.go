package vm

import (
	"encoding/json"
	"testing"

	"cocoonstack.io/cocoon/internal/errdefs"
)

func TestHugePages(t *testing.T) {
	for text, want := range map[string]HugePages{`{}`: 0, `{"huge_pages": true}`: HugePages2M, `{"huge_pages": 1073741824}`: HugePages1G} {
		var h Hardware
		if err := json.Unmarshal([]byte(text), &h); err != nil || h.HugePages != want {
			t.Errorf("%s: %d %v", text, h.HugePages, err)
		}
	}
	for _, p := range AllHugePages {
		if got, err := ParseHugePages(p.String()); err != nil || got != p {
			t.Errorf("%s: %d %v", p, got, err)
		}
		s := Spec{Memory: 2 << 30, Hardware: &Hardware{HugePages: p}}
		if err := s.validateHugePages(); err != nil {
			t.Error(err)
		}
		s.Memory += 1 << 20
		if err := s.validateHugePages(); !errdefs.Is(err, errdefs.InvalidArgument) {
			t.Errorf("odd memory of pages of %s: %v", p, err)
		}
	}
	if _, err := ParseHugePages("4Ki"); !errdefs.Is(err, errdefs.InvalidArgument) {
		t.Error(err)
	}
	if err := (Spec{Memory: 1 << 30, Hardware: &Hardware{HugePages: 4096}}).validateHugePages(); !errdefs.Is(err, errdefs.InvalidArgument) {
		t.Error(err)
	}
}
