package content

import (
	"strings"
	"testing"

	"github.com/opencontainers/go-digest"
	v1 "github.com/opencontainers/image-spec/specs-go/v1"

	"cocoonstack.io/cocoon/internal/registry/reference"
)

// An accepted manifest is stored, and must be accepted when it is read back, where only its own bytes state its type.
func FuzzParseManifest(f *testing.F) {
	d := digest.FromString("x").String()
	config := `"config":{"mediaType":"x/y","digest":"` + d + `","size":1}`
	f.Add(v1.MediaTypeImageManifest, `{"schemaVersion":2,"mediaType":"`+v1.MediaTypeImageManifest+`",`+config+`,"layers":[]}`)
	f.Add(v1.MediaTypeImageManifest+"; charset=utf-8", `{"schemaVersion":2,`+config+`,"subject":{"digest":"`+d+`"}}`)
	f.Add(v1.MediaTypeImageIndex, `{"schemaVersion":2,"manifests":[]}`)
	f.Add(v1.MediaTypeImageIndex, `{"schemaVersion":2}`)
	f.Add("", `{"schemaVersion":2,"config":{"digest":"sha256:../..","size":-1}}`)
	f.Fuzz(func(t *testing.T, mediaType, body string) {
		doc, err := ParseManifest(mediaType, []byte(body))
		if err != nil {
			if CodeOf(err) != ManifestInvalid {
				t.Fatalf("%q: %v", body, err)
			}
			return
		}
		for _, b := range append(doc.blobs(), doc.Manifests...) {
			if _, err := reference.Digest(b.Digest.String()); err != nil || b.Size < 0 || strings.Contains(blobKey(b.Digest), "..") {
				t.Fatalf("%+v is taken", b)
			}
		}
		back, err := ParseManifest("", []byte(body))
		if err != nil || back.MediaType != doc.MediaType {
			t.Fatalf("%q was taken as %s and is read as %+v, %v", body, doc.MediaType, back, err)
		}
	})
}
