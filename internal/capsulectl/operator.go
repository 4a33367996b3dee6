package capsulectl

import (
	"context"
	"crypto/ed25519"
	"fmt"
	"maps"
	"net"
	"os"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	capsulev1 "cocoonstack.io/cocoon/api/capsule/v1"
	"cocoonstack.io/cocoon/internal/capsulectl/config"
	"cocoonstack.io/cocoon/internal/capsulewire"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/textui"
)

func (a *app) adoptCommand() *cobra.Command {
	var o adoption
	cmd := &cobra.Command{
		Use: "adopt", Short: "Become the first operator of a new machine", Args: cobra.NoArgs,
		Long: `Become the first operator of a new machine: enroll your key there, and keep its address and certificate as a context.

The machine takes the first key within 30 minutes after it has booted. Later, an operator enrolls your key with
` + "`capsulectl key add`" + `, and this command then only makes the context.

The certificate is trusted from now on. Compare its fingerprint with the one that the machine shows on its screen, or give
that one with --fingerprint.`,
		Example: `  capsulectl adopt --capsule 192.0.2.7 --name lab
  capsulectl adopt --capsule 192.0.2.7:50000 --fingerprint 3f:9a:…:10 --yes`,
		RunE: func(cmd *cobra.Command, _ []string) error { return a.adopt(cmd.Context(), o) },
	}
	f := cmd.Flags()
	f.StringVar(&o.name, "name", "", "name of the context (default: the host of the address)")
	f.StringVar(&o.fingerprint, "fingerprint", "", "accept this certificate only: its `SHA-256`")
	f.BoolVar(&o.yes, "yes", false, "trust the certificate without a question")
	return cmd
}

type adoption struct {
	name, fingerprint string
	yes               bool
}

func (a *app) adopt(ctx context.Context, o adoption) error {
	if a.target == "" {
		return errdefs.Invalidf("say which machine: --capsule HOST[:PORT]; `capsulectl discover --unadopted` shows new ones")
	}
	dir, err := a.configDir()
	if err != nil {
		return err
	}
	addr := config.WithPort(a.target)
	name := o.name
	if name == "" {
		name, _, _ = net.SplitHostPort(addr) // it has a port
	}
	contexts, err := config.Load(dir)
	if err != nil {
		return err
	}
	if x, ok := contexts.Contexts[name]; ok && x.Addr != addr {
		return taken(name, x)
	}
	seen, err := a.trusted(ctx, addr, o)
	if err != nil {
		return err
	}
	key, err := config.EnsureKey(ctx, config.KeyPath(dir))
	if err != nil {
		return err
	}
	c, err := dial(name, addr, seen)
	if err != nil {
		return err
	}
	defer c.close()
	answer, err := c.identity().Adopt(ctx, &capsulev1.AdoptRequest{Pubkey: key.Public().(ed25519.PublicKey), Name: a.operatorName(name)})
	switch {
	case errdefs.IsFailedPrecondition(err):
		return errdefs.New(errdefs.FailedPrecondition, "%s cannot be adopted now: %w; let one of its operators run `capsulectl key add --name YOU FILE`"+
			" with what `capsulectl key show` prints, then adopt again", addr, err)
	case err != nil:
		return fmt.Errorf("adopt %s: %w", addr, err)
	case answer.GetCapsuleId() == "" || !strings.EqualFold(answer.GetTlsFingerprintSha256(), seen):
		return errdefs.Unauthenticatedf("%s says that its certificate is %q, but shows %s; nothing is kept", addr, answer.GetTlsFingerprintSha256(), seen)
	}
	x := config.Context{Addr: addr, CapsuleID: answer.GetCapsuleId(), TLSFingerprint: seen, KeyPath: config.KeyPath(dir)}
	err = config.Update(ctx, dir, func(c *config.Config) error {
		if old, ok := c.Contexts[name]; ok && old.Addr != addr {
			return taken(name, old)
		}
		c.Contexts[name], c.Current = x, name
		return nil
	})
	if err != nil {
		return err
	}
	a.printf("%s is adopted, and is the current context.\ncapsule_id  %s\nkid         %s\naddr        %s\n", textui.Cell(name), textui.Cell(x.CapsuleID), textui.Cell(answer.GetKid()), addr)
	return nil
}

func taken(name string, x config.Context) error {
	return errdefs.Existsf("there is a context %s already, for %s; choose another --name, or run `capsulectl context rm %s`", name, x.Addr, name)
}

