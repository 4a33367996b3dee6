package logging

import (
	"bytes"
	"strings"
	"testing"

	"cocoonstack.io/cocoon/internal/errdefs"
)

func TestLevelAndFormat(t *testing.T) {
	var buf bytes.Buffer
	log, err := New(&buf, "warn", "json")
	if err != nil {
		t.Fatal(err)
	}
	log.Info("quiet")
	log.Warn("loud", "vm", "a")
	if got := buf.String(); strings.Contains(got, "quiet") || !strings.Contains(got, `"vm":"a"`) {
		t.Errorf("logged %s", got)
	}
}

func TestUnknownLevelOrFormatIsRefused(t *testing.T) {
	for _, c := range [][2]string{{"loud", "text"}, {"info", "xml"}} {
		if _, err := New(&bytes.Buffer{}, c[0], c[1]); !errdefs.IsInvalid(err) {
			t.Errorf("%v: %v", c, err)
		}
	}
}
