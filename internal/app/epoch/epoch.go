// Package epoch is the registry binary: configuration, construction and what it serves.
//
// It only wires and makes no decisions: package registry handles requests, package content handles stored data.
package epoch

import (
	"context"
	"fmt"
	"io"
	"time"

	"github.com/spf13/cobra"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/logging"
	"cocoonstack.io/cocoon/internal/registry/objects"
	"cocoonstack.io/cocoon/internal/registry/objects/folder"
	"cocoonstack.io/cocoon/internal/registry/objects/s3"
	"cocoonstack.io/cocoon/internal/settings"
	"cocoonstack.io/cocoon/internal/version"
)

// Main runs epoch with args (without the program's name) until it is done or ctx ends, and returns the exit code: 2 for
// a bad command line, 1 for a failure.
func Main(ctx context.Context, args []string, env func(string) string, stdout, stderr io.Writer) int {
	cmd := command(env, stderr) //nolint:contextcheck // cobra hands ctx to the commands
	cmd.SetArgs(args)
	cmd.SetOut(stdout)
	cmd.SetErr(stderr)
	err := cmd.ExecuteContext(ctx)
	if err == nil {
		return 0
	}
	fmt.Fprintf(stderr, "Error: %v\n", err)
	if errdefs.IsInvalid(err) {
		return 2
	}
	return 1
}

const long = `epoch is the registry of Cocoon's snapshots and images: one binary, one folder.

It speaks the OCI distribution specification 1.1, so that every client of registries can use it, and serves disks and
snapshots as plain downloads:

  GET /dl/NAME[?tag=TAG]   an OS image as raw disk bytes, a snapshot as the tar stream that "cocoon snapshot import" reads

Each setting is a flag, an environment variable or, for "epoch serve", a key of the YAML file given by --config; they count
in this order.`

const serveLong = `Serve a registry from a folder.

Who may do what is in the token file, one token a line ('#' begins a comment). The file must not be readable by everybody,
and is read again when it changes:

  TOKEN                                             the token itself; it may do everything
  NAME sha256:HEX [scope=...]... [expires=TIME]     a hashed token, as "epoch token new" prints it

A scope is ACTION:PREFIX. Actions are pull, push (includes pull) and * (includes delete); the prefix "team" covers the
repository team and all below team/, none covers all. Clients send "Authorization: Bearer TOKEN", or any user name and
the token as the password ("docker login").

Snapshots hold the memory of guests, with their secrets: nobody pulls without a token unless --anonymous-pull is given.
Without --tls-cert the registry speaks plain HTTP: keep it on loopback, in a cluster's own network, or behind a proxy.

Garbage (blobs that no manifest names any more) is collected while the registry serves; whatever was pushed or asked for
within --gc-grace stays. Snapshots whose tag moved on are removed after --gc-untagged-snapshots, images never.

Secrets have only a variable, because every user of the host can read command lines:

`

const serveExamples = `  epoch serve --addr 127.0.0.1:8080 --data /var/lib/epoch --token-file /etc/epoch/tokens
  epoch serve --addr :443 --data /srv/epoch --token-file /etc/epoch/tokens --tls-cert crt.pem --tls-key key.pem --quota 500Gi
  epoch token new --name ci --scope push:team --expires-in 2160h   # prints a token, and the line for the file`

func command(env func(string) string, stderr io.Writer) *cobra.Command {
	root := &cobra.Command{
		Use: "epoch", Short: "The registry of Cocoon", Long: long,
		SilenceUsage: true, SilenceErrors: true, Version: version.Version,
		CompletionOptions: cobra.CompletionOptions{DisableDefaultCmd: true},
	}
	root.SetFlagErrorFunc(func(_ *cobra.Command, err error) error { return errdefs.As(errdefs.InvalidArgument, err) })
	cfg := defaults()
	set := settings.New("epoch", "EPOCH_CONFIG", cfg.settings())
	serve := &cobra.Command{
		Use: "serve", Short: "Serve a registry", Long: serveLong + settings.Unflagged(cfg.settings()), Example: serveExamples, Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := set.Read(env); err != nil {
				return errdefs.As(errdefs.InvalidArgument, err) // also for a file that is not there
			}
			if err := cfg.complete(); err != nil {
				return err
			}
			log, err := logging.New(stderr, cfg.LogLevel, cfg.LogFormat)
			if err != nil {
				return err
			}
			s, err := newServer(cmd.Context(), cfg, log)
			if err != nil {
				return err
			}
			return s.run(cmd.Context())
		},
	}
	set.Flags(serve.Flags())
	root.AddCommand(serve, workCommand("gc", env), workCommand("scrub", env), tokenCommand())
	return root
}

