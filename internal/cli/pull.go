package cli

import (
	"context"
	"fmt"
	"strings"

	"github.com/spf13/cobra"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/image"
	"cocoonstack.io/cocoon/internal/nodeclient"
	"cocoonstack.io/cocoon/internal/textui"
)

// pullPolicy is the value of --policy and --pull.
type pullPolicy image.PullPolicy

// The policies as users write them.
var pullPolicies = []struct {
	word   string
	policy image.PullPolicy
}{{"missing", image.PullIfNotPresent}, {"always", image.PullAlways}, {"never", image.PullNever}}

func (p *pullPolicy) Type() string { return "policy" }

func (p *pullPolicy) String() string {
	for _, known := range pullPolicies {
		if known.policy == image.PullPolicy(*p) {
			return known.word
		}
	}
	return ""
}

func (p *pullPolicy) Set(v string) error {
	for _, known := range pullPolicies {
		if known.word == v {
			*p = pullPolicy(known.policy)
			return nil
		}
	}
	return errdefs.Invalidf("use missing, always or never")
}

func pullPolicyFlag(cmd *cobra.Command, p *pullPolicy, name string, value image.PullPolicy, usage string) {
	*p = pullPolicy(value)
	cmd.Flags().Var(p, name, usage)
	textui.CompleteWords(cmd, name, "missing", "always", "never")
}

func (a *app) imagePullCommand() *cobra.Command {
	var policy pullPolicy
	var force, quiet bool
	var authFile, tokenFile string
	var out textui.Format
	cmd := &cobra.Command{
		Use:   "pull NAME...",
		Short: "Fetch images from where their names say",
		Long: `Fetch images from where their names say, one after the other, and print what each is called here.

NAME may be a container image of a registry (debian:12, ghcr.io/org/image@sha256:...), the web address of a disk image
(https://example.net/disk.qcow2), or an alias of the name mappings; "cocoon image explain NAME" tells which. An image
that has not changed since it was fetched is not transferred again, and a transfer that breaks off is resumed. Interrupted
with Ctrl-C it leaves nothing.

Credentials for registries are the token in --token-file, those of --auth-file, then those of the daemon's own docker
configuration.`,
		Example: `  cocoon image pull debian:12
  cocoon image pull --policy missing https://cloud.debian.org/images/cloud/bookworm/latest/debian-12-genericcloud-amd64.qcow2
  cocoon image pull --auth-file ~/.docker/config.json registry.example.com/team/app:1.4`,
		Args: cobra.MinimumNArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			r := image.PullRequest{Policy: image.PullPolicy(policy), Force: force}
			if force && r.Policy != image.PullAlways {
				return errdefs.Invalidf("--force fetches in any case, and --policy %s does not", policy.String())
			}
			if authFile != "" {
				var err error
				if r.Auth, err = readAuth(authFile); err != nil {
					return err
				}
			}
			token, err := registryToken(tokenFile, args)
			if err != nil {
				return err
			}
			return a.withClient(func(c *nodeclient.Client) error {
				return each(args, func(name string) error {
					r := r
					r.Name = name
					if token != "" {
						r.Auth = append([]image.RegistryAuth{{Registry: registryHost(name), Token: token}}, r.Auth...)
					}
					img, err := a.pull(cmd.Context(), c, r, quiet)
					switch {
					case err != nil:
						return err
					case out == textui.FormatJSON:
						return textui.PrintJSON(a.Stdout, img)
					case quiet || img.Name == "":
						a.printf("%s\n", img.ID)
					default:
						a.printf("%s\n", img.Name)
					}
					return nil
				})
			})
		},
	}
	pullPolicyFlag(cmd, &policy, "policy", image.PullAlways, "always: ask whether there is something newer; missing: only when it is not here; never")
	cmd.Flags().BoolVar(&force, "force", false, "fetch anew even what has not changed, and in place of an imported image")
	cmd.Flags().StringVar(&authFile, "auth-file", "", "docker config.json with credentials for registries")
	cmd.Flags().StringVar(&tokenFile, "token-file", "", "`FILE` with a bearer token for the registry that the names say")
	cmd.Flags().BoolVarP(&quiet, "quiet", "q", false, "no progress; print the id")
	textui.OutputFlag(cmd, &out)
	cmd.Flags().SortFlags = false
	return cmd
}

