package distribution

import (
	"bytes"
	"cmp"
	"context"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"sync"

	"github.com/google/go-containerregistry/pkg/name"
	"github.com/google/go-containerregistry/pkg/v1/types"
	"golang.org/x/sync/errgroup"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/image"
	"cocoonstack.io/cocoon/internal/ociclient"
	"cocoonstack.io/cocoon/internal/vm"
)

// The form of a cloud image in a registry: its disk in one layer, or in consecutive parts.
const (
	artifactDisk    = "application/vnd.cocoonstack.os-image.v1+json"
	artifactWindows = "application/vnd.cocoonstack.windows-image.v1+json" // written by earlier systems
	mediaQCOW2      = "application/vnd.cocoonstack.disk.qcow2"
	mediaRaw        = "application/vnd.cocoonstack.disk.raw"
	mediaEmpty      = "application/vnd.oci.empty.v1+json"
	suffixPart      = ".part"
	suffixZstd      = "+zstd"

	annotationTitle = "org.opencontainers.image.title"
	annotationIndex = "cocoonstack.chunk.index"
	annotationCount = "cocoonstack.chunk.count"
)

// Phases that a push reports.
const (
	PhasePrepare = "preparing"
	PhaseSend    = "sending"
)

const (
	defaultPart   = 1 << 30 // bytes of a disk in one layer
	parallelSends = 4
)

// Push implements image.Pusher. A container image is pushed with uncompressed layers and keeps its id. A disk image is
// pushed as an artifact of its disk in parts of at most 1 GiB. The host's credentials are used if r has none.
func (c *Client) Push(ctx context.Context, r image.PushRequest, progress func(image.Progress)) (digest string, err error) {
	to, err := ociclient.ParseRef(r.To)
	if err != nil {
		return "", err
	}
	if to.Digest != "" {
		return "", errdefs.Invalidf("a push needs a tag, not a digest: %s", to)
	}
	parts, err := c.store.Parts(ctx, r.Ref)
	if err != nil {
		return "", err
	}
	defer func() { err = errors.Join(err, parts.Close()) }()
	called := cmp.Or(parts.Image.Name, parts.Image.ID)
	ca, err := c.authority(to.Host, r.CA)
	if err != nil {
		return "", err
	}
	auth := ociclient.Auth{Token: r.Token, Username: r.Username, Password: r.Password, CA: ca}
	if r.Token == "" && r.Username == "" && r.Password == "" {
		if repo, err := name.NewRepository(to.Host + "/" + to.Repository); err == nil {
			if host, ok := c.hostAuth(ctx, repo); ok {
				auth = host
				auth.CA = ca
			}
		}
	}
	s, err := ociclient.Open(ctx, to, auth, ociclient.Push, ociclient.Config{Stall: c.cfg.Stall, Backoff: c.cfg.Backoff})
	if err != nil {
		return "", fmt.Errorf("push image %s to %s: %w", called, to, err)
	}
	defer s.Close()
	p := &push{s: &ociclient.Sender{Session: s}, parts: parts, size: cmp.Or(c.cfg.Part, defaultPart), tell: progress}
	if digest, err = p.run(ctx, to.Tag); err != nil {
		return "", fmt.Errorf("push image %s to %s: %w", called, to, err)
	}
	return digest, nil
}

// authority is the CA to trust for a host: from the request, else from the host's configuration.
func (c *Client) authority(host string, ca []byte) ([]byte, error) {
	if len(ca) > 0 {
		return ca, nil
	}
	return readCA(host, c.cfg.Registries[host])
}

// readCA is the CA of a host's configuration, nil if that names none.
func readCA(host string, cfg RegistryConfig) ([]byte, error) {
	if cfg.CA == "" {
		return nil, nil
	}
	pem, err := os.ReadFile(cfg.CA)
	if err != nil {
		return nil, errdefs.Preconditionf("the CA of %s cannot be read: %w", host, err)
	}
	if !x509.NewCertPool().AppendCertsFromPEM(pem) {
		return nil, errdefs.Preconditionf("the CA file %s of %s holds no certificate", cfg.CA, host)
	}
	return pem, nil
}

// push is one image that is being sent.
type push struct {
	s     *ociclient.Sender
	parts *image.Parts
	size  int64 // of one part of a disk
	tell  func(image.Progress)

	mu sync.Mutex
	p  image.Progress
}

func (p *push) report(phase string, more int64) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.p.Phase, p.p.Done = phase, p.p.Done+more
	if p.tell != nil {
		p.tell(p.p)
	}
}

