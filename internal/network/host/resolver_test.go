package host

import (
	"fmt"
	"strings"
	"testing"
)

func TestParseResolvConf(t *testing.T) {
	for text, want := range map[string]string{
		"": "[]",
		"nameserver 127.0.0.53\nnameserver ::1\n":      "[]",
		"search x\nnameserver 9.9.9.9 # c\nnameserver": "[9.9.9.9]",
		"#nameserver 1.1.1.1\n\tnameserver\t8.8.8.8\n": "[8.8.8.8]",
		strings.Repeat("nameserver 1.2.3.4\n", 5):      "[1.2.3.4 1.2.3.4 1.2.3.4]",
	} {
		if got := fmt.Sprint(parseResolvConf(text)); got != want {
			t.Errorf("%q: %s, want %s", text, got, want)
		}
	}
}

func TestParseSearches(t *testing.T) {
	for text, want := range map[string]string{
		"":                                 "[]",
		"nameserver 9.9.9.9\nsearch .\n":   "[]",
		"domain a.b\nsearch c.d e_1 . x;y": "[c.d e_1]",
	} {
		if got := fmt.Sprint(parseSearches(text)); got != want {
			t.Errorf("%q: %s, want %s", text, got, want)
		}
	}
}
