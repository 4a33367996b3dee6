package capsulectl

import (
	"context"

	"github.com/spf13/cobra"

	capsulev1 "cocoonstack.io/cocoon/api/capsule/v1"
	"cocoonstack.io/cocoon/internal/textui"
)

func (a *app) registryCommand() *cobra.Command {
	var user string
	login := &cobra.Command{
		Use: "login REGISTRY", Short: "Give the machine credentials for a registry", Args: cobra.ExactArgs(1),
		Long: `Give the machine credentials for a registry, HOST or HOST:PORT. Images of that host are fetched with them, for containers and for
micro-VMs. The password or token is read from standard input: its first line, which a terminal does not show. Nobody can read it from the
machine again.`,
		Example: "  capsulectl registry login ghcr.io --username ann <token.txt",
		RunE: a.calling(func(ctx context.Context, c *client, args []string) error {
			secret, err := textui.Secret(a.Stdin, a.Stderr, "Password: ")
			if err != nil {
				return err
			}
			_, err = c.images().RegistryLogin(ctx, &capsulev1.RegistryLoginRequest{Registry: args[0], Username: user, Password: secret})
			return err
		}),
	}
	login.Flags().StringVarP(&user, "username", "u", "", "name of the user")
	_ = login.MarkFlagRequired("username")

	var out textui.Format
	list := &cobra.Command{
		Use: "list", Aliases: []string{"ls"}, Short: "List the registries for which the machine has credentials", Args: cobra.NoArgs,
		RunE: a.calling(func(ctx context.Context, c *client, _ []string) error {
			answer, err := c.images().RegistryList(ctx, &capsulev1.RegistryListRequest{})
			switch {
			case err != nil:
				return err
			case out == textui.FormatJSON:
				return printMessages(a, answer.GetRegistries())
			}
			var table [][]string
			for _, r := range answer.GetRegistries() {
				table = append(table, []string{r.GetRegistry(), r.GetUsername()})
			}
			return textui.PrintTable(a.Stdout, []string{"REGISTRY", "USERNAME"}, table)
		}),
	}
	textui.OutputFlag(list, &out)

	logout := &cobra.Command{
		Use: "logout REGISTRY...", Short: "Have the machine forget the credentials for registries", Args: cobra.MinimumNArgs(1),
		RunE: a.calling(func(ctx context.Context, c *client, names []string) error {
			return each(names, func(name string) error {
				_, err := c.images().RegistryLogout(ctx, &capsulev1.RegistryLogoutRequest{Registry: name})
				return err
			})
		}),
	}
	return group("registry", "Credentials for private registries", "  capsulectl registry login ghcr.io --username ann <token.txt\n  capsulectl registry list", login, list, logout)
}
