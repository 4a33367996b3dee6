package capsulectl

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	capsulev1 "cocoonstack.io/cocoon/api/capsule/v1"
	"cocoonstack.io/cocoon/internal/capsulectl/config"
	"cocoonstack.io/cocoon/internal/capsulectl/manifest"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/textui"
)

const (
	confirmPoll = 2 * time.Second
	confirmCall = 5 * time.Second // a machine that is not there yet does not say so
	addressHelp = "`HOST[:PORT]` at which the machine is with the new configuration (default: the old address, and a static one of the file)"
)

func (a *app) networkCommand() *cobra.Command {
	return group("network", "The network of the machine itself", "  capsulectl network get\n  capsulectl network set -f network.yaml --auto-confirm",
		a.networkGetCommand(), a.networkSetCommand(), a.networkConfirmCommand())
}

func (a *app) networkGetCommand() *cobra.Command {
	var out textui.Format
	var only bool
	cmd := &cobra.Command{
		Use: "get", Short: "Describe the network of the machine", Args: cobra.NoArgs,
		Example: "  capsulectl network get\n  capsulectl network get --config >network.yaml",
		RunE: a.calling(func(ctx context.Context, c *client, _ []string) error {
			g, err := c.network().Get(ctx, &capsulev1.NetworkGetRequest{})
			switch {
			case err != nil:
				return err
			case only:
				return a.printMessage(g.GetConfirmed())
			case out == textui.FormatJSON:
				return a.printMessage(g)
			}
			a.printNetwork(g)
			return nil
		}),
	}
	cmd.Flags().BoolVar(&only, "config", false, "print only the confirmed configuration, as `network set -f` reads it")
	textui.OutputFlag(cmd, &out)
	return cmd
}

func (a *app) printNetwork(g *capsulev1.NetworkGetResponse) {
	line := func(name string, values ...string) {
		if value := strings.Join(values, ", "); value != "" {
			a.printf("%-16s %s\n", name, textui.Cell(value))
		}
	}
	s := g.GetState()
	line("link", s.GetLink())
	line("addresses", s.GetAddresses()...)
	line("gateways", s.GetGateways()...)
	line("name servers", s.GetDns()...)
	line("time servers", s.GetNtp()...)
	if k := s.GetClock(); k.GetServer() != "" {
		text := fmt.Sprintf("by %s, which it differed from by %s", k.GetServer(), time.Duration(k.GetOffsetMicroseconds())*time.Microsecond)
		if !k.GetSynchronized() {
			text = "not set " + text
		}
		line("clock", text)
	}
	line("clock fault", s.GetClock().GetError())
	line("not in use", s.GetError())
	if g.GetTrial() != nil {
		line("on trial", fmt.Sprintf("goes back in %ds without `capsulectl network confirm`", g.GetTrialSecondsLeft()))
	}
	line("last trial", g.GetTrialEnded())
	for _, l := range g.GetLinks() {
		state := "off"
		switch {
		case l.GetCarrier():
			state = "connected"
		case l.GetUp():
			state = "no cable"
		}
		line("ethernet", fmt.Sprintf("%s  %s  %s", l.GetName(), l.GetMac(), state))
	}
}

// networkChange is what `network set` is told.
type networkChange struct {
	file, at     string
	within       time.Duration
	dry, confirm bool
}

func (a *app) networkSetCommand() *cobra.Command {
	var o networkChange
	cmd := &cobra.Command{
		Use: "set -f FILE", Short: "Try another configuration of the machine's network", Args: cobra.NoArgs,
		Long: `Try another configuration of the machine's network. The machine uses it at once. If nobody confirms it in time by a connection to its
new address, the machine goes back by itself to what was confirmed before; so it does after a power cut. An empty file means DHCP
on the first link.

--auto-confirm connects again, at the old address and the new one, and confirms when the machine answers.`,
		Example: "  capsulectl network set -f network.yaml --dry-run\n  capsulectl network set -f network.yaml --auto-confirm\n" +
			"  capsulectl network set -f network.yaml --confirm-within 5m && capsulectl network confirm --at 192.0.2.7",
		RunE: a.calling(func(ctx context.Context, c *client, _ []string) error { return a.setNetwork(ctx, c, o) }),
	}
	f := cmd.Flags()
	f.StringVarP(&o.file, "filename", "f", "", "`FILE` with the configuration, - for standard input")
	f.DurationVar(&o.within, "confirm-within", 90*time.Second, "how long the machine waits for a confirmation")
	f.BoolVar(&o.dry, "dry-run", false, "only ask the machine whether it can work")
	f.BoolVar(&o.confirm, "auto-confirm", false, "confirm when the machine answers again")
	f.StringVar(&o.at, "at", "", addressHelp)
	_ = cmd.MarkFlagRequired("filename")
	cmd.MarkFlagsMutuallyExclusive("dry-run", "auto-confirm")
	return cmd
}

