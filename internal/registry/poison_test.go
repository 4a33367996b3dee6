package registry_test

import (
	"encoding/json"
	"math/rand/v2"
	"net/http"
	"testing"

	v1 "github.com/opencontainers/image-spec/specs-go/v1"

	"cocoonstack.io/cocoon/internal/registry"
	"cocoonstack.io/cocoon/internal/registry/content"
	"cocoonstack.io/cocoon/internal/snapshot/artifact"
)

// pushRanges pushes a snapshot whose memory consists of ranges.
func (r *rig) pushRanges(repo string, size int64, layers []v1.Descriptor, chunks ...artifact.Chunk) {
	r.t.Helper()
	raw, err := json.Marshal(artifact.Config{SchemaVersion: artifact.SchemaVersion, SnapshotID: "abc", Hypervisor: "qemu", Files: artifact.Files{
		"memory-ranges": {Size: size, Chunks: chunks},
	}})
	if err != nil {
		r.t.Fatal(err)
	}
	m := v1.Manifest{ArtifactType: artifact.TypeSnapshotChunks, Config: r.pushBlob(repo, raw), Layers: layers}
	m.Config.MediaType = artifact.MediaConfigChunks
	r.pushManifest(repo, "latest", m)
}

// A manifest that says something else of a blob does not change what others download.
func TestRangesOfABlobThatAnotherManifestMisreads(t *testing.T) {
	r := newRig(t, registry.Config{}, content.Config{})
	noise := make([]byte, 64<<10)
	random := rand.New(rand.NewPCG(1, 2))
	for i := range noise {
		noise[i] = byte(random.IntN(64))
	}
	blob := packed(t, noise)
	plain := r.layer("evil", artifact.MediaMemory, "memory-ranges", blob, 0)
	r.pushRanges("evil", 1<<20, []v1.Descriptor{plain}, artifact.Chunk{Length: int64(len(blob)), Layer: plain.Digest.String(), Ranges: ranges(4096, 4096, 0)})
	r.want(r.do("GET", "/dl/evil", nil), http.StatusOK)
	good := r.layer("good", artifact.MediaMemory+artifact.SuffixZstd, "memory-ranges", blob, 0)
	r.pushRanges("good", 1<<20, []v1.Descriptor{good}, artifact.Chunk{Length: int64(len(noise)), Layer: good.Digest.String(), Ranges: ranges(4096, 4096, 0)})
	r.want(r.do("GET", "/dl/good", nil), http.StatusOK)
}

// A file that would unpack its blobs again and again is refused before anything is unpacked.
func TestRangesThatTakeTurns(t *testing.T) {
	const large, page = artifact.MaxRangedBlob, 4096
	r := newRig(t, registry.Config{}, content.Config{})
	var layers []v1.Descriptor
	var chunks []artifact.Chunk
	for i := range 3 {
		l := r.layer("x", artifact.MediaMemory+artifact.SuffixZstd, "memory-ranges", packed(t, []byte{byte(i)}), i)
		layers = append(layers, l)
		c := artifact.Chunk{Length: large, Layer: l.Digest.String()}
		for j := range 100 {
			c.Ranges = append(c.Ranges, artifact.Range{Offset: int64(3*j+i) * page, Length: page})
		}
		chunks = append(chunks, c)
	}
	r.pushRanges("x", 2*large, layers, chunks...)
	if got := r.do("HEAD", "/dl/x", nil); got.StatusCode == http.StatusOK {
		t.Error("it is sent")
	}
	r.pushRanges("x", 2*large, layers[:2], chunks[:2]...) // both are kept
	r.want(r.do("HEAD", "/dl/x", nil), http.StatusOK)
}
