package cli

import (
	"bufio"
	"cmp"
	"context"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/term"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/nodeclient"
	"cocoonstack.io/cocoon/internal/nodewire"
	"cocoonstack.io/cocoon/internal/textui"
)

func (a *app) nodeCommand() *cobra.Command {
	return group("node", "Look at the node daemon, or reset it", "", a.nodeInfoCommand(), a.nodeResetCommand())
}

func (a *app) nodeInfoCommand() *cobra.Command {
	var out textui.Format
	cmd := &cobra.Command{
		Use: "info", Short: "Show what the node is, runs and can run", Args: cobra.NoArgs,
		RunE: a.calling(func(ctx context.Context, c *nodeclient.Client, _ []string) error {
			i, err := c.Info(ctx)
			if err != nil {
				return err
			}
			if out == textui.FormatJSON {
				return textui.PrintJSON(a.Stdout, i)
			}
			a.printInfo(i)
			return nil
		}),
	}
	textui.OutputFlag(cmd, &out)
	return cmd
}

func (a *app) printInfo(i nodewire.NodeInfo) {
	line := func(key, value string) { a.printf("%-10s %s\n", key, value) }
	line("Host", fmt.Sprintf("%s, %d CPUs, %s memory", i.Hostname, i.CPUs, textui.FormatSize(i.Memory)))
	line("cocoond", fmt.Sprintf("%s, pid %d, up %s", i.Version, i.PID, textui.Age(time.Now(), i.StartedAt)))
	line("State", i.StateDir)
	line("Sockets", i.RunDir)
	line("Networks", textui.Cell(strings.Join(i.Networks, ", ")))
	for _, p := range i.VolumePools {
		text := fmt.Sprintf("%s (%s), %s of %s in use", p.Name, p.Kind, textui.FormatSize(p.Used), textui.FormatSize(p.Size))
		if p.Fault != "" {
			text += ": " + p.Fault
		}
		line("Volumes", text)
	}
	var counts []string
	for _, state := range slices.Sorted(maps.Keys(i.VMs)) {
		if n := i.VMs[state]; n > 0 {
			counts = append(counts, fmt.Sprintf("%d %s", n, state))
		}
	}
	line("VMs", cmp.Or(strings.Join(counts, ", "), "none"))
	for _, d := range i.Drivers {
		text := d.Name
		if d.Default {
			text += " (default)"
		}
		if d.Error != "" {
			line("Driver", text+": "+d.Error)
			continue
		}
		line("Driver", strings.TrimSpace(text+" "+d.Version)+", accel "+d.Accel)
		for _, note := range append([]string{d.Why}, d.Notes...) {
			if note != "" {
				line("", "- "+note)
			}
		}
		for n, text := range commaLines(d.Abilities, abilityWidth) {
			if n == 0 {
				line("", "- can: "+text)
			} else {
				line("", "  "+text)
			}
		}
	}
}

// abilityWidth is how wide a list of abilities is, in bytes.
const abilityWidth = 80

// commaLines joins words by commas, in lines of at most width bytes, or of one word.
func commaLines(words []string, width int) (lines []string) {
	for n, w := range words {
		w = textui.Cell(w)
		if n < len(words)-1 {
			w += ","
		}
		if last := len(lines) - 1; last >= 0 && len(lines[last])+1+len(w) <= width {
			lines[last] += " " + w
		} else {
			lines = append(lines, w)
		}
	}
	return lines
}

func (a *app) nodeResetCommand() *cobra.Command {
	var yes bool
	cmd := &cobra.Command{
		Use:   "reset",
		Short: "Remove every VM, and every link and rule of cocoond's networks",
		Long: `Remove every VM with its disks, running or not, and every link and firewall rule that cocoond made.
Images stay. Afterwards cocoond can be stopped and leaves nothing behind.`,
		Args: cobra.NoArgs,
		RunE: a.calling(func(ctx context.Context, c *nodeclient.Client, _ []string) error {
			all, err := c.List(ctx)
			if err != nil {
				return err
			}
			if !yes {
				if err := a.confirm(fmt.Sprintf("This removes %d VMs with their disks. Go on? [y/N] ", len(all))); err != nil {
					return err
				}
			}
			return c.Reset(ctx)
		}),
	}
	cmd.Flags().BoolVarP(&yes, "yes", "y", false, "do not ask")
	return cmd
}

