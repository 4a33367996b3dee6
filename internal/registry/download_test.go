package registry_test

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/klauspost/compress/zstd"
	v1 "github.com/opencontainers/image-spec/specs-go/v1"

	"cocoonstack.io/cocoon/internal/registry"
	"cocoonstack.io/cocoon/internal/registry/content"
	"cocoonstack.io/cocoon/internal/snapshot/artifact"
	"cocoonstack.io/cocoon/internal/snapshot/bundle"
)

func pattern(n int, seed byte) []byte {
	b := make([]byte, n)
	for i := range b {
		b[i] = byte(i/7) ^ byte(i>>9) ^ seed
	}
	return b
}

func packed(t testing.TB, b []byte) []byte {
	t.Helper()
	w, err := zstd.NewWriter(nil)
	if err != nil {
		t.Fatal(err)
	}
	return w.EncodeAll(b, nil)
}

func (r *rig) layer(repo, mediaType, title string, data []byte, index ...int) v1.Descriptor {
	d := r.pushBlob(repo, data)
	d.MediaType = mediaType
	d.Annotations = map[string]string{artifact.AnnotationTitle: title}
	if len(index) > 0 {
		d.Annotations[artifact.AnnotationChunkIndex] = fmt.Sprint(index[0])
	}
	return d
}

// pushDisk pushes an OS image in three parts, unordered, one of them compressed.
func (r *rig) pushDisk(repo, tag string) (disk []byte) {
	a, b, c := pattern(300_000, 1), pattern(500_000, 2), pattern(12345, 3)
	r.pushManifest(repo, tag, v1.Manifest{
		ArtifactType: artifact.TypeOSImage, Config: r.pushBlob(repo, []byte("{}")),
		Layers: []v1.Descriptor{
			r.layer(repo, artifact.MediaRaw+artifact.SuffixPart, "disk.raw.part002", c),
			r.layer(repo, artifact.MediaRaw+artifact.SuffixPart, "disk.raw.part000", a),
			r.layer(repo, artifact.MediaRaw+artifact.SuffixPart+artifact.SuffixZstd, "disk.raw.part001", packed(r.t, b)),
			r.layer(repo, "text/plain", "README", []byte("no disk")),
		},
	})
	return bytes.Join([][]byte{a, b, c}, nil)
}

func TestDownloadOfAnOSImage(t *testing.T) {
	r := newRig(t, registry.Config{}, content.Config{})
	disk := r.pushDisk("images/debian", "latest")
	r.pushDisk("images/debian", "v1")
	sum := sha256.Sum256(disk)

	head := r.want(r.do("HEAD", "/dl/images/debian", nil), 200)
	if head.ContentLength != int64(len(disk)) || head.Header.Get("Content-Type") != "application/octet-stream" || head.Header.Get("Accept-Ranges") != "bytes" {
		t.Errorf("HEAD: %v", head.Header)
	}
	got := r.want(r.do("GET", "/dl/images/debian", nil, "TE: trailers"), 200)
	if !bytes.Equal(got.body, disk) {
		t.Fatal("other bytes")
	}
	if got.Trailer.Get("X-Checksum-Sha256") != hex.EncodeToString(sum[:]) || got.Trailer.Get("Repr-Digest") == "" {
		t.Errorf("trailer %v", got.Trailer)
	}
	got = r.want(r.do("GET", "/dl/images/debian?tag=v1", nil), 200)
	if !bytes.Equal(got.body, disk) || got.ContentLength != int64(len(disk)) {
		t.Error("with a length: other bytes")
	}
	if got.Header.Get("X-Checksum-Sha256") != hex.EncodeToString(sum[:]) {
		t.Error("a checksum known from before is not in the header")
	}
	for _, c := range []struct{ header, want string }{
		{"bytes=0-9", string(disk[:10])},
		{"bytes=299990-300009", string(disk[299990:300010])},
		{"bytes=799999-", string(disk[799999:])},
		{"bytes=-5", string(disk[len(disk)-5:])},
	} {
		part := r.want(r.do("GET", "/dl/images/debian", nil, "Range: "+c.header, "If-Range: "+got.Header.Get("ETag")), 206)
		if string(part.body) != c.want {
			t.Errorf("%s: %d bytes, others", c.header, len(part.body))
		}
	}
	r.want(r.do("GET", "/dl/images/debian", nil, "Range: bytes=99999999-"), 416)
	whole := r.want(r.do("GET", "/dl/images/debian", nil, "Range: bytes=0-9", `If-Range: "other"`), 200)
	if len(whole.body) != len(disk) {
		t.Error("a range of something else was served")
	}
}

