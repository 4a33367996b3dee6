package volumes

import (
	"slices"
	"testing"
)

func TestParseMounts(t *testing.T) {
	const text = `22 1 254:0 / / rw,relatime - ext4 /dev/vda rw
30 22 8:0 / /data rw,relatime - ext4 /dev/sda rw
31 22 8:0 /a/b /with\040space\134and\011more ro,nosuid shared:1 - ext4 /dev/sda rw
32 22 8:01 / /other ro - ext4 /dev/sdb rw
broken
`
	want := []mountLine{{"/", "/data", false}, {"/a/b", "/with space\\and\tmore", true}}
	if got := parseMounts(text, "8:0"); !slices.Equal(got, want) {
		t.Errorf("%+v", got)
	}
}
