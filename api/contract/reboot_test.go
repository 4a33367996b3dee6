package contract

import "testing"

func TestReboot(t *testing.T) {
	for value, want := range map[string]Reboot{"": {}, "soft 1": {ID: "1"}, "hard a-B": {Hard: true, ID: "a-B"}} {
		got, err := ParseReboot(map[string]string{KeyReboot: value})
		if err != nil || got != want || value != "" && got.String() != value {
			t.Errorf("%q: %+v, %v, %q", value, got, err, got.String())
		}
	}
	for _, bad := range []string{"soft", "hard ", "now 1", "soft  1", "soft 1 2", " soft 1", "soft 1\n"} {
		if got, err := ParseReboot(map[string]string{KeyReboot: bad}); err == nil || got != (Reboot{}) {
			t.Errorf("%q: %+v, %v", bad, got, err)
		}
	}
	for value, want := range map[string]Rebooted{"": {}, "1": {ID: "1"}, "1 it is paused": {ID: "1", Why: "it is paused"}} {
		if got := ParseRebooted(map[string]string{KeyRebooted: value}); got != want || got.String() != value {
			t.Errorf("%q: %+v, %q", value, got, got.String())
		}
	}
}
