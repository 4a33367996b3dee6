package cli

import (
	"fmt"
	"os"
	"path/filepath"

	"github.com/spf13/cobra"

	"cocoonstack.io/cocoon/internal/atomicfile"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/network"
	"cocoonstack.io/cocoon/internal/nodeclient"
	"cocoonstack.io/cocoon/internal/nodewire"
)

func (a *app) netCommand() *cobra.Command {
	return group("net", "Look at the node's networks, take them down, or let CNI use the bridge", "",
		a.netStatusCommand(), a.netTeardownCommand(), a.netConflistCommand())
}

func (a *app) netStatusCommand() *cobra.Command {
	var out format
	cmd := &cobra.Command{
		Use: "status", Short: "Show the node's networks and their addresses", Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return a.withClient(func(c *nodeclient.Client) error {
				i, err := c.Info(cmd.Context())
				if err != nil {
					return err
				}
				if out == formatJSON {
					return printJSON(a.Stdout, i.NetworkDetails)
				}
				var rows [][]string
				for _, n := range i.NetworkDetails {
					rows = append(rows, netCells(n))
				}
				return printTable(a.Stdout, []string{"NAME", "KIND", "STATE", "BRIDGE", "SUBNET", "GATEWAY", "LEASED", "FREE"}, rows)
			})
		},
	}
	outputFlag(cmd, &out)
	return cmd
}

func netCells(n nodewire.Network) []string {
	name, state := n.Name, "down"
	if n.Default {
		name += " (default)"
	}
	if n.Up {
		state = "up"
	}
	if n.Error != "" {
		state += ": " + n.Error
	}
	leased, free := "", ""
	if n.Subnet != "" {
		leased, free = fmt.Sprint(n.Leased), fmt.Sprint(n.Free)
	}
	return []string{name, n.Kind, state, n.Bridge, n.Subnet, n.Gateway, leased, free}
}

func (a *app) netTeardownCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "teardown",
		Short: "Remove every link and rule of cocoond's networks",
		Long: `Remove every link and firewall rule that cocoond's networks made, and nothing else. No VM with a network may run.
Leases of the bridge stay; the next VM that starts brings the networks up again.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return a.withClient(func(c *nodeclient.Client) error { return c.TeardownNetworks(cmd.Context()) })
		},
	}
}

func (a *app) netConflistCommand() *cobra.Command {
	var bridge, dir string
	var install bool
	cmd := &cobra.Command{
		Use:   "conflist",
		Short: "Print or install a CNI configuration that uses cocoond's bridge",
		Long: `Print the CNI configuration list ` + network.ConflistName + `: interfaces on cocoond's bridge that do not reach each
other there and speak under their own MAC alone, with addresses by DHCP. With --install it is written to
` + network.ConflistFile + ` in the folder of --conf-dir. The bridge itself is cocoond's to make.`,
		Args:    cobra.NoArgs,
		Example: "  cocoon net conflist --install",
		RunE: func(*cobra.Command, []string) error {
			text := network.Conflist(bridge)
			if !install {
				a.printf("%s", text)
				return nil
			}
			path := filepath.Join(dir, network.ConflistFile)
			if old, err := os.ReadFile(path); err == nil && string(old) != text {
				return errdefs.Existsf("%s exists and is different; remove it first", path)
			}
			if err := os.MkdirAll(dir, 0o755); err != nil {
				return errdefs.New(errdefs.FailedPrecondition, "install the conflist: %w", err)
			}
			if err := atomicfile.WriteFile(path, []byte(text), 0o644); err != nil {
				return errdefs.New(errdefs.FailedPrecondition, "install the conflist: %w", err)
			}
			a.printf("%s\n", path)
			return nil
		},
	}
	cmd.Flags().StringVar(&bridge, "bridge", "cocoon0", "link name of the bridge")
	cmd.Flags().StringVar(&dir, "conf-dir", "/etc/cni/net.d", "folder for --install")
	cmd.Flags().BoolVar(&install, "install", false, "write the file instead of printing it")
	return cmd
}
