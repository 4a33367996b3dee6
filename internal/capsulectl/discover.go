package capsulectl

import (
	"cmp"
	"context"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/spf13/cobra"

	"cocoonstack.io/cocoon/internal/capsulectl/config"
	"cocoonstack.io/cocoon/internal/capsulewire"
	"cocoonstack.io/cocoon/internal/mdns"
	"cocoonstack.io/cocoon/internal/textui"
)

const (
	handshakes    = 16 // at the same time
	handshakeTime = 3 * time.Second
)

// discovered is a machine that was found, with the certificate that it shows.
type discovered struct {
	mdns.Entry
	Fingerprint string `json:"fingerprint"`
	Unreachable bool   `json:"unreachable"`
}

func (a *app) discoverCommand() *cobra.Command {
	var timeout time.Duration
	var asJSON, installers, unadopted bool
	var out textui.Format
	cmd := &cobra.Command{
		Use: "discover", Short: "Find machines on this network", Args: cobra.NoArgs,
		Long: `Find machines on this network by multicast DNS, which routers do not pass on. What they say of themselves is not verified; the
fingerprint is that of the certificate which is shown at the address.`,
		Example: "  capsulectl discover\n  capsulectl discover --unadopted --json",
		RunE: func(cmd *cobra.Command, _ []string) error {
			if asJSON {
				out = textui.FormatJSON
			}
			found, err := a.Browse(cmd.Context(), timeout)
			if err != nil {
				return err
			}
			found = slices.DeleteFunc(found, func(e mdns.Entry) bool {
				return installers && !e.Installer() || unadopted && (e.Installer() || e.Adopted)
			})
			all := fingerprints(cmd.Context(), found)
			if out == textui.FormatJSON {
				return textui.PrintJSON(a.Stdout, all)
			}
			return a.printDiscovered(all)
		},
	}
	f := cmd.Flags()
	f.DurationVar(&timeout, "timeout", 3*time.Second, "how long to wait for answers")
	f.BoolVar(&asJSON, "json", false, "the same as --output json")
	f.BoolVar(&installers, "installers", false, "only machines that wait for an installation")
	f.BoolVar(&unadopted, "unadopted", false, "only machines without an operator")
	textui.OutputFlag(cmd, &out)
	cmd.MarkFlagsMutuallyExclusive("installers", "unadopted")
	return cmd
}

// fingerprints asks every machine for its certificate.
func fingerprints(ctx context.Context, found []mdns.Entry) []discovered {
	all := make([]discovered, len(found))
	slots := make(chan struct{}, handshakes)
	var wg sync.WaitGroup
	for i, e := range found {
		all[i] = discovered{Entry: e, Unreachable: e.Addr == ""}
		if e.Addr == "" {
			continue
		}
		wg.Go(func() {
			slots <- struct{}{}
			defer func() { <-slots }()
			ctx, cancel := context.WithTimeout(ctx, handshakeTime)
			defer cancel()
			f, err := capsulewire.PeerFingerprint(ctx, e.Addr)
			all[i].Fingerprint, all[i].Unreachable = f, err != nil
		})
	}
	wg.Wait()
	return all
}

func (a *app) printDiscovered(all []discovered) error {
	if len(all) == 0 {
		a.note("No machine answered. Try --timeout 10s, and from the same network: multicast does not cross routers.")
		return nil
	}
	names := map[string]string{}
	if dir, err := a.configDir(); err == nil {
		if c, err := config.Load(dir); err == nil {
			for name, x := range c.Contexts {
				names[x.CapsuleID] = name
			}
		}
	}
	var table [][]string
	for _, d := range all {
		state := "new"
		switch {
		case d.Installer():
			disks := slices.DeleteFunc(slices.Concat([]string{d.TargetDisk}, d.Targets), func(t string) bool { return t == "" })
			slices.Sort(disks)
			state = "installer for " + cmp.Or(strings.Join(slices.Compact(disks), ", "), "no disk")
			if d.TargetSize > 0 {
				state += " (" + size(d.TargetSize) + ")"
			}
		case names[d.CapsuleID] != "":
			state = "context " + names[d.CapsuleID]
		case d.Adopted:
			state = "adopted"
		}
		addr := d.Addr
		if d.Unreachable && addr != "" {
			addr += " (no answer)"
		}
		print := ""
		if d.Fingerprint != "" {
			print = strings.TrimSpace(capsulewire.FingerprintRows(d.Fingerprint[:16])) + "…"
		}
		table = append(table, []string{d.Instance, d.ShortID, addr, state, d.Version, print})
	}
	return textui.PrintTable(a.Stdout, []string{"NAME", "ID", "ADDRESS", "STATE", "VERSION", "FINGERPRINT"}, table)
}

// size writes bytes for people.
func size(n uint64) string { return textui.FormatSize(int64(min(n, 1<<62))) } //nolint:gosec // bounded
