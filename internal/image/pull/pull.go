// Package pull fetches images into the local store: it translates the name, asks the store what it has, applies the
// policy, and fetches the rest over HTTP or from an OCI registry.
//
// It only connects other packages: translate knows the grammar of names, fetch and registry the protocols, local the
// files. It adds the policy, the sharing of transfers between callers and the limit of parallel transfers.
package pull

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"log/slog"
	"strings"
	"sync"
	"time"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/image"
	"cocoonstack.io/cocoon/internal/image/distribution"
	"cocoonstack.io/cocoon/internal/image/fetch"
	"cocoonstack.io/cocoon/internal/image/translate"
	"cocoonstack.io/cocoon/internal/reach"
	"cocoonstack.io/cocoon/internal/vm"
)

// DefaultParallel is the default number of parallel transfers.
const DefaultParallel = 4

// Config says how names resolve and how images are fetched. The zero value is usable.
type Config struct {
	Mappings   string              // folder of mapping files; "" for none
	Protocol   string              // for names without one: https (default) or http
	Regexps    bool                // enables mappings by regular expression
	Registries distribution.Config // how registries are reached
	Parallel   int                 // transfers at a time; 0 is DefaultParallel
	Stall      time.Duration       // a connection that delivers no byte for this time is replaced; 0 is the default of package fetch
	UserAgent  string
	Reach      Reach
	Verify     Verification // of images in the store; "" is VerifyPulled
	Observer   Observer     // nil: none
	Log        *slog.Logger // nil discards
}

// Reach limits where images may come from when somebody other than the operator names the host: a host that neither a
// mapping nor Registries.Registries names.
type Reach struct {
	URLs       reach.Policy
	Registries reach.Policy
}

// Observer is told about the transfers. Its methods must be quick and safe for concurrent use.
type Observer interface {
	Began()
	Received(bytes int64)
	Ended(kind string, took time.Duration, err error) // kind as in image.Explanation
}

// Store is what a Puller and its clients need of the image store. Each of them keeps only the part that it uses.
type Store interface {
	contents
	grants
	distribution.Store
}

type contents interface {
	Get(ctx context.Context, ref string) (image.Image, error)
	Origin(ctx context.Context, key string) (image.Origin, image.Image, error)
	Touch(id string)
	Put(ctx context.Context, key string, r io.Reader, o image.Fetched) (image.Image, error)
	Link(ctx context.Context, key, id string, o image.Origin) (image.Image, error)
}

type grants interface {
	Grants(ctx context.Context, id string) (map[string]image.Grant, error)
	Grant(ctx context.Context, id, repo string, more image.Grant) error
	Imported(ctx context.Context, key, id string) (bool, error)
	Fingerprint(ctx context.Context, parts ...string) (string, error)
}

// Puller implements image.Puller.
type Puller struct {
	cfg    Config
	log    *slog.Logger
	store  contents
	grants grants
	names  *translate.Translator
	own    sources // for what the operator names
	others sources // for what others name
	slots  chan struct{}

	mu   sync.Mutex
	jobs map[jobKey]*job
}

var (
	_ image.Puller = (*Puller)(nil)
	_ image.Pusher = (*Puller)(nil)
)

// New returns a puller that fetches into store.
func New(cfg Config, store Store) (*Puller, error) {
	cfg.Log = cmp.Or(cfg.Log, slog.New(slog.DiscardHandler))
	var err error
	if cfg.Verify, err = ParseVerification(string(cfg.Verify)); err != nil {
		return nil, err
	}
	if cfg.Parallel < 0 {
		return nil, errdefs.Invalidf("invalid number of parallel pulls, %d; it must not be negative", cfg.Parallel)
	}
	names, err := translate.New(translate.Options{Dir: cfg.Mappings, Protocol: cfg.Protocol, Regexps: cfg.Regexps, Log: cfg.Log})
	if err != nil {
		return nil, err
	}
	cfg.Registries.Log, cfg.Registries.Stall = cfg.Log, cfg.Stall
	return &Puller{
		cfg: cfg, log: cfg.Log, store: store, grants: store, names: names, jobs: map[jobKey]*job{},
		own: cfg.sources(store, nil, nil), others: cfg.sources(store, &cfg.Reach.URLs, &cfg.Reach.Registries),
		slots: make(chan struct{}, cmp.Or(cfg.Parallel, DefaultParallel)),
	}, nil
}

