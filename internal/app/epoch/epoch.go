// Package epoch is the registry binary: configuration, construction and what it serves.
//
// It only wires and makes no decisions: package registry handles requests, package content handles stored data.
package epoch

import (
	"context"
	"fmt"
	"io"
	"strconv"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/logging"
	"cocoonstack.io/cocoon/internal/registry/objects"
	"cocoonstack.io/cocoon/internal/registry/objects/folder"
	"cocoonstack.io/cocoon/internal/registry/objects/s3"
	"cocoonstack.io/cocoon/internal/version"
)

// Main runs epoch with args (without the program's name) until it is done or ctx ends, and returns the exit code: 2 for
// a bad command line, 1 for a failure.
func Main(ctx context.Context, args []string, env func(string) string, stdout, stderr io.Writer) int {
	cmd, err := command(env, stderr) //nolint:contextcheck // cobra hands ctx to the commands
	if err == nil {
		cmd.SetArgs(args)
		cmd.SetOut(stdout)
		cmd.SetErr(stderr)
		err = cmd.ExecuteContext(ctx)
	}
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

Every flag has an environment variable in its description, which the flag wins over.`

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
within --gc-grace stays. Snapshots whose tag moved on are removed after --gc-untagged-snapshots, images never.`

const serveExamples = `  epoch serve --addr 127.0.0.1:8080 --data /var/lib/epoch --token-file /etc/epoch/tokens
  epoch serve --addr :443 --data /srv/epoch --token-file /etc/epoch/tokens --tls-cert crt.pem --tls-key key.pem --quota 500Gi
  epoch token new --name ci --scope push:team --expires-in 2160h   # prints a token, and the line for the file`

func command(env func(string) string, stderr io.Writer) (*cobra.Command, error) {
	root := &cobra.Command{
		Use: "epoch", Short: "The registry of Cocoon", Long: long,
		SilenceUsage: true, SilenceErrors: true, Version: version.Version,
		CompletionOptions: cobra.CompletionOptions{DisableDefaultCmd: true},
	}
	root.SetFlagErrorFunc(func(_ *cobra.Command, err error) error { return errdefs.As(errdefs.InvalidArgument, err) })
	cfg := defaults()
	serve := &cobra.Command{
		Use: "serve", Short: "Serve a registry", Long: serveLong, Example: serveExamples, Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
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
	if err := cfg.flags(serve.Flags(), env); err != nil {
		return nil, err
	}
	root.AddCommand(serve, workCommand("gc", env), workCommand("scrub", env), tokenCommand())
	return root, nil
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
	StaticToken      string // from the environment only: all users can see a command line
	TLSCert, TLSKey  string
	AnonymousPull    bool
	VerifyReads      bool
	Quota            string
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
	quota            int64
	shutdownPatience time.Duration
	ready            func(addr string) // for tests
}

func defaults() *Config {
	return &Config{
		Addr: ":8080", Data: "/var/lib/epoch", Quota: "0", UploadTTL: 24 * time.Hour, MaxUploads: 1000, MaxPerToken: 100, GCInterval: time.Hour, GCGrace: time.Hour,
		GCUntagged: 7 * 24 * time.Hour, ScrubInterval: 7 * 24 * time.Hour, LogLevel: "info", LogFormat: "text",
		shutdownPatience: 10 * time.Second,
	}
}

// flags declares the flags of serve; the environment supplies their defaults.
func (c *Config) flags(f *pflag.FlagSet, env func(string) string) error {
	f.SortFlags = false
	f.StringVar(&c.Addr, "addr", c.Addr, "HOST:PORT to serve on")
	f.StringVar(&c.Data, "data", c.Data, "folder of everything that is stored, or, with --s3-endpoint, of uploads in progress")
	f.StringVar(&c.TokenFile, "token-file", "", "file with the accepted tokens")
	f.StringVar(&c.TLSCert, "tls-cert", "", "PEM file with the serving certificate")
	f.StringVar(&c.TLSKey, "tls-key", "", "PEM file with its key")
	f.BoolVar(&c.AnonymousPull, "anonymous-pull", false, "let who has no token pull everything, guest memory too")
	f.StringVar(&c.PublicURL, "public-url", "", "how clients reach the registry, https://HOST, behind a proxy")
	f.StringVar(&c.Quota, "quota", c.Quota, "most bytes of blobs and uploads, e.g. 500Gi; 0 for no limit")
	f.BoolVar(&c.VerifyReads, "verify-reads", false, "hash every blob that is read whole; a damaged one is broken off and goes into quarantine")
	f.DurationVar(&c.UploadTTL, "upload-ttl", c.UploadTTL, "how long an unfinished upload can be resumed")
	f.IntVar(&c.MaxPerToken, "max-uploads-per-token", c.MaxPerToken, "most unfinished uploads of one token; 0 for no limit")
	f.IntVar(&c.MaxUploads, "max-uploads", c.MaxUploads, "most unfinished uploads of all; 0 for no limit")
	f.DurationVar(&c.GCInterval, "gc-interval", c.GCInterval, "pause between collections of garbage")
	f.DurationVar(&c.GCGrace, "gc-grace", c.GCGrace, "how long a blob that no manifest names stays after its last use")
	f.DurationVar(&c.GCUntagged, "gc-untagged-snapshots", c.GCUntagged, "how long a snapshot without a tag stays; 0 for ever")
	f.DurationVar(&c.ScrubInterval, "scrub-interval", c.ScrubInterval, "pause between readings of everything against bit rot; 0 for none")
	f.StringVar(&c.MetricsAddr, "metrics-addr", "", "HOST:PORT for Prometheus (otherwise /metrics of the registry itself)")
	f.StringVar(&c.LogLevel, "log-level", c.LogLevel, "debug, info, warn or error")
	f.StringVar(&c.LogFormat, "log-format", c.LogFormat, "text or json")
	c.StaticToken = env("EPOCH_REGISTRY_TOKEN")
	c.s3Flags(f, env)
	return environment(f, env)
}

// s3Flags declares the flags of the bucket. Its keys come from the environment only.
func (c *Config) s3Flags(f *pflag.FlagSet, env func(string) string) {
	f.StringVar(&c.S3.Endpoint, "s3-endpoint", "", "HOST[:PORT] of an S3-compatible service that keeps everything but uploads in progress; keys: $EPOCH_S3_ACCESS_KEY, $EPOCH_S3_SECRET_KEY")
	f.StringVar(&c.S3.Bucket, "s3-bucket", "", "bucket there; one registry each")
	f.StringVar(&c.S3.Region, "s3-region", "us-east-1", "its region")
	f.StringVar(&c.S3.Prefix, "s3-prefix", "epoch/", "what all keys begin with")
	f.BoolVar(&c.s3Secure, "s3-secure", true, "speak HTTPS with it")
	c.S3.Access, c.S3.Secret = env("EPOCH_S3_ACCESS_KEY"), env("EPOCH_S3_SECRET_KEY")
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

// environment takes the defaults of flags from variables: --token-file is EPOCH_TOKEN_FILE.
func environment(f *pflag.FlagSet, env func(string) string) error {
	var failed error
	f.VisitAll(func(flag *pflag.Flag) {
		name := envName(flag.Name)
		flag.Usage += " [$" + name + "]"
		v := env(name)
		if v == "" || failed != nil {
			return
		}
		if err := flag.Value.Set(v); err != nil {
			failed = errdefs.Invalidf("%s: %w", name, err)
			return
		}
		flag.DefValue = flag.Value.String()
	})
	return failed
}

func envName(flag string) string {
	b := []byte("EPOCH_" + flag)
	for i, c := range b {
		switch {
		case c == '-':
			b[i] = '_'
		case c >= 'a' && c <= 'z':
			b[i] = c - 'a' + 'A'
		}
	}
	return string(b)
}

// complete validates everything that can be checked without side effects.
func (c *Config) complete() (err error) {
	if c.quota, err = parseSize(c.Quota); err != nil {
		return errdefs.Invalidf("--quota: %w", err)
	}
	if c.TokenFile == "" && c.StaticToken == "" {
		return errdefs.Invalidf("--token-file is missing: without tokens nobody could push (epoch token new makes one)")
	}
	if (c.TLSCert == "") != (c.TLSKey == "") {
		return errdefs.Invalidf("--tls-cert and --tls-key go together")
	}
	if c.Data == "" {
		return errdefs.Invalidf("--data is missing: a folder of your own for the registry")
	}
	for name, d := range map[string]time.Duration{
		"--upload-ttl": c.UploadTTL, "--gc-interval": c.GCInterval, "--gc-grace": c.GCGrace,
		"--gc-untagged-snapshots": c.GCUntagged, "--scrub-interval": c.ScrubInterval,
	} {
		if d < 0 {
			return errdefs.Invalidf("%s is negative", name)
		}
	}
	if c.MaxUploads < 0 || c.MaxPerToken < 0 {
		return errdefs.Invalidf("--max-uploads and --max-uploads-per-token cannot be negative; 0 is no limit")
	}
	if c.GCInterval == 0 || c.UploadTTL == 0 {
		return errdefs.Invalidf("--gc-interval and --upload-ttl must be longer than nothing")
	}
	return nil
}

// parseSize reads a size in bytes: a number, optionally followed by Ki, Mi, Gi, Ti or k, M, G, T.
func parseSize(text string) (int64, error) {
	units := []struct {
		name string
		n    int64
	}{{"Ki", 1 << 10}, {"Mi", 1 << 20}, {"Gi", 1 << 30}, {"Ti", 1 << 40}, {"k", 1e3}, {"M", 1e6}, {"G", 1e9}, {"T", 1e12}}
	number, unit := text, int64(1)
	for _, u := range units {
		if n := len(text) - len(u.name); n > 0 && text[n:] == u.name {
			number, unit = text[:n], u.n
			break
		}
	}
	n, err := strconv.ParseInt(number, 10, 64)
	if err != nil || n < 0 || n > (1<<63-1)/unit {
		return 0, errdefs.Invalidf("%q is not a size such as 500Gi", text)
	}
	return n * unit, nil
}

// lines prints to standard output and reports when that fails.
func lines(cmd *cobra.Command, format string, args ...any) error {
	_, err := fmt.Fprintf(cmd.OutOrStdout(), format, args...)
	return err
}