func (p *push) run(ctx context.Context, tag string) (string, error) {
	p.p.Total = -1
	p.report(PhasePrepare, 0)
	m := ociclient.Manifest{SchemaVersion: 2, MediaType: ociclient.MediaManifest}
	config, layers := p.parts.Config, []layer(nil)
	if p.parts.Disk == nil {
		m.Config.MediaType = string(types.OCIConfigJSON)
		for _, l := range p.parts.Layers {
			layers = append(layers, layer{
				Descriptor: ociclient.Descriptor{MediaType: string(types.OCIUncompressedLayer), Digest: l.Digest, Size: l.Size},
				body:       func() io.Reader { return restored(ctx, l) },
			})
		}
	} else {
		m.ArtifactType, m.Config.MediaType, config = artifactDisk, mediaEmpty, []byte("{}")
		layers = p.disk()
	}
	p.p.Total = 0
	for _, l := range layers {
		p.p.Total += l.Size
	}
	p.report(PhaseSend, 0)
	g, gctx := errgroup.WithContext(ctx)
	g.SetLimit(parallelSends)
	for i := range layers {
		g.Go(func() error { return p.send(gctx, &layers[i]) })
	}
	if err := g.Wait(); err != nil {
		return "", err
	}
	m.Config.Digest, m.Config.Size = ociclient.Digest(config), int64(len(config))
	if err := p.s.Send(ctx, m.Config.Digest, m.Config.Size, func() io.Reader { return bytes.NewReader(config) }); err != nil {
		return "", err
	}
	m.Layers = []ociclient.Descriptor{}
	for _, l := range layers {
		m.Layers = append(m.Layers, l.Descriptor)
	}
	raw, err := json.Marshal(m)
	if err != nil {
		return "", fmt.Errorf("encode manifest: %w", err)
	}
	return p.s.PutManifest(ctx, tag, ociclient.MediaManifest, raw)
}

// layer is one blob to send. Its digest may not be known yet.
type layer struct {
	ociclient.Descriptor

	body func() io.Reader
}

// diskMedia returns the media type of a disk, and its title.
func diskMedia(format vm.DiskFormat) (media, title string) {
	if format == vm.DiskQCOW2 {
		return mediaQCOW2, "disk.qcow2"
	}
	return mediaRaw, "disk.raw"
}

// DiskManifest returns the manifest of a cloud image whose disk is one blob, and its configuration. The blob may be compressed.
func DiskManifest(format vm.DiskFormat, digest string, size int64) (m ociclient.Manifest, config []byte) {
	media, title := diskMedia(format)
	config = []byte("{}")
	return ociclient.Manifest{
		SchemaVersion: 2, MediaType: ociclient.MediaManifest, ArtifactType: artifactDisk,
		Config: ociclient.Descriptor{MediaType: mediaEmpty, Digest: ociclient.Digest(config), Size: int64(len(config))},
		Layers: []ociclient.Descriptor{{MediaType: media, Digest: digest, Size: size, Annotations: map[string]string{annotationTitle: title}}},
	}, config
}

// disk cuts the disk into layers.
func (p *push) disk() []layer {
	media, title := diskMedia(p.parts.Format)
	n := int((p.parts.Size + p.size - 1) / p.size)
	var out []layer
	for i := range max(n, 1) {
		at := int64(i) * p.size
		size := min(p.size, p.parts.Size-at)
		l := layer{
			Descriptor: ociclient.Descriptor{MediaType: media, Size: size, Annotations: map[string]string{annotationTitle: title}},
			body:       func() io.Reader { return io.NewSectionReader(p.parts.Disk, at, size) },
		}
		if n > 1 {
			l.MediaType = media + suffixPart
			l.Annotations = map[string]string{annotationTitle: fmt.Sprintf("%s.%04d", title, i), annotationIndex: fmt.Sprint(i), annotationCount: fmt.Sprint(n)}
		}
		out = append(out, l)
	}
	return out
}

func (p *push) send(ctx context.Context, l *layer) error {
	if l.Digest == "" {
		var err error
		if l.Digest, err = ociclient.DigestOf(ctx, l.body()); err != nil {
			return fmt.Errorf("read the disk: %w", err)
		}
	}
	if err := p.s.Send(ctx, l.Digest, l.Size, l.body); err != nil {
		return err
	}
	p.report(PhaseSend, l.Size)
	return nil
}

// restored reads the original tar of a layer. The goroutine that writes it ends when the reader ends.
func restored(ctx context.Context, l image.Part) io.Reader {
	r, w := io.Pipe()
	go func() { w.CloseWithError(l.Write(ctx, w)) }()
	return r // the HTTP client closes it
}