// sources are the clients that fetch images.
type sources struct {
	web      *fetch.Client
	registry *distribution.Client
}

func (c Config) sources(store distribution.Store, urls, registries *reach.Policy) sources {
	c.Registries.Reach = registries
	return sources{
		web:      fetch.New(fetch.Options{Log: c.Log, UserAgent: c.UserAgent, Stall: c.Stall, Reach: urls}),
		registry: distribution.New(c.Registries, store),
	}
}

// from returns the clients that may fetch d on behalf of the owner in ctx.
func (p *Puller) from(ctx context.Context, d translate.Decision) sources {
	if vm.Behalf(ctx).Operator() || !d.HostGiven {
		return p.own
	}
	return p.others
}

// Pull implements image.Puller. progress is called only when the network is used.
//
// On behalf of somebody other than the operator, an image in the store is used if it came without credentials, if the
// request has credentials that it came with, or if the registry, asked again, accepts those of the request.
// Besides the errors of the contract: AlreadyExists when r asks for the newest version of an image that was imported and
// so has no origin. With Force, the image that the name resolves to replaces it.
func (p *Puller) Pull(ctx context.Context, r image.PullRequest, progress func(image.Progress)) (image.Image, error) {
	policy := cmp.Or(r.Policy, image.PullAlways)
	switch policy {
	case image.PullAlways, image.PullIfNotPresent, image.PullNever:
	default:
		return image.Image{}, errdefs.Invalidf("invalid pull policy %q; use Always, IfNotPresent or Never", policy)
	}
	if r.Force && policy == image.PullNever {
		return image.Image{}, errdefs.Invalidf("an image cannot be fetched by force with the policy Never")
	}
	d, err := p.names.Translate(r.Name)
	if err != nil {
		return image.Image{}, err
	}
	if d.Kind == translate.Local && policy == image.PullAlways && !vm.Behalf(ctx).Operator() {
		return image.Image{}, errdefs.Invalidf("%s is the id of an image, and the policy Always needs a registry to ask; name the image REPOSITORY@DIGEST", d.Name)
	}
	here, err := p.find(ctx, d, r.Name)
	have := err == nil
	switch {
	case have:
	case !errdefs.IsNotFound(err):
		return image.Image{}, err
	case d.Kind == translate.Local:
		return image.Image{}, err
	case policy == image.PullNever:
		return image.Image{}, errdefs.NotFoundf("the image %s is not here, and the pull policy is Never; fetch it with `cocoon image pull`", d.Name)
	}
	switch {
	case have && (policy != image.PullAlways || d.Kind == translate.Local) && !r.Force:
		img, done, err := p.use(ctx, d, here, r, policy, progress)
		if done || err != nil {
			return img, err
		}
	case have && here.imported() && !r.Force:
		return image.Image{}, errdefs.Existsf("the image %s was imported here and has no origin to ask for a newer one; to replace it with the image that its name means elsewhere, pull it by force", d.Name)
	case d.Kind == translate.Local:
		return image.Image{}, errdefs.Invalidf("%s is the id of an image, which does not say where to fetch the image", d.Name)
	}
	got, err := p.share(ctx, d, r, progress)
	if err == nil {
		err = p.record(ctx, d, got.ID, got.Proof)
	}
	if err != nil {
		return image.Image{}, fmt.Errorf("pull image %s: %w", d.Name, err)
	}
	return got.Image, nil
}

