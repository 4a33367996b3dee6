package cli

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"

	"github.com/spf13/cobra"

	"cocoonstack.io/cocoon/internal/atomicfile"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/network"
	"cocoonstack.io/cocoon/internal/nodeclient"
	"cocoonstack.io/cocoon/internal/nodewire"
	"cocoonstack.io/cocoon/internal/textui"
)

func (a *app) netCommand() *cobra.Command {
	return group("net", "Look at the node's networks, take them down, or let CNI use the bridge", "",
		a.netStatusCommand(), a.netAdoptCommand(), a.netTeardownCommand(), a.netConflistCommand())
}

func (a *app) netStatusCommand() *cobra.Command {
	var out textui.Format
	cmd := &cobra.Command{
		Use: "status", Short: "Show the node's networks and their addresses", Args: cobra.NoArgs,
		RunE: a.calling(func(ctx context.Context, c *nodeclient.Client, _ []string) error {
			i, err := c.Info(ctx)
			if err != nil {
				return err
			}
			if out == textui.FormatJSON {
				return textui.PrintJSON(a.Stdout, i.NetworkDetails)
			}
			var rows [][]string
			for _, n := range i.NetworkDetails {
				rows = append(rows, netCells(n))
			}
			return textui.PrintTable(a.Stdout, []string{"NAME", "KIND", "STATE", "BRIDGE", "SUBNET", "GATEWAY", "LEASED", "FREE"}, rows)
		}),
	}
	textui.OutputFlag(cmd, &out)
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
	subnet := n.Subnet
	if n.Subnet6 != "" {
		subnet += "," + n.Subnet6
	}
	return []string{name, n.Kind, state, n.Bridge, subnet, n.Gateway, leased, free}
}

func (a *app) netAdoptCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "adopt BRIDGE",
		Short: "Print the configuration that puts VMs on a bridge of this host",
		Long: `Look at a bridge of this host and print what cocoond's configuration file needs for its VMs to be on it. The bridge
keeps its address, which becomes the guests' gateway, and everything that is on it; nothing is changed now or later.`,
		Args:    cobra.ExactArgs(1),
		Example: "  cocoon net adopt br0 >> /etc/cocoon/cocoond.yaml && systemctl restart cocoond",
		RunE: func(_ *cobra.Command, args []string) error {
			addr, err := bridgeAddress(args[0])
			if err != nil {
				return err
			}
			a.printf("network: # guests in %s, with %s as their gateway\n  bridge: %s\n  adopt: true\n", addr.Masked(), addr.Addr(), args[0])
			return nil
		},
	}
}

// bridgeAddress returns the first IPv4 address of a bridge of this host.
func bridgeAddress(name string) (netip.Prefix, error) {
	link, err := net.InterfaceByName(name)
	if err != nil {
		return netip.Prefix{}, errdefs.New(errdefs.NotFound, "look for bridge %s: %w", name, err)
	}
	if _, err := os.Stat(filepath.Join("/sys/class/net", link.Name, "bridge")); err != nil {
		return netip.Prefix{}, errdefs.Preconditionf("%s is not a bridge", name)
	}
	addrs, err := link.Addrs()
	if err != nil {
		return netip.Prefix{}, errdefs.New(errdefs.Internal, "list addresses of %s: %w", name, err)
	}
	for _, a := range addrs {
		if p, err := netip.ParsePrefix(a.String()); err == nil && p.Addr().Is4() {
			return p, nil
		}
	}
	return netip.Prefix{}, errdefs.Preconditionf("bridge %s has no IPv4 address; give it one with `ip addr add CIDR dev %s`", name, name)
}

func (a *app) netTeardownCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "teardown",
		Short: "Remove every link and rule of cocoond's networks",
		Long: `Remove every link and firewall rule that cocoond's networks made, and nothing else. No VM with a network may run.
Leases of the bridge stay; the next VM that starts brings the networks up again.`,
		Args: cobra.NoArgs,
		RunE: a.calling(func(ctx context.Context, c *nodeclient.Client, _ []string) error {
			return c.TeardownNetworks(ctx)
		}),
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
