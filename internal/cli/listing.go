package cli

import (
	"context"

	"github.com/spf13/cobra"

	"cocoonstack.io/cocoon/internal/nodeclient"
	"cocoonstack.io/cocoon/internal/textui"
)

// listing is a command that prints all objects of one kind: as a table, as JSON, or their names.
type listing[T any] struct {
	short string
	list  func(ctx context.Context, c *nodeclient.Client) ([]T, error)
	name  func(T) string
	json  func(T) any
	table func([]T) error
}

func listCommand[T any](a *app, l listing[T]) *cobra.Command {
	var out textui.Format
	var quiet bool
	cmd := &cobra.Command{
		Use: "list", Aliases: []string{"ls"}, Short: l.short, Args: cobra.NoArgs,
		RunE: a.calling(func(ctx context.Context, c *nodeclient.Client, _ []string) error {
			all, err := l.list(ctx, c)
			switch {
			case err != nil:
				return err
			case quiet:
				for _, x := range all {
					a.printf("%s\n", l.name(x))
				}
				return nil
			case out == textui.FormatJSON:
				list := make([]any, len(all)) // prints [] when empty, never null
				for i, x := range all {
					list[i] = l.json(x)
				}
				return textui.PrintJSON(a.Stdout, list)
			}
			return l.table(all)
		}),
	}
	textui.OutputFlag(cmd, &out)
	cmd.Flags().BoolVarP(&quiet, "quiet", "q", false, "names only")
	return cmd
}

// jsonByDefault gives cmd the flag --output, which is json unless it is given.
func jsonByDefault(cmd *cobra.Command, out *textui.Format) {
	textui.OutputFlag(cmd, out)
	*out = textui.FormatJSON
	cmd.Flags().Lookup("output").DefValue = string(textui.FormatJSON)
}
