package epoch

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/registry/access"
	"cocoonstack.io/cocoon/internal/registry/content"
	"cocoonstack.io/cocoon/internal/registry/objects/folder"
	"cocoonstack.io/cocoon/internal/settings"
)

var workTexts = map[string][2]string{
	"gc": {"Collect garbage now", `Remove blobs that no manifest names any more, and old snapshots without a tag.

With --server it runs in the registry that serves, beside pushes. Without, the registry that owns --data must not be running;
--gc-grace still protects what a client pushed just before it stopped.`},
	"scrub": {"Read everything and compare it with its digests", `Read everything and compare it with its digests. What is damaged is moved to the folder quarantine of --data and not
served any more; the next push of the same content mends it. The exit code is 1 when something was damaged.

With --server it runs in the registry that serves. Without, the registry that owns --data must not be running.`},
}

// workSettings are the settings of gc or scrub: where the data is, and for gc what stays.
func (c *Config) workSettings(verb string, server, token *string) []settings.Setting {
	all := []settings.Setting{
		{Flag: "server", Env: "EPOCH_SERVER", Value: settings.Text(server), Usage: "URL of the running registry; the token in $EPOCH_TOKEN is sent, which must be allowed everything"},
		{Env: "EPOCH_TOKEN", Value: settings.Text(token), Usage: "the token for --server"},
		{Flag: "data", Env: "EPOCH_DATA", Value: settings.Text(&c.Data), Usage: "folder of a registry that is not running"},
	}
	for _, x := range c.settings() {
		if verb == "gc" && (x.Flag == "gc-grace" || x.Flag == "gc-untagged-snapshots") || strings.HasPrefix(x.Env, "EPOCH_S3_") {
			x.Key = "" // no file
			all = append(all, x)
		}
	}
	return all
}

// workCommand is gc or scrub: in the running server, or on the data of a stopped one.
func workCommand(verb string, env func(string) string) *cobra.Command {
	cfg := defaults()
	cfg.Data = ""
	var server, token string
	all := cfg.workSettings(verb, &server, &token)
	set := settings.New("epoch "+verb, "", all)
	cmd := &cobra.Command{
		Use: verb, Short: workTexts[verb][0], Long: workTexts[verb][1] + "\n\n" + settings.Unflagged(all), Args: noArgs,
		Example: fmt.Sprintf("  EPOCH_TOKEN=... epoch %s --server http://127.0.0.1:8080\n  epoch %s --data /var/lib/epoch", verb, verb),
	}
	set.Flags(cmd.Flags())
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		if err := set.Read(env); err != nil {
			return err
		}
		if cmd.Flags().Changed("data") && !cmd.Flags().Changed("server") {
			server = ""
		}
		var done any
		var err error
		switch {
		case server != "":
			done, err = remote(cmd.Context(), server, verb, token)
		case cfg.Data == "":
			return errdefs.Invalidf("--server or --data is missing: give the URL or the folder of the registry")
		default:
			done, err = local(cmd.Context(), cfg, verb, slog.New(slog.NewTextHandler(cmd.ErrOrStderr(), nil)))
		}
		if err != nil {
			return err
		}
		text, err := json.Marshal(done)
		if err != nil {
			return err
		}
		if err := lines(cmd, "%s\n", text); err != nil {
			return err
		}
		if s, ok := done.(content.Scrubbed); ok && s.Damaged > 0 {
			return errdefs.DataLossf("%d of %d objects were damaged and are in quarantine; push them again", s.Damaged, s.Objects)
		}
		return nil
	}
	return cmd
}

// local works on the data of a stopped registry.
func local(ctx context.Context, cfg *Config, verb string, log *slog.Logger) (any, error) {
	if _, err := folder.Open(cfg.Data); err != nil { // do not create a folder for a mistyped path
		return nil, err
	}
	store, err := cfg.store(ctx)
	if err != nil {
		return nil, err
	}
	lock, err := lockDir(ctx, cfg.Data)
	if err != nil {
		return nil, err
	}
	defer lock.Close()
	c, err := content.New(ctx, store, content.Config{Grace: cfg.GCGrace, UploadTTL: cfg.UploadTTL, Untagged: cfg.GCUntagged, Log: log})
	if err != nil {
		return nil, err
	}
	if verb == "gc" {
		return c.Collect(ctx, true)
	}
	return c.Scrub(ctx)
}

// remote makes the server do the work.
func remote(ctx context.Context, server, verb, token string) (any, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, strings.TrimSuffix(server, "/")+"/api/"+verb, nil)
	if err != nil {
		return nil, errdefs.Invalidf("--server: %w", err)
	}
	req.Header.Set("Authorization", "Bearer "+token)
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return nil, errdefs.Unavailablef("registry: %w", err)
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(io.LimitReader(resp.Body, 1<<20))
	if err != nil {
		return nil, errdefs.Unavailablef("registry: %w", err)
	}
	if resp.StatusCode != http.StatusOK {
		return nil, errdefs.Preconditionf("registry %s answers %s: %s", server, resp.Status, strings.TrimSpace(string(body)))
	}
	if verb == "gc" {
		var done content.Collected
		err = json.Unmarshal(body, &done)
		return done, err
	}
	var done content.Scrubbed
	err = json.Unmarshal(body, &done)
	return done, err
}

func tokenCommand() *cobra.Command {
	var name string
	var scopes []string
	var lives time.Duration
	cmd := &cobra.Command{Use: "token", Short: "Make tokens"}
	create := &cobra.Command{
		Use: "new", Short: "Make a token", Args: noArgs,
		Long: `Make a token. It is printed once, after it the line for the token file, which holds only its hash: add that line to the
file that "epoch serve" reads, which notices by itself.`,
		Example: `  epoch token new --name node-7                        # may do everything
  epoch token new --name ci --scope push:team --scope pull:base --expires-in 2160h`,
		RunE: func(cmd *cobra.Command, _ []string) error {
			var parsed []access.Scope
			for _, text := range scopes {
				s, err := access.ParseScope(text)
				if err != nil {
					return err
				}
				parsed = append(parsed, s)
			}
			var expires time.Time
			if lives < 0 {
				return errdefs.Invalidf("--expires-in is negative")
			}
			if lives > 0 {
				expires = time.Now().Add(lives)
			}
			token, line, err := access.New(name, parsed, expires)
			if err != nil {
				return err
			}
			return lines(cmd, "%s\n%s\n", token, line)
		},
	}
	create.Flags().StringVar(&name, "name", "", "who will use it; shown in logs and errors")
	create.Flags().StringArrayVar(&scopes, "scope", nil, "what it may do: ACTION:PREFIX with pull, push (and pull) or * (and delete); everything if not given")
	create.Flags().DurationVar(&lives, "expires-in", 0, "how long it is good for; 0 for ever")
	cmd.AddCommand(create)
	return cmd
}
