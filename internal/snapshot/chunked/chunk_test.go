package chunked_test

import (
	"bytes"
	"math/rand/v2"
	"slices"
	"testing"

	"cocoonstack.io/cocoon/internal/snapshot/artifact"
	"cocoonstack.io/cocoon/internal/snapshot/chunked"
)

const pageSize = 4096

// cutPages cuts a file of whole pages; it passes zero pages as holes or as zeros, as requested.
func cutPages(t testing.TB, data []byte, holes bool) []artifact.Extent {
	t.Helper()
	out, err := chunked.Cut(int64(len(data)), func(add func(int64, []byte) error, hole func(int64) error) error {
		for at := 0; at < len(data); {
			p := data[at:min(at+pageSize, len(data))]
			end := at + len(p)
			if holes && !slices.ContainsFunc(p, func(b byte) bool { return b != 0 }) {
				for end < len(data) && !slices.ContainsFunc(data[end:min(end+pageSize, len(data))], func(b byte) bool { return b != 0 }) {
					end = min(end+pageSize, len(data))
				}
				if err := hole(int64(end - at)); err != nil {
					return err
				}
			} else if err := add(int64(at), p); err != nil {
				return err
			}
			at = end
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return out
}

func TestChunks(t *testing.T) {
	random := rand.New(rand.NewChaCha8([32]byte{1}))
	data := make([]byte, 48<<20)
	fill(random, data)
	for range 300 { // runs of zeros of many lengths
		at, n := random.IntN(len(data)/pageSize)*pageSize, (1+random.IntN(40))*pageSize
		clear(data[at:min(at+n, len(data))])
	}
	chunks := cutPages(t, data, false)
	end := int64(0)
	for _, c := range chunks {
		if c.Offset%pageSize != 0 || c.Offset < end || c.Length > 1<<20 || c.Length <= 0 {
			t.Fatalf("chunk %+v after byte %d", c, end)
		}
		if bytes.ContainsFunc(data[end:c.Offset], func(r rune) bool { return r != 0 }) {
			t.Fatalf("bytes before %+v are in no chunk", c)
		}
		end = c.Offset + c.Length
	}
	if bytes.ContainsFunc(data[end:], func(r rune) bool { return r != 0 }) {
		t.Fatal("the last bytes are in no chunk")
	}
	if n := len(data) / (512 << 10); len(chunks) < n/3 || len(chunks) > 4*n {
		t.Errorf("%d chunks of %d bytes", len(chunks), len(data))
	}
	if !slices.Equal(chunks, cutPages(t, data, true)) {
		t.Error("holes and zeros are cut unlike")
	}
	// A changed page affects only nearby chunks; moved pages keep their chunks.
	other := bytes.Clone(data)
	other[20<<20] ^= 1
	if again := cutPages(t, other, false); common(data, chunks, other, again) < len(chunks)-4 {
		t.Errorf("one page changed, and of %d chunks %d are the same", len(chunks), common(data, chunks, other, again))
	}
	moved := append(bytes.Repeat([]byte{1}, 3*pageSize), data...)
	if again := cutPages(t, moved[:len(data)], false); common(data, chunks, moved, again) < len(chunks)*8/10 {
		t.Errorf("three pages came before, and of %d chunks %d are the same", len(chunks), common(data, chunks, moved, again))
	}
}

func common(a []byte, ac []artifact.Extent, b []byte, bc []artifact.Extent) int {
	seen := map[string]bool{}
	for _, c := range ac {
		seen[string(a[c.Offset:c.Offset+c.Length])] = true
	}
	n := 0
	for _, c := range bc {
		if seen[string(b[c.Offset:c.Offset+c.Length])] {
			n++
		}
	}
	return n
}

// FuzzChunks checks that chunks are in order and that they contain every byte that is not zero.
func FuzzChunks(f *testing.F) {
	f.Add([]byte{0, 1, 1, 0, 2, 255, 0, 0, 9})
	f.Add(bytes.Repeat([]byte{1, 0}, 200))
	f.Add(bytes.Repeat([]byte{7}, 300))
	f.Fuzz(func(t *testing.T, shape []byte) { // one byte per page
		data := make([]byte, len(shape)*pageSize)
		for i, b := range shape {
			for k := range pageSize {
				data[i*pageSize+k] = b
			}
		}
		for _, holes := range []bool{false, true} {
			end := int64(0)
			for _, c := range append(cutPages(t, data, holes), artifact.Extent{Offset: int64(len(data))}) {
				if c.Offset < end || len(bytes.Trim(data[end:c.Offset], "\x00")) > 0 {
					t.Fatalf("chunk %+v after byte %d", c, end)
				}
				end = c.Offset + c.Length
			}
		}
	})
}