// operatorName is under which name the key is enrolled by default.
func (a *app) operatorName(fallback string) string {
	if user := a.Getenv("USER"); user != "" {
		if host, err := os.Hostname(); err == nil {
			return user + "@" + host
		}
	}
	return fallback
}

// trusted returns the fingerprint of the machine at addr, after the operator has agreed to it.
func (a *app) trusted(ctx context.Context, addr string, o adoption) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, connectTime)
	defer cancel()
	seen, err := capsulewire.PeerFingerprint(ctx, addr)
	if err != nil {
		return "", fmt.Errorf("%w; is the machine on, and is this its address? `capsulectl discover` shows the machines here", err)
	}
	if o.fingerprint != "" {
		if plain := strings.ToLower(strings.ReplaceAll(strings.TrimSpace(o.fingerprint), ":", "")); plain != seen {
			return "", errdefs.Unauthenticatedf("the certificate of %s is %s, not %s; do not go on unless you know why", addr, seen, plain)
		}
		return seen, nil
	}
	if o.yes {
		return seen, nil
	}
	return seen, a.confirmed(fmt.Sprintf("The certificate of %s has this fingerprint (SHA-256). Compare it with the screen of the machine:\n\n%s\n", addr, capsulewire.FingerprintRows(seen)))
}

func (a *app) whoamiCommand() *cobra.Command {
	var out textui.Format
	cmd := &cobra.Command{
		Use: "whoami", Short: "Show your key and role on the machine", Args: cobra.NoArgs,
		RunE: a.calling(func(ctx context.Context, c *client, _ []string) error {
			w, err := c.identity().WhoAmI(ctx, &capsulev1.WhoAmIRequest{})
			switch {
			case err != nil:
				return err
			case out == textui.FormatJSON:
				return a.printMessage(w)
			}
			a.printf("context     %s\ncapsule_id  %s\nkid         %s\nname        %s\nrole        %s\n",
				textui.Cell(c.name), textui.Cell(w.GetCapsuleId()), textui.Cell(w.GetKid()), textui.Cell(w.GetName()), roleName(w.GetRole()))
			return nil
		}),
	}
	textui.OutputFlag(cmd, &out)
	return cmd
}

func roleName(r capsulev1.Role) string {
	if r == capsulev1.Role_ROLE_UNSPECIFIED {
		return "admin"
	}
	return short("ROLE_", r)
}

// short returns the name of a value of an enum without its prefix: on-failure of RESTART_POLICY_ON_FAILURE.
func short(prefix string, v fmt.Stringer) string {
	return textui.Cell(strings.ToLower(strings.ReplaceAll(strings.TrimPrefix(v.String(), prefix), "_", "-")))
}

// roleFlag is the value of --role.
type roleFlag capsulev1.Role

func (r *roleFlag) Type() string   { return "role" }
func (r *roleFlag) String() string { return roleName(capsulev1.Role(*r)) }

func (r *roleFlag) Set(s string) error {
	v, ok := capsulev1.Role_value["ROLE_"+strings.ToUpper(s)]
	if !ok || v == 0 {
		return errdefs.Invalidf("it is view, operate or admin")
	}
	*r = roleFlag(v)
	return nil
}

