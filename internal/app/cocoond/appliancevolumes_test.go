package cocoond

import (
	"bytes"
	"io"
	"strings"
	"testing"
	"testing/iotest"

	"cocoonstack.io/cocoon/internal/errdefs"
)

func TestSized(t *testing.T) {
	for _, wrap := range []func(io.Reader) io.Reader{func(r io.Reader) io.Reader { return r }, iotest.OneByteReader, iotest.DataErrReader} {
		for in, want := range map[string]string{"": "", "a": "a\x00\x00\x00", "abcd": "abcd", "abcdef": "abcdef"} {
			got, err := io.ReadAll(&sized{from: wrap(strings.NewReader(in)), least: 4, most: 6})
			if err != nil || !bytes.Equal(got, []byte(want)) {
				t.Errorf("%q is %q, %v", in, got, err)
			}
		}
		if _, err := io.ReadAll(&sized{from: wrap(strings.NewReader("abcdefg")), least: 4, most: 6}); !errdefs.IsInvalid(err) {
			t.Errorf("too much: %v", err)
		}
	}
}
