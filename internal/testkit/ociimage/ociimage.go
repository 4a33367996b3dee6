// Package ociimage builds small container images in memory, well-formed and hostile ones, for tests.
//
// It is deterministic and independent of the reader it tests: standard library, and zstd because Go has none.
package ociimage

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/klauspost/compress/zstd"
)

// Epoch is the modification time of every file.
var Epoch = time.Unix(1_700_000_000, 0)

// Entry is one entry of a layer or of an archive.
type Entry struct {
	Name   string
	Type   byte // tar type; 0 is a regular file
	Body   string
	Link   string
	Mode   int64 // 0 is 0644, for folders 0755
	UID    int
	GID    int
	Xattrs map[string]string
}

// File is a regular file.
func File(name, body string) Entry { return Entry{Name: name, Body: body} }

// Dir is a folder.
func Dir(name string) Entry { return Entry{Name: name + "/", Type: tar.TypeDir} }

// Symlink is a symbolic link.
func Symlink(name, target string) Entry {
	return Entry{Name: name, Type: tar.TypeSymlink, Link: target}
}

// HardLink is another name of target.
func HardLink(name, target string) Entry { return Entry{Name: name, Type: tar.TypeLink, Link: target} }

// Device is a character device.
func Device(name string) Entry { return Entry{Name: name, Type: tar.TypeChar} }

// Whiteout hides name of lower layers.
func Whiteout(dir, name string) Entry { return File(dir+"/.wh."+name, "") }

// Opaque hides everything that lower layers put into dir.
func Opaque(dir string) Entry { return File(dir+"/.wh..wh..opq", "") }

// Tar writes entries unchanged, including hostile ones.
func Tar(entries ...Entry) []byte {
	var buf bytes.Buffer
	w := tar.NewWriter(&buf)
	for _, e := range entries {
		h := &tar.Header{Name: e.Name, Typeflag: e.Type, Linkname: e.Link, Mode: e.Mode, Uid: e.UID, Gid: e.GID, ModTime: Epoch}
		if h.Typeflag == 0 {
			h.Typeflag = tar.TypeReg
		}
		if h.Mode == 0 {
			h.Mode = 0o644
			if h.Typeflag == tar.TypeDir {
				h.Mode = 0o755
			}
		}
		for k, v := range e.Xattrs {
			if h.PAXRecords == nil {
				h.PAXRecords = map[string]string{}
			}
			h.PAXRecords["SCHILY.xattr."+k] = v
		}
		if h.Typeflag == tar.TypeReg {
			h.Size = int64(len(e.Body))
		}
		must(w.WriteHeader(h))
		_, err := w.Write([]byte(e.Body))
		must(err)
	}
	must(w.Close())
	return buf.Bytes()
}

// Layer is one layer: an uncompressed tar and its compression for transfer.
type Layer struct {
	Tar      []byte
	Compress string // "", "gzip", "zstd"
}

// Of is an uncompressed layer of entries.
func Of(entries ...Entry) Layer { return Layer{Tar: Tar(entries...)} }

// Blob returns the layer as it is transferred, and its media type.
func (l Layer) Blob() ([]byte, string) {
	const media = "application/vnd.oci.image.layer.v1.tar"
	switch l.Compress {
	case "gzip":
		return Gzip(l.Tar), media + "+gzip"
	case "zstd":
		return Zstd(l.Tar), media + "+zstd"
	}
	return l.Tar, media
}

// Gzip compresses b.
func Gzip(b []byte) []byte {
	var buf bytes.Buffer
	w := gzip.NewWriter(&buf)
	_, err := w.Write(b)
	must(err)
	must(w.Close())
	return buf.Bytes()
}

// Zstd compresses b.
func Zstd(b []byte) []byte {
	w, err := zstd.NewWriter(nil)
	must(err)
	return w.EncodeAll(b, nil)
}

// Image is an image to write.
type Image struct {
	Layers     []Layer
	OS, Arch   string // "" is linux, amd64
	Variant    string
	Entrypoint []string
	Cmd        []string
	Env        []string
	User       string
	WorkDir    string
	DiffIDs    []string // instead of the correct ones
}

// Config returns the image's configuration, whose digest is the image's id.
func (i Image) Config() []byte {
	ids := i.DiffIDs
	for _, l := range i.Layers {
		if i.DiffIDs == nil {
			ids = append(ids, Digest(l.Tar))
		}
	}
	return encode(map[string]any{
		"architecture": or(i.Arch, "amd64"), "os": or(i.OS, "linux"), "variant": i.Variant,
		"config": map[string]any{"Entrypoint": i.Entrypoint, "Cmd": i.Cmd, "Env": i.Env, "User": i.User, "WorkingDir": i.WorkDir},
		"rootfs": map[string]any{"type": "layers", "diff_ids": ids},
	})
}

