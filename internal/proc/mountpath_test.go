package proc

import "testing"

func TestMountPath(t *testing.T) {
	for text, want := range map[string]string{
		"/a": "/a", `/a\040b`: "/a b", `/\011\012`: "/\t\n", `/a\134b`: `/a\b`, `/a\134040`: `/a\040`, `/a\04`: `/a\04`, "": "",
	} {
		if got := MountPath(text); got != want {
			t.Errorf("%q: %q, want %q", text, got, want)
		}
	}
}
