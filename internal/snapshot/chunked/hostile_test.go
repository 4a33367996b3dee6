package chunked_test

import (
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/ociclient"
	"cocoonstack.io/cocoon/internal/snapshot"
	"cocoonstack.io/cocoon/internal/snapshot/artifact"
	"cocoonstack.io/cocoon/internal/snapshot/chunked"
	"cocoonstack.io/cocoon/internal/vm"
)

// told is what a registry returns about a snapshot.
type told struct {
	m ociclient.Manifest
	c artifact.Config
	s snapshot.Snapshot
}

func sha(n int) string { return fmt.Sprintf("sha256:%064x", n) }

// good is a snapshot that can be pulled: memory of two chunks, and a disk of one layer in two parts.
func good() told {
	layer := func(n int, media, title string, size int64, notes ...string) ociclient.Descriptor {
		d := ociclient.Descriptor{MediaType: media, Digest: sha(n), Size: size, Annotations: map[string]string{artifact.AnnotationTitle: title}}
		for i := 0; i < len(notes); i += 2 {
			d.Annotations[notes[i]] = notes[i+1]
		}
		return d
	}
	return told{
		m: ociclient.Manifest{
			SchemaVersion: 2, ArtifactType: artifact.TypeSnapshotV2, Config: ociclient.Descriptor{MediaType: artifact.MediaConfig, Digest: sha(1), Size: 100},
			Layers: []ociclient.Descriptor{
				layer(2, artifact.MediaVMConfig, artifact.TitleVMConfig, 100),
				layer(3, artifact.MediaState+artifact.SuffixZstd, snapshot.FileState, 50),
				layer(4, artifact.MediaMemory+artifact.SuffixZstd, snapshot.FileMemory, 1000),
				layer(5, artifact.MediaMemory, snapshot.FileMemory, 4096),
				layer(6, artifact.MediaRaw+artifact.SuffixPart, "disk-0.0.raw", 4096, artifact.AnnotationChunkIndex, "1"),
				layer(7, artifact.MediaRaw+artifact.SuffixPart, "disk-0.0.raw", 8192, artifact.AnnotationChunkIndex, "0"),
			},
		},
		c: artifact.Config{SchemaVersion: artifact.SchemaVersion, SnapshotID: "s", Hypervisor: "qemu", CPU: 1, Memory: 1 << 20, Storage: 1 << 20, Files: map[string]artifact.File{
			artifact.TitleVMConfig: {Size: 100},
			snapshot.FileState:     {Size: 200},
			snapshot.FileMemory:    {Size: 1 << 20, Chunks: []artifact.Chunk{{Offset: 4096, Length: 8192, Layer: sha(4)}, {Offset: 65536, Length: 4096, Layer: sha(5)}, {Offset: 81920, Length: 8192, Layer: sha(4)}}},
			"disk-0.0.raw":         {SparseSize: 1 << 20, SparseMap: []artifact.Extent{{Offset: 0, Length: 4096}, {Offset: 8192, Length: 8192}}},
		}},
		s: snapshot.Snapshot{ID: "s", Name: "s", Hypervisor: "qemu", CPU: 1, Memory: 1 << 20, Storage: 1 << 20, Live: true, Disks: []snapshot.Disk{
			{Serial: "d", Role: vm.RoleCOW, Size: 1 << 20, Layers: []snapshot.Layer{{File: "disk-0.0.raw", Format: vm.DiskRaw}}},
		}},
	}
}

// range0 makes the first chunk of the memory one with ranges.
func (x told) range0(r ...artifact.Range) {
	c := &x.c.Files[snapshot.FileMemory].Chunks[0]
	c.Offset, c.Ranges = 0, r
}

func (x told) encode(t testing.TB) (m, c, s []byte) {
	t.Helper()
	m, err := json.Marshal(x.m)
	if err != nil {
		t.Fatal(err)
	}
	if c, err = json.Marshal(x.c); err != nil {
		t.Fatal(err)
	}
	if s, err = json.Marshal(x.s); err != nil {
		t.Fatal(err)
	}
	return m, c, s
}

