package cli

import (
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"cocoonstack.io/cocoon/internal/guest"
	"cocoonstack.io/cocoon/internal/nodeclient"
	"cocoonstack.io/cocoon/internal/textui"
)

func (a *app) vmGuestInfoCommand() *cobra.Command {
	var out textui.Format
	cmd := &cobra.Command{
		Use: "guest-info REF", Short: "Show what a guest tells of itself: its system, users and file systems",
		Long: `Show what a guest that boots itself tells of itself: its system, who is logged in, and its file systems. Its
qemu-guest-agent tells it, as far as the guest's operator allows.` + refHelp,
		Example: "  cocoon vm guest-info web\n  cocoon vm guest-info -o json web | jq -r .os.pretty_name",
		Args:    cobra.ExactArgs(1), ValidArgsFunction: a.completeVMs,
		RunE: a.calling(func(ctx context.Context, c *nodeclient.Client, args []string) error {
			d, err := c.Describe(ctx, args[0])
			switch {
			case err != nil:
				return err
			case out == textui.FormatJSON:
				return textui.PrintJSON(a.Stdout, d)
			}
			return a.printDescription(d)
		}),
	}
	textui.OutputFlag(cmd, &out)
	return cmd
}

func (a *app) printDescription(d guest.Description) error {
	zone := d.Timezone.Name
	if zone != "" {
		zone += time.Unix(0, 0).In(time.FixedZone("", d.Timezone.Offset)).Format(" (-07:00)")
	}
	var users []string
	for _, u := range d.Users {
		name := u.Name
		if u.Domain != "" {
			name = u.Domain + `\` + name
		}
		if !u.Since.IsZero() {
			name += u.Since.Local().Format(" (since 2006-01-02 15:04)")
		}
		users = append(users, name)
	}
	rows := [][]string{
		{"HOSTNAME", d.Hostname},
		{"SYSTEM", d.OS.PrettyName},
		{"KERNEL", strings.TrimSpace(d.OS.KernelRelease + " " + d.OS.Machine)},
		{"TIMEZONE", zone},
		{"USERS", strings.Join(users, ", ")},
		{"AGENT", d.Agent},
	}
	for _, r := range rows {
		if r[1] == "" {
			r[1] = "-"
		}
		if _, err := fmt.Fprintf(a.Stdout, "%-9s %s\n", r[0], textui.Cell(r[1])); err != nil {
			return err
		}
	}
	if len(d.FileSystems) == 0 {
		return nil
	}
	mounted := make([][]string, len(d.FileSystems))
	for i, f := range d.FileSystems {
		size := "-"
		if f.Total > 0 {
			size = textui.FormatSize(f.Used) + " / " + textui.FormatSize(f.Total)
		}
		var disks []string
		for _, k := range f.Disks {
			disks = append(disks, k.Serial)
		}
		mounted[i] = []string{f.Path, f.Device, f.Type, size, strings.Join(disks, ", ")}
	}
	if _, err := fmt.Fprintln(a.Stdout); err != nil {
		return err
	}
	return textui.PrintTable(a.Stdout, []string{"FILE SYSTEM", "DEVICE", "TYPE", "USED", "DISK"}, mounted)
}
