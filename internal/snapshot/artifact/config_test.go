package artifact_test

import (
	"encoding/json"
	"reflect"
	"strings"
	"testing"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/snapshot/artifact"
)

// documented is a config in the documented form; earlier is one of our earlier releases.
const (
	documented = `{"schemaVersion":"v1","snapshotId":"abc","description":"d","image":"ubuntu:24.04","imageDigest":"sha256:1","imageType":"oci",
		"imageBlobIds":{"b":{}},"hypervisor":"cloud-hypervisor","cpu":2,"memory":1073741824,"storage":10737418240,"nics":1,"network":"n","windows":true,
		"files":{"config.json":{"mode":420},"memory-ranges":{"mode":384,"sparseMap":"[{\"o\":4096,\"l\":8192}]","sparseSize":1073741824},
		"overlay.qcow2":{"mode":416,"size":9,"chunks":["sha256:2","sha256:3","sha256:2"]}},"createdAt":"2026-01-02T03:04:05Z"}`
	earlier = `{"schemaVersion":1,"snapshotId":"abc","hypervisor":"qemu","cpu":1,"memory":2,"storage":3,"nics":0,
		"files":{"memory-ranges":{"mode":384,"size":20,"chunks":[{"o":1,"l":2,"d":"sha256:2","s":"3"},{"o":5,"l":6,"d":"sha256:4"}]},
		"disk-0.0.raw":{"mode":384,"sparseMap":[{"o":4096,"l":8192}],"sparseSize":65536}},"createdAt":"2026-01-02T03:04:05Z"}`
	ranged = `{"schemaVersion":"v1","snapshotId":"abc","hypervisor":"cloud-hypervisor","driver":"qemu","cpu":1,"memory":65536,"storage":3,"nics":0,
		"files":{"memory-ranges":{"mode":384,"size":65536,"pages":"00","chunks":[{"o":0,"l":8192,"d":"sha256:2","r":[4096,4096,0,12288,4096,4096]},
		{"o":8192,"l":4096,"d":"sha256:3"}]}},"createdAt":"2026-01-02T03:04:05Z"}`
)

func TestConfigsOfBothForms(t *testing.T) {
	c, err := artifact.ParseConfig([]byte(documented))
	want := artifact.Files{
		"config.json":   {Mode: 0o644},
		"memory-ranges": {Mode: 0o600, SparseMap: artifact.Map{{Offset: 4096, Length: 8192}}, SparseSize: 1 << 30},
		"overlay.qcow2": {Mode: 0o640, Size: 9, Layers: []string{"sha256:2", "sha256:3", "sha256:2"}},
	}
	if err != nil || c.SchemaVersion != "v1" || c.SnapshotID != "abc" || c.Hypervisor != "cloud-hypervisor" || c.Memory != 1<<30 || !c.Windows || !reflect.DeepEqual(c.Files, want) {
		t.Errorf("%+v, %v", c, err)
	}
	c, err = artifact.ParseConfig([]byte(earlier))
	want = artifact.Files{
		"memory-ranges": {Mode: 0o600, Size: 20, Chunks: []artifact.Chunk{{Offset: 1, Length: 2, Layer: "sha256:2", Sum: "3"}, {Offset: 5, Length: 6, Layer: "sha256:4"}}},
		"disk-0.0.raw":  {Mode: 0o600, SparseMap: artifact.Map{{Offset: 4096, Length: 8192}}, SparseSize: 65536},
	}
	if err != nil || c.SchemaVersion != "v1" || c.Hypervisor != "qemu" || !reflect.DeepEqual(c.Files, want) {
		t.Errorf("%+v, %v", c, err)
	}
}