// ID returns the image's id.
func (i Image) ID() string { return Digest(i.Config()) }

// Descriptor points at a blob.
type Descriptor struct {
	MediaType   string            `json:"mediaType"`
	Digest      string            `json:"digest"`
	Size        int               `json:"size"`
	Platform    map[string]string `json:"platform,omitempty"`
	Annotations map[string]string `json:"annotations,omitempty"`
}

// Media types of indexes and manifests.
const (
	MediaIndex    = "application/vnd.oci.image.index.v1+json"
	MediaManifest = "application/vnd.oci.image.manifest.v1+json"
	mediaConfig   = "application/vnd.oci.image.config.v1+json"
)

// Blobs writes the image's blobs and returns the descriptor of its manifest.
func (i Image) Blobs(l *Layout) Descriptor {
	cfg := l.Add(mediaConfig, i.Config())
	layers := []Descriptor{}
	for _, layer := range i.Layers {
		blob, media := layer.Blob()
		layers = append(layers, l.Add(media, blob))
	}
	return l.Add(MediaManifest, encode(map[string]any{"schemaVersion": 2, "mediaType": MediaManifest, "config": cfg, "layers": layers}))
}

// Layout is an OCI image layout under construction: a list of files that a test may change before writing them.
type Layout struct{ Files []Entry }

// Add stores a blob under its digest.
func (l *Layout) Add(media string, data []byte) Descriptor {
	d := Digest(data)
	name := "blobs/sha256/" + d[len("sha256:"):]
	for _, f := range l.Files {
		if f.Name == name {
			return Descriptor{MediaType: media, Digest: d, Size: len(data)}
		}
	}
	l.Files = append(l.Files, File(name, string(data)))
	return Descriptor{MediaType: media, Digest: d, Size: len(data)}
}

// Index stores an index of manifests.
func (l *Layout) Index(manifests ...Descriptor) Descriptor {
	return l.Add(MediaIndex, index(manifests))
}

// Close adds the files that complete a layout whose index lists manifests.
func (l *Layout) Close(manifests ...Descriptor) {
	l.Files = append(l.Files, File("oci-layout", `{"imageLayoutVersion":"1.0.0"}`), File("index.json", string(index(manifests))))
}

// Tar returns the layout as an archive.
func (l *Layout) Tar() []byte { return Tar(l.Files...) }

func index(manifests []Descriptor) []byte {
	return encode(map[string]any{"schemaVersion": 2, "mediaType": MediaIndex, "manifests": manifests})
}

// OCI returns the image as an OCI image layout archive.
func (i Image) OCI() []byte {
	var l Layout
	l.Close(i.Blobs(&l))
	return l.Tar()
}

// Docker returns the images as `docker save` writes them, each with its tag.
func Docker(images map[string]Image) []byte {
	type entry struct {
		Config   string
		RepoTags []string
		Layers   []string
	}
	var manifest []entry
	var files []Entry
	for _, tag := range sorted(images) {
		img := images[tag]
		cfg := img.Config()
		e := entry{Config: Digest(cfg)[7:] + ".json", RepoTags: []string{tag}}
		files = append(files, File(e.Config, string(cfg)))
		for n, layer := range img.Layers {
			blob, _ := layer.Blob()
			name := fmt.Sprintf("%s-%d/layer.tar", Digest(cfg)[7:19], n)
			files = append(files, File(name, string(blob)))
			e.Layers = append(e.Layers, name)
		}
		manifest = append(manifest, e)
	}
	return Tar(append(files, File("manifest.json", string(encode(manifest))))...)
}

// Digest returns the sha256 digest of b as images write it.
func Digest(b []byte) string {
	sum := sha256.Sum256(b)
	return "sha256:" + hex.EncodeToString(sum[:])
}

func encode(v any) []byte {
	b, err := json.Marshal(v)
	must(err)
	return b
}

func or(s, fallback string) string {
	if s == "" {
		return fallback
	}
	return s
}

// must panics on an error: in a test it means that the fixture itself is broken.
func must(err error) {
	if err != nil {
		panic(err)
	}
}

func sorted(m map[string]Image) []string { return slices.Sorted(maps.Keys(m)) }
