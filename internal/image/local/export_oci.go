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
	"os"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/types"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/image"
)

// exportOCI writes a container image as an OCI image layout. Its layers are the original tars, uncompressed, so importing
// it gives the same id.
func (s *Store) exportOCI(ctx context.Context, img image.Image, w io.Writer) (err error) {
	work, err := s.newWork()
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, work.close()) }()
	rec, err := s.use(img.ID)
	if err != nil {
		return err
	}
	if err := s.pin(work, rec.Layers...); err != nil { // they stay if the image is removed meanwhile
		return err
	}
	hex, _ := hexOf(rec.ID)
	config, err := os.ReadFile(s.path("data", hex, configFile))
	if err != nil {
		return fmt.Errorf("export image %s: %w", orID(img), err)
	}
	m := v1.Manifest{SchemaVersion: 2, MediaType: types.OCIManifestSchema1, Config: descriptor(types.OCIConfigJSON, config)}
	infos := make([]layerInfo, len(rec.Layers))
	for n, key := range rec.Layers {
		if infos[n], err = s.layerInfo(key); err != nil {
			return err
		}
		if infos[n].DiffID == "" {
			return errdefs.Unsupportedf("image %s has more than %d layers, and its lowest layers were merged, so it cannot be exported unchanged; get it from its registry or with `docker save`", orID(img), maxLayers)
		}
		digest, err := v1.NewHash(infos[n].DiffID)
		if err != nil {
			return errdefs.DataLossf("the layer record %s is damaged; remove the image and fetch it again", key)
		}
		m.Layers = append(m.Layers, v1.Descriptor{MediaType: types.OCIUncompressedLayer, Digest: digest, Size: infos[n].TarSize})
	}
	manifest, err := json.Marshal(m)
	if err != nil {
		return fmt.Errorf("encode manifest: %w", err)
	}
	d := descriptor(types.OCIManifestSchema1, manifest)
	d.Platform = &v1.Platform{OS: "linux", Architecture: rec.Arch}
	d.Annotations = map[string]string{"io.containerd.image.name": img.Name}
	index, err := json.Marshal(v1.IndexManifest{SchemaVersion: 2, MediaType: types.OCIImageIndex, Manifests: []v1.Descriptor{d}})
	if err != nil {
		return fmt.Errorf("encode index: %w", err)
	}
	a := layoutWriter{tw: tar.NewWriter(w), have: map[string]bool{}}
	if err := a.file("oci-layout", []byte(`{"imageLayoutVersion":"1.0.0"}`)); err != nil {
		return err
	}
	for n, l := range m.Layers {
		if err := a.layer(ctx, s, rec.Layers[n], infos[n], l); err != nil {
			return fmt.Errorf("export layer %d of %d: %w", n+1, len(m.Layers), err)
		}
	}
	for _, f := range []struct {
		name string
		data []byte
	}{{blobName(m.Config.Digest), config}, {blobName(d.Digest), manifest}, {"index.json", index}} {
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

// layoutWriter writes the files of an image layout, equal files only once.
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

func (a *layoutWriter) layer(ctx context.Context, s *Store, key string, info layerInfo, d v1.Descriptor) error {
	name := blobName(d.Digest)
	if a.have[name] {
		return nil
	}
	a.have[name] = true
	if err := a.header(name, info.TarSize); err != nil {
		return err
	}
	return s.restoreLayer(ctx, key, info, a.tw)
}