func noArgs(cmd *cobra.Command, args []string) error {
	if len(args) > 0 {
		return errdefs.Invalidf("%s takes no arguments, only flags; %q is one", cmd.CommandPath(), args[0])
	}
	return nil
}

// Config is the configuration of one registry.
type Config struct {
	Addr, PublicURL  string
	Data, TokenFile  string
	StaticToken      string
	TLSCert, TLSKey  string
	AnonymousPull    bool
	VerifyReads      bool
	Quota            int64
	UploadTTL        time.Duration
	MaxUploads       int
	MaxPerToken      int
	GCInterval       time.Duration
	GCGrace          time.Duration
	GCUntagged       time.Duration
	ScrubInterval    time.Duration
	LogLevel         string
	LogFormat        string
	MetricsAddr      string
	S3               s3.Config // Endpoint "": the data is in the folder
	s3Secure         bool
	shutdownPatience time.Duration
	ready            func(addr string) // for tests
}

func defaults() *Config {
	c := &Config{shutdownPatience: 10 * time.Second}
	settings.Fill(c.settings())
	return c
}

// settings are all settings of serve.
func (c *Config) settings() []settings.Setting {
	return append([]settings.Setting{
		{Flag: "addr", Env: "EPOCH_ADDR", Key: "addr", Default: ":8080", Value: settings.Text(&c.Addr), Usage: "HOST:PORT to serve on"},
		{Flag: "data", Env: "EPOCH_DATA", Key: "data", Default: "/var/lib/epoch", Value: settings.Text(&c.Data), Usage: "folder of everything that is stored, or, with --s3-endpoint, of uploads in progress"},
		{Flag: "token-file", Env: "EPOCH_TOKEN_FILE", Key: "tokenFile", Value: settings.Text(&c.TokenFile), Usage: "file with the accepted tokens"},
		{Env: "EPOCH_REGISTRY_TOKEN", Value: settings.Text(&c.StaticToken), Usage: "one more accepted token, which may do everything"},
		{Flag: "tls-cert", Env: "EPOCH_TLS_CERT", Key: "tlsCert", Value: settings.Text(&c.TLSCert), Usage: "PEM file with the serving certificate"},
		{Flag: "tls-key", Env: "EPOCH_TLS_KEY", Key: "tlsKey", Value: settings.Text(&c.TLSKey), Usage: "PEM file with its key"},
		{Flag: "anonymous-pull", Env: "EPOCH_ANONYMOUS_PULL", Key: "anonymousPull", Value: settings.Bool(&c.AnonymousPull), Usage: "allow pulls without a token, of everything, guest memory too"},
		{Flag: "public-url", Env: "EPOCH_PUBLIC_URL", Key: "publicURL", Value: settings.Text(&c.PublicURL), Usage: "how clients reach the registry, https://HOST, behind a proxy"},
		{Flag: "quota", Env: "EPOCH_QUOTA", Key: "quota", Value: settings.Size(&c.Quota), Usage: "most bytes of blobs and uploads, e.g. 500Gi; 0 for no limit"},
		{Flag: "verify-reads", Env: "EPOCH_VERIFY_READS", Key: "verifyReads", Value: settings.Bool(&c.VerifyReads), Usage: "hash every blob that is read whole; a damaged one is broken off and goes into quarantine"},
		{Flag: "upload-ttl", Env: "EPOCH_UPLOAD_TTL", Key: "uploadTTL", Default: "24h", Value: settings.Duration(&c.UploadTTL), Usage: "how long an unfinished upload can be resumed"},
		{Flag: "max-uploads-per-token", Env: "EPOCH_MAX_UPLOADS_PER_TOKEN", Key: "maxUploadsPerToken", Default: "100", Value: settings.Number(&c.MaxPerToken), Usage: "most unfinished uploads of one token; 0 for no limit"},
		{Flag: "max-uploads", Env: "EPOCH_MAX_UPLOADS", Key: "maxUploads", Default: "1000", Value: settings.Number(&c.MaxUploads), Usage: "most unfinished uploads of all; 0 for no limit"},
		{Flag: "gc-interval", Env: "EPOCH_GC_INTERVAL", Key: "gcInterval", Default: "1h", Value: settings.Duration(&c.GCInterval), Usage: "pause between collections of garbage"},
		{Flag: "gc-grace", Env: "EPOCH_GC_GRACE", Key: "gcGrace", Default: "1h", Value: settings.Duration(&c.GCGrace), Usage: "how long a blob that no manifest names stays after its last use"},
		{Flag: "gc-untagged-snapshots", Env: "EPOCH_GC_UNTAGGED_SNAPSHOTS", Key: "gcUntaggedSnapshots", Default: "168h", Value: settings.Duration(&c.GCUntagged), Usage: "how long a snapshot without a tag stays; 0 for ever"},
		{Flag: "scrub-interval", Env: "EPOCH_SCRUB_INTERVAL", Key: "scrubInterval", Default: "168h", Value: settings.Duration(&c.ScrubInterval), Usage: "pause between readings of everything against bit rot; 0 for none"},
		{Flag: "metrics-addr", Env: "EPOCH_METRICS_ADDR", Key: "metricsAddr", Value: settings.Text(&c.MetricsAddr), Usage: "HOST:PORT for Prometheus (default: /metrics of the registry itself)"},
		{Flag: "log-level", Env: "EPOCH_LOG_LEVEL", Key: "logLevel", Default: "info", Value: settings.Text(&c.LogLevel), Usage: "debug, info, warn or error"},
		{Flag: "log-format", Env: "EPOCH_LOG_FORMAT", Key: "logFormat", Default: "text", Value: settings.Text(&c.LogFormat), Usage: "text or json"},
	}, c.bucket()...)
}