func (a *app) confirm(question string) error {
	f := textui.File(a.Stdin)
	if f == nil || !term.IsTerminal(int(f.Fd())) {
		return errdefs.Preconditionf("there is no terminal to ask for confirmation; give --yes to go on")
	}
	fmt.Fprint(a.Stderr, question)
	answer, _ := bufio.NewReader(f).ReadString('\n')
	if w := strings.ToLower(strings.TrimSpace(answer)); w != "y" && w != "yes" {
		return errdefs.New(errdefs.Canceled, "nothing was changed")
	}
	return nil
}

func (a *app) doctorCommand() *cobra.Command {
	var out textui.Format
	var fix, remote bool
	cmd := &cobra.Command{
		Use:   "doctor",
		Short: "Find out what this host is missing, and fix what is safe to fix",
		Long: `Find out what this host is missing for each feature, and print the command that fixes it.

It works without cocoond. --fix does what is safe: make folders and device nodes. It never installs packages.
It ends with exit code 5 when something fails that no VM can run without.`,
		Example: "  cocoon doctor\n  sudo cocoon doctor --fix",
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if fix && remote {
				return errdefs.Invalidf("--fix changes this host; it cannot be combined with --node")
			}
			var checks []nodewire.Check
			var err error
			if remote {
				err = a.withClient(func(c *nodeclient.Client) (err error) { checks, err = c.Doctor(cmd.Context()); return err })
			} else {
				checks, err = a.Doctor(cmd.Context(), a.dir, fix)
			}
			if err != nil {
				return err
			}
			return a.printChecks(checks, out)
		},
	}
	cmd.Flags().BoolVar(&fix, "fix", false, "fix what is safe to fix")
	cmd.Flags().BoolVar(&remote, "node", false, "let cocoond do the checks, instead of this program")
	textui.OutputFlag(cmd, &out)
	return cmd
}

func (a *app) printChecks(checks []nodewire.Check, out textui.Format) error {
	failed := 0
	rows := make([][]string, len(checks))
	for i, c := range checks {
		status := c.Status
		if c.Fixed {
			status = "fixed"
		}
		if c.Status == "fail" {
			failed++
		}
		rows[i] = []string{status, c.Name, c.Feature, c.Detail}
	}
	var err error
	if out == textui.FormatJSON {
		err = textui.PrintJSON(a.Stdout, append([]nodewire.Check{}, checks...))
	} else {
		err = textui.PrintTable(a.Stdout, []string{"STATUS", "CHECK", "NEEDED FOR", "FOUND"}, rows)
		for _, c := range checks {
			if c.Status != "ok" && c.Remedy != "" {
				a.printf("\n%s:\n  %s\n", c.Name, c.Remedy)
			}
		}
	}
	if err == nil && failed > 0 {
		err = errdefs.Preconditionf("%s failed; the commands above fix this host", plural(failed, "check"))
	}
	return err
}

func plural(n int, noun string) string {
	if n == 1 {
		return "1 " + noun
	}
	return strconv.Itoa(n) + " " + noun + "s"
}

func (a *app) versionCommand() *cobra.Command {
	var out textui.Format
	cmd := &cobra.Command{
		Use: "version", Short: "Print the versions of cocoon and of cocoond, if it runs", Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			v := struct {
				Client string `json:"client"`
				Daemon string `json:"daemon,omitempty"`
			}{Client: a.Version}
			_ = a.withClient(func(c *nodeclient.Client) error { // no daemon is no error here
				ctx, cancel := context.WithTimeout(cmd.Context(), quickly)
				defer cancel()
				i, err := c.Info(ctx)
				v.Daemon = i.Version
				return err
			})
			if out == textui.FormatJSON {
				return textui.PrintJSON(a.Stdout, v)
			}
			a.printf("cocoon   %s\ncocoond  %s\n", v.Client, textui.Cell(v.Daemon))
			return nil
		},
	}
	textui.OutputFlag(cmd, &out)
	return cmd
}
