package cocoond

import (
	"cmp"
	"context"
	"path/filepath"
	"time"

	"k8s.io/apimachinery/pkg/api/resource"

	"cocoonstack.io/cocoon/internal/catalog"
	"cocoonstack.io/cocoon/internal/engine"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/image"
	"cocoonstack.io/cocoon/internal/image/distribution"
	"cocoonstack.io/cocoon/internal/image/pull"
	"cocoonstack.io/cocoon/internal/image/translate"
	"cocoonstack.io/cocoon/internal/reach"
	"cocoonstack.io/cocoon/internal/version"
)

// Images configures the sources of images and when they are removed. Durations are written as 30s or 5m.
type Images struct {
	Mappings          string              `json:"mappings,omitempty"`          // folder of mapping files, reloaded on every change
	DownloadProtocol  string              `json:"downloadProtocol,omitempty"`  // for names without one: https or http
	RegexpTranslation string              `json:"regexpTranslation,omitempty"` // enables mappings by regular expression
	Registries        map[string]Registry `json:"registries,omitempty"`        // by host[:port]
	MaxParallelPulls  int                 `json:"maxParallelPulls,omitempty"`
	StallTimeout      string              `json:"stallTimeout,omitempty"`                // timeout of a connection without data
	Allow             []string            `json:"allow,omitempty"`                       // where pods' URLs and registries may lead besides public addresses
	PrivateRegistries *bool               `json:"privateRegistries,omitempty"`           // pods' registries may be in private networks; default true
	Verification      string              `json:"pullCredentialsVerification,omitempty"` // who may use an image that is present, as in the kubelet
	GC                GC                  `json:"gc,omitzero"`

	reach  pull.Reach
	stall  time.Duration
	every  time.Duration // 0: never
	limits image.GCLimits
}

// Registry holds the special settings of one registry.
type Registry struct {
	Mirrors  []string `json:"mirrors,omitempty"`  // host[:port][/path], tried first, in order
	CA       string   `json:"ca,omitempty"`       // PEM file, trusted in addition to the system's
	Insecure bool     `json:"insecure,omitempty"` // plain HTTP, and certificates are not verified
}

// GC configures when unused images are removed. Empty fields without a default set no limit.
type GC struct {
	Interval string `json:"interval,omitempty"` // between collections; default 5m, "off" for none
	MinAge   string `json:"minAge,omitempty"`   // images used more recently stay; default 2m
	MaxAge   string `json:"maxAge,omitempty"`   // images unused for longer are removed
	MaxSize  string `json:"maxSize,omitempty"`  // of the store, such as 50Gi; the least recently used images are removed
	High     int    `json:"high,omitempty"`     // disk usage in percent at which removal starts; default 85
	Low      int    `json:"low,omitempty"`      // usage at which it stops; default 80, or high when that is lower
}

// Defaults of images.
const (
	DefaultMappings = "/etc/cocoon/images.d"

	defaultGCInterval = 5 * time.Minute
	defaultGCMinAge   = 2 * time.Minute
	defaultGCHigh     = 85
	defaultGCLow      = 80
)

// complete fills in defaults and rejects invalid settings.
func (i *Images) complete() error {
	i.Mappings = cmp.Or(i.Mappings, DefaultMappings)
	dir, err := filepath.Abs(i.Mappings)
	if err != nil {
		return errdefs.Invalidf("images.mappings %q: %w", i.Mappings, err)
	}
	i.Mappings = dir
	if i.MaxParallelPulls < 0 {
		return errdefs.Invalidf("images.maxParallelPulls %d: it must be at least 1", i.MaxParallelPulls)
	}
	if _, err := pull.ParseVerification(i.Verification); err != nil {
		return errdefs.Invalidf("images.pullCredentialsVerification: %w", err)
	}
	if i.reach.URLs, err = (reach.Policy{Setting: "images.allow"}).Open(i.Allow); err != nil {
		return errdefs.Invalidf("images.allow: %w", err)
	}
	i.reach.Registries = i.reach.URLs
	i.reach.Registries.Private = i.PrivateRegistries == nil || *i.PrivateRegistries
	i.every = defaultGCInterval
	if i.GC.Interval == "off" {
		i.GC.Interval, i.every = "", 0
	}
	i.limits = image.GCLimits{MinAge: defaultGCMinAge, High: cmp.Or(i.GC.High, defaultGCHigh)}
	i.limits.Low = cmp.Or(i.GC.Low, min(defaultGCLow, i.limits.High))
	for _, d := range []struct {
		key, text string
		to        *time.Duration
	}{
		{"stallTimeout", i.StallTimeout, &i.stall},
		{"gc.interval", i.GC.Interval, &i.every},
		{"gc.minAge", i.GC.MinAge, &i.limits.MinAge},
		{"gc.maxAge", i.GC.MaxAge, &i.limits.MaxAge},
	} {
		if d.text == "" {
			continue
		}
		v, err := time.ParseDuration(d.text)
		if err != nil || v <= 0 {
			return errdefs.Invalidf("images.%s %q is not a duration such as 30s or 5m", d.key, d.text)
		}
		*d.to = v
	}
	if i.GC.MaxSize != "" {
		q, err := resource.ParseQuantity(i.GC.MaxSize)
		if err != nil || q.Value() <= 0 {
			return errdefs.Invalidf("images.gc.maxSize %q is not a size such as 50Gi", i.GC.MaxSize)
		}
		i.limits.MaxSize = q.Value()
	}
	if l := i.limits; l.Low < 1 || l.High > 100 || l.Low > l.High {
		return errdefs.Invalidf("images.gc: low %d and high %d are percentages, and low is not above high", l.Low, l.High)
	}
	return nil
}

func (d *daemon) pullConfig() pull.Config {
	i := d.cfg.Images
	registries := map[string]distribution.RegistryConfig{}
	for host, r := range i.Registries {
		registries[host] = distribution.RegistryConfig{Mirrors: r.Mirrors, CA: r.CA, Insecure: r.Insecure}
	}
	return pull.Config{
		Mappings: i.Mappings, Protocol: i.DownloadProtocol, Regexps: translate.RegexpEnabled(i.RegexpTranslation),
		Registries: distribution.Config{Registries: registries}, Parallel: i.MaxParallelPulls, Stall: i.stall,
		UserAgent: "cocoon/" + version.Version, Reach: i.reach, Verify: pull.Verification(i.Verification), Observer: d.metrics, Log: d.log.With("component", "pull"),
	}
}

// clientImages is what clients do with images.
func (d *daemon) clientImages(e *engine.Engine) catalog.Images {
	return catalog.Images{Puller: d.puller, Store: d.named, Pusher: d.puller, InUse: e.ImageInUse}
}

// collect removes unused images, at start and then regularly. Imported images stay, because they cannot be pulled
// again; `cocoon image gc` removes them on request.
func (d *daemon) collect(ctx context.Context, e *engine.Engine) error {
	if d.cfg.Images.every <= 0 {
		return nil
	}
	select {
	case <-e.Recovered(): // until then every image counts as used
	case <-ctx.Done():
		return nil
	}
	tick := time.NewTicker(d.cfg.Images.every)
	defer tick.Stop()
	for {
		got, err := d.clientImages(e).CollectPulled(ctx, d.cfg.Images.limits)
		d.metrics.freed.Add(float64(got.Freed))
		if got.Freed > 0 || len(got.Images) > 0 {
			d.log.Info("images collected", "op", "collect", "images", len(got.Images), "bytes", got.Freed)
		}
		if err != nil && ctx.Err() == nil {
			d.log.Warn("images not collected", "op", "collect", "err", err)
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return nil
		}
	}
}