func (a *app) setNetwork(ctx context.Context, c *client, o networkChange) error {
	data, err := a.readFile(o.file)
	if err != nil {
		return err
	}
	wanted := &capsulev1.NetworkConfig{}
	if err := manifest.Message(data, wanted); err != nil {
		return fmt.Errorf("%s:\n%w", o.file, err)
	}
	if o.within < time.Second || o.within > 24*time.Hour {
		return errdefs.Invalidf("--confirm-within %s is no time to confirm in", o.within)
	}
	begin := time.Now()
	answer, err := c.network().Set(ctx, &capsulev1.NetworkSetRequest{Config: wanted, ConfirmWithinSeconds: uint32(o.within / time.Second), DryRun: o.dry}) //nolint:gosec // bounded
	switch {
	case err != nil:
		return fmt.Errorf("set the network of %s: %w", c.name, err)
	case o.dry:
		a.printf("%s would try it for %ds.\n", c.name, answer.GetSecondsLeft())
		return nil
	case !answer.GetTrial():
		a.printf("%s uses it: it is what was confirmed before.\n", c.name)
		return nil
	}
	a.printf("%s tries it for %ds.\n", c.name, answer.GetSecondsLeft())
	if !o.confirm {
		a.printf("Confirm it with `capsulectl --capsule %s network confirm`; otherwise it goes back.\n", c.name)
		return nil
	}
	return a.confirmNetwork(ctx, c, candidates(c.addr, o.at, wanted), begin.Add(time.Duration(answer.GetSecondsLeft())*time.Second))
}

// candidates returns the addresses at which a machine may be with a configuration.
func candidates(old, at string, wanted *capsulev1.NetworkConfig) []string {
	if at != "" {
		return []string{config.WithPort(at)}
	}
	out := []string{old}
	_, port, err := net.SplitHostPort(old)
	if err != nil {
		return out
	}
	for _, s := range []string{wanted.GetIpv4().GetAddress(), wanted.GetIpv6().GetAddress()} {
		if p, err := netip.ParsePrefix(s); err == nil {
			out = append(out, net.JoinHostPort(p.Addr().String(), port))
		}
	}
	return slices.Compact(out)
}

func (a *app) networkConfirmCommand() *cobra.Command {
	var at string
	cmd := &cobra.Command{
		Use: "confirm", Short: "Keep the configuration of the network that is on trial", Args: cobra.NoArgs,
		RunE: a.calling(func(ctx context.Context, c *client, _ []string) error {
			return a.confirmNetwork(ctx, c, candidates(c.addr, at, nil), time.Time{})
		}),
	}
	cmd.Flags().StringVar(&at, "at", "", addressHelp)
	return cmd
}

// confirmNetwork confirms by the first address at which the machine answers, until a time; the zero time means one attempt. If that is
// another address than that of the context, the context has it from then on.
func (a *app) confirmNetwork(ctx context.Context, c *client, addrs []string, until time.Time) error {
	for {
		var last error
		for _, addr := range addrs {
			err := a.confirmAt(ctx, addr)
			if err == nil {
				a.printf("%s keeps it.\n", c.name)
				return a.moved(ctx, c, addr)
			}
			if errdefs.IsFailedPrecondition(err) || errdefs.Is(err, errdefs.PermissionDenied) {
				return fmt.Errorf("confirm the network of %s: %w", c.name, err)
			}
			last = err
		}
		if !time.Now().Before(until) {
			return fmt.Errorf("confirm the network of %s: %w; without a confirmation it goes back to what it had", c.name, last)
		}
		if err := a.Pause(ctx, confirmPoll); err != nil {
			return err
		}
	}
}

// confirmAt confirms by a new connection to an address.
func (a *app) confirmAt(ctx context.Context, addr string) error {
	ctx, cancel := context.WithTimeout(ctx, confirmCall)
	defer cancel()
	n, err := a.openAt(addr)
	if err != nil {
		return err
	}
	defer n.close()
	_, err = n.network().Confirm(ctx, &capsulev1.NetworkConfirmRequest{})
	return err
}

// moved stores the address of a machine in its context.
func (a *app) moved(ctx context.Context, c *client, addr string) error {
	if addr == c.addr {
		return nil
	}
	dir, err := a.configDir()
	if err != nil {
		return err
	}
	a.printf("The context %s has the address %s now.\n", c.name, addr)
	return config.Update(ctx, dir, func(all *config.Config) error {
		if x, ok := all.Contexts[c.name]; ok {
			x.Addr = addr
			all.Contexts[c.name] = x
		}
		return nil
	})
}