// hostile lists changes of good that must be refused, each with a word of the reason.
var hostile = map[string]struct {
	change func(*told)
	word   string
}{
	"no snapshot":               {func(x *told) { x.m.ArtifactType = artifact.TypeOSImage }, "not a snapshot"},
	"other config":              {func(x *told) { x.m.Config.MediaType = "application/json" }, "configuration"},
	"huge config":               {func(x *told) { x.m.Config.Size = 1 << 40 }, "configuration"},
	"digest of a layer":         {func(x *told) { x.m.Layers[2].Digest = "sha256:../../etc" }, "digest"},
	"sha512":                    {func(x *told) { x.m.Layers[2].Digest = "sha512:" + strings.Repeat("0", 128) }, "digest"},
	"negative layer":            {func(x *told) { x.m.Layers[2].Size = -1 }, "bytes"},
	"too many layers":           {func(x *told) { x.m.Layers = slices.Repeat(x.m.Layers, 5000) }, "layers"},
	"driver":                    {func(x *told) { x.s.Hypervisor, x.c.Driver = "fake", "fake" }, `"fake"`},
	"hypervisor":                {func(x *told) { x.c.Hypervisor = "firecracker" }, "firecracker"},
	"other driver":              {func(x *told) { x.c.Driver = "firecracker" }, "firecracker"},
	"version":                   {func(x *told) { x.c.SchemaVersion = "v9" }, `"v9"`},
	"record of another":         {func(x *told) { x.s.ID = "t" }, "another system"},
	"no record":                 {func(x *told) { x.m.Layers = x.m.Layers[1:] }, "another system"},
	"record and config differ":  {func(x *told) { x.s.Memory = 2 << 20 }, "memory"},
	"negative memory":           {func(x *told) { x.s.Memory, x.c.Memory = -1, -1 }, "invalid VM"},
	"name with a slash":         {func(x *told) { x.s.Disks[0].Layers[0].File = "../../etc/passwd" }, "not a valid name"},
	"disk called vmstate":       {func(x *told) { x.s.Disks[0].Layers[0].File = snapshot.FileState }, "not a valid name"},
	"disk called as record":     {func(x *told) { x.s.Disks[0].Layers[0].File = snapshot.FileMeta }, "not a valid name"},
	"format of a disk":          {func(x *told) { x.s.Disks[0].Layers[0].Format = "vmdk" }, "format"},
	"file of nobody":            {func(x *told) { x.c.Files["extra"] = artifact.File{} }, "extra"},
	"layer of nobody":           {func(x *told) { x.m.Layers[2].Annotations[artifact.AnnotationTitle] = "../x" }, "../x"},
	"file is missing":           {func(x *told) { delete(x.c.Files, snapshot.FileMemory) }, "missing"},
	"chunks overlap":            {func(x *told) { x.c.Files[snapshot.FileMemory].Chunks[1].Offset = 8192 }, "overlaps"},
	"chunks in disorder":        {func(x *told) { slices.Reverse(x.c.Files[snapshot.FileMemory].Chunks) }, "overlaps"},
	"chunk beyond the end":      {func(x *told) { x.c.Files[snapshot.FileMemory].Chunks[2].Offset = 1 << 20 }, "does not fit"},
	"offset that overflows":     {func(x *told) { x.c.Files[snapshot.FileMemory].Chunks[2].Offset = 1<<63 - 1 }, "does not fit"},
	"negative offset":           {func(x *told) { x.c.Files[snapshot.FileMemory].Chunks[0].Offset = -4096 }, "does not fit"},
	"empty chunk":               {func(x *told) { x.c.Files[snapshot.FileMemory].Chunks[0].Length = 0 }, "does not fit"},
	"chunk without layer":       {func(x *told) { x.c.Files[snapshot.FileMemory].Chunks[0].Layer = sha(99) }, "does not have"},
	"chunk of another file":     {func(x *told) { x.c.Files[snapshot.FileMemory].Chunks[0].Layer = sha(6) }, "does not have"},
	"two lengths":               {func(x *told) { x.c.Files[snapshot.FileMemory].Chunks[2].Length = 4096 }, "two lengths"},
	"layer larger than chunk":   {func(x *told) { x.m.Layers[2].Size = 1 << 30 }, "cannot be"},
	"plain layer of other size": {func(x *told) { x.m.Layers[3].Size = 4095 }, "cannot be"},
	"range beyond its chunk":    {func(x *told) { x.range0(artifact.Range{Offset: 4096, Length: 4096, From: 8192}) }, "not in its"},
	"range that overflows":      {func(x *told) { x.range0(artifact.Range{Offset: 4096, Length: 4096, From: 1<<63 - 4096}) }, "not in its"},
	"range of a part of a page": {func(x *told) { x.range0(artifact.Range{Offset: 4096, Length: 100}) }, "whole pages"},
	"range over another chunk":  {func(x *told) { x.range0(artifact.Range{Offset: 65536, Length: 4096}) }, "overlaps"},
	"ranges of two lengths": {func(x *told) {
		x.range0(artifact.Range{Offset: 4096, Length: 4096})
		x.c.Files[snapshot.FileMemory].Chunks[0].Length = 12288
	}, "two lengths"},
	"ranges of a large chunk": {func(x *told) {
		x.range0(artifact.Range{Offset: 4096, Length: 4096})
		x.c.Files[snapshot.FileMemory].Chunks[0].Length = 1 << 30
	}, "does not fit"},
	"checksum of half a page": {func(x *told) {
		f := x.c.Files[snapshot.FileMemory]
		f.Chunks[0].Offset, f.Pages = 4095, strings.Repeat("0", 64)
		x.c.Files[snapshot.FileMemory] = f
	}, "whole pages"},
	"memory larger than the VM's": {func(x *told) {
		f := x.c.Files[snapshot.FileMemory]
		f.Size = 1 << 45
		x.c.Files[snapshot.FileMemory] = f
	}, "at most"},
	"memory is empty": {func(x *told) {
		x.c.Files[snapshot.FileMemory] = artifact.File{}
		x.m.Layers = slices.Delete(x.m.Layers, 2, 4)
	}, "empty"},
	"negative size":    {func(x *told) { x.c.Files[snapshot.FileState] = artifact.File{Size: -1} }, "is invalid"},
	"map overlaps":     {func(x *told) { x.c.Files["disk-0.0.raw"].SparseMap[1].Offset = 0 }, "before the end"},
	"map beyond":       {func(x *told) { x.c.Files["disk-0.0.raw"].SparseMap[1].Offset = 1 << 20 }, "beyond"},
	"map of more":      {func(x *told) { x.c.Files["disk-0.0.raw"].SparseMap[1].Length = 4096 }, "instead of"},
	"map is missing":   {func(x *told) { x.c.Files["disk-0.0.raw"] = artifact.File{SparseSize: 1 << 20} }, "no map"},
	"place of a layer": {func(x *told) { x.m.Layers[4].Annotations[artifact.AnnotationChunkIndex] = "7" }, "number"},
	"place twice":      {func(x *told) { x.m.Layers[4].Annotations[artifact.AnnotationChunkIndex] = "0" }, "number"},
	"no place":         {func(x *told) { delete(x.m.Layers[5].Annotations, artifact.AnnotationChunkIndex) }, "number"},
	"disk larger than the VM's": {func(x *told) {
		x.c.Files["disk-0.0.raw"] = artifact.File{SparseSize: 1 << 40, SparseMap: x.c.Files["disk-0.0.raw"].SparseMap}
	}, "at most"},
	"compressed file of unknown size": {func(x *told) { x.c.Files[snapshot.FileState] = artifact.File{} }, "size is missing"},
}

