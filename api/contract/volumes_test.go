package contract

import (
	"strings"
	"testing"

	"cocoonstack.io/cocoon/internal/testkit/diff"
)

func TestVolumes(t *testing.T) {
	for text, want := range map[string]map[string]string{
		"":                               nil,
		"data=claim":                     {"data": "claim"},
		"a=x,b=y.z-1":                    {"a": "x", "b": "y.z-1"},
		strings.Repeat("n", 63) + "=c":   {strings.Repeat("n", 63): "c"},
		"data=" + strings.Repeat("c", 9): {"data": "ccccccccc"},
	} {
		got, err := ParseVolumes(map[string]string{KeyVolumes: text})
		if err != nil {
			t.Errorf("%q: %v", text, err)
		}
		if d := diff.Of(want, got); d != "" {
			t.Errorf("%q:\n%s", text, d)
		}
		if back := VolumesText(got); back != text {
			t.Errorf("%q is written as %q", text, back)
		}
	}
	for _, text := range []string{"data", "data=", "=claim", "a=x,a=y", "a=x,", "A=x", "a=x y", "a=ns/x", "a=../x", strings.Repeat("n", 64) + "=c", "a=" + strings.Repeat("c", 254)} {
		if got, err := ParseVolumes(map[string]string{KeyVolumes: text}); err == nil {
			t.Errorf("%q is read as %v", text, got)
		}
	}
}

func TestPlugged(t *testing.T) {
	list := []Plugged{{Volume: "a", Claim: "x", ID: "01", Serial: "vol-1"}, {Volume: "b", Claim: "y", Why: "it is not bound"}}
	if d := diff.Of(list, ParsePlugged(map[string]string{KeyPlugged: PluggedText(list)})); d != "" {
		t.Error(d)
	}
	for _, text := range []string{"", "nonsense", "{}", "[1]"} {
		if got := ParsePlugged(map[string]string{KeyPlugged: text}); len(got) != 0 {
			t.Errorf("%q is read as %v", text, got)
		}
	}
	if PluggedText(nil) != "" {
		t.Error("nothing is a text")
	}
}
