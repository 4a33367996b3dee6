package oci

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io"
	"slices"
	"strings"

	v1 "github.com/google/go-containerregistry/pkg/v1"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/vm"
)

// Image is one image, chosen for one architecture. Its metadata are verified; BuildLayer verifies the uncompressed digests
// of its layers.
type Image struct {
	ID      string     // digest of the configuration, which determines the content of every layer
	Arch    string     // GOARCH
	Process vm.Process // the process that the image runs by default
	Config  []byte     // the configuration itself
	DiffIDs []string   // of the uncompressed layers, lowest first, sha256:<hex>

	archive *Archive
	layers  []blob
}

// Layer opens a layer of an image from an archive.
func (i *Image) Layer(n int) io.Reader { return i.archive.open(i.layers[n]) }

const maxLayers = 1024

// Image chooses the linux image of an architecture. name (repository:tag) decides when the archive holds several.
// Errors: InvalidArgument (not an image), DataLoss (a blob is missing or has another digest), Unsupported (no image for arch).
func (a *Archive) Image(name, arch string) (*Image, error) {
	if b, ok := a.find("index.json"); ok {
		if _, isLayout := a.find("oci-layout"); isLayout {
			return a.fromLayout(b, name, arch)
		}
	}
	if b, ok := a.find("manifest.json"); ok {
		return a.fromDockerSave(b, name, arch)
	}
	if !a.ended {
		return nil, errdefs.DataLossf("the archive is truncated: it ends before its index; fetch it again")
	}
	return nil, errdefs.Invalidf("the archive is a tar but no image: it has neither oci-layout and index.json nor manifest.json " +
		"(a file system made by `docker export` is not an image; use `docker save`)")
}

// fromDockerSave reads manifest.json, the list of images that `docker save` writes.
func (a *Archive) fromDockerSave(b blob, name, arch string) (*Image, error) {
	type entry struct {
		Config   string
		RepoTags []string
		Layers   []string
	}
	r, err := a.metadata(b, "manifest.json")
	if err != nil {
		return nil, err
	}
	var all []entry
	if err := json.NewDecoder(r).Decode(&all); err != nil {
		return nil, errdefs.Invalidf("manifest.json is not what `docker save` writes: %w", err)
	}
	if len(all) > 1 {
		all = slices.DeleteFunc(all, func(e entry) bool { return !slices.ContainsFunc(e.RepoTags, sameName(name)) })
	}
	if len(all) != 1 {
		return nil, errdefs.Invalidf("the archive holds several images and %d of them are called %s; save one image per archive", len(all), name)
	}
	cfg, ok := a.find(all[0].Config)
	if !ok {
		return nil, errdefs.DataLossf("the archive is incomplete: its configuration %q is missing; fetch it again", all[0].Config)
	}
	if want := strings.TrimSuffix(all[0].Config, ".json"); len(want) == hex.EncodedLen(len(cfg.sum)) && "sha256:"+want != cfg.digest() {
		return nil, errdefs.DataLossf("the configuration %s has the digest %s: the archive is damaged", all[0].Config, cfg.digest())
	}
	layers := make([]blob, len(all[0].Layers))
	for i, l := range all[0].Layers {
		if layers[i], ok = a.find(l); !ok {
			return nil, errdefs.DataLossf("the archive is incomplete: its layer %q is missing; fetch it again", l)
		}
	}
	return a.image(cfg, layers, arch)
}

func sameName(name string) func(string) bool {
	return func(tag string) bool {
		return tag == name || strings.HasSuffix(name, "/"+tag) || strings.HasSuffix(tag, "/"+name)
	}
}

// byDigest returns a blob of a layout after checking that its content matches its digest.
func (a *Archive) byDigest(d v1.Descriptor, what string) (blob, error) {
	if d.Digest.Algorithm != "sha256" {
		return blob{}, errdefs.Invalidf("the %s %s uses the digest algorithm %q; only sha256 is supported", what, d.Digest, d.Digest.Algorithm)
	}
	b, ok := a.find("blobs/sha256/" + d.Digest.Hex)
	switch {
	case !ok:
		return blob{}, errdefs.DataLossf("the archive is incomplete: the %s %s is missing; fetch it again", what, d.Digest)
	case b.digest() != d.Digest.String():
		return blob{}, errdefs.DataLossf("the %s %s has the digest %s: the archive is damaged", what, d.Digest, b.digest())
	case d.Size != b.size:
		return blob{}, errdefs.DataLossf("the %s %s is %d bytes long, not %d as its descriptor says: the archive is damaged", what, d.Digest, b.size, d.Size)
	}
	return b, nil
}