// use returns an image of the store after it has checked that the request may use it. If done is false, the image must be
// fetched as if the store did not have it.
func (p *Puller) use(ctx context.Context, d translate.Decision, here found, r image.PullRequest, policy image.PullPolicy, progress func(image.Progress)) (img image.Image, done bool, err error) {
	ok, err := p.may(ctx, d, here, r.Auth)
	if err != nil {
		return image.Image{}, false, fmt.Errorf("use image %s: %w", d.Name, err)
	}
	if !ok {
		switch {
		case policy == image.PullNever || sourceOf(d, here) == "":
			return image.Image{}, false, foreign(ctx, d.Name)
		case d.Ref == "" || here.origin.Digest == "":
			return image.Image{}, false, nil
		}
		if err := p.ask(ctx, d, here, r, progress); errdefs.IsNotFound(err) {
			return image.Image{}, false, nil // perhaps the name resolves to another image by now
		} else if err != nil {
			return image.Image{}, false, fmt.Errorf("pull image %s: %w", d.Name, err)
		}
	}
	p.store.Touch(here.img.ID)
	return here.img, true, nil
}

// found is an image of the store and where it came from.
type found struct {
	img    image.Image
	origin image.Origin
	keyed  bool // the name itself led to it, not an id or another name of the same image
}

func (f found) imported() bool { return f.origin.IsZero() }

// find looks for the image of d: under its key, else as an image that was imported under the name as written.
func (p *Puller) find(ctx context.Context, d translate.Decision, name string) (found, error) {
	if d.Kind == translate.Local {
		img, err := p.store.Get(ctx, d.Key)
		return found{img: img}, err
	}
	o, img, err := p.store.Origin(ctx, d.Key)
	if err == nil && (d.Digest == "" || d.Kind == translate.Registry || d.Digest == img.ID || d.Digest == o.Digest) {
		return found{img, o, true}, nil
	}
	if err != nil && !errdefs.IsNotFound(err) && !errdefs.IsInvalid(err) {
		return found{}, err
	}
	if d.Name.Scheme != "" {
		if d.Kind != translate.Registry {
			return found{}, errdefs.NotFoundf("the image %s is not here", d.Name)
		}
		name = d.Key
	}
	if img, err = p.store.Get(ctx, name); err != nil {
		return found{}, err
	}
	// An origin under another name of the same image.
	o, _, err = p.store.Origin(ctx, img.Name)
	if errdefs.IsNotFound(err) || errdefs.IsInvalid(err) {
		err = nil
	}
	return found{img, o, !byID(name, img)}, err
}

// byID reports whether a name matched an image because it is a prefix of the image's id.
func byID(name string, img image.Image) bool {
	hex, ok := strings.CutPrefix(img.ID, "sha256:")
	return ok && strings.HasPrefix(hex, name) && !strings.HasPrefix(img.Name, name)
}

// Get resolves a reference as Pull does, but without the network, so that a VM boots from what was pulled for it. NotFound
// if the image needs credentials that the namespace of ctx has never shown.
func (p *Puller) Get(ctx context.Context, ref string) (image.Image, error) {
	d, err := p.names.Translate(ref)
	if err != nil && vm.Behalf(ctx).Operator() { // mappings do not decide about what the store already has
		return p.store.Get(ctx, ref)
	}
	if err != nil {
		return image.Image{}, err
	}
	here, err := p.find(ctx, d, ref)
	if err != nil {
		return image.Image{}, err
	}
	if ok, err := p.granted(ctx, d, here); err != nil {
		return image.Image{}, fmt.Errorf("use image %s: %w", d.Name, err)
	} else if !ok {
		return image.Image{}, foreign(ctx, d.Name)
	}
	return here.img, nil
}

// Push implements image.Pusher. Names mean the same as for Pull.
func (p *Puller) Push(ctx context.Context, r image.PushRequest, progress func(image.Progress)) (string, error) {
	img, err := p.Get(ctx, r.Ref)
	if err != nil {
		return "", err
	}
	r.Ref = img.ID
	return p.own.registry.Push(ctx, r, progress)
}

// SyncMappings implements image.Puller.
func (p *Puller) SyncMappings(_ context.Context, source string, mappings []image.Mapping) ([]image.MappingProblem, error) {
	if source == "" || source == translate.SourceFiles {
		return nil, errdefs.Invalidf("invalid source %q of pushed mappings", source)
	}
	return p.names.Set(source, mappings), nil
}

// Problems implements image.Puller.
func (p *Puller) Problems(context.Context) ([]image.MappingProblem, error) {
	return p.names.Problems(), nil
}