func TestWhatCannotBeDownloaded(t *testing.T) {
	r := newRig(t, registry.Config{}, content.Config{})
	r.pushImage("app", "latest", "layer")
	r.pushDisk("disk", "latest")
	r.want(r.do("GET", "/dl/app", nil), 405, content.Unsupported)
	r.want(r.do("GET", "/dl/none", nil), 404, content.ManifestUnknown)
	r.want(r.do("GET", "/dl/disk?tag=other", nil), 404, content.ManifestUnknown)
	r.want(r.do("GET", "/dl/disk?tag=.bad", nil), 404, content.ManifestUnknown)
	r.want(r.do("GET", "/dl/UP/../x", nil), 400, content.NameInvalid)
	r.want(r.do("POST", "/dl/disk", nil), 405, content.Unsupported)
	r.want(r.do("GET", "/dl/disk", nil, "Authorization: "), 401, content.Unauthorized)
	r.want(r.do("GET", "/dl/disk", nil, "Authorization: Bearer "+pullToken), 403, content.Denied)
}

// Whatever the damage, and however the body is sent, a client sees a broken response, never a short or wrong one.
func TestDamageBreaksTheDownload(t *testing.T) {
	for _, te := range []string{"TE: ", "TE: trailers"} {
		r := newRig(t, registry.Config{}, content.Config{})
		disk := r.pushDisk("disk", "latest")
		damage(t, r.dir, 12345)                                           // the last part
		resp, body, err := r.try(t.Context(), "GET", "/dl/disk", nil, te) //nolint:bodyclose // try closed it
		if err == nil {
			t.Fatalf("%s: %s with %d of %d bytes and no error", te, resp.Status, len(body), len(disk))
		}
		if !errors.Is(err, io.ErrUnexpectedEOF) {
			t.Errorf("%s: %v", te, err)
		}
		// It is in quarantine now: the error comes before the first byte.
		r.want(r.do("GET", "/dl/disk", nil, te), 500)
		r.pushDisk("disk", "latest")
		if got := r.want(r.do("GET", "/dl/disk", nil, te), 200); !bytes.Equal(got.body, disk) {
			t.Error("a new push does not mend it")
		}
	}
}

// damage flips a bit of the stored blob with the given size.
func damage(t *testing.T, dir string, size int64) {
	t.Helper()
	done := false
	err := filepath.Walk(filepath.Join(dir, "blobs"), func(path string, fi os.FileInfo, err error) error {
		if err != nil || fi.IsDir() || fi.Size() != size {
			return err
		}
		data, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		data[len(data)/2] ^= 1
		done = true
		return os.WriteFile(path, data, 0o600)
	})
	if err != nil || !done {
		t.Fatalf("no blob of %d bytes was damaged: %v", size, err)
	}
}