// registryToken returns the token in a file for the registry that the names say; "" without a file. It is for one registry:
// no other may see it.
func registryToken(path string, names []string) (string, error) {
	if path == "" {
		return "", nil
	}
	for _, name := range names {
		if !strings.Contains(name, "/") {
			return "", errdefs.Invalidf("--token-file is for a name that says its registry: HOST/REPOSITORY")
		}
		if registryHost(name) != registryHost(names[0]) {
			return "", errdefs.Invalidf("--token-file is for one registry, and these names say %s and %s; pull them separately", registryHost(names[0]), registryHost(name))
		}
	}
	return readToken(path)
}

func readAuth(path string) ([]image.RegistryAuth, error) {
	data, err := readSmall(path, "credentials")
	if err != nil {
		return nil, err
	}
	auth, err := image.ParseDockerConfig(data)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	if len(auth) == 0 {
		return nil, errdefs.Invalidf("%s holds no credentials itself, and credential helpers are not asked", path)
	}
	return auth, nil
}

// pull fetches an image and draws its progress if a person watches.
func (a *app) pull(ctx context.Context, c *nodeclient.Client, r image.PullRequest, quiet bool) (image.Image, error) {
	b := textui.NewBar(a.Stderr, r.Name, quiet)
	defer b.Clear()
	return c.Pull(ctx, r, showImage(b))
}

// image returns show for the transfer of an image, nil if nothing is drawn.
func showImage(b *textui.Bar) func(image.Progress) {
	if b == nil {
		return nil
	}
	return func(p image.Progress) { b.Show(p.Phase, p.Done, p.Total) }
}

func (a *app) imageExplainCommand() *cobra.Command {
	var out textui.Format
	cmd := &cobra.Command{
		Use:   "explain NAME",
		Short: "Say what an image name means here, step by step",
		Long: `Say what an image name means here: which mapping and rule apply to it, where and how it would be fetched, and whether
it is here already. The network is not used.`,
		Example: "  cocoon image explain virtlet.cloud/cirros\n  cocoon image explain -o json debian:12 | jq -r .url",
		Args:    cobra.ExactArgs(1), ValidArgsFunction: a.completeImages,
		RunE: a.calling(func(ctx context.Context, c *nodeclient.Client, args []string) error {
			e, err := c.Explain(ctx, args[0])
			if err != nil {
				return err
			}
			if out == textui.FormatJSON {
				e.Steps = append([]string{}, e.Steps...) // never null
				return textui.PrintJSON(a.Stdout, e)
			}
			a.printExplanation(e)
			return nil
		}),
	}
	textui.OutputFlag(cmd, &out)
	return cmd
}

// printExplanation prints the steps as a numbered list and then the result.
func (a *app) printExplanation(e image.Explanation) {
	a.printf("%s\n", textui.Cell(e.Name))
	for i, step := range e.Steps {
		a.printf("%3d. %s\n", i+1, textui.Cell(step))
	}
	a.printf("\n")
	present := "no"
	if e.Present {
		present = "yes"
	}
	for _, l := range [][2]string{
		{"Kind", e.Kind},
		{"Stored as", e.Key},
		{"Fetched from", e.URL},
		{"Mapping", e.Source},
		{"Rule", e.Rule},
		{"Transport", e.Transport},
		{"Here already", present},
	} {
		if l[1] != "" {
			a.printf("%-14s %s\n", l[0]+":", textui.Cell(strings.TrimSpace(l[1])))
		}
	}
}
