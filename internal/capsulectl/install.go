package capsulectl

import (
	"context"
	"crypto/ed25519"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	capsulev1 "cocoonstack.io/cocoon/api/capsule/v1"
	"cocoonstack.io/cocoon/internal/capsulectl/config"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/textui"
)

func (a *app) installCommand() *cobra.Command {
	var o installation
	var out textui.Format
	cmd := &cobra.Command{
		Use: "install {ID | --addr HOST[:PORT]}", Short: "Install the system on a machine that booted from the installer", Args: cobra.MaximumNArgs(1),
		Long: `Install the system on the disk of a machine that booted from the installer. The machine comes up adopted by your key, unless
--no-seal is given, and is a context then.

A disk that holds data is overwritten only with --reinstall and the code that the machine shows on its console.`,
		Example: "  capsulectl discover --installers\n  capsulectl install capsule-a3f2 --name lab\n  capsulectl install --addr 192.0.2.9 --target /dev/nvme0n1 --reinstall",
		RunE: func(cmd *cobra.Command, args []string) error {
			if len(args) == 1 {
				o.id = args[0]
			}
			return a.install(cmd.Context(), o, out)
		},
	}
	f := cmd.Flags()
	f.StringVar(&o.addr, "addr", "", "address of the installer, `HOST[:PORT]`, instead of finding it")
	f.StringVar(&o.target, "target", "", "`DISK` to install on, if there are several")
	f.StringVar(&o.name, "name", "", "name of the context (default: the ID of the machine)")
	f.BoolVar(&o.noSeal, "no-seal", false, "do not enroll your key: the machine is adopted after it has booted")
	f.BoolVar(&o.reinstall, "reinstall", false, "overwrite the data that the disk holds")
	f.StringVar(&o.codeFile, "code-file", "", "read the code of the machine's console from `FILE` (default: ask for it)")
	f.BoolVar(&o.yes, "yes", false, "trust the certificate, and overwrite the disk, without a question")
	f.StringVar(&o.fingerprint, "fingerprint", "", "accept this certificate of the installer only: its `SHA-256`")
	f.DurationVar(&o.timeout, "timeout", 5*time.Second, "how long to look for the installer")
	textui.OutputFlag(cmd, &out)
	return cmd
}

type installation struct {
	id, addr, target, name, fingerprint, codeFile string
	noSeal, reinstall, yes                        bool
	timeout                                       time.Duration
}