// A snapshot is downloaded as a tar stream that the reader of exports accepts, whether it was stored whole, sparse or
// in chunks, or in ranges of chunks.
func TestDownloadOfASnapshot(t *testing.T) {
	const mib = 1 << 20
	memory := make([]byte, 6*mib)
	copy(memory[mib:], pattern(mib, 1))
	copy(memory[2*mib:], pattern(mib, 2))
	copy(memory[5*mib:], pattern(mib/2, 3))
	state := pattern(70_001, 4)
	record := []byte(`{"id":"abc","name":"dev:1"}`)
	for _, form := range []string{"whole", "chunks", "ranges"} {
		r := newRig(t, registry.Config{}, content.Config{})
		c := artifact.Config{SchemaVersion: artifact.SchemaVersion, SnapshotID: "abc", Hypervisor: "qemu", CPU: 2, Memory: 6 * mib, Files: map[string]artifact.File{}}
		m := v1.Manifest{ArtifactType: artifact.TypeSnapshot, Layers: []v1.Descriptor{r.layer("vm/one", artifact.MediaVMConfig, artifact.TitleVMConfig, record)}}
		add := func(ds ...v1.Descriptor) { m.Layers = append(m.Layers, ds...) }
		c.Files["empty"] = artifact.File{Size: 4 * mib}
		switch form {
		case "ranges": // pages of a chunk have changed: the new ones are in another, and nobody needs the old ones
			m.ArtifactType = artifact.TypeSnapshotChunks
			const page = 4096
			old := bytes.Clone(memory[mib : 2*mib])
			copy(old[3*page:], pattern(page, 7))
			copy(old[7*page:], pattern(2*page, 8))
			fresh := append(bytes.Clone(memory[mib+3*page:mib+4*page]), memory[mib+7*page:mib+9*page]...)
			tail := append(pattern(page, 9), memory[5*mib:5*mib+mib/2]...)
			l1 := r.layer("vm/one", artifact.MediaMemory+artifact.SuffixZstd, "memory-ranges", packed(t, old), 0)
			l2 := r.layer("vm/one", artifact.MediaMemory+artifact.SuffixZstd, "memory-ranges", packed(t, fresh), 1)
			l3 := r.layer("vm/one", artifact.MediaMemory, "memory-ranges", memory[2*mib:3*mib], 2)
			l4 := r.layer("vm/one", artifact.MediaMemory, "memory-ranges", tail, 3)
			add(l1, l2, l3, l4, r.layer("vm/one", artifact.MediaState+artifact.SuffixZstd, "vmstate", packed(t, state)))
			c.Files["memory-ranges"] = artifact.File{Mode: 0o600, Size: 6 * mib, Chunks: []artifact.Chunk{
				{Length: mib, Layer: l1.Digest.String(), Ranges: ranges(mib, 3*page, 0, mib+4*page, 3*page, 4*page, mib+9*page, mib-9*page, 9*page)},
				{Length: 3 * page, Layer: l2.Digest.String(), Ranges: ranges(mib+3*page, page, 0, mib+7*page, 2*page, page)},
				{Offset: 2 * mib, Length: mib, Layer: l3.Digest.String()},
				{Length: mib/2 + page, Layer: l4.Digest.String(), Ranges: ranges(5*mib, mib/2, page)},
			}}
			c.Files["vmstate"] = artifact.File{Mode: 0o600, Size: int64(len(state))}
		case "chunks":
			m.ArtifactType = artifact.TypeSnapshotV2
			one, two, three := packed(t, memory[mib:2*mib]), memory[2*mib:3*mib], packed(t, memory[5*mib:5*mib+mib/2])
			l1 := r.layer("vm/one", artifact.MediaMemory+artifact.SuffixZstd, "memory-ranges", one, 0)
			l2 := r.layer("vm/one", artifact.MediaMemory, "memory-ranges", two, 1)
			l3 := r.layer("vm/one", artifact.MediaMemory+artifact.SuffixZstd, "memory-ranges", three, 2)
			add(l1, l2, l3, r.layer("vm/one", artifact.MediaState+artifact.SuffixZstd, "vmstate", packed(t, state)))
			c.Files["memory-ranges"] = artifact.File{Mode: 0o600, Size: 6 * mib, Chunks: []artifact.Chunk{
				{Offset: mib, Length: mib, Layer: l1.Digest.String()},
				{Offset: 2 * mib, Length: mib, Layer: l2.Digest.String()},
				{Offset: 5 * mib, Length: mib / 2, Layer: l3.Digest.String()},
			}}
			c.Files["vmstate"] = artifact.File{Mode: 0o600, Size: int64(len(state))}
		default:
			data := append(append([]byte{}, memory[mib:3*mib]...), memory[5*mib:5*mib+mib/2]...)
			add(r.layer("vm/one", artifact.MediaMemory, "memory-ranges", data), r.layer("vm/one", artifact.MediaState, "vmstate", state))
			c.Files["memory-ranges"] = artifact.File{Mode: 0o600, SparseSize: 6 * mib, SparseMap: []artifact.Extent{{Offset: mib, Length: 2 * mib}, {Offset: 5 * mib, Length: mib / 2}}}
		}
		raw, err := json.Marshal(c)
		if err != nil {
			t.Fatal(err)
		}
		m.Config = r.pushBlob("vm/one", raw)
		m.Config.MediaType = artifact.MediaConfig
		r.pushManifest("vm/one", "hibernate", m)

		got := r.want(r.do("GET", "/dl/vm/one?tag=hibernate", nil), 200)
		if got.Header.Get("Content-Type") != "application/x-tar" || got.ContentLength != int64(len(got.body)) {
			t.Errorf("%v", got.Header)
		}
		rd := bundle.NewReader(bytes.NewReader(got.body))
		head, err := rd.Header()
		if err != nil {
			t.Fatal(err)
		}
		if head.Config.Name != "dev:1" || head.Config.Hypervisor != "qemu" || string(head.Snapshot) != string(record) {
			t.Errorf("header %+v", head)
		}
		files := map[string][]byte{}
		for {
			f, err := rd.Next()
			if errors.Is(err, io.EOF) {
				break
			}
			if err != nil {
				t.Fatal(err)
			}
			mem := make(at, f.Size)
			if _, err := rd.CopyTo(mem, nil); err != nil {
				t.Fatal(err)
			}
			files[f.Name] = mem
		}
		if len(files) != 3 || !bytes.Equal(files["memory-ranges"], memory) || !bytes.Equal(files["vmstate"], state) || !bytes.Equal(files["empty"], make([]byte, 4*mib)) {
			t.Errorf("%s: other files came out: %d", form, len(files))
		}
		for _, from := range []int{1, 511, 4096, len(got.body) - mib, len(got.body) - 1} {
			part := r.want(r.do("GET", "/dl/vm/one?tag=hibernate", nil, fmt.Sprintf("Range: bytes=%d-", from)), http.StatusPartialContent)
			if !bytes.Equal(part.body, got.body[from:]) {
				t.Errorf("%s: from byte %d others came", form, from)
			}
		}
	}
}

