package contract

import (
	"strings"
	"testing"

	"cocoonstack.io/cocoon/internal/testkit/diff"
)

func TestParseNetworks(t *testing.T) {
	for text, want := range map[string][]Attachment{
		"":                    nil,
		"[]":                  {},
		"lab":                 {{Name: "lab"}},
		" ns/lab , dmz@eth2 ": {{Name: "lab", Namespace: "ns"}, {Name: "dmz", Interface: "eth2"}},
		`[{"name":"lab"}]`:    {{Name: "lab"}},
		`[{"name": "lab", "namespace": "ns", "interface": "eth1"}]`: {{Name: "lab", Namespace: "ns", Interface: "eth1"}},
	} {
		got, err := ParseNetworks(map[string]string{KeyNetworks: text})
		if d := diff.Of(want, got); err != nil || d != "" {
			t.Errorf("%q: %v %s", text, err, d)
		}
	}
	for text, want := range map[string]string{
		"lab,lab":                    "names network lab twice",
		"lab,":                       "no name of a network",
		"a/b/c":                      "no name of a network",
		"-/lab":                      "no namespace",
		"lab@net1":                   "its guest calls it eth1",
		"a,b,c,d,e,f,g,h,i":          "names 9 networks, and 8 are possible",
		`[{"name":"lab","mac":"x"}]`: "must be JSON like",
		`[{"name":"lab"}] x`:         "must be JSON like",
		`{"name":"lab"}`:             "no name of a network",
	} {
		got, err := ParseNetworks(map[string]string{KeyNetworks: text})
		if err == nil || !strings.Contains(err.Error(), want) || got != nil {
			t.Errorf("%q: %v %v; want %s", text, got, err, want)
		}
	}
}

func FuzzNetworks(f *testing.F) {
	for _, text := range []string{"lab", "ns/lab@eth1,dmz", `[{"name":"lab"}]`, "[", "@", "/"} {
		f.Add(text)
	}
	f.Fuzz(func(t *testing.T, text string) {
		list, err := ParseNetworks(map[string]string{KeyNetworks: text})
		if err != nil && list != nil || len(list) > MaxNetworks {
			t.Fatalf("%q: %v %v", text, list, err)
		}
		seen := map[string]bool{}
		for _, a := range list {
			if seen[a.Name] || !networkName.MatchString(a.Name) {
				t.Fatalf("%q: %v", text, list)
			}
			seen[a.Name] = true
		}
		if out := ParseNetworkStatus(map[string]string{KeyNetworkStatus: text}); NetworkStatusText(out) == "" && len(out) > 0 {
			t.Fatalf("%q: %v", text, out)
		}
	})
}
