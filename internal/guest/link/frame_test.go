package link

import (
	"bytes"
	"testing"
)

func TestScannerFindsFramesInNoise(t *testing.T) {
	want := []frame{{kindHello, 1}, {kindReady, 1<<64 - 1}, {kindGo, 0xc0}, {kindSession, 42}}
	var stream []byte
	for _, f := range want {
		stream = append(stream, "noise \xc0\xc0CK"...)
		stream = append(stream, f.bytes()...)
	}
	stream = append(stream, "rest"...)
	for size := 1; size <= len(stream); size++ {
		var s scanner
		var got []frame
		var rest []byte
		for i := 0; i < len(stream); i += size {
			data := stream[i:min(i+size, len(stream))]
			for len(data) > 0 {
				f, after, ok := s.next(data)
				if ok {
					got = append(got, f)
				}
				data, rest = after, after
			}
		}
		if len(got) != len(want) {
			t.Fatalf("chunks of %d: found %v (rest %q)", size, got, rest)
		}
		for i := range want {
			if got[i] != want[i] {
				t.Fatalf("chunks of %d: frame %d is %v", size, i, got[i])
			}
		}
	}
}

func TestOnlyHello(t *testing.T) {
	hello, ready := frame{kindHello, 7}.bytes(), frame{kindReady, 7}.bytes()
	for name, c := range map[string]struct {
		data []byte
		want bool
	}{
		"nothing":     {nil, false},
		"one":         {hello, true},
		"two":         {append(bytes.Clone(hello), hello...), true},
		"another":     {ready, false},
		"with a tail": {append(bytes.Clone(hello), 'x'), false},
		"damaged":     {append([]byte{0}, hello[1:]...), false},
	} {
		if got := onlyHello(c.data); got != c.want {
			t.Errorf("%s: %v", name, got)
		}
	}
}

// FuzzScanner feeds arbitrary bytes in arbitrary pieces: no panic, limited memory, and a frame after the noise is
// always found.
func FuzzScanner(f *testing.F) {
	f.Add([]byte("noise"), uint8(3))
	f.Add(frame{kindHello, 9}.bytes(), uint8(20))
	f.Add(append([]byte(magic), frame{kindGo, 9}.bytes()...), uint8(7))
	f.Add(frame{kindSession, 1}.bytes()[:19], uint8(19))
	f.Fuzz(func(t *testing.T, noise []byte, cut uint8) {
		size := int(cut) + 1
		var s scanner
		feed := func(p []byte) (last frame, found bool) {
			for i := 0; i < len(p); i += size {
				data := p[i:min(i+size, len(p))]
				for len(data) > 0 {
					f, rest, ok := s.next(data)
					if ok {
						last, found = f, true
					}
					data = rest
				}
				if len(s.buf) >= frameSize {
					t.Fatalf("the scanner keeps %d bytes", len(s.buf))
				}
			}
			return last, found
		}
		feed(noise)
		want := frame{kindReady, 0x0123456789abcdef}
		if got, ok := feed(want.bytes()); !ok || got != want {
			if got, ok = feed(want.bytes()); !ok || got != want { // the noise ended in half a frame
				t.Fatalf("after %q the frame was not found", noise)
			}
		}
		onlyHello(noise)
	})
}