func (a *Archive) image(cfg blob, layers []blob, arch string) (*Image, error) {
	r, err := a.metadata(cfg, "the image configuration")
	if err != nil {
		return nil, err
	}
	raw, err := io.ReadAll(r)
	if err != nil {
		return nil, err
	}
	img, err := NewImage(raw, len(layers), arch)
	if err != nil {
		return nil, err
	}
	img.archive, img.layers = a, layers
	return img, nil
}

// NewImage reads an image configuration and checks it against the number of layers in its manifest and the wanted
// architecture.
// Errors: InvalidArgument (not an image we can boot), Unsupported (another platform).
func NewImage(config []byte, layers int, arch string) (*Image, error) {
	c, err := v1.ParseConfigFile(bytes.NewReader(config))
	if err != nil {
		return nil, errdefs.Invalidf("the image configuration cannot be read: %w", err)
	}
	switch {
	case c.RootFS.Type != "layers" || layers == 0:
		return nil, errdefs.Invalidf("this is an OCI artifact or an empty image: it has no file system layers to boot from")
	case layers > maxLayers:
		return nil, errdefs.Invalidf("the image has %d layers; at most %d are allowed", layers, maxLayers)
	case len(c.RootFS.DiffIDs) != layers:
		return nil, errdefs.Invalidf("the image has %d layers but its configuration lists %d", layers, len(c.RootFS.DiffIDs))
	case !runs(c.OS, c.Architecture, arch):
		return nil, errdefs.Unsupportedf("the image is for %s/%s, this host runs linux/%s; use the image for the platform of this host", c.OS, c.Architecture, arch)
	}
	p, err := process(c.Config)
	if err != nil {
		return nil, err
	}
	sum := sha256.Sum256(config)
	img := &Image{ID: "sha256:" + hex.EncodeToString(sum[:]), Arch: c.Architecture, Process: p, Config: config}
	for _, d := range c.RootFS.DiffIDs {
		if d.Algorithm != "sha256" {
			return nil, errdefs.Invalidf("the image names a layer by the digest algorithm %q; only sha256 is supported", d.Algorithm)
		}
		img.DiffIDs = append(img.DiffIDs, d.String())
	}
	return img, nil
}

func (a *Archive) config(b blob) (*v1.ConfigFile, error) {
	r, err := a.metadata(b, "the image configuration")
	if err != nil {
		return nil, err
	}
	c, err := v1.ParseConfigFile(r)
	if err != nil {
		return nil, errdefs.Invalidf("the image configuration cannot be read: %w", err)
	}
	return c, nil
}

func runs(os, arch, want string) bool { return (os == "linux" || os == "") && arch == want }

// process reads the process to run from the configuration. Exec cannot pass NUL bytes, so the configuration must not have any.
func process(c v1.Config) (vm.Process, error) {
	for _, list := range [][]string{c.Entrypoint, c.Cmd, c.Env, {c.WorkingDir, c.User, c.StopSignal}} {
		if slices.ContainsFunc(list, func(s string) bool { return strings.ContainsRune(s, 0) }) {
			return vm.Process{}, errdefs.Invalidf("the image configuration holds a NUL byte in its command or environment: refused")
		}
	}
	p := vm.Process{Entrypoint: c.Entrypoint, Args: c.Cmd, WorkDir: c.WorkingDir, User: c.User, StopSignal: c.StopSignal}
	for _, e := range c.Env {
		name, value, _ := strings.Cut(e, "=")
		if name == "" {
			return vm.Process{}, errdefs.Invalidf("the image configuration sets an environment variable without a name")
		}
		p.Env = append(p.Env, vm.EnvVar{Name: name, Value: value})
	}
	return p, nil
}

// fromLayout searches index.json and nested indexes for the one matching manifest.
func (a *Archive) fromLayout(index blob, name, arch string) (*Image, error) {
	w := walk{a: a, arch: arch, seen: map[string]bool{}}
	if err := w.index(index, "", 0); err != nil {
		return nil, err
	}
	m, err := w.choose(name)
	if err != nil {
		return nil, err
	}
	cfg, err := a.byDigest(m.Config, "configuration")
	if err != nil {
		return nil, err
	}
	layers := make([]blob, len(m.Layers))
	for i, d := range m.Layers {
		if layers[i], err = a.byDigest(d, "layer"); err != nil {
			return nil, fmt.Errorf("layer %d of %d: %w", i+1, len(m.Layers), err)
		}
	}
	return a.image(cfg, layers, arch)
}