func TestOddConfigs(t *testing.T) {
	file := func(f string) string { return `{"files":{"f":` + f + `}}` }
	for name, c := range map[string]struct {
		text string
		ok   bool
	}{
		"version as text":       {`{"schemaVersion":"v2"}`, true},
		"version as a number":   {`{"schemaVersion":2}`, true},
		"no version":            {`{}`, true},
		"no files":              {`{"files":null}`, true},
		"map of a file of zero": {file(`{"sparseMap":"[]","sparseSize":4096}`), true},
		"no map":                {file(`{"sparseMap":"","chunks":null}`), true},
		"no chunks":             {file(`{"chunks":[]}`), true},
		"blanks":                {file(`{"sparseMap":" [ {\"o\":0, \"l\":1} ] ","chunks":[ "a" ]}`), true},

		"not JSON":               {`{`, false},
		"a list":                 {`[]`, false},
		"a later version":        {`{"schemaVersion":"v3"}`, false},
		"a version of fractions": {`{"schemaVersion":1.5}`, false},
		"version of a type":      {`{"schemaVersion":[1]}`, false},
		"files as a list":        {`{"files":[]}`, false},
		"a file as text":         {file(`"x"`), false},
		"a map of text":          {file(`{"sparseMap":"hello"}`), false},
		"a map of numbers":       {file(`{"sparseMap":[1]}`), false},
		"a map in a map":         {file(`{"sparseMap":"\"[]\""}`), false},
		"more than a map":        {file(`{"sparseMap":"[][]"}`), false},
		"a map that is cut":      {file(`{"sparseMap":"[{\"o\":0"}`), false},
		"an offset as text":      {file(`{"sparseMap":"[{\"o\":\"0\",\"l\":1}]"}`), false},
		"a size beyond 64 bits":  {file(`{"size":9223372036854775808}`), false},
		"chunks as text":         {file(`{"chunks":"x"}`), false},
		"both kinds of chunks":   {file(`{"chunks":["a",{"o":0,"l":1,"d":"a"}]}`), false},
		"both kinds, reversed":   {file(`{"chunks":[{"o":0,"l":1,"d":"a"},"a"]}`), false},
		"ranges":                 {file(`{"chunks":[{"l":1,"d":"a","r":[0,1,2, 3,4,5]}]}`), true},
		"ranges of null":         {file(`{"chunks":[{"l":1,"d":"a","r":null}]}`), true},
		"ranges of two numbers":  {file(`{"chunks":[{"l":1,"d":"a","r":[0,1]}]}`), false},
		"ranges as text":         {file(`{"chunks":[{"l":1,"d":"a","r":"0,1,2"}]}`), false},
		"ranges of lists":        {file(`{"chunks":[{"l":1,"d":"a","r":[[0,1,2]]}]}`), false},
		"ranges of fractions":    {file(`{"chunks":[{"l":1,"d":"a","r":[0,1,2.5]}]}`), false},
		"ranges beyond 64 bits":  {file(`{"chunks":[{"l":1,"d":"a","r":[0,1,9223372036854775808]}]}`), false},
		"many ranges":            {file(`{"chunks":[{"l":1,"d":"a","r":[0` + strings.Repeat(`,0`, 3<<20) + `]}]}`), false},
		"many ranges of chunks":  {file(`{"chunks":[{}` + strings.Repeat(`,{"r":[`+strings.Repeat(`0,`, 3*1000-1)+`0]}`, 600) + `]}`), false},
		"many files":             {`{"files":{` + strings.Repeat(`"f":{},`, 3) + strings.Join(names(5000), ",") + `}}`, false},
		"many extents":           {file(`{"sparseMap":[{}` + strings.Repeat(`,{}`, 3<<20) + `]}`), false},
	} {
		if _, err := artifact.ParseConfig([]byte(c.text)); c.ok != (err == nil) || err != nil && !errdefs.IsInvalid(err) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func names(n int) (out []string) {
	for i := range n {
		name, _ := json.Marshal(strings.Repeat("x", i+1)[:i%100+1] + string(rune('a'+i/100)))
		out = append(out, string(name)+":{}")
	}
	return out
}

// TestWrittenConfig decodes what we write into types written from the documents.
func TestWrittenConfig(t *testing.T) {
	data, err := json.Marshal(artifact.Config{SchemaVersion: artifact.SchemaVersion, SnapshotID: "abc", Hypervisor: "cloud-hypervisor", Driver: "qemu", Files: artifact.Files{
		"memory-ranges": {Mode: 0o600, SparseMap: artifact.Map{{Offset: 4096, Length: 8192}}, SparseSize: 1 << 20},
		"disk-0.0.raw":  {Mode: 0o600, SparseMap: artifact.Map{}, SparseSize: 1 << 20},
		"vmstate":       {Mode: 0o600, Size: 9},
	}})
	if err != nil {
		t.Fatal(err)
	}
	var got struct {
		SchemaVersion string `json:"schemaVersion"`
		Hypervisor    string `json:"hypervisor"`
		Files         map[string]struct {
			SparseMap  string `json:"sparseMap"`
			SparseSize int64  `json:"sparseSize"`
		} `json:"files"`
	}
	if err := json.Unmarshal(data, &got); err != nil {
		t.Fatal(err)
	}
	if got.SchemaVersion != "v1" || got.Hypervisor != "cloud-hypervisor" || got.Files["memory-ranges"].SparseMap != `[{"o":4096,"l":8192}]` || got.Files["disk-0.0.raw"].SparseMap != "[]" || got.Files["vmstate"].SparseMap != "" {
		t.Errorf("%+v in %s", got, data)
	}
	again, err := artifact.ParseConfig(data)
	if err != nil || again.Files["disk-0.0.raw"].SparseMap == nil || again.Driver != "qemu" {
		t.Errorf("%+v, %v", again, err)
	}
}

// TestFitMap: all maps of a snapshot fit into the config that the first documented readers read.
func TestFitMap(t *testing.T) {
	left := artifact.MaxMaps
	c := artifact.Config{Files: artifact.Files{}}
	for n := range 20 {
		var m []artifact.Extent
		for i := range int64(50_000) {
			m = append(m, artifact.Extent{Offset: i << 13, Length: 1 << 12})
		}
		c.Files[strings.Repeat("f", n+1)] = artifact.File{SparseMap: artifact.FitMap(m, &left), SparseSize: 1 << 40}
	}
	data, err := json.Marshal(c)
	if err != nil || len(data) > 1<<20 || len(data) < 512<<10 {
		t.Errorf("%d bytes, %v", len(data), err)
	}
}

func FuzzParseConfig(f *testing.F) {
	f.Add([]byte(documented))
	f.Add([]byte(earlier))
	f.Add([]byte(ranged))
	f.Fuzz(func(t *testing.T, data []byte) {
		c, err := artifact.ParseConfig(data)
		if err != nil {
			if !errdefs.IsInvalid(err) {
				t.Errorf("%v", err)
			}
			return
		}
		for name, file := range c.Files {
			if len(file.Chunks) > 0 && len(file.Layers) > 0 {
				t.Errorf("%s has chunks of both kinds", name)
			}
			pieces, err := artifact.Pieces(file.Chunks, file.Size)
			if err != nil && !errdefs.IsInvalid(err) {
				t.Errorf("%s: %v", name, err)
			}
			end := int64(0)
			for _, p := range pieces {
				if p.Offset < end || p.Length <= 0 || p.From < 0 || p.End() > file.Size || p.From+p.Length > file.Chunks[p.Chunk].Length {
					t.Errorf("%s: a piece of %+v after byte %d", name, p, end)
				}
				end = p.End()
			}
		}
		raw, err := json.Marshal(c)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := artifact.ParseConfig(raw); err != nil {
			t.Errorf("what was read is written as %s: %v", raw, err)
		}
	})
}
