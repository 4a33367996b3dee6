package artifact_test

import (
	"encoding/json"
	"math"
	"reflect"
	"strings"
	"testing"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/snapshot/artifact"
)

func TestPieces(t *testing.T) {
	c, err := artifact.ParseConfig([]byte(ranged))
	if err != nil {
		t.Fatal(err)
	}
	f := c.Files["memory-ranges"]
	got, err := artifact.Pieces(f.Chunks, f.Size)
	want := []artifact.Piece{
		{Range: artifact.Range{Offset: 4096, Length: 4096}, Chunk: 0},
		{Range: artifact.Range{Offset: 8192, Length: 4096}, Chunk: 1},
		{Range: artifact.Range{Offset: 12288, Length: 4096, From: 4096}, Chunk: 0},
	}
	if err != nil || !reflect.DeepEqual(got, want) {
		t.Errorf("%+v, %v", got, err)
	}
	raw, err := json.Marshal(f.Chunks[0])
	if err != nil || string(raw) != `{"o":0,"l":8192,"d":"sha256:2","r":[4096,4096,0,12288,4096,4096]}` {
		t.Errorf("%s, %v", raw, err)
	}
}

func TestHostilePieces(t *testing.T) {
	const size = 1 << 20
	one := func(length int64, r ...artifact.Range) []artifact.Chunk {
		return []artifact.Chunk{{Length: length, Layer: "a", Ranges: r}}
	}
	for name, c := range map[string]struct {
		chunks []artifact.Chunk
		word   string
	}{
		"no range":                  {[]artifact.Chunk{{Length: 4096, Layer: "a", Ranges: artifact.Ranges{}}}, "0 ranges"},
		"a range and an offset":     {[]artifact.Chunk{{Offset: 4096, Length: 4096, Layer: "a", Ranges: artifact.Ranges{{Length: 4096}}}}, "the offset"},
		"empty range":               {one(4096, artifact.Range{}), "does not fit"},
		"negative length":           {one(8192, artifact.Range{Length: -4096, From: 4096}), "does not fit"},
		"negative offset":           {one(8192, artifact.Range{Offset: -4096, Length: 4096}), "does not fit"},
		"beyond the file":           {one(8192, artifact.Range{Offset: size - 4096, Length: 8192}), "does not fit"},
		"offset that overflows":     {one(8192, artifact.Range{Offset: math.MaxInt64 &^ 4095, Length: 8192}), "does not fit"},
		"length that overflows":     {one(8192, artifact.Range{Offset: 4096, Length: math.MaxInt64 &^ 4095}), "does not fit"},
		"negative from":             {one(8192, artifact.Range{Length: 4096, From: -4096}), "not in its"},
		"from beyond the chunk":     {one(8192, artifact.Range{Length: 4096, From: 8192}), "not in its"},
		"end beyond the chunk":      {one(8192, artifact.Range{Length: 8192, From: 4096}), "not in its"},
		"from that overflows":       {one(8192, artifact.Range{Length: 4096, From: math.MaxInt64 &^ 4095}), "not in its"},
		"half a page":               {one(8192, artifact.Range{Length: 2048}), "whole pages"},
		"from the middle of a page": {one(8192, artifact.Range{Length: 4096, From: 1}), "whole pages"},
		"to the middle of a page":   {one(8192, artifact.Range{Offset: 1, Length: 4096}), "whole pages"},
		"overlap":                   {one(8192, artifact.Range{Length: 8192}, artifact.Range{Offset: 4096, Length: 4096}), "overlaps"},
		"the same twice":            {one(8192, artifact.Range{Length: 4096}, artifact.Range{Length: 4096}), "overlaps"},
		"overlap of two chunks": {[]artifact.Chunk{
			{Length: 8192, Layer: "a", Ranges: artifact.Ranges{{Length: 4096}, {Offset: 8192, Length: 4096, From: 4096}}},
			{Offset: 8192, Length: 4096, Layer: "b"},
		}, "overlaps"},
		"chunk larger than the file": {one(2*size, artifact.Range{Length: 4096}), "does not fit"},
		"chunks of many bytes": {[]artifact.Chunk{
			{Length: size, Layer: "a", Ranges: artifact.Ranges{{Length: 4096}}},
			{Length: size, Layer: "b", Ranges: artifact.Ranges{{Offset: 4096, Length: 4096}}},
			{Length: size, Layer: "c", Ranges: artifact.Ranges{{Offset: 8192, Length: 4096}}},
		}, "more than 2 times"},
		"plain chunks in disorder": {[]artifact.Chunk{{Offset: 8192, Length: 4096, Layer: "a"}, {Length: 4096, Layer: "b"}}, "overlaps"},
	} {
		if got, err := artifact.Pieces(c.chunks, size); !errdefs.IsInvalid(err) || !strings.Contains(err.Error(), c.word) {
			t.Errorf("%s: %v, %v, which does not speak of %q", name, got, err, c.word)
		}
	}
	huge := []artifact.Chunk{{Length: artifact.MaxRangedBlob + 4096, Layer: "a", Ranges: artifact.Ranges{{Length: 4096}}}}
	if _, err := artifact.Pieces(huge, 1<<40); !errdefs.IsInvalid(err) || !strings.Contains(err.Error(), "at most") {
		t.Errorf("a large chunk: %v", err)
	}
}