func TestHostileManifests(t *testing.T) {
	m, c, s := good().encode(t)
	if n, err := chunked.Plan(m, c, s); err != nil || n != 200+8192+4096+8192+12288 {
		t.Fatalf("%d bytes, %v", n, err)
	}
	ranged := good()
	ranged.range0(artifact.Range{Offset: 4096, Length: 4096, From: 4096}, artifact.Range{Offset: 12288, Length: 4096})
	m, c, s = ranged.encode(t)
	if n, err := chunked.Plan(m, c, s); err != nil || n != 200+8192+4096+8192+12288 {
		t.Fatalf("with ranges: %d bytes, %v", n, err)
	}
	for name, h := range hostile {
		x := good()
		h.change(&x)
		m, c, s := x.encode(t)
		_, err := chunked.Plan(m, c, s)
		if !errdefs.IsInvalid(err) && !errdefs.Is(err, errdefs.DataLoss) || !strings.Contains(err.Error(), h.word) {
			t.Errorf("%s: %v, which does not speak of %q", name, err, h.word)
		}
	}
}

// documented returns good with its disk in the documented form, whose chunks are digests. disk is what the config says
// about it.
func documented(t testing.TB, disk string) (m, c, s []byte) {
	m, c, s = good().encode(t)
	var fields, files map[string]json.RawMessage
	if err := errors.Join(json.Unmarshal(c, &fields), json.Unmarshal(fields["files"], &files)); err != nil {
		t.Fatal(err)
	}
	files["disk-0.0.raw"] = json.RawMessage(disk)
	var err1, err2 error
	fields["files"], err1 = json.Marshal(files)
	c, err2 = json.Marshal(fields)
	if err := errors.Join(err1, err2); err != nil {
		t.Fatal(err)
	}
	return m, c, s
}