// at is memory that implements io.WriterAt.
type at []byte

func (a at) WriteAt(p []byte, off int64) (int, error) { return copy(a[off:], p), nil }

func TestHostileSnapshotsAreNotDownloaded(t *testing.T) {
	r := newRig(t, registry.Config{}, content.Config{})
	data := r.layer("x", artifact.MediaMemory, "memory-ranges", []byte("0123456789"))
	pages := r.layer("x", artifact.MediaMemory, "memory-ranges", pattern(4096, 1))
	for name, c := range map[string]string{
		"no json":       `{`,
		"name":          `{"files":{"../../etc/passwd":{"size":10}}}`,
		"header name":   `{"files":{"snapshot.json":{"size":10}}}`,
		"negative":      `{"files":{"memory-ranges":{"size":-1}}}`,
		"huge":          `{"files":{"memory-ranges":{"size":9223372036854775807}}}`,
		"map":           `{"files":{"memory-ranges":{"sparseSize":5,"sparseMap":[{"o":0,"l":10}]}}}`,
		"short map":     `{"files":{"memory-ranges":{"sparseSize":50,"sparseMap":[{"o":0,"l":9}]}}}`,
		"chunk":         `{"files":{"memory-ranges":{"size":10,"chunks":[{"o":9223372036854775807,"l":10,"d":"` + data.Digest.String() + `"}]}}}`,
		"overlap":       `{"files":{"memory-ranges":{"size":15,"chunks":[{"o":0,"l":10,"d":"` + data.Digest.String() + `"},{"o":5,"l":10,"d":"` + data.Digest.String() + `"}]}}}`,
		"no layer":      `{"files":{"memory-ranges":{"size":10,"chunks":[{"o":0,"l":10,"d":"sha256:` + strings.Repeat("0", 64) + `"}]}}}`,
		"range beyond":  `{"files":{"memory-ranges":{"size":8192,"chunks":[{"o":0,"l":4096,"d":"` + pages.Digest.String() + `","r":[0,4096,4096]}]}}}`,
		"range of half": `{"files":{"memory-ranges":{"size":8192,"chunks":[{"o":0,"l":4096,"d":"` + pages.Digest.String() + `","r":[0,10,0]}]}}}`,
		"ranges twice":  `{"files":{"memory-ranges":{"size":8192,"chunks":[{"o":0,"l":4096,"d":"` + pages.Digest.String() + `","r":[0,4096,0,0,4096,0]}]}}}`,
		"other length":  `{"files":{"memory-ranges":{"size":8192,"chunks":[{"o":0,"l":8192,"d":"` + pages.Digest.String() + `","r":[0,4096,4096]}]}}}`,
	} {
		m := v1.Manifest{ArtifactType: artifact.TypeSnapshotV2, Config: r.pushBlob("x", []byte(c)), Layers: []v1.Descriptor{data, pages}}
		m.Config.MediaType = artifact.MediaConfig
		r.pushManifest("x", "latest", m)
		if got := r.do("GET", "/dl/x", nil); got.StatusCode != 500 {
			t.Errorf("%s: %s", name, got.Status)
		}
	}
}