func (a *app) keyCommand() *cobra.Command {
	var name string
	role := roleFlag(capsulev1.Role_ROLE_ADMIN)
	add := &cobra.Command{
		Use: "add FILE", Short: "Enroll the key of another operator", Args: cobra.ExactArgs(1),
		Long: `Enroll the key of another operator, which is the output of their ` + "`capsulectl key show`" + `. A role includes those before it:

  view      read
  operate   change workloads and volumes, and run programs in them
  admin     keys, updates, reboots, and workloads that reach into the machine`,
		Example: "  capsulectl key add --name ann --role operate ann.pub",
		RunE: a.calling(func(ctx context.Context, c *client, args []string) error {
			public, err := config.LoadPublic(args[0])
			if err != nil {
				return err
			}
			k, err := c.identity().KeyAdd(ctx, &capsulev1.KeyAddRequest{Pubkey: public, Name: name, Role: capsulev1.Role(role)})
			if err != nil {
				return err
			}
			a.printf("%s\n", textui.Cell(k.GetKey().GetKid()))
			return nil
		}),
	}
	add.Flags().StringVar(&name, "name", "", "name of the operator")
	add.Flags().Var(&role, "role", "view, operate or admin")
	_ = add.MarkFlagRequired("name")
	textui.CompleteWords(add, "role", "view", "operate", "admin")

	var out textui.Format
	list := &cobra.Command{
		Use: "list", Aliases: []string{"ls"}, Short: "List the keys of the machine", Args: cobra.NoArgs,
		RunE: a.calling(func(ctx context.Context, c *client, _ []string) error {
			answer, err := c.identity().KeyList(ctx, &capsulev1.KeyListRequest{})
			switch {
			case err != nil:
				return err
			case out == textui.FormatJSON:
				return printMessages(a, answer.GetKeys())
			}
			var table [][]string
			for _, k := range answer.GetKeys() {
				table = append(table, []string{k.GetKid(), k.GetName(), roleName(k.GetRole()), stamp(k.GetAddedAtUnix()), k.GetAddedByKid()})
			}
			return textui.PrintTable(a.Stdout, []string{"KID", "NAME", "ROLE", "ADDED", "ADDED BY"}, table)
		}),
	}
	textui.OutputFlag(list, &out)

	rm := &cobra.Command{
		Use: "rm KID...", Short: "Remove keys; the last one with the role admin stays", Args: cobra.MinimumNArgs(1), ValidArgsFunction: a.completeKeys,
		RunE: a.calling(func(ctx context.Context, c *client, args []string) error {
			return each(args, func(kid string) error {
				_, err := c.identity().KeyRemove(ctx, &capsulev1.KeyRemoveRequest{Kid: kid})
				if err == nil {
					a.printf("%s\n", kid)
				}
				return err
			})
		}),
	}
	show := &cobra.Command{
		Use: "show", Short: "Print your public key, for an operator who enrolls it", Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			dir, err := a.configDir()
			if err != nil {
				return err
			}
			key, err := config.EnsureKey(cmd.Context(), config.KeyPath(dir))
			if err != nil {
				return err
			}
			text, err := config.PublicPEM(key)
			if err != nil {
				return err
			}
			a.printf("# kid: %s\n%s", capsulewire.Kid(key.Public().(ed25519.PublicKey)), text)
			return nil
		},
	}
	return group("key", "Who may use the machine", "  capsulectl key show >me.pub\n  capsulectl key add --name ann --role operate ann.pub", add, list, rm, show)
}

func (a *app) contextCommand() *cobra.Command {
	var out textui.Format
	list := &cobra.Command{
		Use: "list", Aliases: []string{"ls"}, Short: "List the machines that you have adopted", Args: cobra.NoArgs,
		RunE: func(*cobra.Command, []string) error {
			dir, err := a.configDir()
			if err != nil {
				return err
			}
			c, err := config.Load(dir)
			if err != nil {
				return err
			}
			if out == textui.FormatJSON {
				return textui.PrintJSON(a.Stdout, map[string]any{"current": c.Current, "contexts": c.Contexts})
			}
			var table [][]string
			for _, name := range slices.Sorted(maps.Keys(c.Contexts)) {
				mark := " "
				if name == c.Current {
					mark = "*"
				}
				table = append(table, []string{mark, name, c.Contexts[name].Addr, c.Contexts[name].CapsuleID})
			}
			return textui.PrintTable(a.Stdout, []string{" ", "NAME", "ADDRESS", "CAPSULE ID"}, table)
		},
	}
	textui.OutputFlag(list, &out)
	change := func(fn func(c *config.Config, name string)) func(*cobra.Command, []string) error {
		return func(cmd *cobra.Command, args []string) error {
			dir, err := a.configDir()
			if err != nil {
				return err
			}
			return config.Update(cmd.Context(), dir, func(c *config.Config) error {
				if _, ok := c.Contexts[args[0]]; !ok {
					return errdefs.NotFoundf("there is no context %q; `capsulectl context list` has all", args[0])
				}
				fn(c, args[0])
				return nil
			})
		}
	}
	use := &cobra.Command{
		Use: "use NAME", Short: "Choose the machine that verbs are for without --capsule", Args: cobra.ExactArgs(1), ValidArgsFunction: a.completeContexts,
		RunE: change(func(c *config.Config, name string) { c.Current = name }),
	}
	rm := &cobra.Command{
		Use: "rm NAME", Short: "Forget a machine; your key stays enrolled there", Args: cobra.ExactArgs(1), ValidArgsFunction: a.completeContexts,
		RunE: change(func(c *config.Config, name string) {
			delete(c.Contexts, name)
			if c.Current == name {
				c.Current = ""
			}
		}),
	}
	return group("context", "The machines that you have adopted", "  capsulectl context list\n  capsulectl context use lab", list, use, rm)
}
