package link

import (
	"bytes"
	"io"
	"slices"
	"testing"
)

func TestCutPlain(t *testing.T) {
	whole := plainMessage([]byte("hello"))
	for name, c := range map[string]struct {
		in      []byte
		m, rest []byte
		need    int
	}{
		"nothing":         {nil, nil, nil, plainHeader},
		"HTTP/2":          {[]byte("PRI * HTTP/2.0\r\n"), nil, nil, 0},
		"half a magic":    {whole[:2], nil, nil, plainHeader},
		"half a length":   {whole[:6], nil, nil, plainHeader},
		"half a message":  {whole[:10], nil, nil, len(whole)},
		"a message":       {whole, []byte("hello"), []byte{}, len(whole)},
		"and what is not": {slices.Concat(whole, []byte("PRI")), []byte("hello"), []byte("PRI"), len(whole)},
		"too long":        {[]byte(plainMagic + "\x7f\xff\xff\xff"), nil, nil, 0},
		"empty":           {plainMessage(nil), []byte{}, []byte{}, plainHeader},
	} {
		m, rest, need := cutPlain(c.in)
		if !bytes.Equal(m, c.m) || !bytes.Equal(rest, c.rest) || (rest == nil) != (c.rest == nil) || need != c.need {
			t.Errorf("%s: %q, %q, %d", name, m, rest, need)
		}
	}
}

// FuzzPlain reads input of a hostile side: both readers agree and stay within their limits.
func FuzzPlain(f *testing.F) {
	f.Add(plainMessage([]byte("hello")))
	f.Add([]byte(plainMagic + "\x00\x01\x00\x01"))
	f.Add([]byte("PRI * HTTP/2.0"))
	f.Fuzz(func(t *testing.T, b []byte) {
		cut, rest, need := cutPlain(b)
		r := bytes.NewReader(b)
		read, err := readPlain(r)
		if (err == nil) != (rest != nil) || err == nil && !bytes.Equal(cut, read) {
			t.Errorf("cut %q, read %q, %v", cut, read, err)
		}
		if len(cut) > MaxPlain || need > MaxPlain+plainHeader {
			t.Errorf("%d bytes, %d needed", len(cut), need)
		}
		if left, _ := io.ReadAll(r); err == nil && !bytes.Equal(left, rest) {
			t.Errorf("left %q, rest %q", left, rest)
		}
	})
}