// ranges makes ranges of three numbers each.
func ranges(numbers ...int64) (out artifact.Ranges) {
	for n := range slices.Chunk(numbers, 3) {
		out = append(out, artifact.Range{Offset: n[0], Length: n[1], From: n[2]})
	}
	return out
}

// TestRangesOfAWrongLayer: a range is never sent from a layer that is damaged or has another length than stated.
func TestRangesOfAWrongLayer(t *testing.T) {
	for name, length := range map[string]int64{"damaged": 1 << 20, "longer": 1<<20 - 4096, "shorter": 1<<20 + 4096} {
		r := newRig(t, registry.Config{}, content.Config{})
		l := r.layer("x", artifact.MediaMemory+artifact.SuffixZstd, "memory-ranges", packed(t, pattern(1<<20, 1)), 0)
		chunk := artifact.Chunk{Length: length, Layer: l.Digest.String(), Ranges: ranges(4096, 4096, 0, 16384, 8192, 4096)}
		raw, err := json.Marshal(artifact.Config{SchemaVersion: artifact.SchemaVersion, SnapshotID: "abc", Hypervisor: "qemu", Files: artifact.Files{
			"memory-ranges": {Size: 2 << 20, Chunks: []artifact.Chunk{chunk}},
		}})
		if err != nil {
			t.Fatal(err)
		}
		m := v1.Manifest{ArtifactType: artifact.TypeSnapshotChunks, Config: r.pushBlob("x", raw), Layers: []v1.Descriptor{l}}
		m.Config.MediaType = artifact.MediaConfigChunks
		r.pushManifest("x", "latest", m)
		if name == "damaged" {
			damage(t, r.dir, l.Size)
		}
		resp, body, err := r.try(t.Context(), "GET", "/dl/x", nil) //nolint:bodyclose // try closed it
		if err == nil && resp.StatusCode == http.StatusOK {
			t.Errorf("%s: all %d bytes came", name, len(body))
		}
	}
}
