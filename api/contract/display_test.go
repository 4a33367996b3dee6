package contract

import (
	"testing"
	"time"
)

func FuzzParseGuestFreeze(f *testing.F) {
	for _, value := range []string{"", GuestDescription, GuestThaw, GuestFreeze(time.Second), GuestFreeze(MaxFreeze), "freeze 0", "freeze 301", "freeze -1", "freeze 18446744073709551615"} {
		f.Add(value)
	}
	f.Fuzz(func(t *testing.T, value string) {
		most, asks, err := ParseGuestFreeze(value)
		if asks && err == nil {
			if again, _, err := ParseGuestFreeze(GuestFreeze(most)); err != nil || again != most || most < time.Second || most > MaxFreeze {
				t.Errorf("%q: %s, %s, %v", value, most, again, err)
			}
		} else if most != 0 {
			t.Errorf("%q: %s, %v, %v", value, most, asks, err)
		}
	})
}