// bucket are the settings of the bucket.
func (c *Config) bucket() []settings.Setting {
	return []settings.Setting{
		{Flag: "s3-endpoint", Env: "EPOCH_S3_ENDPOINT", Key: "s3Endpoint", Value: settings.Text(&c.S3.Endpoint), Usage: "HOST[:PORT] of an S3-compatible service that keeps everything but uploads in progress; keys: $EPOCH_S3_ACCESS_KEY, $EPOCH_S3_SECRET_KEY"},
		{Flag: "s3-bucket", Env: "EPOCH_S3_BUCKET", Key: "s3Bucket", Value: settings.Text(&c.S3.Bucket), Usage: "bucket there; one registry each"},
		{Flag: "s3-region", Env: "EPOCH_S3_REGION", Key: "s3Region", Default: "us-east-1", Value: settings.Text(&c.S3.Region), Usage: "its region"},
		{Flag: "s3-prefix", Env: "EPOCH_S3_PREFIX", Key: "s3Prefix", Default: "epoch/", Value: settings.Text(&c.S3.Prefix), Usage: "what all keys begin with"},
		{Flag: "s3-secure", Env: "EPOCH_S3_SECURE", Key: "s3Secure", Default: "true", Value: settings.Bool(&c.s3Secure), Usage: "speak HTTPS with it"},
		{Env: "EPOCH_S3_ACCESS_KEY", Value: settings.Text(&c.S3.Access), Usage: "the bucket's access key"},
		{Env: "EPOCH_S3_SECRET_KEY", Value: settings.Text(&c.S3.Secret), Usage: "the bucket's secret key"},
	}
}

// store opens the object store.
func (c *Config) store(ctx context.Context) (objects.Store, error) {
	local, err := folder.New(c.Data)
	if err != nil || c.S3.Endpoint == "" {
		return local, err
	}
	if c.S3.Bucket == "" || c.S3.Access == "" || c.S3.Secret == "" {
		return nil, errdefs.Invalidf("--s3-endpoint needs --s3-bucket, and EPOCH_S3_ACCESS_KEY and EPOCH_S3_SECRET_KEY in the environment")
	}
	cfg := c.S3
	cfg.Insecure, cfg.Staging = !c.s3Secure, local.Staging()
	return s3.New(ctx, cfg)
}

// complete validates everything that can be checked without side effects.
func (c *Config) complete() error {
	if c.TokenFile == "" && c.StaticToken == "" {
		return errdefs.Invalidf("--token-file is missing: without tokens nobody could push (epoch token new makes one)")
	}
	if (c.TLSCert == "") != (c.TLSKey == "") {
		return errdefs.Invalidf("--tls-cert and --tls-key go together")
	}
	if c.Data == "" {
		return errdefs.Invalidf("--data is missing: give the folder of the registry")
	}
	if c.MaxUploads < 0 || c.MaxPerToken < 0 {
		return errdefs.Invalidf("--max-uploads and --max-uploads-per-token cannot be negative; 0 is no limit")
	}
	if c.GCInterval == 0 || c.UploadTTL == 0 {
		return errdefs.Invalidf("--gc-interval and --upload-ttl must be longer than 0")
	}
	return nil
}

// lines prints to standard output and reports when that fails.
func lines(cmd *cobra.Command, format string, args ...any) error {
	_, err := fmt.Fprintf(cmd.OutOrStdout(), format, args...)
	return err
}
