package diff

import (
	"strings"
	"testing"
	"time"
)

type inner struct {
	list []string
	at   time.Time
}

type outer struct {
	Name  string
	Other string
	in    *inner
}

func TestOf(t *testing.T) {
	at := time.Unix(1, 0)
	for name, tt := range map[string]struct {
		want, got outer
		says      []string // in this order; none: they are equal
	}{
		"equal":            {outer{Name: "a", in: &inner{list: []string{"x"}}}, outer{Name: "a", in: &inner{list: []string{"x"}}}, nil},
		"field":            {outer{Name: "a", Other: "same"}, outer{Name: "b", Other: "same"}, []string{"-want +got:", "\n-", `"a"`, "\n+", `"b"`}},
		"unexported":       {outer{in: &inner{list: []string{"x"}}}, outer{in: &inner{list: []string{"y"}}}, []string{"\n-", "list", `"x"`, "\n+", "list", `"y"`}},
		"nil is not empty": {outer{in: &inner{}}, outer{in: &inner{list: []string{}}}, []string{"\n-", "nil", "\n+", "{}"}},
		"no pointer":       {outer{in: &inner{}}, outer{}, []string{"\n-", "inner", "\n+", "nil"}},
		"two time zones":   {outer{in: &inner{at: at.UTC()}}, outer{in: &inner{at: at.In(time.FixedZone("X", 3600))}}, []string{"\n-", "at", "UTC", "\n+", "at", "X"}},
	} {
		got := Of(tt.want, tt.got)
		if (got == "") != (tt.says == nil) {
			t.Errorf("%s: %q", name, got)
		}
		rest := got
		for _, s := range tt.says {
			_, after, ok := strings.Cut(rest, s)
			if !ok {
				t.Errorf("%s: no %q where it should be in %s", name, s, got)
			}
			rest = after
		}
		if strings.Count(got, "same") > 1 {
			t.Errorf("%s: what is equal is said twice:\n%s", name, got)
		}
	}
}