// documentedDisks maps what a config says about the disk to a word of the reason for which it is refused; "": it is
// not.
func documentedDisks() map[string]string {
	both := `"chunks":["` + sha(7) + `","` + sha(6) + `"]`
	return map[string]string{
		`{"size":12288,` + both + `}`: "",
		`{` + both + `}`:              "",
		`{"sparseMap":"[{\"o\":0,\"l\":4096},{\"o\":8192,\"l\":8192}]","sparseSize":1048576,"size":12288,` + both + `}`:   "",
		`{"sparseMap":"[{\"o\":0,\"l\":4096},{\"o\":8192,\"l\":8192}]","sparseSize":1048576,"size":1048576,` + both + `}`: "",
		`{"sparseMap":"[{\"o\":0,\"l\":4096},{\"o\":8192,\"l\":8192}]","sparseSize":1048576,"size":1,` + both + `}`:       "neither",
		`{"sparseMap":"[{\"o\":0,\"l\":4096}]","sparseSize":1048576,` + both + `}`:                                        "instead of",
		`{"sparseMap":"[]","sparseSize":1048576,` + both + `}`:                                                            "instead of",
		`{"sparseSize":1048576,` + both + `}`:                                                                             "no map",
		`{"size":12289,` + both + `}`:                                                                                     "instead of",
		`{"size":8192,"chunks":["` + sha(6) + `","` + sha(6) + `"]}`:                                                      "",
		`{"chunks":["` + sha(4) + `"]}`:                                                                                   "does not have",
		`{"chunks":["../../etc"]}`:                                                                                        "does not have",
		`{"chunks":["` + strings.Repeat(sha(6)+`","`, 30_000) + sha(6) + `"]}`:                                            "layers",
	}
}

func TestDocumentedChunks(t *testing.T) {
	for disk, word := range documentedDisks() {
		_, err := chunked.Plan(documented(t, disk))
		if word == "" && err != nil || word != "" && (!errdefs.IsInvalid(err) && !errdefs.Is(err, errdefs.DataLoss) || !strings.Contains(err.Error(), word)) {
			t.Errorf("%.200s: %v", disk, err)
		}
	}
}

func FuzzPlan(f *testing.F) {
	m, c, s := good().encode(f)
	f.Add(m, c, s)
	ranged := good()
	ranged.range0(artifact.Range{Offset: 4096, Length: 4096, From: 4096}, artifact.Range{Offset: 12288, Length: 4096})
	m, c, s = ranged.encode(f)
	f.Add(m, c, s)
	for disk := range documentedDisks() {
		if len(disk) < 1000 {
			m, c, s := documented(f, disk)
			f.Add(m, c, s)
		}
	}
	for _, name := range slices.Sorted(maps.Keys(hostile)) {
		x := good()
		if name == "too many layers" {
			continue
		}
		hostile[name].change(&x)
		m, c, s := x.encode(f)
		f.Add(m, c, s)
	}
	f.Fuzz(func(t *testing.T, m, c, s []byte) {
		n, err := chunked.Plan(m, c, s)
		if err != nil && errdefs.ClassOf(err) == errdefs.Internal {
			t.Fatalf("without a class: %v", err)
		}
		if n < 0 {
			t.Fatalf("%d bytes", n)
		}
	})
}