func (a *app) install(ctx context.Context, o installation, out textui.Format) error {
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
	target, err := choose(s, o.target)
	if err != nil {
		return err
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
	code := ""
	if !s.GetInstalled() { // otherwise nothing is overwritten any more
		if code, err = a.mayOverwrite(o, s, target); err != nil {
			return err
		}
	}
	key, err := config.EnsureKey(ctx, config.KeyPath(dir))
	if err != nil {
		return err
	}
	stream, err := installer.Install(ctx, &capsulev1.InstallRequest{
		TargetDisk: target.GetPath(), OperatorPubkey: key.Public().(ed25519.PublicKey), OperatorName: a.operatorName(name), Seal: !o.noSeal, Reinstall: o.reinstall, Code: code,
	})
	if err != nil {
		return err
	}
	result, err := a.follow(stream)
	if err != nil {
		return fmt.Errorf("install on %s of %s: %w", target.GetPath(), addr, err)
	}
	if out == textui.FormatJSON {
		if err := a.printMessage(result); err != nil || o.noSeal {
			return err
		}
	} else if o.noSeal {
		a.printf("The system is installed. Take the installer out, reboot the machine, and run: capsulectl adopt --capsule %s\n", addr)
		return nil
	}
	// The new system usually gets the address of the installer.
	x := config.Context{Addr: addr, CapsuleID: result.GetCapsuleId(), TLSFingerprint: strings.ToLower(result.GetTlsFingerprintSha256()), KeyPath: config.KeyPath(dir)}
	if err := config.Update(ctx, dir, func(c *config.Config) error { c.Contexts[name], c.Current = x, name; return nil }); err != nil {
		return err
	}
	if out == textui.FormatJSON {
		return nil
	}
	a.printf("The system is installed, and %s is the current context. Take the installer out, and reboot the machine.\n"+
		"If its address changes, `capsulectl discover` shows the new one.\n", textui.Cell(name))
	return nil
}

// choose returns the disk that is meant.
func choose(s *capsulev1.InstallStatusResponse, wanted string) (*capsulev1.InstallDisk, error) {
	if wanted == "" {
		wanted = s.GetTargetDisk()
	}
	if wanted == "" || len(s.GetTargets()) > 0 && !slices.Contains(s.GetTargets(), wanted) {
		var all []string
		for _, path := range s.GetTargets() {
			all = append(all, describe(diskOf(s, path)))
		}
		return nil, errdefs.Invalidf("choose the disk with --target; the machine has %s", strings.Join(all, "; "))
	}
	return diskOf(s, wanted), nil
}

// diskOf returns what the installer says of a disk. That of the documented system says little.
func diskOf(s *capsulev1.InstallStatusResponse, path string) *capsulev1.InstallDisk {
	for _, d := range s.GetDisks() {
		if d.GetPath() == path {
			return d
		}
	}
	d := &capsulev1.InstallDisk{Path: path, Holds: "data, perhaps"}
	if path == s.GetTargetDisk() {
		d.SizeBytes = s.GetTargetSizeBytes()
	}
	return d
}

// describe tells a person which disk it is.
func describe(d *capsulev1.InstallDisk) string {
	var parts []string
	if d.GetSizeBytes() > 0 {
		parts = append(parts, size(d.GetSizeBytes()))
	}
	for _, p := range []string{d.GetModel(), d.GetSerial()} {
		if p != "" {
			parts = append(parts, textui.Cell(p))
		}
	}
	if len(parts) == 0 {
		return textui.Cell(d.GetPath())
	}
	return textui.Cell(d.GetPath()) + " (" + strings.Join(parts, ", ") + ")"
}

// mayOverwrite asks what has to be asked before a disk is overwritten, and returns the code of the console if it is needed.
func (a *app) mayOverwrite(o installation, s *capsulev1.InstallStatusResponse, d *capsulev1.InstallDisk) (code string, err error) {
	knows := len(s.GetDisks()) > 0 // it is an installer of ours
	if knows && d.GetHolds() != "" && !o.reinstall {
		return "", errdefs.Preconditionf("%s holds %s; add --reinstall if nobody needs that", describe(d), textui.Cell(d.GetHolds()))
	}
	if !o.yes {
		question := fmt.Sprintf("Everything on %s will be lost; it holds %s.", describe(d), textui.Cell(d.GetHolds()))
		if d.GetHolds() == "" {
			question = fmt.Sprintf("The system will be on %s, which is blank.", describe(d))
		}
		if err := a.confirmed(question); err != nil {
			return "", err
		}
	}
	switch {
	case !knows || d.GetHolds() == "" || s.GetOpen():
		return "", nil
	case o.codeFile != "":
		text, err := os.ReadFile(o.codeFile)
		if err != nil {
			return "", errdefs.New(errdefs.InvalidArgument, "read the code: %w", err)
		}
		code = string(text)
	case o.yes:
		return "", errdefs.Invalidf("the disk holds data: give the code that the machine shows on its console with --code-file, or leave --yes out")
	default:
		fmt.Fprint(a.Stderr, "Type the code that the machine shows on its console: ")
		code = a.line(64)
	}
	if code = strings.TrimSpace(code); code == "" {
		return "", errdefs.Invalidf("there is no code; the machine shows it on its console")
	}
	return code, nil
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
	bar := textui.NewBar(a.Stderr, "", false)
	defer bar.Clear()
	phase := ""
	for {
		p, err := stream.Recv()
		switch {
		case errors.Is(err, io.EOF) && result == nil:
			return nil, errdefs.New(errdefs.Internal, "the installer ended without a result")
		case errors.Is(err, io.EOF):
			return result, nil
		case errdefs.IsUnavailable(err):
			return nil, fmt.Errorf("%w; run the same command again: it goes on, or tells what was installed", err)
		case err != nil:
			return nil, err
		}
		if p.GetResult() != nil {
			result = p.GetResult()
		}
		if p.GetPhase() != phase {
			phase = p.GetPhase()
			bar.Clear()
			a.note("%-16s %s", textui.Cell(phase), textui.Cell(p.GetMessage()))
		}
		bar.Percent(phase, int64(p.GetPercent()))
	}
}
