package contract

import (
	"strings"
	"testing"
	"time"
)

func TestParseSticky(t *testing.T) {
	for text, want := range map[string]Sticky{
		"": {}, "wait": {Asked: true}, "never": {Asked: true, Never: true}, "10m": {Asked: true, Wait: new(10 * time.Minute)}, "0s": {Asked: true, Wait: new(time.Duration(0))},
	} {
		got, err := ParseSticky(map[string]string{KeySticky: text})
		if err != nil || got.Asked != want.Asked || got.Never != want.Never || (got.Wait == nil) != (want.Wait == nil) || got.Wait != nil && *got.Wait != *want.Wait {
			t.Errorf("%q: %+v, %v", text, got, err)
		}
	}
	for policy, asked := range map[string]bool{"hibernate": true, "delete": false, "": false} {
		if got, err := ParseSticky(map[string]string{KeyDeletionPolicy: policy}); err != nil || got.Asked != asked {
			t.Errorf("deletion policy %q: %+v, %v", policy, got, err)
		}
	}
	for _, text := range []string{"true", "-5s", "10", "1ms", "Wait", " wait"} {
		if got, err := ParseSticky(map[string]string{KeySticky: text}); err == nil || got.Asked || !strings.Contains(err.Error(), KeySticky) {
			t.Errorf("%q: %+v, %v", text, got, err)
		}
	}
}
