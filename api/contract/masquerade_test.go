package contract

import (
	"testing"

	"cocoonstack.io/cocoon/internal/testkit/diff"
)

func FuzzMasquerade(f *testing.F) {
	for _, text := range []string{"", "{}", `{"cidr": "10.0.2.0/24", "ports": [{"port": 80}]}`, `{"ports": [{"protocol": "UDP", "port": 1, "last": 2}]}`, "[]", `{"x": 1}`} {
		f.Add(text)
	}
	f.Fuzz(func(t *testing.T, text string) {
		m, err := ParseMasquerade(map[string]string{KeyMasquerade: text})
		if m == nil {
			if (err == nil) != (text == "") {
				t.Fatalf("%q: %v", text, err)
			}
			return
		}
		out := map[string]string{}
		m.Apply(out)
		again, err := ParseMasquerade(out)
		if err != nil {
			t.Fatal(err)
		}
		if len(m.Ports) == 0 {
			m.Ports = nil
		}
		if d := diff.Of(m, again); d != "" {
			t.Fatalf("%q: %s", text, d)
		}
	})
}
