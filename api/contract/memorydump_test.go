package contract

import (
	"strings"
	"testing"
	"time"
)

func TestMemoryDump(t *testing.T) {
	for value, want := range map[string]MemoryDump{"": {}, "core/vm.dump": {Claim: "core", File: "vm.dump"}, "a.b/1": {Claim: "a.b", File: "1"}} {
		got, err := ParseMemoryDump(map[string]string{KeyMemoryDump: value})
		if err != nil || got != want || value != "" && got.String() != value {
			t.Errorf("%q: %+v, %v, %q", value, got, err, got.String())
		}
	}
	for _, bad := range []string{"core", "core/", "/vm", "core/a/b", "core/..", "core/.a", "Core/a", "core/a b", "core/a\n", "core/" + strings.Repeat("a", 256)} {
		if got, err := ParseMemoryDump(map[string]string{KeyMemoryDump: bad}); err == nil || got != (MemoryDump{}) {
			t.Errorf("%q: %+v, %v", bad, got, err)
		}
	}
	answer := MemoryDumped{Claim: "core", File: "vm.dump", Begun: time.Unix(1, 0).UTC(), Ended: time.Unix(9, 0).UTC(), Why: "it does not run"}
	if got := ParseMemoryDumped(map[string]string{KeyMemoryDumped: answer.String()}); got != answer || !got.Answers(MemoryDump{"core", "vm.dump"}) || got.Answers(MemoryDump{"core", "b"}) {
		t.Errorf("%+v", got)
	}
	for _, text := range []string{"", "{", `[]`, `{"ended":"soon"}`} {
		if got := ParseMemoryDumped(map[string]string{KeyMemoryDumped: text}); got != (MemoryDumped{}) {
			t.Errorf("%q: %+v", text, got)
		}
	}
}
