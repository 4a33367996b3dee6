package capsulectl

import (
	"context"
	"crypto/ed25519"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/spf13/cobra"

	capsulev1 "cocoonstack.io/cocoon/api/capsule/v1"
	"cocoonstack.io/cocoon/internal/capsulectl/config"
	"cocoonstack.io/cocoon/internal/capsulewire"
	"cocoonstack.io/cocoon/internal/errdefs"
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
			state = "installer for " + strings.Join(slices.Concat([]string{d.TargetDisk}, slices.DeleteFunc(slices.Clone(d.Targets), func(t string) bool { return t == d.TargetDisk })), ", ")
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
			print = strings.TrimSpace(rows(d.Fingerprint[:16])) + "…"
		}
		table = append(table, []string{d.Instance, d.ShortID, addr, state, d.Version, print})
	}
	return textui.PrintTable(a.Stdout, []string{"NAME", "ID", "ADDRESS", "STATE", "VERSION", "FINGERPRINT"}, table)
}

// size writes bytes for people.
func size(n uint64) string { return textui.FormatSize(int64(min(n, 1<<62))) } //nolint:gosec // bounded

func (a *app) installCommand() *cobra.Command {
	var o installation
	cmd := &cobra.Command{
		Use: "install {ID | --addr HOST[:PORT]}", Short: "Install the system on a machine that booted from the installer", Args: cobra.MaximumNArgs(1),
		Long: `Install the system on the disk of a machine that booted from the installer. The disk is overwritten. The machine comes up
adopted by your key, unless --no-seal is given, and is a context then.`,
		Example: "  capsulectl discover --installers\n  capsulectl install capsule-a3f2 --name lab\n  capsulectl install --addr 192.0.2.9 --target /dev/nvme0n1",
		RunE: func(cmd *cobra.Command, args []string) error {
			if len(args) == 1 {
				o.id = args[0]
			}
			return a.install(cmd.Context(), o)
		},
	}
	f := cmd.Flags()
	f.StringVar(&o.addr, "addr", "", "address of the installer, `HOST[:PORT]`, instead of finding it")
	f.StringVar(&o.target, "target", "", "`DISK` to install on, if there are several")
	f.StringVar(&o.name, "name", "", "name of the context (default: the ID of the machine)")
	f.BoolVar(&o.noSeal, "no-seal", false, "do not enroll your key: the machine is adopted after it has booted")
	f.BoolVar(&o.reinstall, "reinstall", false, "overwrite a system that is installed there already")
	f.BoolVar(&o.yes, "yes", false, "trust the certificate, and overwrite the disk, without a question")
	f.StringVar(&o.fingerprint, "fingerprint", "", "accept this certificate of the installer only: its `SHA-256`")
	f.DurationVar(&o.timeout, "timeout", 5*time.Second, "how long to look for the installer")
	return cmd
}

type installation struct {
	id, addr, target, name, fingerprint string
	noSeal, reinstall, yes              bool
	timeout                             time.Duration
}

func (a *app) install(ctx context.Context, o installation) error {
	addr, err := a.installer(ctx, o)
	if err != nil {
		return err
	}
	dir, err := a.configDir()
	if err != nil {
		return err
	}
	seen, err := a.trusted(ctx, addr, adoption{yes: o.yes, fingerprint: o.fingerprint})
	if err != nil {
		return err
	}
	c, err := dial(addr, addr, seen)
	if err != nil {
		return err
	}
	defer c.close()
	installer := capsulev1.NewInstallServiceClient(c.conn)
	s, err := installer.Status(ctx, &capsulev1.InstallStatusRequest{})
	if err != nil {
		return fmt.Errorf("ask the installer at %s: %w", addr, err)
	}
	if o.target == "" {
		o.target = s.GetTargetDisk()
	}
	if o.target == "" || len(s.GetTargets()) > 0 && !slices.Contains(s.GetTargets(), o.target) {
		return errdefs.Invalidf("choose the disk with --target; the machine has %s", textui.Cell(strings.Join(s.GetTargets(), ", ")))
	}
	name := o.name
	for _, fallback := range []string{s.GetShortId(), o.id, addr} {
		if name == "" {
			name = fallback
		}
	}
	contexts, err := config.Load(dir)
	if err != nil {
		return err
	}
	if x, ok := contexts.Contexts[name]; ok && !o.noSeal {
		return taken(name, x)
	}
	if !o.yes {
		if err := a.confirmed(fmt.Sprintf("Everything on %s (%s) of %s will be lost.", textui.Cell(o.target), size(s.GetTargetSizeBytes()), textui.Cell(name))); err != nil {
			return err
		}
	}
	key, err := config.EnsureKey(ctx, config.KeyPath(dir))
	if err != nil {
		return err
	}
	stream, err := installer.Install(ctx, &capsulev1.InstallRequest{
		TargetDisk: o.target, OperatorPubkey: key.Public().(ed25519.PublicKey), OperatorName: a.operatorName(name), Seal: !o.noSeal, Reinstall: o.reinstall,
	})
	if err != nil {
		return err
	}
	result, err := a.follow(stream)
	if err != nil {
		return fmt.Errorf("install on %s of %s: %w", o.target, addr, err)
	}
	if o.noSeal {
		a.printf("The system is installed. Take the installer out, reboot the machine, and run: capsulectl adopt --capsule %s\n", addr)
		return nil
	}
	// The new system usually gets the address of the installer.
	x := config.Context{Addr: addr, CapsuleID: result.GetCapsuleId(), TLSFingerprint: strings.ToLower(result.GetTlsFingerprintSha256()), KeyPath: config.KeyPath(dir)}
	if err := config.Update(ctx, dir, func(c *config.Config) error { c.Contexts[name], c.Current = x, name; return nil }); err != nil {
		return err
	}
	a.printf("The system is installed, and %s is the current context. Take the installer out, and reboot the machine.\n"+
		"If its address changes, `capsulectl discover` shows the new one.\n", textui.Cell(name))
	return nil
}

// installer returns the address of the installer.
func (a *app) installer(ctx context.Context, o installation) (string, error) {
	if o.addr != "" {
		return config.WithPort(o.addr), nil
	}
	if o.id == "" {
		return "", errdefs.Invalidf("say which machine: its ID, which `capsulectl discover --installers` shows, or --addr HOST")
	}
	found, err := a.Browse(ctx, o.timeout)
	if err != nil {
		return "", err
	}
	for _, e := range found {
		if e.Installer() && e.Addr != "" && slices.Contains([]string{e.ShortID, e.Hostname, e.Instance, e.CapsuleID}, o.id) {
			return e.Addr, nil
		}
	}
	return "", errdefs.NotFoundf("no installer called %s answers on this network; `capsulectl discover --installers` shows those that do, and --addr HOST needs no search", o.id)
}

// follow shows the progress of an installation, and returns its result.
func (a *app) follow(stream receiver[*capsulev1.InstallProgress]) (*capsulev1.InstallResult, error) {
	var result *capsulev1.InstallResult
	phase := ""
	for {
		p, err := stream.Recv()
		switch {
		case errors.Is(err, io.EOF) && result == nil:
			return nil, errdefs.New(errdefs.Internal, "the installer ended without a result")
		case errors.Is(err, io.EOF):
			return result, nil
		case err != nil:
			return nil, err
		}
		if p.GetResult() != nil {
			result = p.GetResult()
		}
		if p.GetPhase() != phase {
			phase = p.GetPhase()
			a.note("%3d%%  %s  %s", p.GetPercent(), textui.Cell(phase), textui.Cell(p.GetMessage()))
		}
	}
}
