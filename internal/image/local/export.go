package local

import (
	"archive/tar"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/types"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/image"
)

// Export writes a disk image's file, the one that VMs boot from. A disk that was converted at import is exported as qcow2;
// importing that gives another id.
//
// A container image becomes an OCI image layout with its original layers, uncompressed, and keeps its id.
// Errors: NotFound, Unsupported (layers that were merged), DataLoss.
func (s *Store) Export(ctx context.Context, ref string, w io.Writer) (err error) {
	p, err := s.Parts(ctx, ref)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, p.Close()) }()
	if p.Disk == nil {
		return exportLayout(ctx, p, w)
	}
	disk := io.NewSectionReader(p.Disk, 0, p.Size)
	if _, err := io.CopyBuffer(w, &source{ctx: ctx, r: disk}, make([]byte, 1<<20)); err != nil {
		return fmt.Errorf("export image %s: %w", orID(p.Image), err)
	}
	return nil
}

// exportLayout writes a container image as an OCI image layout. Its layers are the original tars, uncompressed, so
// importing it gives the same id.
func exportLayout(ctx context.Context, p *image.Parts, w io.Writer) error {
	m := v1.Manifest{SchemaVersion: 2, MediaType: types.OCIManifestSchema1, Config: descriptor(types.OCIConfigJSON, p.Config)}
	for _, l := range p.Layers {
		digest, err := v1.NewHash(l.Digest)
		if err != nil {
			return errdefs.DataLossf("the record of the layer %s is damaged; remove the image and fetch it again", l.Digest)
		}
		m.Layers = append(m.Layers, v1.Descriptor{MediaType: types.OCIUncompressedLayer, Digest: digest, Size: l.Size})
	}
	manifest, err := json.Marshal(m)
	if err != nil {
		return fmt.Errorf("encode manifest: %w", err)
	}
	d := descriptor(types.OCIManifestSchema1, manifest)
	d.Platform = &v1.Platform{OS: "linux", Architecture: p.Image.Arch}
	d.Annotations = map[string]string{"io.containerd.image.name": p.Image.Name}
	index, err := json.Marshal(v1.IndexManifest{SchemaVersion: 2, MediaType: types.OCIImageIndex, Manifests: []v1.Descriptor{d}})
	if err != nil {
		return fmt.Errorf("encode index: %w", err)
	}
	a := layoutWriter{tw: tar.NewWriter(w), have: map[string]bool{}}
	if err := a.file("oci-layout", []byte(`{"imageLayoutVersion":"1.0.0"}`)); err != nil {
		return err
	}
	for n, l := range p.Layers {
		if err := a.layer(ctx, blobName(m.Layers[n].Digest), l); err != nil {
			return fmt.Errorf("export layer %d of %d: %w", n+1, len(p.Layers), err)
		}
	}
	for _, f := range []struct {
		name string
		data []byte
	}{{blobName(m.Config.Digest), p.Config}, {blobName(d.Digest), manifest}, {"index.json", index}} {
		if err := a.file(f.name, f.data); err != nil {
			return err
		}
	}
	return a.tw.Close()
}

func blobName(h v1.Hash) string { return "blobs/" + h.Algorithm + "/" + h.Hex }

func descriptor(media types.MediaType, data []byte) v1.Descriptor {
	sum := sha256.Sum256(data)
	return v1.Descriptor{MediaType: media, Size: int64(len(data)), Digest: v1.Hash{Algorithm: "sha256", Hex: hex.EncodeToString(sum[:])}}
}

// layoutWriter writes the files of an image layout, equal layers only once.
type layoutWriter struct {
	tw   *tar.Writer
	have map[string]bool
}

func (a *layoutWriter) header(name string, size int64) error {
	return a.tw.WriteHeader(&tar.Header{Name: name, Typeflag: tar.TypeReg, Mode: 0o644, Size: size})
}

func (a *layoutWriter) file(name string, data []byte) error {
	if err := a.header(name, int64(len(data))); err != nil {
		return err
	}
	_, err := a.tw.Write(data)
	return err
}

func (a *layoutWriter) layer(ctx context.Context, name string, l image.Part) error {
	if a.have[name] {
		return nil
	}
	a.have[name] = true
	if err := a.header(name, l.Size); err != nil {
		return err
	}
	return l.Write(ctx, a.tw)
}
